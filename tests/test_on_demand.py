"""Samples that are made on demand: the same results as with all of them in memory, in bounded
memory."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.rng import Streams
from fedsim.core.types import Correction, Params
from fedsim.data import synthetic
from fedsim.data.base import SampleSource
from fedsim.data.synthetic import OwnerSamples, Synthetic
from fedsim.engine import data as engine_data
from fedsim.engine import on_demand
from fedsim.engine.backend import Backend, Workload
from fedsim.engine.batched import BatchedBackend
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.graph.backend import GraphBackend
from fedsim.engine.model import initial
from fedsim.engine.native.backend import NativeBackend
from fedsim.engine.on_demand import OnDemandBackend
from fedsim.engine.optimizers import SGD, Constant
from fedsim.engine.reference import ReferenceBackend
from fedsim.engine.schedule import LocalWork, Schedule, make_schedule
from fedsim.models.mlp import MLP
from fedsim.running.assembly import build
from fedsim.running.lanes import TrainingCall, train_jointly

SMALL: dict[str, Any] = {
    "num_owners": 12,
    "samples_per_owner": 9.0,
    "size_deviation": 0.8,
    "num_features": 7,
}
SMALL |= {"num_classes": 4, "alpha": 1.0, "beta": 1.0, "test_samples": 30, "seed": 3}
BACKENDS: dict[str, Callable[[Workload], Backend]] = {
    "reference": lambda w: ReferenceBackend(w, precision="float32", workers=1),
    "batched": lambda w: BatchedBackend(w, precision="float32", chunk_size="auto", compile=False),
    "graph": lambda w: GraphBackend(w, precision="float32", chunk_size="auto"),
    "native": lambda w: NativeBackend(w, workers=1),
}


def dataset(folder: Path, hold: str = "on_demand", **values: Any) -> Synthetic:
    return Synthetic(folder, folder, hold=hold, **SMALL | values)


# --- the data set ----------------------------------------------------------------------------------------------------


def test_both_ways_to_hold_it_are_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demanded, held = dataset(tmp_path).load(), dataset(tmp_path, "memory").load()
    assert isinstance(demanded.train.x, SampleSource)
    assert torch.equal(demanded.train.x.everything(), held.train.tensor)
    assert torch.equal(demanded.train.y, held.train.y)
    assert demanded.fingerprint == held.fingerprint
    assert demanded.input_shape == held.input_shape == (7,)
    with pytest.raises(DataError, match="on demand"):
        _ = demanded.train.tensor
    monkeypatch.setattr(synthetic, "BLOCK_NUMBERS", 1)  # owners that are made at once
    alone = synthetic_owners({})._build()
    monkeypatch.undo()
    assert all(
        torch.equal(value, alone[name]) for name, value in synthetic_owners({})._build().items()
    )


def synthetic_owners(values: dict[str, Any]) -> Synthetic:
    return Synthetic(Path(), Path(), **SMALL | values, hold="on_demand")


def test_a_row_depends_on_its_position_and_the_seed_alone() -> None:
    source = OwnerSamples(synthetic_owners({}))
    whole = source.everything()
    assert whole.shape == source.shape
    positions = np.random.default_rng(0).integers(
        len(source), size=200
    )  # in any order, with repetitions
    assert torch.equal(source.rows(positions), whole[torch.as_tensor(positions)])
    assert torch.equal(source.rows(positions[:1]), whole[torch.as_tensor(positions[:1])])
    assert source.rows(np.empty(0, np.int64)).shape == (0, 7)
    same, other = (OwnerSamples(synthetic_owners({"seed": seed})).everything() for seed in (3, 4))
    assert torch.equal(whole, same)
    assert not torch.equal(whole[0], other[0])
    assert len(torch.unique(whole, dim=0)) == len(whole)


def test_labels_are_those_of_the_owners_own_models(tmp_path: Path) -> None:
    """alpha = 0: a label follows W x + b of the owner; here its distribution, and that of x,
    against the paper's."""
    owners = synthetic_owners(
        {"num_owners": 400, "samples_per_owner": 50.0, "beta": 2.0, "num_features": 5}
    )
    x = OwnerSamples(owners).everything().numpy()
    starts = np.cumsum(owners.counts) - owners.counts
    own = [x[s : s + n] for s, n in zip(starts, owners.counts, strict=True) if n > 20]
    within = np.mean([part.var(0, ddof=1) for part in own], axis=0)
    np.testing.assert_allclose(within, np.arange(1, 6) ** -1.2, rtol=0.1)
    means = np.stack([part.mean(0) for part in own])
    assert np.var(means[:, 4]) == pytest.approx(2.0**2 + 1, rel=0.25)
    assert np.var(means.mean(1)) == pytest.approx(2.0**2 + 1 / 5, rel=0.25)
    loaded = dataset(tmp_path).load()
    (weight,), (bias,) = dataset(tmp_path)._models(np.array([2]))
    assert loaded.owners is not None
    chosen = loaded.owners == 2
    assert isinstance(loaded.train.x, SampleSource)
    logits = loaded.train.x.everything().numpy()[chosen] @ weight + bias
    assert loaded.train.y[chosen].tolist() == logits.argmax(1).tolist()


def test_the_test_set_has_equally_many_of_each_owner(tmp_path: Path) -> None:
    loaded = dataset(tmp_path).load()
    assert loaded.test_owners is not None
    assert sorted(np.bincount(loaded.test_owners, minlength=12)) == [2] * 6 + [3] * 6
    held = loaded.test.tensor
    assert isinstance(loaded.train.x, SampleSource)
    assert not (held[0] == loaded.train.x.everything()).all(1).any()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"num_owners": 0}, r"num_owners=0: must lie in \[1, 1e\+06\]"),
        (
            {"samples_per_owner": 1e8, "num_owners": 2},
            "samples_per_owner=100000000.0: must be at most 50000000",
        ),
    ],
)
def test_values_that_cannot_be_are_refused(
    tmp_path: Path, values: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        dataset(tmp_path, **values)
    large: dict[str, Any] = {"num_owners": 1_000_000, "samples_per_owner": 40.0, "num_features": 60}
    dataset(tmp_path, **large)
    with pytest.raises(
        ConfigError, match=r"samples_per_owner=40.0: must be at most 33\n.*dataset.hold=on_demand"
    ):
        dataset(tmp_path, "memory", **large)


# --- the engine ------------------------------------------------------------------------------------------------------


SGD_WITH_ALL = SGD(lr=0.1, momentum=0.5, nesterov=False, weight_decay=1e-3, schedule=Constant())


def model() -> nn.Module:
    torch.manual_seed(0)
    return MLP((7,), 4, hidden=[5], dropout=0.25)


def engines(
    make: Callable[[Workload], Backend], work: LocalWork, num_owners: int = 12
) -> tuple[Engine, Engine]:
    """On samples made on demand, and on the same samples in memory; both by clients of different
    sizes."""
    owners = synthetic_owners({"num_owners": num_owners})
    source, y = OwnerSamples(owners), torch.arange(int(owners.counts.sum())) * 7 % 4
    rng = np.random.default_rng(1)
    clients = [
        rng.permutation(own) for own in np.split(np.arange(len(y)), np.cumsum(owners.counts)[:-1])
    ]
    demanded = Workload(model(), ClientData.on_demand(source, y, clients, clients, 4), SGD_WITH_ALL)
    held = Workload(model(), ClientData(source.everything(), y, clients, clients, 4), SGD_WITH_ALL)
    first = Engine(OnDemandBackend(demanded, make), demanded, work, Streams(0))
    return first, Engine(make(held), held, work, Streams(0))


def correction(params: Params, count: int) -> Correction:
    random = torch.Generator().manual_seed(4)
    return Correction(
        0.1, {n: torch.randn(count, *p.shape, generator=random) for n, p in params.items()}
    )


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_gives_the_same_bits(name: str) -> None:
    demanded, held = engines(BACKENDS[name], LocalWork(2, None, 4))
    params = initial(held.workload.model)
    ids = np.array([1, 4, 5, 9])
    for round in (1, 2):
        one, other = (
            e.train(params, ids, round, 0.1, correction=correction(params, 4))
            for e in (demanded, held)
        )
        assert equal(one.delta, other.delta)
        assert one.momentum is not None
        assert other.momentum is not None
        assert equal(one.momentum, other.momentum)
        assert one.loss.tolist() == other.loss.tolist()
    for few in (
        held.data.train[2:5],
        held.data.train,
    ):  # some, and most of all, which pass in their order
        assert demanded.losses(params, few).tolist() == held.losses(params, few).tolist()
        assert demanded.accuracies(params, few).tolist() == held.accuracies(params, few).tolist()
    both = zip(
        demanded.client_gradients(params, few), held.client_gradients(params, few), strict=True
    )
    assert all(torch.equal(a, b) for a, b in both)
    assert demanded.hits(params, few[3]).tolist() == held.hits(params, few[3]).tolist()
    x = held.data.x[:9]
    assert torch.equal(demanded.predict(params, x), held.predict(params, x))


@pytest.mark.parametrize("largest_last", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_calls_that_do_not_fit_are_taken_in_parts(
    name: str, largest_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`largest_last`: the others by falling size, so that later parts have fewer steps and need no
    other order."""
    monkeypatch.setattr(engine_data, "BUFFER_BYTES", 0)  # three of the largest clients
    monkeypatch.setattr(on_demand, "BUFFER_BYTES", 1000)  # of gradients, three
    demanded, held = engines(BACKENDS[name], LocalWork(1, None, 4), 60)
    assert len(demanded.data.x) < len(held.data.x)
    params, ids = initial(held.workload.model), np.arange(60)
    if largest_last:
        ids = np.roll(np.argsort([-len(own) for own in held.data.train], kind="stable"), -1)
    placed = watched(demanded)
    one, other = (
        e.train(params, ids, 1, 0.1, correction=correction(params, 60)) for e in (demanded, held)
    )
    assert len(placed) > 1
    for key, value in one.delta.items():
        torch.testing.assert_close(value, other.delta[key], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(one.loss, other.loss, rtol=1e-5)
    everyone = held.data.train
    np.testing.assert_allclose(
        demanded.losses(params, everyone), held.losses(params, everyone), rtol=1e-5
    )
    for a, b in zip(
        demanded.client_gradients(params, everyone),
        held.client_gradients(params, everyone),
        strict=True,
    ):
        demanded.losses(params, everyone[:2])  # whoever takes a gradient may use the samples' room
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def watched(engine: Engine) -> list[int]:
    """The numbers of samples that are asked for, as they come."""
    source, asked = engine.data.source, []
    assert source is not None
    rows = source.rows

    def counted(positions: NDArray[np.int64]) -> Tensor:
        asked.append(len(positions))
        return rows(positions)

    source.rows = counted  # type: ignore[method-assign]
    return asked


def test_a_round_makes_the_samples_of_its_clients_alone() -> None:
    demanded, _ = engines(BACKENDS["batched"], LocalWork(3, None, 4))
    asked, ids = watched(demanded), np.array([2, 7])
    demanded.train(initial(demanded.workload.model), ids, 1, 0.1)
    assert len(asked) == 1
    assert (
        0 <= asked[0] - sum(len(demanded.data.train[i]) for i in ids) <= 1
    )  # padding repeats position 0


# --- runs side by side, each with a room of its own ------------------------------------------------------------------


def divided(
    name: str, sizes: Sequence[int], batch_size: int = 100
) -> tuple[OnDemandBackend, Schedule]:
    """A backend for 750 samples, divided into clients of these sizes, and a schedule of all
    clients."""
    owners = synthetic_owners({"num_owners": 1, "samples_per_owner": 750.0, "size_deviation": 0.0})
    source, y = OwnerSamples(owners), torch.arange(750) % 4
    clients = np.split(np.random.default_rng(0).permutation(750), np.cumsum(sizes))[: len(sizes)]
    data = ClientData.on_demand(source, y, clients, clients, 4)
    backend = OnDemandBackend(Workload(model(), data, SGD_WITH_ALL), BACKENDS[name])
    work = LocalWork(1, None, batch_size)
    return backend, make_schedule(
        clients, work, Streams(0), 1, np.arange(len(sizes)), 0.1, dropout=True
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_calls_that_find_room_one_by_one_alone_are_not_cut_elsewhere(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_data, "BUFFER_BYTES", 0)
    backend, schedule = divided(name, [37, 5, 30, 3, 33, 4], 64)
    assert backend.buffer_size == 112
    params = initial(model())
    parts = [
        schedule.rows(np.array(rows), padded=True)
        for rows in ([0, 1, 2], [0, 3, 4], [0, 5], [0, 1, 2, 3, 4, 5])
    ]
    calls = [TrainingCall(backend, [params] * len(part), part) for part in parts]
    for call, joint in zip(calls, train_jointly(calls), strict=True):
        alone = backend.train(call.start, call.schedule)
        assert equal(joint.delta, alone.delta)
        assert np.array_equal(joint.losses[call.schedule.mask], alone.losses[call.schedule.mask])


# --- whole runs ------------------------------------------------------------------------------------------------------

RUN = (
    *(
        "dataset=synthetic",
        "dataset.num_owners=40",
        "dataset.size_deviation=0.7",
        "partition=natural",
    ),
    *(
        "partition.min_samples=1",
        "num_clients=40",
        "cohort_size=5",
        "num_rounds=4",
        "model=logistic",
    ),
    *("local.holdout_fraction=0.2", "local.evaluate_on=holdout", "server.validation_fraction=0.1"),
    *("server.public_samples=20", "tracker=files_only"),
)


@pytest.fixture(scope="module", autouse=True)
def _conf() -> Iterator[None]:
    with search_path():
        yield


def outcome(*words: str) -> tuple[Any, ...]:
    """Division, records without their times, and final model of a run."""
    (job,) = compose_jobs([*RUN, *words], multirun=False)
    made = build(make_plan(job.config, job.choices))
    records = [
        {k: v for k, v in r.as_dict().items() if "seconds" not in k} for r in made.simulation
    ]
    return (
        made.division.hash,
        records,
        {n: v.numpy().tobytes() for n, v in made.simulation.params.items()},
    )


@pytest.mark.parametrize(
    "selector", ["random", "power_of_choice", "pncs", "greedy_shapley", "fedabc", "afl", "delta"]
)
def test_a_run_is_the_same_however_its_data_are_held(tmp_path: Path, selector: str) -> None:
    words = (f"selector={selector}", f"cache_dir={tmp_path}")
    demanded, held = (
        outcome(*words, "dataset.hold=on_demand"),
        outcome(*words, "dataset.hold=memory"),
    )
    assert demanded == held
    assert demanded[2] != outcome(*words, "seed=1")[2]
