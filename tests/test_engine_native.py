"""The native engine: what is special to its C code, and what it rejects.

tests/test_engine.py and tests/test_engine_chain.py compare it with the reference.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.core.rng import Streams
from fedsim.core.types import Params
from fedsim.engine import choose, device
from fedsim.engine.choose import C_WORTH_STEPS
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine, mean_losses
from fedsim.engine.model import initial
from fedsim.engine.native import library as native_library
from fedsim.engine.native.calls import ChainCalls
from fedsim.engine.native.library import library
from fedsim.engine.schedule import LocalWork
from fedsim.models.cnn import CNN, FemnistCNN
from fedsim.models.mlp import MLP
from fedsim.running.lanes import TrainingCall, train_jointly
from tests.engines import auto, native, reference, schedule_of
from tests.test_engine import OPTIMIZERS, SIZES, WORKS, assert_engines_equal, model_of, problem
from tests.test_engine_chain import CHAINS, CONVOLUTIONS, images, linear

pytestmark = pytest.mark.usefixtures("compiled")
SGDS = ["sgd", "decay", "momentum", "nesterov"]


def engines(
    model: nn.Module,
    data: ClientData,
    work: LocalWork = WORKS["epochs"],
    optimizer: str = "sgd",
    workers: int = 2,
) -> tuple[Engine, Engine]:
    """Return a native engine and the reference."""
    task = (model, data, work, OPTIMIZERS[optimizer], Streams(3))
    return native(*task, workers=workers), reference(*task)


def clients_of(positions: list[Any], shape: tuple[int, ...], classes: int) -> ClientData:
    generator = torch.Generator().manual_seed(0)
    count = 1 + max(int(chosen.max(initial=0)) for chosen in positions)
    x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(classes, (count,), generator=generator)
    return ClientData(x, y, positions, positions, classes)


def test_after_an_interruption_no_client_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    class InterruptedPool:
        def submit(self, function: Any, *_: Any) -> None:
            self.function = function
            raise KeyboardInterrupt

    engine, pool = engines(model_of("mlp"), problem([20, 20]))[0], InterruptedPool()
    monkeypatch.setattr(engine.backend, "_pool", pool)
    with pytest.raises(KeyboardInterrupt):
        engine.train(initial(engine.workload.model), np.arange(2), 1, 0.1)
    monkeypatch.setattr(ChainCalls, "train", lambda *_: pytest.fail("a client was trained"))
    pool.function(0)


@pytest.mark.parametrize("optimizer", SGDS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("hidden", [[70], [128, 7], [5, 64, 33]])
def test_layers_wider_and_deeper_than_a_tile(
    hidden: list[int], dropout: float, optimizer: str
) -> None:
    """Rows, columns and depths of products leave rests, and 600 is deeper than a block of sums."""
    data = clients_of([np.arange(3, 40)], (1, 1, 600), 11)
    model = MLP((1, 1, 600), 11, hidden=hidden, dropout=dropout).double()
    assert_engines_equal(*engines(model, data, LocalWork(2, None, 17), optimizer), np.arange(1))


def padded() -> nn.Module:
    """Images that are not square, paddings, pooling before and after ReLU, sizes with rests."""
    return nn.Sequential(
        *(nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(5, 20, 5, padding=2, bias=False), nn.ReLU()),
        *(nn.Conv2d(20, 7, 2, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(42, 12), nn.Dropout(0.4), nn.ReLU(), nn.Linear(12, 4, bias=False)),
    )


def femnist_cnn(dropout: float) -> Callable[[], nn.Module]:
    return lambda: FemnistCNN((2, 10, 12), 5, dropout=dropout)


def all_dropped() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Dropout(1.0)),
        *(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)),
    )


IMAGES: dict[str, tuple[tuple[int, ...], int, Callable[[], nn.Module]]] = {
    "cnn": ((3, 32, 32), 10, lambda: CNN((3, 32, 32), 10)),
    "femnist_cnn": ((2, 10, 12), 5, femnist_cnn(dropout=0.5)),
    "femnist_cnn without dropout": ((2, 10, 12), 5, femnist_cnn(dropout=0.0)),
    "dropouts": ((1, 4, 4), 3, CONVOLUTIONS["dropouts between convolutions"]),
    "dropout of everything": ((1, 4, 4), 3, all_dropped),
    "padded": ((1, 9, 11), 4, padded),
    "one pixel": ((2, 5, 5), 3, images(nn.Conv2d(2, 3, 1), nn.ReLU(), flat=75)),
}


@pytest.mark.parametrize("optimizer", SGDS)
@pytest.mark.parametrize("name", IMAGES)
def test_convolutions_equal_the_reference(name: str, optimizer: str) -> None:
    shape, classes, build = IMAGES[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = build().double()
    data = clients_of([np.arange(11), np.arange(0), np.arange(22, 10, -1)], shape, classes)
    data.x[::3] = 1  # All pixels of a pool are equal.
    fast, plain = engines(model, data, LocalWork(2, None, 5), optimizer)
    assert_engines_equal(fast, plain, np.arange(3))
    params = initial(model)
    losses = [engine.losses(params, data.train) for engine in (fast, plain)]
    np.testing.assert_allclose(*losses, rtol=1e-10)
    predictions = [engine.predict(params, data.x) for engine in (fast, plain)]
    torch.testing.assert_close(*predictions, rtol=1e-10, atol=1e-10)
    gradients = [torch.stack([*e.client_gradients(params, data.train)]) for e in (fast, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["decay", "momentum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["dropout", "dropouts between convolutions"])
def test_a_client_has_the_same_bits_next_to_any_others(
    name: str, dtype: torch.dtype, optimizer: str
) -> None:
    model, data = (CHAINS | CONVOLUTIONS)[name]().to(dtype), problem(SIZES["ragged"], dtype)
    one_worker, three_workers = (
        engines(model, data, WORKS["epochs"], optimizer, workers)[0] for workers in (1, 3)
    )
    params, cohorts = initial(model), ([4, 0, 2], [3], [1, 2])
    calls = []
    for ids in cohorts:
        schedule = schedule_of(three_workers, np.array(ids), 2)
        calls.append(TrainingCall(three_workers.backend, [params] * len(ids), schedule))
    for ids, call, result in zip(cohorts, calls, train_jointly(calls), strict=True):
        loss, rms_loss = mean_losses(result.losses, call.schedule)
        for row, client in enumerate(ids):
            alone = one_worker.train(params, np.array([client]), 2, 0.1)
            assert all(torch.equal(alone.delta[n][0], result.delta[n][row]) for n in params)
            assert (alone.loss[0], alone.rms_loss[0]) == (loss[row], rms_loss[row])


def test_samples_need_not_be_contiguous() -> None:
    data = problem(SIZES["ragged"])
    strided = replace(data, x=data.x.repeat_interleave(2, dim=3)[..., ::2])
    assert not strided.x.is_contiguous()
    fast, plain = engines(model_of("mlp"), strided)[0], engines(model_of("mlp"), data)[1]
    assert_engines_equal(fast, plain, np.arange(5))
    params = initial(model_of("mlp"))
    predictions = [fast.predict(params, strided.x), plain.predict(params, data.x)]
    torch.testing.assert_close(*predictions, rtol=1e-10, atol=1e-10)


def test_a_model_may_have_more_outputs_than_classes() -> None:
    fast, plain = engines(linear(nn.Linear(16, 5)).double(), problem(SIZES["ragged"]))
    assert_engines_equal(fast, plain, np.arange(5))


# --- nan ------------------------------------------------------------------------------------------

NAN_MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: linear(
        nn.Linear(36, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)
    ),
    "pooling": images(nn.Conv2d(1, 3, 1), nn.ReLU(), nn.MaxPool2d(2), flat=27),
    "pooling first": images(nn.Conv2d(1, 3, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), flat=27),
}
NAN_DATA = clients_of([np.arange(4), np.arange(4, 7)], (1, 6, 6), 3)


def assert_nans_equal(model: nn.Module, data: ClientData, params: Params) -> None:
    """Check that results have nan where those of plain PyTorch have it, and that there are any."""
    results: list[dict[str, Any]] = []
    for engine in engines(model, data, LocalWork(None, 1, 4)):
        cohort = engine.train(params, np.arange(2), 1, 0.1)
        values = {name: delta.flatten(1).isnan().any(1) for name, delta in cohort.delta.items()}
        values["training loss"] = cohort.loss
        values["losses"] = engine.losses(params, data.train)
        values["predictions"] = engine.predict(params, data.x)
        values["gradients"] = torch.stack([*engine.client_gradients(params, data.train)])
        results.append(values)
    native_results, expected = results
    for name, value in native_results.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)
    assert np.isnan(native_results["losses"]).any()
    assert np.isnan(native_results["training loss"]).any()


@pytest.mark.parametrize("name", NAN_MODELS)
def test_a_nan_weight_is_not_hidden_by_relu_pooling_or_padding(name: str) -> None:
    model = NAN_MODELS[name]().double()
    for tensor in initial(model):
        params = initial(model)
        params[tensor].view(-1)[-1] = torch.nan
        assert_nans_equal(model, NAN_DATA, params)


@pytest.mark.parametrize("pixel", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("name", NAN_MODELS)
def test_a_nan_pixel_is_not_hidden_at_any_place_of_a_pool(
    name: str, pixel: tuple[int, int]
) -> None:
    model, x = NAN_MODELS[name]().double(), NAN_DATA.x.clone()
    x[(5, 0, *pixel)] = torch.nan
    assert_nans_equal(model, replace(NAN_DATA, x=x), initial(model))


# --- what is rejected -----------------------------------------------------------------------------


def convolution(inputs: int, kernel: int, flat: int) -> nn.Module:
    return images(nn.Conv2d(inputs, 4, kernel), nn.ReLU(), flat=flat)()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (model_of("batch norm 2d"), {}, r"(?s)only runs chains of plain convolut.*engine=auto"),
        (model_of("mlp"), {"optimizer": "adam"}, r"(?s)only optimizer=sgd, not Adam.*engine=auto"),
        (model_of("mlp"), {"workers": 0}, "workers=0"),
        (linear(nn.Linear(15, 3)), {}, "1.weight is for 15 inputs, not for 16"),
        (convolution(2, 3, 16), {}, "0.weight is for 2 inputs"),
        (convolution(1, 3, 9), {}, "3.weight is for 9 inputs"),
        (convolution(1, 5, 4), {}, "3.weight .* of 0 x 0 pixels"),
        (linear(nn.Linear(16, 2)), {}, "output for each of 3 classes, not 2"),
    ],
)
def test_what_it_cannot_train_never_reaches_c(
    model: nn.Module, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engines(model.double(), problem([4]), **options)


# --- engine=auto ----------------------------------------------------------------------------------


def chosen(model: str = "mlp", optimizer: str = "sgd", compile: Any = True, rounds: int = 1) -> str:
    """Return the choice for runs in which the median client makes two steps a round."""
    data, work = problem(SIZES["ragged"]), LocalWork(2, None, 4)
    task = model_of(model), data, work, OPTIMIZERS[optimizer], Streams(3)
    return auto(*task, rounds=rounds, compile=compile).description


LINEAR_ROUNDS = C_WORTH_STEPS["linear"] // 2
CONVOLUTIONAL_ROUNDS = C_WORTH_STEPS["convolutional"] // 2


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({}, "native (auto: no convolutions)"),
        ({"compile": "auto", "rounds": LINEAR_ROUNDS}, "native"),
        ({"compile": "auto", "rounds": LINEAR_ROUNDS - 1}, "batched"),
        ({"compile": False, "rounds": 10**6}, "batched"),
        ({"optimizer": "adam"}, "batched"),
        ({"model": "batch norm 1d", "compile": "auto", "rounds": 10**6}, "batched"),
        ({"model": "conv"}, "native"),
        ({"model": "conv", "compile": "auto"}, "sequential"),
        ({"model": "conv", "compile": "auto", "rounds": CONVOLUTIONAL_ROUNDS}, "native"),
        ({"model": "conv", "compile": False, "rounds": 10**6}, "sequential"),
        ({"model": "batch norm 2d", "rounds": 10**6}, "sequential"),
    ],
)
def test_auto_chooses_native_for_what_it_can_train_in_long_runs(
    options: dict[str, Any], backend: str
) -> None:
    assert chosen(**options).startswith(backend)


def test_a_short_run_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "library", lambda _: pytest.fail("it was compiled"))
    assert chosen(compile="auto").startswith("batched")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide a machine that has compiled nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.cache_clear()
    device.warn_not_compiled.cache_clear()
    yield tmp_path
    library.cache_clear()


@pytest.mark.parametrize(
    ("cc", "reason"),
    [
        ("", "there is no C compiler"),
        ("{folder}/broken", "it is broken"),
        ("{folder}/nowhere", "No such file"),
        ("gcc '-O2", "No closing quotation"),
        (None, "native-.*.so"),
    ],
)
def test_without_a_library_auto_chooses_another_engine_and_says_so_once(
    cc: str | None,
    reason: str,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`cc` is the compiler; None compiles to a file that is no library."""
    script = empty_cache / "broken"
    script.write_text("#!/bin/sh\necho 'it is broken' >&2\necho more >&2\nexit 3\n")
    script.chmod(0o755)
    if cc is None:
        monkeypatch.setattr(native_library, "_build", lambda _, path: path.write_text("nothing"))
    else:
        monkeypatch.setitem(native_library.ENVIRONMENT, "CC", cc.format(folder=empty_cache))
        monkeypatch.setitem(native_library.ENVIRONMENT, "PATH", "")
    for _ in range(2):
        description = chosen()
        assert description.startswith("batched (auto: no convolutions, not compiled: ")
        assert re.search(reason, description)
        assert "\n" not in description
    assert capsys.readouterr().err.count("engine.compile: not compiled") == 1
    with pytest.raises(ConfigError, match=rf"(?s){reason}.*engine=batched"):
        engines(model_of("mlp"), problem([4]))
