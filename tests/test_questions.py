"""Which samples, which stream and whose numbers an answer is made of."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.clients.compression import Coordinates
from fedsim.clients.context import Signal
from fedsim.clients.ledger import Ledger
from fedsim.core.rng import Purpose, Streams
from tests.test_ledger import asked, ids, split_engine
from tests.toys import ToyEngine, toy_clients

GRADIENTS = frozenset({Signal.GRADIENTS, Signal.TRAINING})


def test_label_counts_are_of_training_samples() -> None:
    engine = split_engine()
    engine.data.y[:] = torch.arange(200) % 2
    clients = toy_clients([200], frozenset({Signal.LABEL_COUNTS}), engine=engine)
    assert clients.label_counts(ids(0)).tolist() == [[100, 0, 0]]


@pytest.mark.parametrize(("question", "signal"), [("batch_losses", Signal.LOSSES), ("gradients", Signal.GRADIENTS)])
def test_mini_batches_are_the_beginning_of_a_permutation_by_round_and_client(
    question: str, signal: Signal, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ToyEngine([9, 9], batch_size=4)
    seen = asked(monkeypatch, engine, "losses" if question == "batch_losses" else "client_gradients")
    for t in (1, 2):
        clients = toy_clients([9, 9], frozenset({signal}), engine=engine, round=t)
        list(getattr(clients, question)(ids(0, 1), **({"batch": True} if question == "gradients" else {})))
        for i in (0, 1):
            shuffled = Streams(0).generator(Purpose.LOSS_BATCH, t, i).permutation(np.arange(9 * i, 9 * i + 9))
            assert seen[-1][i].tolist() == shuffled[:4].tolist()


def test_spreads_by_hand() -> None:
    """Gradients (m + 1, -m^2 / 7) of batches with mean position m: the root of their mean squared distance from the
    mean; samples are charged once each."""
    engine, ledger = ToyEngine([8], batch_size=4), Ledger()
    (found,) = toy_clients([8], GRADIENTS, engine=engine, ledger=ledger).gradient_spreads(ids(0))
    shuffled = Streams(0).generator(Purpose.LOSS_BATCH, 1, 0).permutation(np.arange(8))
    a, b = (np.array([m + 1, -m * m / 7]) for m in (shuffled[:4].mean(), shuffled[4:].mean()))
    assert found == pytest.approx(np.linalg.norm(a - b) / 2, rel=1e-5)
    assert ledger.train_samples == 8


def test_sketches_of_a_round_share_a_key_and_those_of_another_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[int] = []
    monkeypatch.setattr(Coordinates, "compress", lambda self, vector, key: (keys.append(key), vector[:1])[1])
    for t in (1, 2):
        clients = toy_clients([2, 2], GRADIENTS, round=t)
        list(clients.gradients(ids(0, 1), compressor=Coordinates(size=1)))
    expected = [Streams(0).key(Purpose.SKETCH, t) for t in (1, 2)]
    assert keys == [expected[0], expected[0], expected[1], expected[1]]


def test_layers_are_named_whole() -> None:
    """`fc1` is not `fc10`."""

    engine = ToyEngine([2, 2])
    engine.trained = ["fc1.weight", "fc1.bias", "fc10.weight", "out"]
    clients = toy_clients([2, 2], GRADIENTS, engine=engine)
    assert clients.layer_names(["fc1"]) == ["fc1.weight", "fc1.bias"]
    assert clients.layer_names(["out"]) == ["out"]
    assert clients.layer_names(["fc10.weight", "fc1.bias"]) == ["fc1.bias", "fc10.weight"]


def test_a_cohorts_sizes_are_its_own_and_all_who_train_are_counted() -> None:
    ledger = Ledger()
    clients = toy_clients([5, 1, 4, 2], frozenset(), ledger=ledger)
    assert clients.collect(ids(1, 3)).sizes.tolist() == [1, 2]
    clients.collect(ids(0, 1, 3))
    assert ledger.trained == ledger.uploaded == {0, 1, 3}
    assert (ledger.bytes_down, ledger.bytes_up, ledger.train_samples) == (3 * 8, 3 * 8, 2 * (5 + 1 + 2))


def test_infinite_losses_are_counted_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ledger = ToyEngine([2, 2, 2]), Ledger()
    monkeypatch.setattr(engine, "losses", lambda *_: np.array([1.0, np.inf, np.nan]))
    toy_clients([2, 2, 2], frozenset({Signal.LOSSES}), engine=engine, ledger=ledger).losses(ids(0, 1, 2))
    assert ledger.nonfinite_reports == 2


def test_public_labels_and_momentum_cost_their_numbers() -> None:
    ledger = Ledger()
    needs = frozenset({Signal.TRAINING, Signal.PUBLIC})
    clients: Any = toy_clients([2, 2], needs, ledger=ledger)
    list(clients.public_labels(ids(0, 1)))
    assert (ledger.forward_samples, ledger.bytes_up) == (2 * 3, 2 * 3 * 3 * 4)
    clients.momentum_buffers(ids(0))
    assert ledger.bytes_up == 2 * 3 * 3 * 4 + 2 * 4


def test_data_of_other_clients_is_never_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ToyEngine([3, 4, 5])
    engine.data = replace(engine.data)
    seen = asked(monkeypatch, engine, "losses")
    toy_clients([3, 4, 5], frozenset({Signal.LOSSES}), engine=engine).losses(ids(0, 2))
    assert [p.tolist() for p in seen[0]] == [[0, 1, 2], [7, 8, 9, 10, 11]]


def test_some_of_those_that_trained_together_are_collected_alone() -> None:
    clients = toy_clients([1] * 4, frozenset())
    clients.collect(ids(1, 2, 3))
    for some in ([1, 2], [2, 3], [1, 2, 3], [0, 3]):
        cohort = clients.collect(ids(*some))
        assert cohort.delta["w"][:, 0].tolist() == [i / 2 for i in some]
        assert cohort.loss.tolist() == some
