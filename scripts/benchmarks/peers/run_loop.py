"""Hand-written PyTorch: one client after another, data in memory, no DataLoader. Runs in fedsim's
own environment."""

import copy
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.benchmarks.peers.networks import accuracy, new_network
from scripts.benchmarks.peers.stopwatch import Stopwatch, parse_case
from scripts.benchmarks.peers.workloads import Workload, read_arrays

State = dict[str, Tensor]


def shuffled_batches(workload: Workload, device: str) -> Iterable[Tensor]:
    """Indices of a client's samples, batch by batch over its epochs."""
    for _ in range(workload.epochs):
        yield from torch.randperm(workload.samples, device=device).split(workload.batch_size)


def train_client(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    batches: Iterable[Tensor],
    lr: float,
    weight_decay: float,
) -> State:
    """The state of a copy of `model` after one step of SGD a batch."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=weight_decay)
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return model.state_dict()


def average(states: Sequence[State]) -> State:
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def main() -> None:
    case = parse_case()
    workload = case.workload
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    x, y, x_test, y_test = (
        torch.from_numpy(a).to(case.device) for a in read_arrays(case.data, workload)
    )
    model, watch, rng = (
        new_network(workload).to(case.device),
        Stopwatch(case),
        np.random.default_rng(0),
    )
    enough = False
    while not enough:
        cohort = rng.choice(workload.num_clients, workload.cohort_size, replace=False)
        states = []
        for i in cohort:
            batches = shuffled_batches(workload, case.device)
            states.append(
                train_client(model, x[i], y[i], batches, workload.lr, workload.weight_decay)
            )
        model.load_state_dict(average(states))
        enough = watch.end_round(accuracy(model, x_test, y_test) if watch.evaluates else None)
    watch.report(["torch"])


if __name__ == "__main__":
    main()
