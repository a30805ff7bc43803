"""Local training in C equals plain PyTorch, client by client, and stands aside where it cannot run."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.core.rng import Streams
from fedsim.engine import choose
from fedsim.engine import device as compiled
from fedsim.engine.choose import WORTH_STEPS
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine, mean_losses
from fedsim.engine.model import initial
from fedsim.engine.native import backend as native_backend
from fedsim.engine.native import library as native_library
from fedsim.engine.native.backend import PRODUCT_ROWS
from fedsim.engine.native.library import library
from fedsim.engine.optimizers import LocalOptimizer
from fedsim.engine.schedule import LocalWork
from fedsim.models.cnn import CNN
from fedsim.models.mlp import MLP
from fedsim.running.interleaving import TrainingCall, train_jointly
from tests.engines import auto, native, reference, schedule_of
from tests.test_engine import OPTIMIZERS, SIZES, WORKS, assert_equal, model_of, problem
from tests.test_engine_chain import CHAINS

pytestmark = pytest.mark.usefixtures("compiled")
SGDS = ["sgd", "decay", "momentum", "nesterov"]


def pair(
    model: nn.Module, data: ClientData, work: LocalWork, optimizer: LocalOptimizer, workers: int = 2
) -> tuple[Engine, Engine]:
    common = (model, data, work, optimizer, Streams(3))
    return native(*common, workers=workers), reference(*common)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("optimizer", SGDS)
@pytest.mark.parametrize("name", CHAINS)
def test_native_equals_sequential(name: str, optimizer: str, sizes: str) -> None:
    model: Any = CHAINS[name]().double()
    for work in WORKS.values():
        assert_equal(*pair(model, problem(SIZES[sizes]), work, OPTIMIZERS[optimizer]), np.arange(len(SIZES[sizes])))


@pytest.mark.parametrize("optimizer", SGDS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("hidden", [[70], [128, 7], [5, 64, 33]])
def test_layers_wider_and_deeper_than_a_tile(hidden: list[int], dropout: float, optimizer: str) -> None:
    """Products whose rows, columns and depths leave rests, and are deeper than one block of sums."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 1, 1, 600, generator=generator, dtype=torch.float64)
    data = ClientData(x, torch.randint(11, (40,), generator=generator), *[[np.arange(3, 40)]] * 2, 11)
    model: Any = MLP((1, 1, 600), 11, hidden=hidden, dropout=dropout).double()
    assert_equal(*pair(model, data, LocalWork(2, None, 17), OPTIMIZERS[optimizer]), np.arange(1))


def padded() -> nn.Module:
    """Images that are not square, paddings, pooling before and behind ReLU, sizes that leave rests."""
    return nn.Sequential(
        *(nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(5, 20, 5, padding=2, bias=False), nn.ReLU()),
        *(nn.Conv2d(20, 7, 2, padding=1), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(42, 12), nn.Dropout(0.4), nn.ReLU(), nn.Linear(12, 4, bias=False)),
    )


IMAGES: dict[str, tuple[tuple[int, ...], int, Any]] = {
    "cnn": ((3, 32, 32), 10, lambda: CNN((3, 32, 32), 10)),
    "padded": ((1, 9, 11), 4, padded),
    "one pixel": ((2, 5, 5), 3, lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(75, 3))),
}


def images(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, ClientData]:
    """A model, and 23 samples of three clients, one of whom has none. Some are blank: all pixels of a pool tie."""
    shape, num_classes, model = IMAGES[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(23, *shape, generator=generator, dtype=torch.float64).to(dtype)
    x[::3] = 1
    y = torch.randint(num_classes, (23,), generator=generator)
    positions = [np.arange(11), np.arange(0), np.arange(22, 10, -1)]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return model().to(dtype), ClientData(x, y, positions, positions, num_classes)


@pytest.mark.parametrize("optimizer", SGDS)
@pytest.mark.parametrize("name", IMAGES)
def test_convolutions_equal_those_of_the_plain_engine(name: str, optimizer: str) -> None:
    model, data = images(name)
    fast, plain = pair(model, data, LocalWork(2, None, 5), OPTIMIZERS[optimizer])
    assert_equal(fast, plain, np.arange(3))
    params = initial(model)
    np.testing.assert_allclose(fast.losses(params, data.train), plain.losses(params, data.train), rtol=1e-10)
    torch.testing.assert_close(fast.predict(params, data.x), plain.predict(params, data.x), rtol=1e-10, atol=1e-10)
    gradients = [list(e.client_gradients(params, data.train, None)) for e in (fast, plain)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", IMAGES)
def test_convolutions_in_single_precision(name: str) -> None:
    """Two steps: in more, roundings tip the scales between pixels of a pool that are nearly equal."""
    model, data = images(name, torch.float32)
    assert_equal(*pair(model, data, LocalWork(None, 2, 5), OPTIMIZERS["decay"]), np.arange(3), tolerance=2e-5)


@pytest.mark.parametrize("name", ["mlp", "dropout"])
def test_single_precision_too(name: str) -> None:
    data = problem(SIZES["ragged"], torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: Any = CHAINS[name]()
    assert_equal(*pair(model, data, WORKS["epochs"], OPTIMIZERS["momentum"]), np.arange(5), tolerance=2e-5)


@pytest.mark.parametrize("optimizer", ["decay", "momentum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_client_is_the_same_to_the_last_bit_in_any_company(dtype: torch.dtype, optimizer: str) -> None:
    model: Any = CHAINS["dropout"]().to(dtype)
    data = problem(SIZES["ragged"], dtype)
    alone, _ = pair(model, data, WORKS["epochs"], OPTIMIZERS[optimizer], workers=1)
    several, _ = pair(model, data, WORKS["epochs"], OPTIMIZERS[optimizer], workers=3)
    params = initial(model)
    cohorts = [[4, 0, 2], [3], [1, 2]]
    schedules = [schedule_of(several, np.array(ids), 2) for ids in cohorts]
    calls = [TrainingCall(several.backend, [params] * len(s), s) for s in schedules]
    for ids, schedule, result in zip(cohorts, schedules, train_jointly(calls), strict=True):
        loss, rms_loss = mean_losses(result.losses, schedule)
        for row, client in enumerate(ids):
            single = alone.train(params, np.array([client]), 2, 0.1)
            assert all(torch.equal(single.delta[n][0], result.delta[n][row]) for n in params)
            assert single.loss[0] == loss[row]
            assert single.rms_loss[0] == rms_loss[row]


@pytest.mark.parametrize("optimizer", ["decay", "nesterov"])
@pytest.mark.parametrize("name", ["cnn", "padded", "mlp"])
def test_cores_that_share_a_client_change_no_bit(name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_backend, "num_cores", lambda: 12)
    if name == "mlp":
        data = problem([70, 3, 41])
        model: Any = MLP((1, 4, 4), 3, hidden=[20, 9], dropout=0.3).double()
    else:
        model, data = images(name)
    params = initial(model)
    expected, *found = (
        pair(model, data, LocalWork(3, None, 9), OPTIMIZERS[optimizer], workers)[0] for workers in (1, 2, 3, 5, 12)
    )
    for ids in ([0], [2, 1], [0, 1, 2]):
        alone = expected.train(params, np.array(ids), 2, 0.1)
        for engine in found:
            shared = engine.train(params, np.array(ids), 2, 0.1)
            assert all(torch.equal(alone.delta[n], shared.delta[n]) for n in params)
            assert all(torch.equal(alone.momentum[n], shared.momentum[n]) for n in alone.momentum or {})
            np.testing.assert_array_equal(alone.rms_loss, shared.rms_loss)


@pytest.mark.parametrize("name", CHAINS)
def test_questions_equal_those_of_the_plain_engine(name: str) -> None:
    sizes = [5, 0, 2 * PRODUCT_ROWS + 7]
    model: Any = CHAINS[name]().double()
    data = problem(sizes)
    fast, plain = pair(model, data, WORKS["epochs"], OPTIMIZERS["sgd"])
    params, last = initial(model), list(initial(model))[-2:]
    np.testing.assert_allclose(fast.losses(params, data.train), plain.losses(params, data.train), rtol=1e-10)
    np.testing.assert_allclose(
        fast.losses(params, data.train[:1]), plain.losses(params, data.train[:1]), rtol=1e-10
    )  # few: gathered by the plain engine
    one, other = (e.evaluate(params, data.x, data.y) for e in (fast, plain))
    assert one.accuracy == other.accuracy
    assert one.loss == pytest.approx(other.loss, rel=1e-10)
    torch.testing.assert_close(fast.predict(params, data.x), plain.predict(params, data.x), rtol=1e-10, atol=1e-10)
    for names in (None, last):
        gradients = [list(e.client_gradients(params, data.train, names)) for e in (fast, plain)]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_samples_that_do_not_lie_in_a_row() -> None:
    data = problem([6, 6])
    apart = replace(data, x=data.x.repeat_interleave(2, dim=3)[..., ::2])
    assert not apart.x.is_contiguous()
    fast, _ = pair(model_of("mlp"), apart, WORKS["epochs"], OPTIMIZERS["sgd"])
    _, plain = pair(model_of("mlp"), data, WORKS["epochs"], OPTIMIZERS["sgd"])
    assert_equal(fast, plain, np.arange(2))
    params = initial(fast.workload.model)
    torch.testing.assert_close(fast.predict(params, apart.x), plain.predict(params, data.x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("model", "optimizer", "rule"),
    [("batch norm 2d", "sgd", "runs chains of plain convolutions"), ("mlp", "adam", "optimizer=sgd alone, not Adam")],
)
def test_what_it_cannot_train_is_refused(model: str, optimizer: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){rule}.*engine=auto"):
        pair(model_of(model), problem([4]), WORKS["epochs"], OPTIMIZERS[optimizer])


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(15, 3)), "1.weight is for 15 inputs, not for 16"),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)), "0.weight is for 2 inputs"),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(9, 3)), "3.weight is for 9 inputs"),
        (nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)), "3.weight .* of 0 x 0 pixels"),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), "output for each of 3 classes, not 2"),
    ],
)
def test_models_that_do_not_fit_the_data_never_reach_c(model: nn.Module, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        pair(model.double(), problem([4]), WORKS["epochs"], OPTIMIZERS["sgd"])


def test_other_samples_never_reach_c() -> None:
    fast, _ = pair(model_of("mlp"), problem([4]), WORKS["epochs"], OPTIMIZERS["sgd"])
    params = initial(fast.workload.model)
    for x in (torch.zeros(2, 1, 4, 3).double(), torch.zeros(2, 1, 4, 4)):
        with pytest.raises(ValueError, match="samples are"):
            fast.predict(params, x)


def test_more_outputs_than_classes() -> None:
    model: Any = nn.Sequential(nn.Flatten(), nn.Linear(16, 5)).double()
    data = problem(SIZES["ragged"])
    fast, plain = pair(model, data, WORKS["epochs"], OPTIMIZERS["sgd"])
    assert_equal(fast, plain, np.arange(5))
    params = initial(model)
    torch.testing.assert_close(fast.predict(params, data.x), plain.predict(params, data.x), rtol=1e-10, atol=1e-10)


def test_no_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="workers=0"):
        pair(model_of("mlp"), problem([4]), WORKS["epochs"], OPTIMIZERS["sgd"], workers=0)


# --- compiling ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As on a machine that has compiled nothing yet."""
    monkeypatch.setattr(native_library, "_folder", lambda: tmp_path / "compiled")
    library.cache_clear()
    compiled.warn_not_compiled.cache_clear()
    yield tmp_path / "compiled"
    library.cache_clear()


def chosen(optimizer: str = "sgd", name: str = "mlp", compile: Any = True, num_rounds: int = 1) -> Engine:
    task = (model_of(name), problem(SIZES["ragged"]), LocalWork(2, None, 4), OPTIMIZERS[optimizer], Streams(3))
    return auto(*task, rounds=num_rounds, compile=compile)


def test_auto_takes_it_for_what_it_can_train_in_long_runs() -> None:
    expected = "native (auto: no convolutions)" if torch.get_num_threads() == 1 else "native, "
    assert chosen().description.startswith(expected)
    assert chosen(compile="auto", num_rounds=WORTH_STEPS["linear"] // 2).description.startswith(expected)
    assert chosen(compile="auto", num_rounds=WORTH_STEPS["linear"] // 2 - 1).description.startswith("batched")
    assert chosen(compile=False, num_rounds=10**6).description.startswith("batched")
    assert chosen("adam").description.startswith("batched")
    assert chosen(name="batch norm 1d", compile="auto", num_rounds=10**6).description.startswith("batched")
    assert chosen(name="conv").description.startswith("native")
    assert chosen(name="conv", compile="auto").description.startswith("sequential")
    few = WORTH_STEPS["convolutional"] // 2
    assert chosen(name="conv", compile="auto", num_rounds=few).description.startswith("native")
    assert chosen(name="conv", compile=False, num_rounds=10**6).description.startswith("sequential")
    assert chosen(name="batch norm 2d", num_rounds=10**6).description.startswith("sequential")


def test_auto_trains_and_answers_as_the_plain_engine() -> None:
    engine = chosen()
    _, plain = pair(model_of("mlp"), engine.data, engine.work, OPTIMIZERS["sgd"])
    assert_equal(engine, plain, np.arange(5))
    params = initial(engine.workload.model)
    np.testing.assert_allclose(
        engine.losses(params, engine.data.train), plain.losses(params, engine.data.train), rtol=1e-10
    )
    torch.testing.assert_close(
        engine.predict(params, engine.data.x), plain.predict(params, engine.data.x), rtol=1e-10, atol=1e-10
    )
    gradients = [list(e.client_gradients(params, engine.data.train, None)) for e in (engine, plain)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_it_is_compiled_once_a_machine(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(torch.float64)
    made = set(fresh.iterdir())
    assert {path.suffix for path in made} == {".so", ".sha256"}
    library.cache_clear()
    monkeypatch.setattr(native_library, "_build", lambda *_: pytest.fail("built again"))
    library(torch.float64)
    monkeypatch.setattr(native_library, "FLAGS", [*native_library.FLAGS, "-g"])
    library.cache_clear()
    with pytest.raises(pytest.fail.Exception):  # other flags, another library
        library(torch.float64)
    assert made == set(fresh.iterdir())


def no_compiler(monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
    monkeypatch.setitem(native_library.ENVIRONMENT, "PATH", "")
    monkeypatch.delitem(native_library.ENVIRONMENT, "CC", raising=False)
    return "there is no C compiler"


def failing_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    folder.mkdir()
    script = folder / "broken"
    script.write_text("#!/bin/sh\necho 'it is broken' >&2\necho more >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setitem(native_library.ENVIRONMENT, "CC", str(script))
    return "it is broken"


def missing_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setitem(native_library.ENVIRONMENT, "CC", str(folder / "nowhere"))
    return "No such file"


def open_quote(monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
    monkeypatch.setitem(native_library.ENVIRONMENT, "CC", "gcc '-O2")
    return "No closing quotation"


def not_a_library(monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
    monkeypatch.setattr(native_library, "_build", lambda _, path: path.write_text("nothing"))
    return "native-.*.so"


@pytest.mark.parametrize("broken", [no_compiler, failing_compiler, missing_compiler, open_quote, not_a_library])
def test_without_a_compiler_auto_goes_on_and_says_so_once(
    broken: Any, fresh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = broken(monkeypatch, fresh)
    for _ in range(2):
        engine = chosen()
        assert engine.description.startswith("batched (auto: no convolutions, not compiled: ")
        assert re.search(reason, engine.description)
        assert "\n" not in engine.description
    assert capsys.readouterr().err.count("engine.compile: not compiled") == 1
    with pytest.raises(ConfigError, match=rf"(?s){reason}.*engine=batched"):
        pair(model_of("mlp"), problem([4]), WORKS["epochs"], OPTIMIZERS["sgd"])


def test_short_runs_do_not_ask_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "library", lambda _: pytest.fail("asked"))
    assert chosen(compile="auto").description.startswith("batched")
