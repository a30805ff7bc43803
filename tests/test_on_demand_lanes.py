"""Runs side by side whose samples are made on demand: each has a room of its own, made for its largest clients."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from fedsim.core.rng import Streams
from fedsim.data.synthetic import OwnerSamples
from fedsim.engine import data as engine_data
from fedsim.engine.backend import TrainingResult, Workload
from fedsim.engine.data import ClientData
from fedsim.engine.model import initial
from fedsim.engine.on_demand import OnDemandBackend
from fedsim.engine.optimizers import SGD, Constant
from fedsim.engine.schedule import LocalWork, Schedule, make_schedule
from fedsim.models.mlp import MLP
from fedsim.running.interleaving import InterleavedRun, SuspendingBackend, TrainingCall, run_interleaved, train_jointly
from tests.test_on_demand import BACKENDS, equal, synthetic_owners


def divided(name: str, sizes: Sequence[int], batch_size: int = 100) -> tuple[OnDemandBackend, Schedule]:
    """A backend for 750 samples, divided into clients of these sizes, and a schedule of all clients."""
    owners = synthetic_owners({"num_owners": 1, "samples_per_owner": 750.0, "size_deviation": 0.0})
    source, y = OwnerSamples(owners), torch.arange(750) % 4
    clients = np.split(np.random.default_rng(0).permutation(750), np.cumsum(sizes))[: len(sizes)]
    torch.manual_seed(0)
    model = MLP((7,), 4, hidden=[5], dropout=0.0)
    sgd = SGD(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0, schedule=Constant())
    data = ClientData.on_demand(source, y, clients, clients, 4)
    backend = OnDemandBackend(Workload(model, data, sgd), BACKENDS[name])
    work = LocalWork(1, None, batch_size)
    return backend, make_schedule(clients, work, Streams(0), 1, np.arange(len(sizes)), 0.1, dropout=False)


@pytest.mark.parametrize("name", BACKENDS)
def test_runs_with_rooms_of_different_sizes_are_each_trained_in_their_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_data, "ROOM_BYTES", 0)  # three of the largest clients
    made = [divided(name, sizes) for sizes in ([75, 75], [450, 300])]
    assert [backend.room for backend, _ in made] == [226, 750]
    assert made[0][0].description == made[1][0].description
    params = initial(MLP((7,), 4, hidden=[5], dropout=0.0))
    expected = [backend.train([params] * 2, schedule) for backend, schedule in made]
    found: dict[int, TrainingResult] = {}

    def work(number: int) -> Callable[[InterleavedRun], object]:
        backend, schedule = made[number]

        def train(run: InterleavedRun) -> None:
            found[number] = SuspendingBackend(backend, run, "").train([params] * 2, schedule)

        return train

    run_interleaved([work(0), work(1)], lambda left, round: None)
    assert all(equal(found[number].delta, result.delta) for number, result in enumerate(expected))


@pytest.mark.parametrize("name", BACKENDS)
def test_calls_that_find_room_one_by_one_alone_are_not_cut_elsewhere(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_data, "ROOM_BYTES", 0)
    backend, schedule = divided(name, [37, 5, 30, 3, 33, 4], 64)
    assert backend.room == 112
    params = initial(MLP((7,), 4, hidden=[5], dropout=0.0))
    parts = [schedule.rows(np.array(rows), padded=True) for rows in ([0, 1, 2], [0, 3, 4], [0, 5], [0, 1, 2, 3, 4, 5])]
    calls = [TrainingCall(backend, [params] * len(part), part) for part in parts]
    for call, joint in zip(calls, train_jointly(calls), strict=True):
        alone = backend.train(call.start, call.schedule)
        assert equal(joint.delta, alone.delta)
        assert np.array_equal(joint.losses[call.schedule.mask], alone.losses[call.schedule.mask])
