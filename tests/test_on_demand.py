"""Samples that are made on demand give the results of the same samples in memory."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.core.arrays import Ints
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
from fedsim.engine.schedule import LocalWork, make_schedule
from fedsim.models.mlp import MLP
from fedsim.running.assembly import build
from fedsim.running.lanes import TrainingCall, train_jointly

OPTIONS: dict[str, Any] = {
    "num_owners": 12,
    "samples_per_owner": 9.0,
    "size_deviation": 0.8,
    "num_features": 7,
    "num_classes": 4,
    "alpha": 1.0,
    "beta": 1.0,
    "test_samples": 30,
    "seed": 3,
}
BACKENDS: dict[str, Callable[[Workload], Backend]] = {
    "reference": lambda w: ReferenceBackend(w, precision="float32", workers=1),
    "batched": lambda w: BatchedBackend(w, precision="float32", chunk_size="auto", compile=False),
    "graph": lambda w: GraphBackend(w, precision="float32", chunk_size="auto"),
    "native": lambda w: NativeBackend(w, workers=1),
}


def dataset(hold: str = "on_demand", **options: Any) -> Synthetic:
    return Synthetic(Path(), Path(), hold=hold, **OPTIONS | options)


def all_samples(data: Any) -> Tensor:
    assert isinstance(data.train.x, SampleSource)
    return data.train.x.everything()


# --- the data set ---------------------------------------------------------------------------------


def test_samples_on_demand_are_those_in_memory() -> None:
    on_demand_data, in_memory = dataset().load(), dataset("memory").load()
    assert torch.equal(all_samples(on_demand_data), in_memory.train.tensor)
    assert torch.equal(on_demand_data.train.y, in_memory.train.y)
    assert on_demand_data.fingerprint == in_memory.fingerprint
    assert on_demand_data.input_shape == in_memory.input_shape == (7,)
    with pytest.raises(DataError, match="on demand"):
        _ = on_demand_data.train.tensor


def test_owners_are_the_same_however_many_are_made_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = dataset()._build()
    monkeypatch.setattr(synthetic, "BLOCK_NUMBERS", 1)
    one_by_one = dataset()._build()
    assert all(torch.equal(value, one_by_one[name]) for name, value in together.items())


def test_a_sample_depends_on_its_position_and_the_seed_only() -> None:
    source = OwnerSamples(dataset())
    samples = source.everything()
    assert samples.shape == source.shape
    positions = np.random.default_rng(0).integers(len(source), size=200)
    for some in (positions, positions[:1], positions[:0]):
        assert torch.equal(source.rows(some), samples[torch.as_tensor(some)])
    assert torch.equal(OwnerSamples(dataset(seed=3)).everything(), samples)
    assert not torch.equal(OwnerSamples(dataset(seed=4)).everything()[0], samples[0])
    assert len(torch.unique(samples, dim=0)) == len(samples)


def test_the_draws_of_an_owner_are_those_of_philox_with_the_seed_and_the_owner_as_key() -> None:
    drawn = dataset(seed=3)._reset_generator(owner=5, stream=2).random(4)
    philox = np.random.Philox(key=[3, 5], counter=[0, 0, 0, 2])
    assert np.array_equal(drawn, np.random.Generator(philox).random(4))


def test_samples_have_the_distribution_of_the_paper() -> None:
    """Feature j has variance j^-1.2 within an owner. Means of owners have variance beta^2 + 1."""
    owners = dataset(num_owners=400, samples_per_owner=50.0, beta=2.0, num_features=5)
    samples = np.split(OwnerSamples(owners).everything().numpy(), np.cumsum(owners.counts)[:-1])
    large_owners = [rows for rows in samples if len(rows) > 20]
    within = np.mean([rows.var(0, ddof=1) for rows in large_owners], axis=0)
    np.testing.assert_allclose(within, np.arange(1, 6) ** -1.2, rtol=0.1)
    means = np.stack([rows.mean(0) for rows in large_owners])
    assert np.var(means[:, 4]) == pytest.approx(2.0**2 + 1, rel=0.25)
    assert np.var(means.mean(1)) == pytest.approx(2.0**2 + 1 / 5, rel=0.25)


def test_labels_are_those_of_the_owners_model() -> None:
    loaded = dataset().load()
    (weight,), (bias,) = dataset()._models(np.array([2]))
    assert loaded.owners is not None
    of_owner = loaded.owners == 2
    logits = all_samples(loaded).numpy()[of_owner] @ weight + bias
    assert loaded.train.y[of_owner].tolist() == logits.argmax(1).tolist()


def test_the_test_set_has_equally_many_samples_of_each_owner_and_none_for_training() -> None:
    loaded = dataset().load()
    assert loaded.test_owners is not None
    assert sorted(np.bincount(loaded.test_owners, minlength=12)) == [2] * 6 + [3] * 6
    assert not (loaded.test.tensor[0] == all_samples(loaded)).all(1).any()


LARGE = {"num_owners": 1_000_000, "samples_per_owner": 40.0, "num_features": 60}


@pytest.mark.parametrize(
    ("hold", "options", "message"),
    [
        ("on_demand", {"num_owners": 0}, r"num_owners=0: must lie in \[1, 1e\+06\]"),
        (
            "on_demand",
            {"samples_per_owner": 1e8, "num_owners": 2},
            "samples_per_owner=100000000.0: must be at most 50000000",
        ),
        ("memory", LARGE, "samples_per_owner=40.0: must be at most 33\n.*dataset.hold=on_demand"),
    ],
)
def test_impossible_values_are_rejected(hold: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataset(hold, **options)


def test_a_large_data_set_can_be_made_on_demand() -> None:
    dataset("on_demand", **LARGE)


# --- the backend ----------------------------------------------------------------------------------


def workload(data: ClientData) -> Workload:
    torch.manual_seed(0)
    model = MLP((7,), 4, hidden=[5], dropout=0.25)
    optimizer = SGD(lr=0.1, momentum=0.5, nesterov=False, weight_decay=1e-3, schedule=Constant())
    return Workload(model, data, optimizer)


def engines(backend: str, work: LocalWork, num_owners: int = 12) -> tuple[Engine, Engine]:
    """Return engines on samples that are made on demand, and on the same samples in memory."""
    owners = dataset(num_owners=num_owners)
    source = OwnerSamples(owners)
    y, rng = torch.arange(len(source)) * 7 % 4, np.random.default_rng(1)
    by_owner = np.split(np.arange(len(y)), np.cumsum(owners.counts)[:-1])
    clients = [rng.permutation(positions) for positions in by_owner]
    make = BACKENDS[backend]
    buffered = workload(ClientData.on_demand(source, y, clients, clients, 4))
    in_memory = workload(ClientData(source.everything(), y, clients, clients, 4))
    return (
        Engine(OnDemandBackend(buffered, make), buffered, work, Streams(0)),
        Engine(make(in_memory), in_memory, work, Streams(0)),
    )


def correction(params: Params, count: int) -> Correction:
    random = torch.Generator().manual_seed(4)
    shift = {n: torch.randn(count, *p.shape, generator=random) for n, p in params.items()}
    return Correction(0.1, shift)


def assert_same(actual: dict[str, Tensor] | None, expected: dict[str, Tensor] | None) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_gives_the_same_bits_on_demand(backend: str) -> None:
    buffered, in_memory = engines(backend, LocalWork(2, None, 4))
    params, ids = initial(in_memory.workload.model), np.array([1, 4, 5, 9])
    for round in (1, 2):
        actual, expected = (
            engine.train(params, ids, round, 0.1, correction=correction(params, 4))
            for engine in (buffered, in_memory)
        )
        assert_same(actual.delta, expected.delta)
        assert_same(actual.momentum, expected.momentum)
        assert actual.loss.tolist() == expected.loss.tolist()
    everyone = in_memory.data.train
    # Few samples are gathered, and most of all samples pass in order.
    for lists in (everyone[2:5], everyone):
        assert buffered.losses(params, lists).tolist() == in_memory.losses(params, lists).tolist()
        accuracies = in_memory.accuracies(params, lists).tolist()
        assert buffered.accuracies(params, lists).tolist() == accuracies
    gradients = [
        torch.stack([*e.client_gradients(params, everyone)]) for e in (buffered, in_memory)
    ]
    assert torch.equal(*gradients)
    hits = in_memory.hits(params, everyone[3]).tolist()
    assert buffered.hits(params, everyone[3]).tolist() == hits
    x = in_memory.data.x[:9]
    assert torch.equal(buffered.predict(params, x), in_memory.predict(params, x))


def noted_requests(engine: Engine) -> list[int]:
    """Return a list that receives the number of samples of each request to the source."""
    source, requests = engine.data.source, []
    assert source is not None
    rows = source.rows

    def noted_rows(positions: Ints) -> Tensor:
        requests.append(len(positions))
        return rows(positions)

    source.rows = noted_rows  # type: ignore[method-assign]
    return requests


@pytest.mark.parametrize("largest_last", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_that_do_not_fit_are_split(
    backend: str, largest_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the largest client last, each part has fewer steps than the one before it."""
    monkeypatch.setattr(engine_data, "BUFFER_BYTES", 0)  # three of the largest clients
    monkeypatch.setattr(on_demand, "GRADIENT_BYTES", 1000)  # three gradients
    buffered, in_memory = engines(backend, LocalWork(1, None, 4), num_owners=60)
    params, everyone = initial(in_memory.workload.model), in_memory.data.train
    ids = np.arange(60)
    if largest_last:
        ids = np.roll(np.argsort([-len(positions) for positions in everyone], kind="stable"), -1)
    requests = noted_requests(buffered)
    actual, expected = (
        engine.train(params, ids, 1, 0.1, correction=correction(params, 60))
        for engine in (buffered, in_memory)
    )
    assert len(requests) > 1
    torch.testing.assert_close(actual.delta, expected.delta, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(actual.loss, expected.loss, rtol=1e-5)
    losses = [engine.losses(params, everyone) for engine in (buffered, in_memory)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    gradients = in_memory.client_gradients(params, everyone)
    for gradient in buffered.client_gradients(params, everyone):
        buffered.losses(params, everyone[:2])  # This overwrites the buffer.
        torch.testing.assert_close(gradient, next(gradients), rtol=1e-4, atol=1e-6)


def test_a_round_makes_only_the_samples_of_its_clients() -> None:
    buffered, _ = engines("batched", LocalWork(3, None, 4))
    requests, ids = noted_requests(buffered), np.array([2, 7])
    buffered.train(initial(buffered.workload.model), ids, 1, 0.1)
    needed = sum(len(buffered.data.train[client]) for client in ids)
    (requested,) = requests
    assert requested in (needed, needed + 1)  # Padding repeats position 0.


@pytest.mark.parametrize(
    ("num_clients", "parts"),
    [
        (5, [slice(0, 3), slice(3, 5)]),
        # The fourth client does not fit with the first three. It would be alone, so it takes one.
        (4, [slice(0, 2), slice(2, 4)]),
    ],
)
def test_no_part_of_a_split_cohort_has_a_single_client(
    num_clients: int, parts: list[slice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_data, "BUFFER_BYTES", 0)
    source = OwnerSamples(dataset(num_owners=1, samples_per_owner=20.0, size_deviation=0.0))
    clients = np.split(np.arange(3 * num_clients), num_clients)  # 3 samples each
    task = workload(ClientData.on_demand(source, torch.arange(20) % 4, clients, clients, 4))
    buffered = OnDemandBackend(task, BACKENDS["reference"])
    assert buffered.buffer_size == 10  # 3 clients of 3 samples, and 1 for padding
    work, ids = LocalWork(1, None, 3), np.arange(num_clients)
    schedule = make_schedule(clients, work, Streams(0), 1, ids, 0.1, dropout=True)
    assert buffered._parts_that_fit(schedule) == parts


def test_a_buffer_without_room_for_three_clients_is_noticed() -> None:
    source = OwnerSamples(dataset(num_owners=1, samples_per_owner=20.0, size_deviation=0.0))
    clients = np.split(np.arange(18), 6)
    data = ClientData(torch.zeros(9, 7), torch.arange(20) % 4, clients, clients, 4, source)
    with pytest.raises(AssertionError, match="the buffer is not that"):
        OnDemandBackend(workload(data), BACKENDS["reference"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_that_fit_alone_are_not_split_when_runs_train_jointly(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_data, "BUFFER_BYTES", 0)
    sizes = [37, 5, 30, 3, 33, 4]
    source = OwnerSamples(dataset(num_owners=1, samples_per_owner=750.0, size_deviation=0.0))
    order, y = np.random.default_rng(0).permutation(750), torch.arange(750) % 4
    clients = np.split(order, np.cumsum(sizes))[: len(sizes)]
    task = workload(ClientData.on_demand(source, y, clients, clients, 4))
    buffered = OnDemandBackend(task, BACKENDS[backend])
    assert buffered.buffer_size == 3 * 37 + 1
    work, ids, params = LocalWork(1, None, 64), np.arange(6), initial(task.model)
    schedule = make_schedule(clients, work, Streams(0), 1, ids, 0.1, dropout=True)
    calls = []
    for rows in ([0, 1, 2], [0, 3, 4], [0, 5], [0, 1, 2, 3, 4, 5]):
        part = schedule.rows(np.array(rows), padded=True)
        calls.append(TrainingCall(buffered, [params] * len(rows), part))
    for call, joint in zip(calls, train_jointly(calls), strict=True):
        alone = buffered.train(call.start, call.schedule)
        assert_same(joint.delta, alone.delta)
        mask = call.schedule.mask
        assert np.array_equal(joint.losses[mask], alone.losses[mask])


def test_padding_counts_when_runs_that_train_jointly_fill_the_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_data, "BUFFER_BYTES", 0)
    sizes = [4, 4, 1, 1, 1, 1, 1]  # 13 samples, at positions 1 to 13
    source = OwnerSamples(dataset(num_owners=1, samples_per_owner=20.0, size_deviation=0.0))
    clients = np.split(np.arange(1, 14), np.cumsum(sizes)[:-1])
    task = workload(ClientData.on_demand(source, torch.arange(20) % 4, clients, clients, 4))
    buffered = OnDemandBackend(task, BACKENDS["native"])
    assert buffered.buffer_size == 13  # 3 clients of 4 samples, and 1 for padding
    work, ids = LocalWork(1, None, 4), np.arange(7)
    schedule = make_schedule(clients, work, Streams(0), 1, ids, 0.1, dropout=True)
    large, small = schedule.rows(slice(0, 2)), schedule.rows(slice(2, 7))
    params = initial(task.model)
    calls = [
        TrainingCall(buffered, [params] * 2, large),
        TrainingCall(buffered, [params] * 5, small),
    ]
    clients_trained = []
    train_part = buffered._train_part

    def noting_train_part(start: Any, part: Any) -> Any:
        clients_trained.append(len(part))
        return train_part(start, part)

    monkeypatch.setattr(buffered, "_train_part", noting_train_part)
    train_jointly(calls)
    # Small batches would be padded to four samples, by position 0: a 14th sample.
    assert clients_trained == [2, 5]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_client_trains_alone_if_a_cohort_is_cut_and_large_clients_make_fewer_steps(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_data, "BUFFER_BYTES", 0)
    source = OwnerSamples(dataset(num_owners=1, samples_per_owner=24.0, size_deviation=0.0))
    clients = np.split(np.arange(4, 24), 5)
    task = workload(ClientData.on_demand(source, torch.arange(24) % 4, clients, clients, 4))
    buffered = OnDemandBackend(task, BACKENDS[backend])
    assert buffered.buffer_size == 13  # 3 clients of 4 samples, and 1 for padding
    work, ids = LocalWork(2, None, 4), np.arange(5)
    schedule = make_schedule(clients, work, Streams(0), 1, ids, 0.1, dropout=True)
    schedule.counts[:4, 1] = 0
    schedule.positions[:4, 1] = 0  # padding, as make_schedule has it after a client's last step
    assert buffered._parts_that_fit(schedule) == [slice(0, 3), slice(3, 5)]


# --- whole runs -----------------------------------------------------------------------------------

RUN = (
    "dataset=synthetic", "dataset.num_owners=40", "dataset.size_deviation=0.7", "partition=natural",
    "partition.min_samples=1", "num_clients=40", "cohort_size=5", "num_rounds=4", "model=logistic",
    "local.holdout_fraction=0.2", "local.evaluate_on=holdout", "server.validation_fraction=0.1",
    "server.public_samples=20", "tracker=files_only",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dataset` keeps its cache in the working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def _conf() -> Iterator[None]:
    with search_path():
        yield


def outcome(*words: str) -> tuple[Any, ...]:
    """Return the partition, the records without times, and the final model of a run."""
    (job,) = compose_jobs([*RUN, *words], multirun=False)
    experiment = build(make_plan(job.config, job.choices))
    records = []
    for record in experiment.simulation:
        values = record.as_dict()
        records.append({key: values[key] for key in values if "seconds" not in key})
    params = {n: v.numpy().tobytes() for n, v in experiment.simulation.params.items()}
    return experiment.division.hash, records, params


@pytest.mark.parametrize(
    "selector", ["random", "power_of_choice", "pncs", "greedy_shapley", "fedabc", "afl", "delta"]
)
def test_a_run_is_the_same_however_its_samples_are_held(tmp_path: Path, selector: str) -> None:
    words = (f"selector={selector}", f"cache_dir={tmp_path}")
    in_memory = outcome(*words, "dataset.hold=memory")
    assert outcome(*words, "dataset.hold=on_demand") == in_memory
    assert outcome(*words, "seed=1")[2] != in_memory[2]
