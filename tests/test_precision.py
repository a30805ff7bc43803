"""Precision, determinism and device: what a config says holds on a (pretended) GPU, whatever stood
before."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fedsim.config.compose import make_plan
from fedsim.core.errors import ConfigError, Problem
from fedsim.engine import choose
from fedsim.engine.device import switches
from fedsim.running import assembly as prepared_data
from fedsim.running.provenance import environment
from tests.card_runs import BATCHED, composed, run_on_card, simulation
from tests.pretended_cuda import PretendedCard

SMALL = ("model.hidden=[16,8]",)
CONVOLUTIONS = ("model=logistic", "model._target_=tests.goldens.Convolutions", "num_rounds=1")
SEQUENTIAL = ("engine=sequential", "engine.workers=1")
CUDNN: Any = torch.backends.cudnn


@pytest.fixture(autouse=True)
def _switches_put_back() -> Iterator[None]:
    prepared_data._latest.clear()
    before = (
        torch.backends.cuda.matmul.fp32_precision,
        CUDNN.conv.fp32_precision,
        CUDNN.rnn.fp32_precision,
    )
    deterministic = CUDNN.deterministic
    yield
    CUDNN.allow_tf32 = before[1] == "tf32"
    (
        torch.backends.cuda.matmul.fp32_precision,
        CUDNN.conv.fp32_precision,
        CUDNN.rnn.fp32_precision,
    ) = before
    CUDNN.deterministic = deterministic


def plan(device: str, *words: str) -> Any:
    job = composed(*words)
    return make_plan({**job.config, "device": device}, job.choices)


class Watch:
    """How the switches stand at each product or convolution."""

    def __init__(self) -> None:
        self.seen: dict[str, set[str]] = {}

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        if name in (
            "mm",
            "addmm",
            "bmm",
            "baddbmm",
            "baddbmm_",
            "convolution",
            "convolution_backward",
        ):
            kind = "convolutions" if name.startswith("conv") else "products"
            self.seen.setdefault(name, set()).add(switches()[kind])


@pytest.mark.parametrize("engine", [SEQUENTIAL, BATCHED], ids=["sequential", "batched"])
@pytest.mark.parametrize(("precision", "kind"), [("float32", "ieee"), ("tf32", "tf32")])
def test_passes_are_computed_in_the_precision_that_is_said(
    engine: tuple[str, ...], precision: str, kind: str
) -> None:
    torch.backends.cuda.matmul.fp32_precision = CUDNN.conv.fp32_precision = (
        "ieee" if kind == "tf32" else "tf32"
    )
    watch = Watch()
    with PretendedCard(refuses=watch):
        made = simulation((*CONVOLUTIONS, *engine, f"engine.precision={precision}"), "cuda")
        watch.seen.clear()  # what was tried out
        next(iter(made))
    assert (
        watch.seen["convolution"]
        == watch.seen["convolution_backward"]
        == watch.seen["addmm"]
        == {kind}
    )
    assert "ieee" in watch.seen["mm"]  # what the server computes is float32's, always
    assert switches()["products"] == switches()["convolutions"] == "ieee"


@pytest.mark.parametrize("engine", ["auto", "batched", "sequential"])
def test_tf32_is_refused_on_a_cpu(engine: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.precision='tf32': needs a CUDA GPU"):
        simulation((*SMALL, f"engine={engine}", "engine.precision=tf32"), "cpu")


@pytest.mark.parametrize(("said", "stands"), [("null", True), ("true", True), ("false", False)])
def test_determinism_of_cudnn_is_a_switch(said: str, stands: bool) -> None:
    CUDNN.deterministic = not stands
    with PretendedCard():
        simulation((*SMALL, *BATCHED, f"engine.deterministic={said}"), "cuda")
    assert CUDNN.deterministic is stands


def test_auto_is_the_gpu_before_the_config_is_hashed() -> None:
    on_cpu = plan("auto", *SMALL)
    with PretendedCard():
        on_gpu, said = plan("auto", *SMALL), plan("cuda", *SMALL)
    assert (on_cpu.config["device"], on_gpu.config["device"]) == ("auto", "cuda")
    assert on_gpu.folder == said.folder != on_cpu.folder


def test_the_second_gpu() -> None:
    words = (*SMALL, *BATCHED)
    with PretendedCard(devices=2) as card:
        for device, number in (("cuda:1", 1), ("cuda", 0)):
            prepared_data._latest.clear()
            made = simulation(words, device)
            assert card.runtime.current == number
            next(iter(made))
            assert {value.device for value in made.params.values()} == {
                torch.device("cuda", number)
            }


def test_a_gpu_that_is_not_there_is_told() -> None:
    with (
        PretendedCard(devices=2),
        pytest.raises(ConfigError, match=r"device='cuda:2': torch sees GPUs 0 to 1"),
    ):
        plan("cuda:2", *SMALL)
    with pytest.raises(ConfigError, match="needs a CUDA GPU that torch can see"):
        plan("cuda:0", *SMALL)
    with pytest.raises(ConfigError, match="must be one of auto, cpu, cuda or cuda:<number>"):
        plan("cuda:x", *SMALL)


def test_the_summary_names_gpu_driver_libraries_and_switches() -> None:
    with PretendedCard():
        simulation((*SMALL, *BATCHED), "cuda")
        found = environment(torch.device("cuda"))
    assert found["device"] == "pretended"
    assert set(found["gpu"]) == {
        "driver",
        "cuda",
        "cudnn",
        "products",
        "convolutions",
        "deterministic",
    }
    assert (found["gpu"]["products"], found["gpu"]["convolutions"]) == ("ieee", "ieee")
    assert "gpu" not in environment(torch.device("cpu"))


def test_auto_trains_batched_on_a_gpu_what_cannot_be_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **more: Any) -> None:
        raise ConfigError([Problem("optimizer", "a user's", "cannot be recorded")])

    def chosen(*words: str) -> str:
        return simulation((*words, "engine=auto"), "cuda").components.engine.description

    with PretendedCard():
        assert chosen(*CONVOLUTIONS).startswith("graph, ")
        monkeypatch.setattr(choose, "GraphBackend", refuse)
        assert chosen(*CONVOLUTIONS) == "batched (auto: convolutions on a GPU)"
        assert chosen(*SMALL) == "batched (auto: no convolutions)"


def test_activations_count_in_what_fits_into_a_gpus_memory() -> None:
    words = (
        "model=logistic",
        "model._target_=tests.goldens.Convolutions",
        *BATCHED,
        "cohort_size=6",
        "num_rounds=1",
    )
    rows: list[int] = []

    def sizes(name: str, args: tuple[Any, ...]) -> None:
        if (
            name == "convolution" and args[1].shape[0] > 4
        ):  # a grouped one: four channels of each client
            rows.append(args[1].shape[0] // 4)

    run_on_card(words, PretendedCard(refuses=sizes))
    assert max(rows) == 6
    rows.clear()
    run_on_card(words, PretendedCard(memory=900_000, refuses=sizes))
    assert max(rows) == 2
