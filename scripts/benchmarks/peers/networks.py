"""The workloads' networks in plain PyTorch, for the peers that train torch modules.

Pooling stands before ReLU, as in fedsim: the same function, and less work for everybody.
"""

import torch
from torch import Tensor, nn

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


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    batches = zip(x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH), strict=True)
    return sum(int((model(part).argmax(1) == labels).sum()) for part, labels in batches) / len(y)
