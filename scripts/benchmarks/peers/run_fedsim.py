"""fedsim by its public path: a composed config, `fedsim.running.assembly.build`, and the rounds.

The words of the case are overrides, as on fedsim's command line. No files are written.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.running.process import tune
from scripts.benchmarks.peers.stopwatch import ENDLESS, Stopwatch, parse_case
from scripts.benchmarks.peers.workloads import CIFAR, Workload

if TYPE_CHECKING:
    from fedsim.running.assembly import Experiment

CIFAR_FOLDER = "cifar10"
"""A folder of CIFAR-10 as parquet files. If the data folder has it, torchvision's files are not
read."""


def overrides_of(workload: Workload, **changes: Any) -> list[str]:
    """Return the workload as overrides of the command `fedsim`, with other values for some keys."""
    words = list(workload.fedsim)
    if CIFAR in words and has_parquet(Path(os.environ.get("FEDSIM_DATA", ""))):
        position = words.index(CIFAR)
        words[position : position + 1] = ["dataset=parquet", f"dataset.path={CIFAR_FOLDER}"]
    values = {
        "selector": "random",
        "aggregator": "uniform",
        "optimizer": workload.optimizer,
        "optimizer.lr": workload.lr,
        "optimizer.weight_decay": workload.weight_decay,
        "num_clients": workload.num_clients,
        "cohort_size": workload.cohort_size,
        "num_rounds": ENDLESS,
        "local.steps": workload.steps,
        "local.batch_size": workload.batch_size,
        "eval_every": workload.eval_every,
        "server.validation_fraction": 0,
        "seed": 0,
    }
    return [*words, *(f"{key}={value}" for key, value in (values | changes).items())]


def has_parquet(data_folder: Path) -> bool:
    return any(data_folder.glob(f"{CIFAR_FOLDER}/*.parquet"))


def experiment_of(overrides: Sequence[str]) -> "Experiment":
    from fedsim import compose
    from fedsim.running.assembly import build

    [plan] = compose(overrides)
    return build(plan)


def main() -> None:
    tune()  # as the command `fedsim` does, before torch is imported
    case = parse_case()
    watch = Stopwatch(case)
    precision = f"engine.precision={case.precision}"
    words = [*overrides_of(case.workload), f"device={case.device}", precision, *case.words]
    simulation = experiment_of(words).simulation
    for record in simulation:
        if watch.end_round(record.test_accuracy):
            break
    watch.report(["fedsim-selection", "torch"], engine=simulation.components.engine.description)


if __name__ == "__main__":
    main()
