"""Clients charge what the cost table says (base: K models down, K up, E n_k training samples)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.clients import clients as clients_module
from fedsim.clients.compression import (
    Compressor,
    Coordinates,
    CountSketch,
    Gaussian,
    Identity,
    Int8,
    TopK,
)
from fedsim.clients.context import Signal, UndeclaredSignalError
from fedsim.clients.ledger import Ledger
from fedsim.clients.phase_timer import PhaseTimer
from fedsim.core.errors import ConfigError, FedsimError
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import Cohort, Ids, Params
from tests.toys import ToyEngine, toy_clients, toy_params

SIZES = [1, 2, 3, 4, 5, 6]
MODEL = 2 * 4  # two float32
LOSSES = frozenset({Signal.LOSSES})


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_nothing_is_charged_but_training_with_models_both_ways_and_every_sample_of_every_epoch() -> (
    None
):
    ledger = Ledger()
    clients = toy_clients(SIZES, frozenset(), ledger=ledger)
    with pytest.raises(UndeclaredSignalError, match=r"Signal\.LOSSES"):
        clients.losses(ids(0))
    assert ledger == Ledger()
    clients.collect(ids(1, 4))
    assert (ledger.bytes_down, ledger.bytes_up) == (2 * MODEL, 2 * MODEL)
    assert (ledger.train_samples, ledger.forward_samples) == (2 * (2 + 5), 0)
    assert ledger.contacted == ledger.trained == ledger.uploaded == {1, 4}


def test_a_client_that_holds_the_model_does_not_download_it_again() -> None:
    ledger = Ledger()
    clients = toy_clients(SIZES, LOSSES, ledger=ledger)
    clients.losses(ids(0, 1, 2))
    clients.losses(ids(1, 2, 3))
    clients.collect(ids(2, 3))
    assert ledger.bytes_down == 4 * MODEL
    assert ledger.bytes_up == 4 * 4 + 2 * MODEL
    assert ledger.forward_samples == 1 + 2 + 3 + 4
    assert (ledger.contacted, ledger.uploaded) == ({0, 1, 2, 3}, {2, 3})


@pytest.mark.parametrize(("question", "most"), [("losses", 6), ("batch_losses", 4)])
def test_a_loss_is_asked_for_once_a_model(question: str, most: int) -> None:
    sizes, ledger = [0, *SIZES], Ledger()
    clients = toy_clients(sizes, LOSSES, ledger=ledger, available=range(7))
    answers = getattr(clients, question)(ids(0, 5, 2))
    assert (ledger.bytes_up, ledger.forward_samples) == (3 * 4, min(5, most) + 2)
    again = getattr(clients, question)(ids(2, 5, 0, 6))
    assert again[:3].tolist() == pytest.approx(answers[[2, 1, 0]].tolist(), nan_ok=True)
    assert (ledger.bytes_up, ledger.forward_samples) == (4 * 4, min(5, most) + 2 + min(6, most))
    assert ledger.nonfinite_reports == 1
    getattr(clients.broadcast({"w": torch.ones(2)}), question)(
        ids(2, 5)
    )  # other losses: another model
    assert (ledger.bytes_up, ledger.bytes_down) == (6 * 4, (4 + 2) * MODEL)


TRAINING = frozenset({Signal.TRAINING})


def test_an_update_that_was_sent_for_comparison_is_not_sent_again() -> None:
    ledger = Ledger()
    clients = toy_clients(SIZES, TRAINING, ledger=ledger)
    clients.updates(ids(0, 1, 2))
    assert (ledger.bytes_up, ledger.uploaded) == (3 * MODEL, set())
    cohort = clients.collect(ids(1, 4))
    assert cohort.delta["w"].tolist() == [[0.5, -0.5], [2, -2]]
    assert (ledger.bytes_up, ledger.uploaded) == (4 * MODEL, {1, 4})
    clients.updates(ids(1, 2, 4))
    clients.collect(ids(1, 2))
    assert (ledger.bytes_up, ledger.uploaded) == (4 * MODEL, {1, 2, 4})
    clients = toy_clients(SIZES, TRAINING, ledger=(ledger := Ledger()))
    clients.updates(ids(0, 1), compressor=TopK(size=1))
    clients.collect(ids(1))  # after a sketch the whole update is sent
    assert ledger.bytes_up == 2 * 8 + MODEL


class TwoLayers(ToyEngine):
    """A trained layer `a` of two numbers and `b` of one, and a buffer of three numbers."""

    def __init__(self) -> None:
        super().__init__(SIZES)
        self.trained = ["a", "b"]

    def train(
        self, params: Params, ids: Ids, round: int, lr: float, *more: Any, **named: Any
    ) -> Cohort:
        plain = super().train(toy_params(), ids, round, lr)
        return replace(plain, delta={"a": plain.delta["w"], "b": plain.delta["w"][:, :1]})


def test_after_some_layers_the_others_are_sent() -> None:
    ledger = Ledger()
    params = {"a": torch.zeros(2), "b": torch.zeros(1), "buffer": torch.zeros(3)}
    clients = toy_clients(SIZES, TRAINING, ledger=ledger, engine=TwoLayers(), params=params)
    clients.updates(ids(0, 1, 2), layers=["a"])
    assert ledger.bytes_up == 3 * 2 * 4
    clients.updates(ids(1), layers=["a", "b"])
    assert ledger.bytes_up == (3 * 2 + 1) * 4
    clients.collect(
        ids(0, 1, 5)
    )  # client 0 still has b and the buffer to send, 1 the buffer, 5 everything
    assert ledger.bytes_up == (3 * 2 + 1 + (1 + 3) + 3 + 6) * 4


def test_a_declared_training_loss_comes_with_the_collected_update_as_one_number() -> None:
    ledger = Ledger()
    clients = toy_clients(SIZES, TRAINING | {Signal.TRAINING_LOSS}, ledger=ledger)
    clients.updates(ids(1, 4))
    for _ in range(2):
        clients.collect(ids(1))
        assert ledger.bytes_up == 2 * MODEL + 4
    clients.collect(ids(2))
    assert ledger.bytes_up == 3 * MODEL + 2 * 4


def split_engine() -> ToyEngine:
    """One client with 100 training samples at even positions, and as many others at odd ones to
    report its loss on."""
    engine = ToyEngine([200])
    engine.data = replace(
        engine.data, train=[np.arange(0, 200, 2)], evaluate=[np.arange(1, 200, 2)]
    )
    return engine


def asked(
    monkeypatch: pytest.MonkeyPatch, engine: ToyEngine, question: str
) -> list[list[np.ndarray]]:
    """The positions that the engine is asked about from now on, call after call."""
    seen: list[list[np.ndarray]] = []
    answer = getattr(engine, question)

    def spy(params: Any, positions: Any, *rest: Any) -> Any:
        seen.append(list(positions))
        return answer(params, positions, *rest)

    monkeypatch.setattr(engine, question, spy)
    return seen


@pytest.mark.parametrize(
    ("question", "values", "num", "odd"),
    [
        ("gradients", {}, 100, 0),
        ("gradients", {"batch": True}, 4, 0),
        ("gradient_norms", {}, 100, 0),
        ("gradient_spreads", {}, 100, 0),
        ("gradients_after_training", {}, 100, 0),
        ("losses", {}, 100, 1),
        ("batch_losses", {}, 4, 1),
    ],
)
def test_gradients_are_of_training_samples_and_losses_of_those_that_they_are_reported_on(
    question: str, values: dict[str, Any], num: int, odd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, needs = split_engine(), LOSSES | TRAINING | {Signal.GRADIENTS, Signal.LABEL_COUNTS}
    engine.data.y[:] = torch.arange(200) % 2
    assert toy_clients([200], needs, engine=engine).label_counts(ids(0)).tolist() == [[100, 0, 0]]
    seen = asked(monkeypatch, engine, "losses" if odd else "client_gradients")
    list(getattr(toy_clients([200], needs, engine=engine), question)(ids(0), **values))
    positions = np.concatenate(seen[0])
    assert len(set(positions.tolist())) == num
    assert (positions % 2 == odd).all()


def test_a_phase_inside_another_stops_the_outer_ones_time() -> None:
    now = iter([0.0, 1.0, 4.0, 9.0, 20.0, 21.0])
    clock = PhaseTimer(torch.device("cpu"), lambda: next(now))
    with clock("select"), clock("train"):
        pass
    with clock("select"):
        pass
    assert clock.seconds == {
        "select": 0 + 1 + 5 + 1,
        "ask": 0,
        "train": 3,
        "aggregate": 0,
        "evaluate": 0,
    }


@pytest.mark.parametrize(
    ("ask", "spent"),
    [
        (
            lambda clients, sketch: (
                clients.losses(clients.available),
                clients.train(clients.available),
            ),
            (3, 5),
        ),
        (lambda clients, sketch: clients.gradient_norms(clients.available), (6, 0)),
        (lambda clients, sketch: clients.gradient_spreads(clients.available), (6, 0)),
        (lambda clients, sketch: clients.update_norms(clients.available), (6, 5)),
        (lambda clients, sketch: clients.updates(clients.available, compressor=sketch), (6, 5)),
        (
            lambda clients, sketch: list(clients.gradients(clients.available, compressor=sketch)),
            (6, 0),
        ),
    ],
    ids=["losses and training", "norms", "spreads", "update norms", "updates", "gradients"],
)
def test_what_clients_compute_is_charged_to_their_time(
    ask: Any, spent: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    time, engine, sketch = [0.0], ToyEngine([2, 2]), TopK(size=1)

    def slowed(function: Any, seconds: float) -> Any:
        def slowly(*args: Any) -> Any:
            time[0] += seconds
            return function(*args)

        return slowly

    slow = [(engine, "losses", 3.0), (engine, "train", 5.0), (sketch, "compress", 3.0)]
    slow += [
        (clients_module, "length", 3.0),
        (clients_module.Clients, "_gradient_spread", 3.0),
        (clients_module, "row_norms", 6.0),
    ]
    for owner, name, seconds in slow:
        monkeypatch.setattr(owner, name, slowed(getattr(owner, name), seconds))
    clock, needs = (
        PhaseTimer(torch.device("cpu"), lambda: time[0]),
        LOSSES | TRAINING | {Signal.GRADIENTS},
    )
    clients = toy_clients([2, 2], needs, engine=engine, timer=clock)
    with clock("select"):
        time[0] += 1
        ask(clients, sketch)
    asking, training = spent
    assert clock.seconds == {
        "select": 1,
        "ask": asking,
        "train": training,
        "aggregate": 0,
        "evaluate": 0,
    }


# --- which samples, which stream and whose numbers an answer is made of ---

BOTH = frozenset({Signal.GRADIENTS, Signal.TRAINING})


@pytest.mark.parametrize(
    ("question", "signal"), [("batch_losses", Signal.LOSSES), ("gradients", Signal.GRADIENTS)]
)
def test_mini_batches_are_the_beginning_of_a_permutation_by_round_and_client(
    question: str, signal: Signal, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ToyEngine([9, 9], batch_size=4)
    seen = asked(
        monkeypatch, engine, "losses" if question == "batch_losses" else "client_gradients"
    )
    for t in (1, 2):
        clients = toy_clients([9, 9], frozenset({signal}), engine=engine, round=t)
        list(
            getattr(clients, question)(
                ids(0, 1), **({"batch": True} if question == "gradients" else {})
            )
        )
        for i in (0, 1):
            shuffled = (
                Streams(0)
                .generator(Purpose.LOSS_BATCH, t, i)
                .permutation(np.arange(9 * i, 9 * i + 9))
            )
            assert seen[-1][i].tolist() == shuffled[:4].tolist()


def test_spreads_by_hand() -> None:
    """Gradients (m + 1, -m^2 / 7) of batches with mean position m: the root of their mean squared
    distance from the mean; samples are charged once each."""
    engine, ledger = ToyEngine([8], batch_size=4), Ledger()
    (found,) = toy_clients([8], BOTH, engine=engine, ledger=ledger).gradient_spreads(ids(0))
    shuffled = Streams(0).generator(Purpose.LOSS_BATCH, 1, 0).permutation(np.arange(8))
    a, b = (np.array([m + 1, -m * m / 7]) for m in (shuffled[:4].mean(), shuffled[4:].mean()))
    assert found == pytest.approx(np.linalg.norm(a - b) / 2, rel=1e-5)
    assert ledger.train_samples == 8


def test_sketches_of_a_round_share_a_key_and_those_of_another_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys: list[int] = []
    monkeypatch.setattr(
        Coordinates, "compress", lambda self, vector, key: (keys.append(key), vector[:1])[1]
    )
    for t in (1, 2):
        clients = toy_clients([2, 2], BOTH, round=t)
        list(clients.gradients(ids(0, 1), compressor=Coordinates(size=1)))
    expected = [Streams(0).key(Purpose.SKETCH, t) for t in (1, 2)]
    assert keys == [expected[0], expected[0], expected[1], expected[1]]


def test_layers_are_named_whole() -> None:
    """`fc1` is not `fc10`."""
    engine = ToyEngine([2, 2])
    engine.trained = ["fc1.weight", "fc1.bias", "fc10.weight", "out"]
    clients = toy_clients([2, 2], BOTH, engine=engine)
    assert clients.layer_names(["fc1"]) == ["fc1.weight", "fc1.bias"]
    assert clients.layer_names(["out"]) == ["out"]
    assert clients.layer_names(["fc10.weight", "fc1.bias"]) == ["fc1.bias", "fc10.weight"]


def test_infinite_losses_are_counted_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ledger = ToyEngine([2, 2, 2]), Ledger()
    monkeypatch.setattr(engine, "losses", lambda *_: np.array([1.0, np.inf, np.nan]))
    toy_clients([2, 2, 2], frozenset({Signal.LOSSES}), engine=engine, ledger=ledger).losses(
        ids(0, 1, 2)
    )
    assert ledger.nonfinite_reports == 2


def test_some_of_those_that_trained_together_are_collected_alone_and_all_who_train_are_counted() -> (
    None
):
    sizes, ledger = [5, 1, 4, 2], Ledger()
    clients = toy_clients(sizes, frozenset(), ledger=ledger)
    clients.collect(ids(1, 2, 3))
    for some in ([1, 2], [2, 3], [1, 2, 3], [0, 3]):
        cohort = clients.collect(ids(*some))
        assert cohort.delta["w"][:, 0].tolist() == [i / 2 for i in some]
        assert (cohort.loss.tolist(), cohort.sizes.tolist()) == (some, [sizes[i] for i in some])
    assert ledger.trained == ledger.uploaded == {0, 1, 2, 3}
    assert (ledger.bytes_down, ledger.bytes_up, ledger.train_samples) == (
        4 * 8,
        4 * 8,
        2 * sum(sizes),
    )


# --- sketches ---

X = torch.tensor([3.0, -1.0, 0.5, -4.0, 0.0])
SKETCHES = [
    Identity(),
    TopK(size=3),
    Coordinates(size=3),
    Gaussian(size=3),
    CountSketch(size=3),
    Int8(),
]


@pytest.mark.parametrize(
    ("sketch", "expected"), list(zip(SKETCHES, [20, 20, 12, 12, 12, 5], strict=True))
)
def test_bytes(sketch: Compressor, expected: int) -> None:
    assert (
        sketch.num_bytes(5) == expected
    )  # of topk 3 numbers and where they are, but no more than all 5 numbers
    assert len(sketch.compress(X, 1)) == (3 if expected == 12 else 5)


def test_topk_keeps_the_largest_and_int8_keeps_all_within_a_step() -> None:
    assert TopK(size=2).compress(X, 0).tolist() == [3, 0, 0, -4, 0]
    assert Int8().compress(X, 0).tolist() == [95, -32, 16, -127, 0]
    assert not Int8().compress(torch.zeros(3), 0).any()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**40))
def test_a_seed_fixes_a_sketch_for_every_client(seed: int) -> None:
    for sketch in SKETCHES:
        torch.testing.assert_close(sketch.compress(X, seed), sketch.compress(X.clone(), seed))
        scale = 1 if isinstance(sketch, Int8) else 2
        torch.testing.assert_close(sketch.compress(2 * X, seed), scale * sketch.compress(X, seed))


@pytest.mark.parametrize("kind", [Gaussian, CountSketch])
def test_inner_products_are_unbiased(kind: type[Gaussian | CountSketch]) -> None:
    x, y = torch.randn(2, 40, generator=torch.Generator().manual_seed(0)).double()
    sketch = kind(size=20)
    products = [float(sketch.compress(x, s) @ sketch.compress(y, s)) for s in range(4000)]
    assert abs(np.mean(products) - float(x @ y)) < 4 * np.std(products) / np.sqrt(len(products))


def test_coordinates_keep_every_power_sum_on_average() -> None:
    x = torch.randn(40, generator=torch.Generator().manual_seed(0)).double()
    sums = [float((Coordinates(size=10).compress(x, s) ** 4).sum()) * 4 for s in range(4000)]
    assert abs(np.mean(sums) - float((x**4).sum())) < 4 * np.std(sums) / np.sqrt(len(sums))


def test_the_door_charges_the_sketch_in_place_of_the_vector() -> None:
    ledger = Ledger()
    clients = toy_clients([2, 2], frozenset({Signal.GRADIENTS, Signal.TRAINING}), ledger=ledger)
    assert [
        len(g) for g in clients.gradients(clients.available, compressor=Coordinates(size=1))
    ] == [1, 1]
    assert ledger.bytes_up == 2 * 4
    (sketches,) = clients.updates(clients.available, compressor=TopK(size=1)).values()
    assert sketches.shape == (2, 2)
    assert ledger.bytes_up == 2 * 4 + 2 * 8


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="size=0: must be >= 1"):
        TopK(size=0)
    with pytest.raises(FedsimError, match=r"takes 4\.0 GiB.*countsketch"):
        Gaussian(size=2**10).compress(torch.zeros(2**20), 0)
