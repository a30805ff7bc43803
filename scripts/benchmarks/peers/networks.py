"""The workloads' networks in plain PyTorch, and their training, for peers that use torch."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.benchmarks.peers.stopwatch import Case
from scripts.benchmarks.peers.workloads import (
    EVALUATION_BATCH,
    Convolution,
    Dropout,
    Layer,
    Linear,
    Workload,
)


def prepare(case: Case) -> None:
    """Set torch's number of threads, seed, and precision on a GPU."""
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = case.precision == "tf32"
    torch.backends.cudnn.allow_tf32 = case.precision == "tf32"
    torch.backends.cudnn.benchmark = True


def new_network(workload: Workload, initial: Sequence[NDArray[np.float32]] = ()) -> nn.Module:
    """Return the workload's network, with the state `initial` if it is not empty."""
    if workload.name == "ResNet-20":  # these two are only for peers in fedsim's environment
        from fedsim.models.resnet20 import ResNet20

        network: nn.Module = ResNet20((3, 32, 32), 10, shortcut="pad", norm="batch", groups=4)
    elif not workload.is_chain:
        from torchvision.models import resnet18

        network = resnet18(num_classes=10)
    else:
        network = nn.Sequential(*[_layer(layer) for layer in workload.layers])
    if initial:
        values = state_of(network).values()
        with torch.no_grad():
            for value, array in zip(values, initial, strict=True):
                value.copy_(torch.from_numpy(array))
    return network


def _layer(layer: Layer) -> nn.Module:
    match layer:
        case Convolution(inputs, outputs, kernel, _):
            return nn.Conv2d(inputs, outputs, kernel)
        case Linear(inputs, outputs):
            return nn.Linear(inputs, outputs)
        case Dropout(rate):
            return nn.Dropout(rate)
        case "pool":
            return nn.MaxPool2d(2)
        case "relu":
            return nn.ReLU()
        case _:
            return nn.Flatten()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point tensors of the state dict, which clients and server exchange."""
    state = model.state_dict()
    return {name: value for name, value in state.items() if value.is_floating_point()}


def shuffled_batches(workload: Workload, device: str = "cpu") -> Iterator[Tensor]:
    """Yield the positions of a client's samples, batch by batch over its epochs."""
    steps_left = workload.steps
    while steps_left > 0:
        order = torch.randperm(workload.samples, device=device)
        yield from order.split(workload.batch_size)[:steps_left]
        steps_left -= workload.batches_per_epoch


def train(
    model: nn.Module, x: Tensor, y: Tensor, batches: Iterable[Tensor], workload: Workload
) -> None:
    """Train a model in place with a step of the workload's optimiser on each batch."""
    model.train()
    make = torch.optim.Adam if workload.optimizer == "adam" else torch.optim.SGD
    optimizer = make(model.parameters(), lr=workload.lr, weight_decay=workload.weight_decay)
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    hits = torch.zeros((), dtype=torch.int64, device=x.device)
    for batch, labels in zip(x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH), strict=True):
        hits += (model(batch).argmax(1) == labels).sum()
    return float(hits) / len(y)
