"""Write a workload's arrays for all peers, with fedsim's normalisation and partition at seed 0."""

import sys
from pathlib import Path

import numpy as np

from fedsim.core.errors import FedsimError
from scripts.benchmarks.peers.run_fedsim import experiment_of, overrides_of
from scripts.benchmarks.peers.workloads import (
    TEST_SAMPLES,
    WORKLOADS,
    Arrays,
    Workload,
    arrays_file,
)


def arrays_of(workload: Workload) -> Arrays:
    components = experiment_of(overrides_of(workload)).simulation.components
    data, test = components.engine.data, components.server_data.test
    positions = np.stack(data.train)
    assert positions.shape == (workload.num_clients, workload.samples)
    assert len(test.y) == TEST_SAMPLES
    x, x_test = data.x.numpy(), test.x.numpy()
    if workload.name == "W1":
        x, x_test = x.reshape(len(x), -1), x_test.reshape(len(x_test), -1)
    return Arrays(x[positions], data.y.numpy()[positions], x_test, test.y.numpy())


def main() -> None:
    name, folder = sys.argv[1:]
    path = arrays_file(Path(folder), WORKLOADS[name])
    try:
        arrays = arrays_of(WORKLOADS[name])
    except FedsimError as error:
        sys.exit(str(error))
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays._asdict())


if __name__ == "__main__":
    main()
