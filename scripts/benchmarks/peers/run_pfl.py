"""Apple's pfl: SimulatedBackend with federated averaging, in one process or several by torchrun.

pfl keeps a client's batches from its first round on. So they are shuffled once and not in every
epoch, which is less work than everybody else's. On a GPU pfl takes it by itself.
"""

import itertools
import os
import types
from collections.abc import Callable

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data import FederatedDataset
from pfl.data.dataset import Dataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn
from torch.nn import functional as F

from scripts.benchmarks.peers.networks import new_network, prepare
from scripts.benchmarks.peers.stopwatch import ENDLESS, Stopwatch, parse_case
from scripts.benchmarks.peers.workloads import EVALUATION_BATCH, Arrays, Workload, read_arrays

RANK = int(os.environ.get("RANK", "0"))
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))


def for_pfl(model: nn.Module) -> nn.Module:
    """Add the two methods that pfl calls to a network."""

    def loss(self, x, y, eval=False):
        self.train(not eval)
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x, y, eval=True):
        self.train(not eval)
        return {"accuracy": Weighted(int((self(x).argmax(1) == y).sum()), len(y))}

    model.loss = types.MethodType(loss, model)
    model.metrics = types.MethodType(metrics, model)
    return model


class TimedEvaluation(CentralEvaluationCallback):
    """Evaluates when it is due, in all processes together.

    The watch of the first process ends the run for all.
    """

    def __init__(self, watch: Stopwatch, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.watch = watch

    def on_train_begin(self, *, model):
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if not self.watch.evaluates:
            self.watch.end_round(None)
            return False, Metrics()
        _, metrics = super().after_central_iteration(
            aggregate_metrics, model, central_iteration=self.watch.round + 1
        )
        values = metrics.to_simple_dict().items()
        [accuracy] = [value for name, value in values if "accuracy" in str(name)]
        return agreed(self.watch.end_round(accuracy)), metrics


def agreed(enough: bool) -> bool:
    """Return what the first process says."""
    if PROCESSES == 1:
        return enough
    flag = torch.tensor([enough])
    torch.distributed.broadcast(flag, 0)
    return bool(flag)


def sampler_of(arrays: Arrays) -> Callable[[], int]:
    """Return a sampler of users that draws the written cohorts."""
    order = itertools.cycle(arrays.cohorts.flatten().tolist())
    return lambda: next(order)


def federated(workload: Workload, arrays: Arrays, device: str) -> FederatedDataset:
    rng = np.random.default_rng(0)
    users = []
    for x, y in zip(arrays.x, arrays.y, strict=True):
        order = rng.permutation(workload.samples)
        users.append([torch.from_numpy(array[order]).to(device) for array in (x, y)])
    return FederatedDataset.from_slices(users, sampler_of(arrays))


def main() -> None:
    case = parse_case()
    workload, arrays = case.workload, read_arrays(case.data, case.workload)
    prepare(case)
    torch.set_num_threads(max(case.threads // PROCESSES, 1))
    network = for_pfl(new_network(workload, arrays.initial)).to(case.device)
    clients = federated(workload, arrays, case.device)

    def local_optimizer(params, lr):
        return torch.optim.SGD(params, lr, weight_decay=workload.weight_decay)

    model = PyTorchModel(
        network,
        local_optimizer_create=local_optimizer,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
    )
    watch = Stopwatch(case)
    evaluation = NNEvalHyperParams(local_batch_size=EVALUATION_BATCH)
    test_set = (torch.from_numpy(array).to(case.device) for array in arrays.data[2:])
    test = Dataset(raw_data=list(test_set))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=ENDLESS,
            evaluation_frequency=ENDLESS,
            train_cohort_size=workload.cohort_size,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(
            training_data=clients, val_data=clients, postprocessors=[WeightByUser()]
        ),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=workload.lr,
            local_num_epochs=workload.epochs,
            local_batch_size=workload.batch_size,
        ),
        model_eval_params=evaluation,
        callbacks=[TimedEvaluation(watch, test, evaluation)],
    )
    if RANK == 0:
        watch.report(["pfl", "torch"], processes=PROCESSES)


if __name__ == "__main__":
    main()
