"""FedLab: StandalonePipeline with its SGDSerialClientTrainer.

Batches are cut from tensors, without a DataLoader.
"""

import random
from collections.abc import Iterator

import fedlab  # noqa: F401, its submodules need it
import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset
from fedlab.core.standalone import StandalonePipeline
from torch import Tensor

from scripts.benchmarks.peers.networks import accuracy, new_network, prepare
from scripts.benchmarks.peers.stopwatch import ENDLESS, Stopwatch, parse_case
from scripts.benchmarks.peers.workloads import Workload, read_arrays


class Batches:
    """One client's data, in a new order in each iteration."""

    def __init__(self, x: Tensor, y: Tensor, batch_size: int) -> None:
        self.x = x
        self.y = y
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in torch.randperm(len(self.x)).split(self.batch_size):
            yield self.x[batch], self.y[batch]


class InMemory(FedDataset):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x = x
        self.y = y

    def get_dataloader(self, id: int, batch_size: int) -> Batches:
        return Batches(self.x[id], self.y[id], batch_size)


class Trainer(SGDSerialClientTrainer):
    """FedLab's trainer with weight decay, for which it has no option."""

    def __init__(self, workload: Workload, dataset: InMemory) -> None:
        super().__init__(new_network(workload), workload.num_clients)
        self.setup_dataset(dataset)
        self.setup_optim(workload.epochs, workload.batch_size, workload.lr)
        self.optimizer = torch.optim.SGD(
            self._model.parameters(), workload.lr, weight_decay=workload.weight_decay
        )


class TimedPipeline(StandalonePipeline):
    """Evaluates when it is due, and stops when the watch has measured enough."""

    def __init__(
        self, handler: SyncServerHandler, trainer: Trainer, watch: Stopwatch, test: list[Tensor]
    ) -> None:
        super().__init__(handler, trainer)
        self.watch = watch
        self.test = test

    def evaluate(self) -> None:
        value = accuracy(self.handler.model, *self.test) if self.watch.evaluates else None
        if self.watch.end_round(value):
            self.handler.round = self.handler.global_round


def main() -> None:
    case = parse_case()
    workload = case.workload
    prepare(case)
    random.seed(0)
    arrays = read_arrays(case.data, workload)
    x, y, *test = map(torch.from_numpy, arrays.data)
    share = workload.cohort_size / workload.num_clients
    handler = SyncServerHandler(new_network(workload, arrays.initial), ENDLESS, share)
    watch = Stopwatch(case)
    TimedPipeline(handler, Trainer(workload, InMemory(x, y)), watch, test).main()
    watch.report(["fedlab", "torch"])


if __name__ == "__main__":
    main()
