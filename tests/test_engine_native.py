"""Local training in C: what is special to it, and that it stands aside where it cannot run.

That it equals plain PyTorch for chains of all kinds is in tests/test_engine.py and
tests/test_engine_chain.py.
"""

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
from fedsim.engine.native import library as native_library
from fedsim.engine.native.calls import ChainCalls
from fedsim.engine.native.library import library
from fedsim.engine.schedule import LocalWork
from fedsim.models.cnn import CNN
from fedsim.models.mlp import MLP
from fedsim.running.lanes import TrainingCall, train_jointly
from tests.engines import auto, native, reference, schedule_of
from tests.test_engine import OPTIMIZERS, SIZES, WORKS, assert_engines_equal, model_of, problem
from tests.test_engine_chain import CHAINS

pytestmark = pytest.mark.usefixtures("compiled")
SGDS = ["sgd", "decay", "momentum", "nesterov"]


def pair(
    model: nn.Module,
    data: ClientData,
    work: LocalWork = WORKS["epochs"],
    optimizer: str = "sgd",
    workers: int = 2,
) -> tuple[Engine, Engine]:
    common = (model, data, work, OPTIMIZERS[optimizer], Streams(3))
    return native(*common, workers=workers), reference(*common)


def test_after_an_interruption_no_client_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def submit(self, function: Any, *_: Any) -> None:
            self.function = function
            raise KeyboardInterrupt

    engine, pool = pair(model_of("mlp"), problem([20, 20]))[0], Interrupted()
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
    """Products whose rows, columns and depths leave rests, and are deeper than one block of
    sums."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 1, 1, 600, generator=generator, dtype=torch.float64)
    data = ClientData(
        x, torch.randint(11, (40,), generator=generator), *[[np.arange(3, 40)]] * 2, 11
    )
    model: Any = MLP((1, 1, 600), 11, hidden=hidden, dropout=dropout).double()
    assert_engines_equal(*pair(model, data, LocalWork(2, None, 17), optimizer), np.arange(1))


def padded() -> nn.Module:
    """Images that are not square, paddings, pooling before and behind ReLU, sizes that leave
    rests."""
    return nn.Sequential(
        *(nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(5, 20, 5, padding=2, bias=False), nn.ReLU()),
        *(nn.Conv2d(20, 7, 2, padding=1), nn.MaxPool2d(2), nn.ReLU()),
        *(
            nn.Flatten(),
            nn.Linear(42, 12),
            nn.Dropout(0.4),
            nn.ReLU(),
            nn.Linear(12, 4, bias=False),
        ),
    )


IMAGES: dict[str, tuple[tuple[int, ...], int, Any]] = {
    "cnn": ((3, 32, 32), 10, lambda: CNN((3, 32, 32), 10)),
    "padded": ((1, 9, 11), 4, padded),
    "one pixel": (
        (2, 5, 5),
        3,
        lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(75, 3)),
    ),
}


def images(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, ClientData]:
    """A model, and 23 samples of three clients, one of whom has none. Some are blank: all pixels of
    a pool tie."""
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
    fast, plain = pair(model, data, LocalWork(2, None, 5), optimizer)
    assert_engines_equal(fast, plain, np.arange(3))
    params = initial(model)
    np.testing.assert_allclose(
        fast.losses(params, data.train), plain.losses(params, data.train), rtol=1e-10
    )
    torch.testing.assert_close(
        fast.predict(params, data.x), plain.predict(params, data.x), rtol=1e-10, atol=1e-10
    )
    for a, b in zip(*(e.client_gradients(params, data.train) for e in (fast, plain)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["decay", "momentum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_client_is_the_same_to_the_last_bit_in_any_company(
    dtype: torch.dtype, optimizer: str
) -> None:
    model: Any = CHAINS["dropout"]().to(dtype)
    data = problem(SIZES["ragged"], dtype)
    alone, several = (
        pair(model, data, WORKS["epochs"], optimizer, workers)[0] for workers in (1, 3)
    )
    params = initial(model)
    cohorts = [[4, 0, 2], [3], [1, 2]]
    schedules = [schedule_of(several, np.array(ids), 2) for ids in cohorts]
    calls = [TrainingCall(several.backend, [params] * len(s), s) for s in schedules]
    for ids, schedule, result in zip(cohorts, schedules, train_jointly(calls), strict=True):
        loss, rms_loss = mean_losses(result.losses, schedule)
        for row, client in enumerate(ids):
            single = alone.train(params, np.array([client]), 2, 0.1)
            assert all(torch.equal(single.delta[n][0], result.delta[n][row]) for n in params)
            assert (single.loss[0], single.rms_loss[0]) == (loss[row], rms_loss[row])


def test_samples_that_do_not_lie_in_a_row_and_more_outputs_than_classes() -> None:
    data = problem(SIZES["ragged"])
    apart = replace(data, x=data.x.repeat_interleave(2, dim=3)[..., ::2])
    assert not apart.x.is_contiguous()
    wide = nn.Sequential(nn.Flatten(), nn.Linear(16, 5)).double()
    for model, samples in ((model_of("mlp"), apart), (wide, data)):
        fast, plain = pair(model, samples)[0], pair(model, data)[1]
        assert_engines_equal(fast, plain, np.arange(5))
        found, wanted = (
            fast.predict(initial(model), samples.x),
            plain.predict(initial(model), data.x),
        )
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


WITH_NAN: dict[str, list[nn.Module]] = {
    "linear": [
        nn.Flatten(),
        nn.Linear(36, 7),
        nn.ReLU(),
        nn.Linear(7, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    ],
    "pooling": [nn.Conv2d(1, 3, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 3)],
    "pooling first": [
        nn.Conv2d(1, 3, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(27, 3),
    ],
}


@pytest.mark.parametrize("name", WITH_NAN)
def test_a_weight_or_a_sample_that_is_nan_is_not_hidden_by_relu_pooling_or_padding(
    name: str,
) -> None:
    """Losses, predictions and gradients have NaN where plain torch has it, updates in the same
    clients' tensors."""
    model: Any = nn.Sequential(*WITH_NAN[name]).double()
    x = torch.randn(7, 1, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    clean = ClientData(x, torch.arange(7) % 3, *[[np.arange(4), np.arange(4, 7)]] * 2, 3)
    tasks = []
    for tensor, value in initial(model).items():
        broken = {**initial(model), tensor: value.clone()}
        broken[tensor].view(-1)[-1] = torch.nan
        tasks.append((clean, broken))
    for pixel in [(0, 0), (0, 1), (1, 0), (1, 1)]:  # each place of a window of the pooling
        dirty = replace(clean, x=x.clone())
        dirty.x[(5, 0, *pixel)] = torch.nan
        tasks.append((dirty, initial(model)))
    for data, params in tasks:
        found, wanted = (
            {
                "losses": engine.losses(params, data.train),
                "predictions": engine.predict(params, data.x).numpy(),
                "gradients": torch.stack(list(engine.client_gradients(params, data.train))).numpy(),
                "training loss": (trained := engine.train(params, np.arange(2), 1, 0.1)).loss,
                **{
                    n: delta.flatten(1).isnan().any(1).numpy() for n, delta in trained.delta.items()
                },
            }
            for engine in pair(model, data, LocalWork(None, 1, 4))
        )
        for key in found:
            np.testing.assert_allclose(found[key], wanted[key], rtol=1e-9, atol=1e-12, err_msg=key)
        assert np.isnan(found["losses"]).any()
        assert np.isnan(found["training loss"]).any()


REFUSED: list[tuple[nn.Module, dict[str, Any], str]] = [
    (model_of("batch norm 2d"), {}, r"(?s)runs chains of plain convolutions.*engine=auto"),
    (model_of("mlp"), {"optimizer": "adam"}, r"(?s)only optimizer=sgd, not Adam.*engine=auto"),
    (model_of("mlp"), {"workers": 0}, "workers=0"),
    (nn.Sequential(nn.Flatten(), nn.Linear(15, 3)), {}, "1.weight is for 15 inputs, not for 16"),
    (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
        {},
        "0.weight is for 2 inputs",
    ),
    (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(9, 3)),
        {},
        "3.weight is for 9 inputs",
    ),
    (
        nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)),
        {},
        "3.weight .* of 0 x 0 pixels",
    ),
    (nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), {}, "output for each of 3 classes, not 2"),
]


@pytest.mark.parametrize(("model", "more", "rule"), REFUSED, ids=range(len(REFUSED)))
def test_what_it_cannot_train_never_reaches_c(
    model: nn.Module, more: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule):
        pair(model.double(), problem([4]), **more)


# --- compiling ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As on a machine that has compiled nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.cache_clear()
    compiled.warn_not_compiled.cache_clear()
    yield tmp_path / "fedsim" / "compiled"
    library.cache_clear()


def chosen(name: str = "mlp", optimizer: str = "sgd", compile: Any = True, rounds: int = 1) -> str:
    """Of runs in which the middling client makes two steps a round."""
    task = (
        model_of(name),
        problem(SIZES["ragged"]),
        LocalWork(2, None, 4),
        OPTIMIZERS[optimizer],
        Streams(3),
    )
    return auto(*task, rounds=rounds, compile=compile).description


def test_auto_takes_it_for_what_it_can_train_in_long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen().startswith(
        "native (auto: no convolutions)" if torch.get_num_threads() == 1 else "native, "
    )
    linear, convolutional = (WORTH_STEPS[kind] // 2 for kind in ("linear", "convolutional"))
    for kind, values in (
        ("native", {"compile": "auto", "rounds": linear}),
        ("batched", {"compile": "auto", "rounds": linear - 1}),
        ("batched", {"compile": False, "rounds": 10**6}),
        ("batched", {"optimizer": "adam"}),
        ("batched", {"name": "batch norm 1d", "compile": "auto", "rounds": 10**6}),
        ("native", {"name": "conv"}),
        ("sequential", {"name": "conv", "compile": "auto"}),
        ("native", {"name": "conv", "compile": "auto", "rounds": convolutional}),
        ("sequential", {"name": "conv", "compile": False, "rounds": 10**6}),
        ("sequential", {"name": "batch norm 2d", "rounds": 10**6}),
    ):
        assert chosen(**values).startswith(kind), values  # type: ignore[arg-type]
    monkeypatch.setattr(
        choose, "library", lambda _: pytest.fail("a short run asks for no compiler")
    )
    assert chosen(compile="auto").startswith("batched")


BROKEN = {
    "": "there is no C compiler",
    "{folder}/broken": "it is broken",
    "{folder}/nowhere": "No such file",
    "gcc '-O2": "No closing quotation",
    "no library": "native-.*.so",
}
"""CC, and what is said of it."""


@pytest.mark.parametrize("cc", BROKEN)
def test_without_a_compiler_auto_goes_on_and_says_so_once(
    cc: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh.mkdir(parents=True)
    script = fresh / "broken"
    script.write_text("#!/bin/sh\necho 'it is broken' >&2\necho more >&2\nexit 3\n")
    script.chmod(0o755)
    if cc == "no library":
        monkeypatch.setattr(native_library, "_build", lambda _, path: path.write_text("nothing"))
    else:
        monkeypatch.setitem(native_library.ENVIRONMENT, "CC", cc.format(folder=fresh))
        monkeypatch.setitem(native_library.ENVIRONMENT, "PATH", "")
    for _ in range(2):
        told = chosen()
        assert told.startswith("batched (auto: no convolutions, not compiled: ")
        assert re.search(BROKEN[cc], told)
        assert "\n" not in told
    assert capsys.readouterr().err.count("engine.compile: not compiled") == 1
    with pytest.raises(ConfigError, match=rf"(?s){BROKEN[cc]}.*engine=batched"):
        pair(model_of("mlp"), problem([4]))
