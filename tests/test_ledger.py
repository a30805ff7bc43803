"""The ledger of a round: what each question to clients costs in bytes, samples and seconds.

The toy model has two float32, 8 bytes. Clients train on their samples twice.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.clients import clients as clients_module
from fedsim.clients.clients import Clients
from fedsim.clients.compression import TopK
from fedsim.clients.context import Signal, UndeclaredSignalError
from fedsim.clients.ledger import Ledger
from fedsim.clients.phase_timer import PhaseTimer
from fedsim.core.arrays import Ints
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import Cohort, Ids, Params
from tests.toys import ToyEngine, toy_clients, toy_params

SIZES = [1, 2, 3, 4, 5, 6]
MODEL = 2 * 4
NUMBER = 4
UPDATES = frozenset({Signal.UPDATES})
LOSSES = frozenset({Signal.LOSSES})
TRAINING = frozenset({Signal.TRAINING, Signal.UPDATES})
GRADIENTS = frozenset({Signal.GRADIENTS})


def ids(*numbers: int) -> Ids:
    return np.array(numbers, np.int64)


def test_a_question_without_its_signal_is_rejected_and_charges_nothing() -> None:
    ledger = Ledger()
    clients = toy_clients(SIZES, frozenset(), ledger=ledger)
    with pytest.raises(UndeclaredSignalError, match=r"Signal\.LOSSES"):
        clients.losses(ids(0))
    assert ledger == Ledger()


def test_training_is_charged_with_models_both_ways_and_every_sample_of_every_epoch() -> None:
    ledger = Ledger()
    toy_clients(SIZES, UPDATES, ledger=ledger).collect(ids(1, 4))
    assert (ledger.bytes_down, ledger.bytes_up) == (2 * MODEL, 2 * MODEL)
    assert (ledger.train_samples, ledger.forward_samples) == (2 * (2 + 5), 0)
    assert ledger.contacted == ledger.trained == ledger.uploaded == {1, 4}


def test_a_client_that_has_the_model_does_not_download_it_again() -> None:
    ledger = Ledger()
    clients = toy_clients(SIZES, LOSSES | UPDATES, ledger=ledger)
    clients.losses(ids(0, 1, 2))
    clients.losses(ids(1, 2, 3))
    clients.collect(ids(2, 3))
    assert ledger.bytes_down == 4 * MODEL
    assert ledger.bytes_up == 4 * NUMBER + 2 * MODEL
    assert ledger.forward_samples == 1 + 2 + 3 + 4
    assert ledger.contacted == {0, 1, 2, 3}
    assert ledger.uploaded == {2, 3}


@pytest.mark.parametrize(
    ("question", "samples_of_5", "samples_of_6"),
    [(Clients.losses, 5, 6), (Clients.batch_losses, 4, 4)],  # a batch has four samples
)
def test_a_client_reports_its_loss_once_for_a_model(
    question: Callable[..., Any], samples_of_5: int, samples_of_6: int
) -> None:
    sizes = [0, *SIZES]
    ledger = Ledger()
    clients = toy_clients(sizes, LOSSES, ledger=ledger, available=range(7))
    losses = question(clients, ids(0, 5, 2))
    assert (ledger.bytes_up, ledger.forward_samples) == (3 * NUMBER, samples_of_5 + 2)
    again = question(clients, ids(2, 5, 0, 6))
    assert again[:3] == pytest.approx(losses[[2, 1, 0]], nan_ok=True)
    samples = samples_of_5 + 2 + samples_of_6
    assert (ledger.bytes_up, ledger.forward_samples) == (4 * NUMBER, samples)
    assert ledger.nonfinite_reports == 1  # client 0 has no sample
    question(clients.broadcast({"w": torch.ones(2)}), ids(2, 5))  # another model
    assert (ledger.bytes_up, ledger.bytes_down) == ((4 + 2) * NUMBER, (4 + 2) * MODEL)


def test_infinite_losses_are_counted_as_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ToyEngine([2, 2, 2])
    monkeypatch.setattr(engine, "losses", lambda *_: np.array([1.0, np.inf, np.nan]))
    ledger = Ledger()
    toy_clients([2, 2, 2], LOSSES, engine=engine, ledger=ledger).losses(ids(0, 1, 2))
    assert ledger.nonfinite_reports == 2


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


def test_after_a_compressed_update_the_whole_update_is_sent() -> None:
    ledger = Ledger()
    clients = toy_clients(SIZES, TRAINING, ledger=ledger)
    clients.updates(ids(0, 1), compressor=TopK(size=1))
    clients.collect(ids(1))
    assert ledger.bytes_up == 2 * (4 + 4) + MODEL  # a number and its position


class TwoLayers(ToyEngine):
    """A trained layer `a` of two numbers and `b` of one, and a buffer of three numbers."""

    def __init__(self) -> None:
        super().__init__(SIZES)
        self.trained = ["a", "b"]

    def train(self, params: Params, ids: Ids, round: int, lr: float, *_: Any, **__: Any) -> Cohort:
        plain = super().train(toy_params(), ids, round, lr)
        return replace(plain, delta={"a": plain.delta["w"], "b": plain.delta["w"][:, :1]})


def test_after_some_layers_only_the_others_are_sent() -> None:
    ledger = Ledger()
    params = {"a": torch.zeros(2), "b": torch.zeros(1), "buffer": torch.zeros(3)}
    clients = toy_clients(SIZES, TRAINING, ledger=ledger, engine=TwoLayers(), params=params)
    clients.updates(ids(0, 1, 2), layers=["a"])
    sent = 3 * 2
    assert ledger.bytes_up == sent * NUMBER
    clients.updates(ids(1), layers=["a", "b"])
    sent += 1
    assert ledger.bytes_up == sent * NUMBER
    clients.collect(ids(0, 1, 5))
    sent += (1 + 3) + 3 + (2 + 1 + 3)  # 0 lacks b and the buffer, 1 the buffer, 5 everything
    assert ledger.bytes_up == sent * NUMBER


def test_a_declared_training_loss_is_one_number_with_each_collected_update() -> None:
    ledger = Ledger()
    clients = toy_clients(SIZES, TRAINING | {Signal.TRAINING_LOSS}, ledger=ledger)
    clients.updates(ids(1, 4))
    for _ in range(2):
        clients.collect(ids(1))
        assert ledger.bytes_up == 2 * MODEL + NUMBER
    clients.collect(ids(2))
    assert ledger.bytes_up == 3 * MODEL + 2 * NUMBER


def test_clients_that_trained_together_can_be_collected_apart() -> None:
    sizes = [5, 1, 4, 2]
    ledger = Ledger()
    clients = toy_clients(sizes, UPDATES, ledger=ledger)
    clients.collect(ids(1, 2, 3))
    for some in ([1, 2], [2, 3], [1, 2, 3], [0, 3]):
        cohort = clients.collect(ids(*some))
        assert cohort.delta["w"][:, 0].tolist() == [i / 2 for i in some]
        assert cohort.loss is not None
        assert cohort.loss.tolist() == some
        assert cohort.sizes.tolist() == [sizes[i] for i in some]
    assert ledger.trained == ledger.uploaded == {0, 1, 2, 3}
    assert (ledger.bytes_down, ledger.bytes_up) == (4 * MODEL, 4 * MODEL)
    assert ledger.train_samples == 2 * sum(sizes)


# --- which samples an answer is made of ---


def spy_on(monkeypatch: pytest.MonkeyPatch, engine: ToyEngine, question: str) -> list[list[Ints]]:
    """Return the positions that the engine is asked about from now on, call after call."""
    calls: list[list[Ints]] = []
    answer = getattr(engine, question)

    def spy(params: Any, positions: Any, *rest: Any) -> Any:
        calls.append(list(positions))
        return answer(params, positions, *rest)

    monkeypatch.setattr(engine, question, spy)
    return calls


def split_engine() -> ToyEngine:
    """Return an engine with one client that trains on 100 samples at even positions, and reports
    its loss on 100 samples at odd positions."""
    engine = ToyEngine([200])
    even, odd = np.arange(0, 200, 2), np.arange(1, 200, 2)
    engine.data = replace(engine.data, train=[even], evaluate=[odd])
    return engine


ON_TRAINING_SAMPLES = [
    ("gradients", {}, 100),
    ("gradients", {"batch": True}, 4),
    ("gradient_norms", {}, 100),
    ("gradient_spreads", {}, 100),
    ("gradients_after_training", {}, 100),
]


@pytest.mark.parametrize(("question", "values", "num"), ON_TRAINING_SAMPLES)
def test_gradients_are_computed_on_training_samples(
    question: str, values: dict[str, Any], num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = split_engine()
    calls = spy_on(monkeypatch, engine, "client_gradients")
    clients = toy_clients([200], TRAINING | GRADIENTS, engine=engine)
    list(getattr(clients, question)(ids(0), **values))
    positions = np.concatenate(calls[0])
    assert len(set(positions.tolist())) == num
    assert (positions % 2 == 0).all()


@pytest.mark.parametrize(("question", "num"), [("losses", 100), ("batch_losses", 4)])
def test_losses_are_computed_on_evaluation_samples(
    question: str, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = split_engine()
    calls = spy_on(monkeypatch, engine, "losses")
    getattr(toy_clients([200], LOSSES, engine=engine), question)(ids(0))
    positions = np.concatenate(calls[0])
    assert len(set(positions.tolist())) == num
    assert (positions % 2 == 1).all()


def test_label_counts_are_those_of_training_samples() -> None:
    engine = split_engine()
    engine.data.y[:] = torch.arange(200) % 2
    clients = toy_clients([200], frozenset({Signal.LABEL_COUNTS}), engine=engine)
    assert clients.label_counts(ids(0)).tolist() == [[100, 0, 0]]


def shuffled(t: int, client: int, positions: Ints) -> list[int]:
    rng = Streams(0).generator(Purpose.LOSS_BATCH, t, client)
    return rng.permutation(positions).tolist()


@pytest.mark.parametrize("t", [1, 2])
def test_mini_batches_are_the_beginning_of_a_permutation_by_round_and_client(
    t: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ToyEngine([9, 9], batch_size=4)
    losses = spy_on(monkeypatch, engine, "losses")
    gradients = spy_on(monkeypatch, engine, "client_gradients")
    clients = toy_clients([9, 9], LOSSES | GRADIENTS, engine=engine, round=t)
    clients.batch_losses(ids(0, 1))
    list(clients.gradients(ids(0, 1), batch=True))
    expected = [shuffled(t, 0, np.arange(9))[:4], shuffled(t, 1, np.arange(9, 18))[:4]]
    for (call,) in (losses, gradients):
        assert [batch.tolist() for batch in call] == expected


def test_gradient_spreads() -> None:
    """Two batches with mean position m have gradients (m + 1, -m^2 / 7). Their root mean square
    distance from the mean is half the distance of the two. Each sample is charged once."""
    ledger = Ledger()
    engine = ToyEngine([8], batch_size=4)
    clients = toy_clients([8], GRADIENTS, engine=engine, ledger=ledger)
    (spread,) = clients.gradient_spreads(ids(0))
    order = shuffled(1, 0, np.arange(8))
    first, second = np.mean(order[:4]), np.mean(order[4:])
    distance = np.hypot(first - second, (first**2 - second**2) / 7)
    assert spread == pytest.approx(distance / 2, rel=1e-5)
    assert ledger.train_samples == 8


LAYERS = [
    (["fc1"], ["fc1.weight", "fc1.bias"]),  # and not fc10
    (["out"], ["out"]),
    (["fc10.weight", "fc1.bias"], ["fc1.bias", "fc10.weight"]),
]


@pytest.mark.parametrize(("layers", "names"), LAYERS)
def test_layers_are_named_whole(layers: list[str], names: list[str]) -> None:
    engine = ToyEngine([2, 2])
    engine.trained = ["fc1.weight", "fc1.bias", "fc10.weight", "out"]
    clients = toy_clients([2, 2], UPDATES, engine=engine)
    assert clients.layer_names(layers) == names


# --- wall time by phase ---


def test_an_inner_phase_pauses_the_outer_one() -> None:
    """`select` runs from 0 to 1, from 4 to 9 and from 20 to 21, `train` from 1 to 4."""
    times = iter([0.0, 1.0, 4.0, 9.0, 20.0, 21.0])
    timer = PhaseTimer(torch.device("cpu"), lambda: next(times))
    with timer("select"), timer("train"):
        pass
    with timer("select"):
        pass
    assert timer.seconds["select"] == 1 + 5 + 1
    assert timer.seconds["train"] == 3
    assert sum(timer.seconds.values()) == 7 + 3


def losses_and_training(clients: Clients, sketch: TopK) -> None:
    clients.losses(clients.available)
    clients.train(clients.available)


QUESTIONS = [
    (losses_and_training, 3, 5),
    (lambda clients, sketch: clients.gradient_norms(clients.available), 2 * 3, 0),
    (lambda clients, sketch: clients.gradient_spreads(clients.available), 2 * 3, 0),
    (lambda clients, sketch: clients.update_norms(clients.available), 6, 5),
    (lambda clients, sketch: clients.updates(clients.available, compressor=sketch), 2 * 3, 5),
    (
        lambda clients, sketch: list(clients.gradients(clients.available, compressor=sketch)),
        2 * 3,
        0,
    ),
]


@pytest.mark.parametrize(("ask", "asking", "training"), QUESTIONS)
def test_the_time_of_an_answer_is_that_of_asking_and_training(
    ask: Any, asking: float, training: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two clients takes 3 s for a gradient's norm or spread and a sketch; all losses take 3
    s, training 5 s, and norms of updates 6 s."""
    time = 0.0

    def slow_down(owner: object, name: str, seconds: float) -> None:
        function = getattr(owner, name)

        def slow(*args: Any) -> Any:
            nonlocal time
            time += seconds
            return function(*args)

        monkeypatch.setattr(owner, name, slow)

    engine, sketch = ToyEngine([2, 2]), TopK(size=1)
    slow_down(engine, "losses", 3.0)
    slow_down(engine, "train", 5.0)
    slow_down(sketch, "compress", 3.0)
    slow_down(clients_module, "length", 3.0)
    slow_down(Clients, "_gradient_spread", 3.0)
    slow_down(clients_module, "row_norms", 6.0)
    timer = PhaseTimer(torch.device("cpu"), lambda: time)
    needs = LOSSES | TRAINING | GRADIENTS
    clients = toy_clients([2, 2], needs, engine=engine, timer=timer)
    with timer("select"):
        time += 1
        ask(clients, sketch)
    assert timer.seconds["select"] == 1
    assert timer.seconds["ask"] == asking
    assert timer.seconds["train"] == training
