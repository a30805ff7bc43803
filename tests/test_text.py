"""Texts from end to end: generated speakers, models over tokens in every engine, and whole runs."""

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
from fedsim.models.text import TextGRU, TextMLP, TextTransformer
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


def load(folder: Path, **values: Any) -> LoadedData:
    """Load generated texts: SMALL unless `values` say otherwise."""
    return build("text_generated", folder, **SMALL | values).load()


def text_of(tokens: Any) -> str:
    return "".join(ALPHABET[token] for token in tokens.tolist())


# --- the data set --------------------------------------------------------------------------------


def test_texts_are_tokens_with_an_owner_each(tmp_path: Path) -> None:
    data = load(tmp_path, length=7)
    assert (data.input_shape, data.num_classes, data.vocabulary) == (TokenShape(7, 27), 27, 27)
    assert isinstance(data.input_shape, TokenShape)
    assert data.train.x.dtype == data.normalise(data.train.x).dtype == torch.int64
    assert set(data.owners) == set(range(8))
    assert np.bincount(data.test_owners).tolist() == [12, 12, 11, 11, 11, 11, 11, 11]  # sum 90


def test_texts_of_a_speaker_overlap_and_labels_are_the_next_characters(tmp_path: Path) -> None:
    data = load(tmp_path, length=7)
    for speaker in range(8):
        rows = torch.as_tensor(data.owners == speaker)
        x, y = data.train.tensor[rows], data.train.y[rows]
        assert torch.equal(x[1:, :-1], x[:-1, 1:])
        assert torch.equal(x[1:, -1], y[:-1])


def test_speakers_say_words_of_the_language(tmp_path: Path) -> None:
    data = load(tmp_path, length=7)
    words = text_of(data.train.y[data.owners == 0]).split(" ")
    whole_words = set(words[1:-1])
    assert whole_words <= set(made_up_words(30, np.random.default_rng(0)))
    assert len(whole_words) > 3


def test_speakers_differ_by_their_style(tmp_path: Path) -> None:
    def spread(style: float) -> float:
        """Return the deviation over speakers of the frequency of a character, summed up."""
        data = load(tmp_path, style=style, samples_per_speaker=2000.0, size_deviation=0.0)
        counts = np.zeros((8, 27))
        np.add.at(counts, (data.owners, data.train.y), 1)
        frequencies = counts / counts.sum(1, keepdims=True)
        return float(frequencies.std(0).sum())

    assert spread(2.0) > 3 * spread(0.0)


def test_every_window_has_the_next_token_as_its_label() -> None:
    x, y = windows(np.array([1, 2, 3, 4], np.uint8), 2)
    assert x.tolist() == [[1, 2], [2, 3]]
    assert y.tolist() == [3, 4]


def test_words_are_spoken_with_spaces_between() -> None:
    tokens = spoken(["ba", "ce"], np.array([1.0, 0.0]), 7, np.random.default_rng(0))
    assert text_of(tokens) == "ba ba b"


@pytest.mark.parametrize("count", range(1, 40))
def test_as_many_tokens_are_spoken_as_are_requested(count: int) -> None:
    rng = np.random.default_rng(count)
    assert len(spoken(["ba", "cedig"], np.array([0.5, 0.5]), count, rng)) == count


@pytest.mark.parametrize(
    ("x", "rule"),
    [
        (torch.zeros(2, 3), "must be int64"),
        (torch.zeros(2, 0, dtype=torch.int64), "length >= 1"),
        (torch.tensor([[0, 4], [1, 2]]), r"must lie in 0\.\.3, found 0\.\.4"),
        (torch.tensor([[0, -1], [1, 2]]), r"must lie in 0\.\.3, found -1\.\.2"),
    ],
)
def test_unsound_texts_are_rejected(x: torch.Tensor, rule: str) -> None:
    y = torch.zeros(2, dtype=torch.int64)
    sound = Samples(torch.zeros(2, 2, dtype=torch.int64), y)
    with pytest.raises(DataError, match=rule):
        LoadedData(sound, Samples(x, y), 1, None, None, "", vocabulary=4)


# --- the models ----------------------------------------------------------------------------------

SHAPE = TokenShape(6, 9)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "text_gru": lambda: TextGRU(SHAPE, 5, embedding=3, hidden=4),
    "text_mlp": lambda: TextMLP(SHAPE, 5, embedding=3, hidden=4),
    "text_transformer": lambda: TextTransformer(
        SHAPE, 5, embedding=4, layers=2, heads=2, hidden=6, dropout=0.3
    ),
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


def test_the_recurrent_unit_equals_pytorchs() -> None:
    torch.manual_seed(0)
    model = TextGRU(SHAPE, 5, embedding=3, hidden=4)
    gru = nn.GRU(3, 4, batch_first=True)
    state = {
        "weight_ih_l0": model.from_input.weight,
        "bias_ih_l0": model.from_input.bias,
        "weight_hh_l0": model.from_state.weight,
        "bias_hh_l0": model.from_state.bias,
    }
    gru.load_state_dict(state)
    tokens = torch.randint(9, (10, 6))
    outputs, _ = gru(model.embedding(tokens))
    torch.testing.assert_close(model(tokens), model.output(outputs[:, -1]))


def test_the_perceptron_by_hand() -> None:
    """Tokens 1 and 2 have the embeddings (1, 2) and (3, 4).

    The hidden unit is 1 + 2 + 3 + 4 - 1 = 9, the output twice that.
    """
    model = TextMLP(TokenShape(2, 3), 1, embedding=2, hidden=1)
    values = {
        "embedding.weight": [[9.0, 9.0], [1.0, 2.0], [3.0, 4.0]],
        "layers.0.weight": [[1.0] * 4],
        "layers.0.bias": [-1.0],
        "layers.2.weight": [[2.0]],
        "layers.2.bias": [0.0],
    }
    model.load_state_dict({name: torch.tensor(value) for name, value in values.items()})
    assert model(torch.tensor([[1, 2]])).tolist() == [[18.0]]


@torch.no_grad()
def test_the_transformer_is_torchs() -> None:
    model = TextTransformer(SHAPE, 5, embedding=8, layers=2, heads=4, hidden=12, dropout=0.0)
    x = model.embedding(torch.arange(6).view(1, 6)) + model.positions
    for block in model.blocks:
        layer = nn.TransformerEncoderLayer(
            d_model=8,
            nhead=4,
            dim_feedforward=12,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        state = {
            "self_attn.in_proj_weight": block.to_heads.weight,
            "self_attn.in_proj_bias": block.to_heads.bias,
            "self_attn.out_proj.weight": block.from_heads.weight,
            "self_attn.out_proj.bias": block.from_heads.bias,
            "linear1.weight": block.mlp[0].weight,
            "linear1.bias": block.mlp[0].bias,
            "linear2.weight": block.mlp[2].weight,
            "linear2.bias": block.mlp[2].bias,
        }
        for name in ("norm1", "norm2"):
            norm = nn.init.uniform_(getattr(block, name).weight)
            state |= {f"{name}.weight": norm, f"{name}.bias": getattr(block, name).bias}
        layer.load_state_dict(state)
        x = layer(x)
    expected = model.output(model.norm(x)[:, -1])
    torch.testing.assert_close(model(torch.arange(6).view(1, 6)), expected)


@pytest.mark.parametrize(
    ("key", "value"),
    [("heads", 3), ("heads", 0), ("layers", 0), ("hidden", 0), ("dropout", 1.0), ("hidden", 10**7)],
)
def test_values_of_the_transformer_out_of_range_are_rejected(key: str, value: float) -> None:
    values = {"embedding": 8, "layers": 2, "heads": 4, "hidden": 12, "dropout": 0.0} | {key: value}
    with pytest.raises(ConfigError, match=rf"{key}=.*must"):
        TextTransformer(SHAPE, 5, **values)  # type: ignore[arg-type]


# --- the engines ---------------------------------------------------------------------------------


@pytest.fixture
def double() -> Iterator[None]:
    """Let new tensors have float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def random_texts() -> ClientData:
    """Return random texts of clients of different sizes."""
    sizes = SIZES["ragged"]
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(9, (sum(sizes), 6), generator=generator)
    y = torch.randint(5, (sum(sizes),), generator=generator)
    positions = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return ClientData(x, y, positions, positions, 5)


def random_model(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]().double()


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of EmbeddingBag under vmap
@pytest.mark.parametrize("backend", [batched, graph])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("double")
def test_engines_agree_on_texts(backend: Any, optimizer: str, name: str) -> None:
    data = random_texts()
    model = random_model(name)
    task = (model, data, LocalWork(2, None, 4), OPTIMIZERS[optimizer], Streams(3))
    engine = backend(*task)
    sequential = reference(*task)
    assert_engines_equal(engine, sequential, np.arange(5))
    params = initial(model)
    losses = sequential.losses(params, data.train)
    np.testing.assert_allclose(engine.losses(params, data.train), losses, rtol=1e-10)
    torch.testing.assert_close(
        list(engine.client_gradients(params, data.train)),
        list(sequential.client_gradients(params, data.train)),
        rtol=1e-10,
        atol=1e-10,
    )


@pytest.mark.parametrize("name", ["text_gru", "text_mlp", "text_transformer"])
@pytest.mark.usefixtures("double")
def test_gradients_of_texts_may_be_computed_jointly(name: str) -> None:
    data = random_texts()
    model = random_model(name).eval()
    engine = reference(model, data, LocalWork(2, None, 4), OPTIMIZERS["sgd"], Streams(3))
    params = initial(model)
    joint = joint_gradients(model, data, "float32", params, data.train, engine.trained, 1000)
    one_by_one = torch.stack(list(engine.client_gradients(params, data.train)))
    torch.testing.assert_close(joint, one_by_one)


@pytest.mark.parametrize("name", ["text_gru", "text_mlp", "text_transformer"])
def test_texts_are_trained_batched_by_default_and_never_in_c(name: str) -> None:
    task = (random_texts(), LocalWork(2, None, 4), OPTIMIZERS["sgd"], Streams(3))
    assert auto(MODELS[name](), *task).backend.description == "batched"
    with pytest.raises(ConfigError, match=r"runs chains of .*\n.*engine=auto takes what fits"):
        native(MODELS[name](), *task)


def test_too_many_parameters_are_those_of_the_layers() -> None:
    """A GRU has three maps of the token and the state, each with a bias."""
    count = 3 * 20_000 * (3 + 20_000 + 1)
    with pytest.raises(ConfigError, match=f"hidden=20000: makes {count} parameters of 20003 x "):
        TextGRU(SHAPE, 5, embedding=3, hidden=20_000)


def test_too_many_parameters_count_all_layers_of_a_transformer() -> None:
    sizes = {"embedding": 64, "heads": 1, "hidden": 4, "dropout": 0}
    message = f"embedding=64: makes {4 * 64 * 65 * 20_000} parameters of 64 x {256 * 20_000}"
    with pytest.raises(ConfigError, match=message):
        TextTransformer(SHAPE, 5, layers=20_000, **sizes)


# --- whole runs ----------------------------------------------------------------------------------


def fedsim(folder: Path, monkeypatch: pytest.MonkeyPatch, overrides: str) -> int:
    """Run `fedsim` on SMALL texts in a folder and return its exit code."""
    monkeypatch.chdir(folder)
    words = ["dataset=text_generated", f"cache_dir={folder / 'cache'}", "tracker=files_only"]
    words += [f"dataset.{key}={value}" for key, value in SMALL.items()]
    words += overrides.split()
    monkeypatch.setattr(sys, "argv", ["fedsim", *words])
    return run(words)


@pytest.mark.parametrize(
    ("model", "rounds"), [("text_mlp", 24), pytest.param("text_gru", 8, marks=pytest.mark.slow)]
)
def test_a_run_learns_to_predict_the_next_character(
    model: str, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = f"""
        model={model} num_rounds={rounds} dataset.samples_per_speaker=150.0 dataset.length=8
        partition=natural partition.min_samples=5 num_clients=7 cohort_size=3
        local.epochs=2 optimizer.lr=0.7 client_accuracy=test
    """
    assert fedsim(tmp_path, monkeypatch, overrides) == 0
    (summary,) = tmp_path.glob("outputs/*/*/summary.json")
    last = read_metrics(summary.parent)[-1]
    labels = load(tmp_path, samples_per_speaker=150.0, length=8).test.y
    most_frequent = float(np.bincount(labels).max() / len(labels))
    assert last["test_accuracy"] > 1.5 * most_frequent
    assert last["client_accuracy_mean"] > 1.3 * most_frequent


@pytest.mark.parametrize(
    "selector",
    [
        "fedabc",
        pytest.param("pncs", marks=pytest.mark.slow),
        pytest.param("gpfl", marks=pytest.mark.slow),
        pytest.param("fedcor", marks=pytest.mark.slow),
    ],
)
def test_selectors_request_their_signals_on_texts(
    selector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = f"""
        selector={selector} model=text_mlp num_rounds=2 partition=dirichlet_client
        num_clients=6 cohort_size=2 local.epochs=1 server.public_samples=20
    """
    assert fedsim(tmp_path, monkeypatch, overrides) == 0
