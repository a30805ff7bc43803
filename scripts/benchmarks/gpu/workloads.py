"""The workloads of the figures of a GPU, and how calls are timed."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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

CLASSES, TEST_SAMPLES, LANES = 10, 10_000, 16


@dataclass(frozen=True)
class Case:
    """A workload: K clients of so many samples (`ragged`: from an eighth of it to all), of
    `shape`."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    clients: int
    samples: int
    work: LocalWork
    optimizer: LocalOptimizer
    eval_every: int
    ragged: bool = False


def sgd(lr: float, decay: float) -> SGD:
    return SGD(lr=lr, momentum=0.0, nesterov=False, weight_decay=decay, schedule=Constant())


def resnet() -> nn.Module:
    return ResNet20((3, 32, 32), CLASSES, shortcut="pad", norm="batch", groups=4)


ADAM = Adam(
    lr=1e-3,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weight_decay=0.0,
    decoupled=False,
    schedule=Constant(),
)
CASES = {
    "W1": Case(
        lambda: MLP((1, 28, 28), CLASSES, hidden=[64, 30], dropout=0.0),
        *((1, 28, 28), 10, 600, LocalWork(None, 30, 64), sgd(0.005, 1e-4), 1),
    ),
    "W2": Case(
        lambda: CNN((3, 32, 32), CLASSES), (3, 32, 32), 5, 500, LocalWork(None, 40, 50), sgd(0.01, 3e-4), 5
    ),
    "ResNet-20": Case(resnet, (3, 32, 32), 10, 640, LocalWork(1, None, 64), ADAM, 1),
    "ResNet-20 ragged": Case(resnet, (3, 32, 32), 10, 640, LocalWork(1, None, 64), ADAM, 1, ragged=True),
}  # fmt: skip


class Bench:
    """A device, a budget of seconds, names of workloads (none: all), and the rows found so far."""

    def __init__(
        self, out: Path, device: str, shrink: int, budget: float, cases: Sequence[str] = ()
    ) -> None:
        self.path, self.device, self.shrink, self.budget = (
            out / "gpu.jsonl",
            torch.device(device),
            shrink,
            budget,
        )
        self.cases = list(cases or CASES)
        self.begin = time.perf_counter()
        self.rows: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def put(self, section: str, case: str, **values: Any) -> None:
        at = round(time.perf_counter() - self.begin)
        self.rows.append({"section": section, "case": case, **values, "at": at})
        with self.path.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def milliseconds(self, call: Callable[[], object], seconds: float = 1.0) -> float:
        """The median of what a call takes until the device is done, the first two left out."""
        seconds = seconds / self.shrink
        for _ in range(2):
            call()
        self.synchronize()
        taken: list[float] = []
        while len(taken) < 3 or (sum(taken) < seconds and len(taken) < 500):
            begin = time.perf_counter()
            call()
            self.synchronize()
            taken.append(time.perf_counter() - begin)
        return 1e3 * statistics.median(taken)

    def size(self, full: int, least: int = 1) -> int:
        return max(full // self.shrink, least)


def workload(
    bench: Bench, name: str, device: torch.device | None = None
) -> tuple[Case, Workload, list[int]]:
    """The case, its workload with data on the device, and its clients' ids."""
    case, device = CASES[name], bench.device if device is None else device
    work = case.work
    if work.steps is not None:
        work = LocalWork(None, bench.size(work.steps, 2), bench.size(work.batch_size, 2))
    case = replace(case, work=work)
    most = bench.size(case.samples, 8)
    sizes = [
        most - (most * 7 // 8) * k // (case.clients - 1) if case.ragged else most
        for k in range(case.clients)
    ]
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x = torch.randn(sum(sizes), *case.shape, generator=generator).to(device)
    y = torch.randint(CLASSES, (len(x),), generator=generator).to(device)
    positions = np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])
    data = ClientData(x, y, positions, positions, CLASSES)
    return case, Workload(case.model().to(device), data, case.optimizer), list(range(case.clients))


def schedule_of(case: Case, task: Workload, ids: list[int], round: int) -> Schedule:
    lr = case.optimizer.lr
    return make_schedule(
        task.data.train, case.work, Streams(0), round, np.array(ids), lr, dropout=False
    )
