"""Hand-written PyTorch: one client after another, with data in memory and without a DataLoader.

It runs in fedsim's own environment.
"""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from scripts.benchmarks.peers.networks import accuracy, new_network, shuffled_batches, train
from scripts.benchmarks.peers.stopwatch import Stopwatch, parse_case
from scripts.benchmarks.peers.workloads import read_arrays

State = dict[str, Tensor]


def average(states: Sequence[State]) -> State:
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def main() -> None:
    case = parse_case()
    workload = case.workload
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    arrays = read_arrays(case.data, workload)
    x, y, x_test, y_test = (torch.from_numpy(array).to(case.device) for array in arrays)
    model = new_network(workload).to(case.device)
    rng = np.random.default_rng(0)
    watch = Stopwatch(case)
    enough = False
    while not enough:
        states = []
        for i in rng.choice(workload.num_clients, workload.cohort_size, replace=False):
            local_model = copy.deepcopy(model)
            batches = shuffled_batches(workload, case.device)
            train(local_model, x[i], y[i], batches, workload.lr, workload.weight_decay)
            states.append(local_model.state_dict())
        model.load_state_dict(average(states))
        enough = watch.end_round(accuracy(model, x_test, y_test) if watch.evaluates else None)
    watch.report(["torch"])


if __name__ == "__main__":
    main()
