"""fedsim by its public path: a composed config, `fedsim.running.assembly.build`, the rounds of the
Simulation.

The words of the case are overrides of the config, as on fedsim's command line. Records are not
written to files.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.running.process import tune
from scripts.benchmarks.peers.stopwatch import ENDLESS, Stopwatch, parse_case
from scripts.benchmarks.peers.workloads import Workload

if TYPE_CHECKING:
    from fedsim.running.assembly import Experiment

CIFAR_FILES = "cifar10"
"""A folder of CIFAR-10 as parquet files; where the data folder has it, it is read in place of
torchvision's files."""


def overrides_of(workload: Workload) -> list[str]:
    """The workload as options of the command `fedsim`."""
    return [
        *data_of(workload),
        f"model={'mlp' if workload.name == 'W1' else 'cnn'}",
        "partition=shards",
        "partition.shards_per_client=2",
        "selector=random",
        "aggregator=uniform",
        "optimizer=sgd",
        f"optimizer.lr={workload.lr}",
        f"optimizer.weight_decay={workload.weight_decay}",
        f"num_clients={workload.num_clients}",
        f"cohort_size={workload.cohort_size}",
        f"num_rounds={ENDLESS}",
        f"local.steps={workload.steps}",
        f"local.batch_size={workload.batch_size}",
        f"eval_every={workload.eval_every}",
        "server.validation_fraction=0",
        "seed=0",
    ]


def data_of(workload: Workload) -> list[str]:
    if workload.name == "W1":
        return ["dataset=fashion_mnist"]
    as_parquet = any(Path(os.environ.get("FEDSIM_DATA", "")).glob(f"{CIFAR_FILES}/*.parquet"))
    return ["dataset=parquet", f"dataset.path={CIFAR_FILES}"] if as_parquet else ["dataset=cifar10"]


def experiment_of(overrides: list[str]) -> "Experiment":
    from fedsim.config.compose import compose_jobs, make_plan, search_path
    from fedsim.running.assembly import build

    with search_path():
        (job,) = compose_jobs(overrides, multirun=False)
    return build(make_plan(job.config, job.choices))


def main() -> None:
    tune()  # as the command `fedsim` does, before torch is imported
    case = parse_case()
    watch = Stopwatch(case)
    simulation = experiment_of(
        [*overrides_of(case.workload), f"device={case.device}", *case.words]
    ).simulation
    for record in simulation:
        if watch.end_round(record.test_accuracy):
            break
    watch.report(["fedsim-selection", "torch"], engine=simulation.components.engine.description)


if __name__ == "__main__":
    main()
