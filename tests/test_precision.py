"""Precision, determinism and device are those of the config, whatever was set before.

GPUs are pretended ones.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fedsim.config.compose import make_plan
from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError, Problem
from fedsim.engine import choose
from fedsim.engine.device import switches
from fedsim.running import assembly
from fedsim.running.assembly import resolve_device
from fedsim.running.provenance import environment
from tests.card_runs import BATCHED, SMALL, composed, run_on_card, simulation
from tests.pretended_cuda import PretendedCard

CONVOLUTIONS = ("model=logistic", "model._target_=tests.goldens.Convolutions", "num_rounds=1")
CUDNN: Any = torch.backends.cudnn
MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _restore_switches() -> Iterator[None]:
    assembly._latest.clear()
    products, deterministic = MATMUL.fp32_precision, CUDNN.deterministic
    convolutions, recurrent = CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision
    yield
    CUDNN.allow_tf32 = convolutions == "tf32"
    MATMUL.fp32_precision, CUDNN.deterministic = products, deterministic
    CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision = convolutions, recurrent


def plan(device: str) -> Plan:
    job = composed(*SMALL)
    return make_plan({**job.config, "device": device}, job.choices)


@pytest.mark.parametrize("engine", [("engine=sequential", "engine.workers=1"), BATCHED])
@pytest.mark.parametrize(
    ("precision", "switch", "before"), [("float32", "ieee", "tf32"), ("tf32", "tf32", "ieee")]
)
def test_passes_have_the_precision_of_the_config(
    engine: tuple[str, ...], precision: str, switch: str, before: Any
) -> None:
    seen: dict[str, set[str]] = defaultdict(set)

    def note_switch(name: str, args: tuple[Any, ...]) -> None:
        kind = "convolutions" if name.startswith("conv") else "products"
        seen[name].add(switches()[kind])

    MATMUL.fp32_precision = before
    CUDNN.conv.fp32_precision = before
    with PretendedCard(on_operation=note_switch):
        rounds = iter(simulation((*CONVOLUTIONS, *engine, f"engine.precision={precision}"), "cuda"))
        seen.clear()  # of trial passes
        next(rounds)
    for operation in ("convolution", "convolution_backward", "addmm"):
        assert seen[operation] == {switch}
    assert "ieee" in seen["mm"]  # The server always computes in float32.
    assert switches()["products"] == "ieee"
    assert switches()["convolutions"] == "ieee"


@pytest.mark.parametrize("engine", ["auto", "batched", "sequential"])
def test_tf32_is_rejected_on_a_cpu(engine: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.precision='tf32': needs a CUDA GPU"):
        simulation((*SMALL, f"engine={engine}", "engine.precision=tf32"), "cpu")


@pytest.mark.parametrize(
    ("value", "deterministic"), [("null", True), ("true", True), ("false", False)]
)
def test_determinism_of_cudnn_is_that_of_the_config(value: str, deterministic: bool) -> None:
    CUDNN.deterministic = not deterministic
    with PretendedCard():
        simulation((*SMALL, *BATCHED, f"engine.deterministic={value}"), "cuda")
    assert CUDNN.deterministic is deterministic


def test_auto_becomes_the_gpu_before_the_config_is_hashed() -> None:
    on_cpu = plan("auto")
    with PretendedCard():
        on_gpu, explicit = plan("auto"), plan("cuda")
    assert (on_cpu.config["device"], on_gpu.config["device"]) == ("auto", "cuda")
    assert on_gpu.folder == explicit.folder != on_cpu.folder


def test_a_gpu_becomes_torchs_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert [resolve_device(name) for name in ("cuda:1", "cuda", "cpu")] == [
        "cuda:1",
        "cuda:0",
        "cpu",
    ]
    assert current == [1, 0]


def test_a_gpu_that_does_not_exist_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs a CUDA GPU that torch can see"):
        plan("cuda:0")
    with pytest.raises(ConfigError, match="must be one of auto, cpu, cuda or cuda:<number>"):
        plan("cuda:x")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"device='cuda:2': torch sees GPUs 0 to 1"):
        plan("cuda:2")


def test_the_summary_names_gpu_driver_libraries_and_switches() -> None:
    with PretendedCard():
        simulation((*SMALL, *BATCHED), "cuda")
        described = environment(torch.device("cuda"))
    assert described["device"] == "pretended"
    gpu = described["gpu"]
    assert set(gpu) == {"driver", "cuda", "cudnn", "products", "convolutions", "deterministic"}
    assert (gpu["products"], gpu["convolutions"]) == ("ieee", "ieee")
    assert "gpu" not in environment(torch.device("cpu"))


def test_auto_trains_batched_on_a_gpu_what_cannot_be_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reject(*args: Any, **kwargs: Any) -> None:
        raise ConfigError([Problem("optimizer", "a user's", "cannot be recorded")])

    def chosen(words: tuple[str, ...]) -> str:
        return simulation((*words, "engine=auto"), "cuda").components.engine.description

    with PretendedCard():
        assert chosen(CONVOLUTIONS).startswith("graph, ")
        monkeypatch.setattr(choose, "GraphBackend", reject)
        assert chosen(CONVOLUTIONS) == "batched (auto: convolutions on a GPU)"
        assert chosen(SMALL) == "batched (auto: no convolutions)"


@pytest.mark.parametrize(("memory", "clients"), [(80 * 10**9, 6), (900_000, 2)])
def test_activations_count_in_what_fits_into_a_gpus_memory(memory: int, clients: int) -> None:
    grouped_channels = [0]

    def note_channels(name: str, args: tuple[Any, ...]) -> None:
        if name == "convolution":
            grouped_channels.append(args[1].shape[0])

    card = PretendedCard(memory=memory, on_operation=note_channels)
    run_on_card((*CONVOLUTIONS, *BATCHED, "cohort_size=6"), card)
    channels_per_client = 4
    assert max(grouped_channels) == clients * channels_per_client
