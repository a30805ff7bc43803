"""Hand-written PyTorch: one client after another, with data in memory and without a DataLoader.

It runs in fedsim's own environment.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from scripts.benchmarks.peers.networks import (
    accuracy,
    new_network,
    prepare,
    shuffled_batches,
    state_of,
    train,
)
from scripts.benchmarks.peers.stopwatch import Stopwatch, parse_case
from scripts.benchmarks.peers.workloads import read_arrays

State = dict[str, Tensor]


def average(states: Sequence[State]) -> State:
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def main() -> None:
    case = parse_case()
    workload = case.workload
    prepare(case)
    arrays = read_arrays(case.data, workload)
    x, y, x_test, y_test = (torch.from_numpy(array).to(case.device) for array in arrays.data)
    model = new_network(workload, arrays.initial).to(case.device)
    watch = Stopwatch(case)
    enough = False
    while not enough:
        states = []
        for i in arrays.cohort(watch.round):
            local_model = copy.deepcopy(model)
            train(local_model, x[i], y[i], shuffled_batches(workload, case.device), workload)
            states.append(state_of(local_model))
        model.load_state_dict(average(states), strict=False)  # without BatchNorm's counters
        enough = watch.end_round(accuracy(model, x_test, y_test) if watch.evaluates else None)
    watch.report(["torch"])


if __name__ == "__main__":
    main()
