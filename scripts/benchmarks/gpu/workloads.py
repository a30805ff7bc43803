"""The workloads that are measured on a GPU, and how calls are timed."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedsim.core.rng import Streams
from fedsim.engine.backend import Workload
from fedsim.engine.data import ClientData
from fedsim.engine.optimizers import SGD, Adam, Constant, LocalOptimizer
from fedsim.engine.schedule import LocalWork, Schedule, make_schedule
from fedsim.models.cnn import CNN
from fedsim.models.mlp import MLP
from fedsim.models.resnet20 import ResNet20

NUM_CLASSES = 10
TEST_SAMPLES = 10_000
NUM_LANES = 16
LONG_RUN = 1_000_000
"""Local steps of a client in a run that is long enough to compile for."""
COLOUR_IMAGE = (3, 32, 32)
GREY_IMAGE = (1, 28, 28)


@dataclass(frozen=True)
class Case:
    """A workload: K clients with `samples` images each.

    If it is `ragged`, client k has fewer samples, down to an eighth.
    """

    make_model: Callable[[], nn.Module]
    image: tuple[int, ...]
    clients: int
    samples: int
    work: LocalWork
    optimizer: LocalOptimizer
    eval_every: int = 1
    ragged: bool = False


def _sgd(lr: float, decay: float) -> SGD:
    return SGD(lr=lr, momentum=0.0, nesterov=False, weight_decay=decay, schedule=Constant())


def _mlp() -> nn.Module:
    return MLP(GREY_IMAGE, NUM_CLASSES, hidden=[64, 30], dropout=0.0)


def _cnn() -> nn.Module:
    return CNN(COLOUR_IMAGE, NUM_CLASSES)


def _resnet() -> nn.Module:
    return ResNet20(COLOUR_IMAGE, NUM_CLASSES, shortcut="pad", norm="batch", groups=4)


ADAM = Adam(
    lr=1e-3,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weight_decay=0.0,
    decoupled=False,
    schedule=Constant(),
)
EPOCH = LocalWork(1, None, 64)
CASES = {
    "W1": Case(_mlp, GREY_IMAGE, 10, 600, LocalWork(None, 30, 64), _sgd(0.005, 1e-4)),
    "W2": Case(_cnn, COLOUR_IMAGE, 5, 500, LocalWork(None, 40, 50), _sgd(0.01, 3e-4), 5),
    "ResNet-20": Case(_resnet, COLOUR_IMAGE, 10, 640, EPOCH, ADAM),
    "ResNet-20 ragged": Case(_resnet, COLOUR_IMAGE, 10, 640, EPOCH, ADAM, ragged=True),
}


class Bench:
    """A device, a budget of seconds, names of workloads, and the rows measured so far.

    `shrink` divides sizes and times, to try the script without a GPU.
    """

    def __init__(
        self, out: Path, device: str, shrink: int, budget: float, cases: Sequence[str]
    ) -> None:
        self.path = out / "gpu.jsonl"
        self.device = torch.device(device)
        self.shrink = shrink
        self.budget = budget
        self.cases = cases
        self.begin = time.perf_counter()
        self.rows: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def put(self, section: str, case: str, **values: Any) -> None:
        """Add a row, also to the file."""
        at = round(time.perf_counter() - self.begin)
        self.rows.append({"section": section, "case": case, **values, "at": at})
        with self.path.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def milliseconds(self, call: Callable[[], object], seconds: float = 1.0) -> float:
        """Return the median time of a call until the device is done, without the first two."""
        for _ in range(2):
            call()
        self.synchronize()
        times: list[float] = []
        while len(times) < 3 or (sum(times) < seconds / self.shrink and len(times) < 500):
            begin = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - begin)
        return 1e3 * statistics.median(times)

    def size(self, full: int, smallest: int = 1) -> int:
        return max(full // self.shrink, smallest)


def workload(bench: Bench, name: str, device: torch.device | None = None) -> tuple[Case, Workload]:
    """Return a case, and its workload with random data on the device."""
    case = CASES[name]
    device = device or bench.device
    largest = bench.size(case.samples, 8)
    sizes = [largest] * case.clients
    if case.ragged:
        steps = range(case.clients)
        sizes = [largest - (largest * 7 // 8) * k // (case.clients - 1) for k in steps]
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x = torch.randn(sum(sizes), *case.image, generator=generator).to(device)
    y = torch.randint(NUM_CLASSES, (len(x),), generator=generator).to(device)
    positions = np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])
    data = ClientData(x, y, positions, positions, NUM_CLASSES)
    return case, Workload(case.make_model().to(device), data, case.optimizer, LONG_RUN)


def local_work(bench: Bench, case: Case) -> LocalWork:
    """Return the local work of a case, with fewer and smaller steps if the bench is shrunk."""
    work = case.work
    if work.steps is None:
        return work
    return LocalWork(None, bench.size(work.steps, 2), bench.size(work.batch_size, 2))


def schedule_of(bench: Bench, case: Case, task: Workload, lanes: int = 1) -> Schedule:
    """Return the schedule of a round of all clients, `lanes` times."""
    ids = np.tile(np.arange(case.clients), lanes)
    work, lr = local_work(bench, case), case.optimizer.lr
    return make_schedule(task.data.train, work, Streams(0), 1, ids, lr, dropout=False)
