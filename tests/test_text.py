"""Texts end to end: generated speakers, models over tokens in every engine, and pairs that do not
fit."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.rng import Streams
from fedsim.data.base import LoadedData, Samples, TokenShape
from fedsim.data.text_generated import ALPHABET, made_up_words, spoken, windows
from fedsim.engine.data import ClientData
from fedsim.engine.model import initial
from fedsim.engine.schedule import LocalWork
from fedsim.engine.vmapped import joint_gradients
from fedsim.jobs.cli import run
from fedsim.models.text import TextGRU, TextMLP
from fedsim.results.reading import read_metrics
from tests.dataset_toys import build
from tests.engines import auto, batched, graph, native, reference
from tests.test_engine import OPTIMIZERS, SIZES, assert_engines_equal

SMALL: dict[str, Any] = {
    "num_speakers": 8,
    "samples_per_speaker": 60.0,
    "test_samples": 90,
    "num_words": 30,
}
WORDS = tuple(f"dataset.{key}={value}" for key, value in SMALL.items())
SHAPE = TokenShape(6, 9)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "text_gru": lambda: TextGRU(SHAPE, 5, embedding=3, hidden=4),
    "text_mlp": lambda: TextMLP(SHAPE, 5, embedding=3, hidden=4),
    "bag": lambda: nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 5)),
    "norm and dropout": lambda: nn.Sequential(
        nn.Embedding(9, 3),
        nn.Flatten(),
        nn.Linear(18, 4),
        nn.BatchNorm1d(4),
        nn.Dropout(0.3),
        nn.Linear(4, 5),
    ),
}


def load(folder: Path, **values: Any) -> LoadedData:
    return build("text_generated", folder, **{**SMALL, **values}).load()


# --- the data set --------------------------------------------------------------------------------------------------


def test_texts_of_a_speaker_follow_each_other_and_their_labels_are_the_next_characters(
    tmp_path: Path,
) -> None:
    data = load(tmp_path, length=7)
    assert (data.input_shape, data.num_classes, data.vocabulary) == ((7,), 27, 27)
    assert isinstance(data.input_shape, TokenShape)
    assert (data.train.x.dtype, data.normalise(data.train.x).dtype) == (torch.int64, torch.int64)
    assert data.owners is not None
    assert np.unique(data.owners).tolist() == list(range(8))
    assert data.test_owners is not None
    assert np.bincount(data.test_owners).tolist() == [12, 12, *[11] * 6]
    for speaker in range(8):
        own = torch.as_tensor(np.flatnonzero(data.owners == speaker))
        x, y = data.train.x[own], data.train.y[own]
        assert torch.equal(x[1:, :-1], x[:-1, 1:])
        assert torch.equal(x[1:, -1], y[:-1])
    text = "".join(ALPHABET[token] for token in data.train.y[data.owners == 0].tolist())
    inner = text.split(" ")[1:-1]
    assert set(inner) <= set(made_up_words(30, np.random.default_rng(0)))
    assert len(set(inner)) > 3


def test_texts_are_a_function_of_the_parameters_and_speakers_differ_by_their_style(
    tmp_path: Path,
) -> None:
    """The spread of the speakers' frequencies of characters, relative to no style at all."""
    first, again, other = (load(tmp_path / str(n), seed=seed) for n, seed in enumerate((0, 0, 1)))
    cached = load(tmp_path / "0")
    assert all(torch.equal(first.train.x, same.train.x) for same in (again, cached))
    assert first.fingerprint == again.fingerprint == cached.fingerprint != other.fingerprint

    def spread(style: float) -> float:
        data = load(tmp_path, style=style, samples_per_speaker=2000.0, size_deviation=0.0)
        counts = np.stack(
            [np.bincount(data.train.y[data.owners == s], minlength=27) for s in range(8)]
        )
        return float((counts / counts.sum(1, keepdims=True)).std(0).sum())

    assert spread(2.0) > 3 * spread(0.0)


def test_windows_and_words_by_hand() -> None:
    x, y = windows(np.array([1, 2, 3, 4], np.uint8), 2)
    assert (x.tolist(), y.tolist()) == ([[1, 2], [2, 3]], [3, 4])
    said = spoken(["ba", "ce"], np.array([1.0, 0.0]), 7, np.random.default_rng(0))
    assert "".join(ALPHABET[token] for token in said) == "ba ba b"
    lengths = [
        len(spoken(["ba", "cedig"], np.array([0.5, 0.5]), n, np.random.default_rng(n)))
        for n in range(1, 40)
    ]
    assert lengths == list(range(1, 40))


def test_tokens_are_checked() -> None:
    y, good = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64)
    for x, text in (
        (torch.zeros(2, 3), "must be int64"),
        (torch.zeros(2, 0, dtype=torch.int64), "length >= 1"),
        (torch.tensor([[0, 4], [1, 2]]), r"0\.\.3, found 0\.\.4"),
        (torch.tensor([[0, -1], [1, 2]]), r"found -1\.\.2"),
    ):
        with pytest.raises(DataError, match=text):
            LoadedData(Samples(good, y), Samples(x, y), 1, None, None, "", vocabulary=4)


# --- the models ----------------------------------------------------------------------------------------------------


def test_the_unit_is_pytorchs() -> None:
    torch.manual_seed(0)
    model, theirs = TextGRU(SHAPE, 5, embedding=3, hidden=4), nn.GRU(3, 4, batch_first=True)
    pairs = {"weight_ih_l0": model.from_input.weight, "bias_ih_l0": model.from_input.bias}
    pairs |= {"weight_hh_l0": model.from_state.weight, "bias_hh_l0": model.from_state.bias}
    theirs.load_state_dict({name: value.detach() for name, value in pairs.items()})
    tokens = torch.randint(9, (10, 6))
    expected = model.output(theirs(model.embedding(tokens))[0][:, -1])
    torch.testing.assert_close(model(tokens), expected)


def test_the_perceptron_by_hand() -> None:
    """Tokens 1 and 2 of two numbers each, whose sum less 1 the hidden unit has, and twice that the
    output."""
    model = TextMLP(TokenShape(2, 3), 1, embedding=2, hidden=1)
    values = {
        "embedding.weight": [[9, 9], [1, 2], [3, 4]],
        "layers.0.weight": [[1, 1, 1, 1]],
        "layers.0.bias": [-1],
    }
    values |= {"layers.2.weight": [[2]], "layers.2.bias": [0]}
    model.load_state_dict(
        {name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()}
    )
    assert model(torch.tensor([[1, 2]])).tolist() == [[18.0]]


# --- the engines ---------------------------------------------------------------------------------------------------


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def texts(sizes: list[int]) -> ClientData:
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randint(9, (sum(sizes), 6), generator=generator),
        torch.randint(5, (sum(sizes),), generator=generator),
    )
    ends = np.cumsum(sizes)
    positions = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return ClientData(x, y, positions, positions, 5)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]().double()


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of EmbeddingBag under vmap
@pytest.mark.parametrize("backend", [batched, graph])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("double")
def test_engines_agree_on_texts(backend: Any, optimizer: str, name: str) -> None:
    data, model = texts(SIZES["ragged"]), model_of(name)
    common = (model, data, LocalWork(2, None, 4), OPTIMIZERS[optimizer], Streams(3))
    one, other = backend(*common), reference(*common)
    assert_engines_equal(one, other, np.arange(5))
    params = initial(model)
    np.testing.assert_allclose(
        one.losses(params, data.train), other.losses(params, data.train), rtol=1e-10
    )
    for a, b in zip(
        *(engine.client_gradients(params, data.train) for engine in (one, other)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["text_gru", "text_mlp"])
@pytest.mark.usefixtures("double")
def test_texts_are_trained_and_asked_batched_by_default_and_never_in_c(name: str) -> None:
    data, model = texts(SIZES["ragged"]), model_of(name).eval()
    params, others = initial(model), (data, LocalWork(2, None, 4), OPTIMIZERS["sgd"], Streams(3))
    engine = reference(model, *others)
    joint = joint_gradients(model, data, "float32", params, data.train, engine.trained, 1000)
    torch.testing.assert_close(
        joint, torch.stack(list(engine.client_gradients(params, data.train)))
    )
    torch.set_default_dtype(torch.float32)
    assert auto(MODELS[name](), *others).backend.description == "batched"
    with pytest.raises(ConfigError, match=r"runs chains of .*\n.*engine=auto takes what fits"):
        native(MODELS[name](), *others)


# --- whole runs ----------------------------------------------------------------------------------------------------


def fedsim(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.chdir(folder)
    argv = [
        "dataset=text_generated",
        *WORDS,
        f"cache_dir={folder / 'cache'}",
        "tracker=files_only",
        *words,
    ]
    monkeypatch.setattr(sys, "argv", ["fedsim", *argv])
    return run(argv)


@pytest.mark.parametrize(
    ("model", "rounds"), [("text_mlp", 24), pytest.param("text_gru", 8, marks=pytest.mark.slow)]
)
def test_a_run_learns_to_predict_the_next_character(
    model: str, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "dataset.samples_per_speaker=150.0",
        "dataset.length=8",
        f"num_rounds={rounds}",
        "optimizer.lr=0.7",
    ]
    words += [
        "partition=natural",
        "partition.min_samples=5",
        "num_clients=7",
        "cohort_size=3",
        "local.epochs=2",
    ]
    assert fedsim(tmp_path, monkeypatch, f"model={model}", "client_accuracy=test", *words) == 0
    (folder,) = (path.parent for path in tmp_path.glob("outputs/*/*/summary.json"))
    last = read_metrics(folder)[-1]
    y = load(tmp_path, samples_per_speaker=150.0, length=8).test.y
    most_frequent = float(np.bincount(y).max() / len(y))
    assert last["test_accuracy"] > 1.5 * most_frequent
    assert last["client_accuracy_mean"] > 1.3 * most_frequent


@pytest.mark.parametrize(
    "selector",
    [
        "fedabc",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("pncs", "gpfl", "fedcor")),
    ],
)
def test_selectors_ask_as_of_images(
    selector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "partition=dirichlet_client",
        "num_clients=6",
        "cohort_size=2",
        "num_rounds=2",
        "local.epochs=1",
    ]
    words += [f"selector={selector}", "model=text_mlp", "server.public_samples=20"]
    assert fedsim(tmp_path, monkeypatch, *words) == 0
