"""Write a workload's arrays for all peers: fedsim's samples, cohorts and model at seed 0."""

import sys
from pathlib import Path

import numpy as np

from fedsim.clients.clients import Clients
from fedsim.core.errors import FedsimError
from fedsim.core.rng import Purpose
from fedsim.rounds.loop import Simulation
from scripts.benchmarks.peers.networks import state_of
from scripts.benchmarks.peers.run_fedsim import experiment_of, overrides_of
from scripts.benchmarks.peers.workloads import (
    NUM_COHORTS,
    WORKLOADS,
    Arrays,
    Workload,
    write_arrays,
)


def arrays_of(workload: Workload, simulation: Simulation) -> Arrays:
    components = simulation.components
    data, test = components.engine.data, components.server_data.test
    positions = np.stack(data.train)
    assert positions.shape == (workload.num_clients, workload.samples)
    assert len(test.y) == workload.test_samples
    x, x_test = data.x.numpy(), test.x.numpy()
    if workload.name == "W1":
        x, x_test = x.reshape(len(x), -1), x_test.reshape(len(x_test), -1)
    return Arrays(
        x[positions],
        data.y.numpy()[positions],
        x_test,
        test.y.numpy(),
        cohorts_of(simulation, NUM_COHORTS),
        [simulation.params[name].numpy() for name in state_of(components.engine.workload.model)],
    )


def cohorts_of(simulation: Simulation, num_rounds: int) -> np.ndarray:
    """Return the clients that the simulation's random selector selects in the first rounds."""
    components = simulation.components
    cohorts = []
    for t in range(1, num_rounds + 1):
        clients = Clients(components.engine, simulation._context(t), simulation.params)
        rng = components.streams.generator(Purpose.SELECT, t)
        cohorts.append(components.selector.select(t, clients, rng).ids)
    return np.stack(cohorts)


def main() -> None:
    name, folder = sys.argv[1:]
    workload = WORKLOADS[name]
    try:
        simulation = experiment_of([*overrides_of(workload), "device=cpu"]).simulation
        write_arrays(Path(folder), workload, arrays_of(workload, simulation))
    except FedsimError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
