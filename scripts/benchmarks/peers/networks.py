"""The workloads' networks in plain PyTorch, and their training, for peers that use torch modules.

Pooling stands before ReLU, as in fedsim. The function is the same, with less work for everybody.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.benchmarks.peers.workloads import EVALUATION_BATCH, Workload


def new_network(workload: Workload) -> nn.Module:
    if workload.name == "W1":
        return nn.Sequential(
            nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 10)
        )
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def shuffled_batches(workload: Workload, device: str = "cpu") -> Iterator[Tensor]:
    """Yield the positions of a client's samples, batch by batch over its epochs."""
    for _ in range(workload.epochs):
        yield from torch.randperm(workload.samples, device=device).split(workload.batch_size)


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    batches: Iterable[Tensor],
    lr: float,
    weight_decay: float,
) -> None:
    """Train a model in place with a step of SGD on each batch."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=weight_decay)
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    hits = 0
    for batch, labels in zip(x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH), strict=True):
        hits += int((model(batch).argmax(1) == labels).sum())
    return hits / len(y)
