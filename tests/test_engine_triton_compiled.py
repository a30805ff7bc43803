"""The Triton kernels compiled for an H100 (sm_90), which needs no GPU: registers, and one program for any company."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.engine.backend import Workload
from fedsim.engine.data import ClientData
from fedsim.engine.device import Precision
from fedsim.engine.graph.backend import ProgramKind, new_programs
from fedsim.engine.graph.buffers import State, Tables
from fedsim.engine.graph.optimizers import FlatOptimizer, flat_optimizer
from fedsim.engine.graph.triton_chain import Launch, Tiles, TritonChain, _unfit_device
from fedsim.engine.optimizers import SGD, Adam, Constant, LocalOptimizer
from fedsim.models.mlp import MLP

triton = pytest.importorskip("triton")

if triton.knobs.runtime.interpret:
    pytest.skip("Triton's kernels are interpreted in this process", allow_module_level=True)

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Card:
    """What Triton asks of the driver of a device when it compiles."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", self.arch, 32)


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiles for an H100, whatever this machine has, and leaves no trace of that."""
    from fedsim.engine.graph import triton_kernels

    cache = tmp_path_factory.getbasetemp() / "triton"  # kernels that several tests compile are compiled once
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    kernels = triton_kernels.forward, triton_kernels.update
    for kernel in kernels:
        monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
    monkeypatch.setattr(triton.runtime.driver, "_active", Card(90))


def sgd(momentum: float = 0.0) -> SGD:
    return SGD(lr=0.1, momentum=momentum, nesterov=False, weight_decay=1e-4, schedule=Constant())


def adam() -> Adam:
    rates = {"lr": 0.001, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    return Adam(**rates, weight_decay=0.0, decoupled=False, schedule=Constant())


Parts = tuple[Workload, Tables, State, FlatOptimizer]


def parts(hidden: tuple[int, ...], optimizer: LocalOptimizer, clients: int = 10, batch: int = 64) -> Parts:
    """Of a chain on 784 inputs and 10 classes; (64, 30) is FedCor's (W1 in docs/performance.md)."""
    model = MLP((1, 28, 28), 10, hidden=list(hidden), dropout=0.0)
    data = ClientData(torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.int64), [], [], 10)
    state = State.of(model, clients, data.x)
    update = flat_optimizer(optimizer, state.flat)
    tables = Tables(2, clients, batch, update.num_scalars, data.x)
    return Workload(model, data, optimizer), tables, state, update


def program(
    hidden: tuple[int, ...], optimizer: LocalOptimizer, *, clients: int = 10, batch: int = 64, **switches: Any
) -> TritonChain:
    return TritonChain(*parts(hidden, optimizer, clients, batch), **switches)


def spilled(launch: Launch, folder: Path) -> int:
    """Bytes of a thread's values that its registers did not hold, by NVIDIA's cuobjdump."""
    binary = folder / f"{launch.kernel.__name__}.cubin"
    binary.write_bytes(compiled(launch).asm["cubin"])
    told = subprocess.run([TOOL, "--dump-resource-usage", binary], capture_output=True, text=True, check=True).stdout
    (use,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told)
    registers, stack, local = map(int, use)
    assert 16 <= registers <= 255
    return stack + local


def compiled(launch: Launch) -> Any:
    return launch.kernel.warmup(grid=launch.grid, **launch.arguments)


with_tool = pytest.mark.skipif(not TOOL.exists(), reason=f"needs {TOOL.name} of Triton's CUDA backend")


@with_tool
def test_nothing_is_spilled(tmp_path: Path) -> None:
    """FedCor's model and SGD, in the form that is used by default (tf32x3)."""
    chain = program((64, 30), sgd())
    assert chain.forward.arguments["PRECISION"] == chain.update.arguments["PRECISION"] == "tf32x3"
    assert spilled(chain.forward, tmp_path) == 0
    assert spilled(chain.update, tmp_path) == 0


@with_tool
def test_a_spill_would_be_seen(tmp_path: Path) -> None:
    """Negative control: the same products by a quarter of the threads."""
    assert spilled(program((64,), sgd(), tiles=Tiles(forward_warps=1)).forward, tmp_path) > 0


@with_tool
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [sgd(0.9), adam()], ids=["momentum", "adam"])
@pytest.mark.parametrize("hidden", [(), (64,), (64, 30), (128,)])
def test_nothing_is_spilled_in_other_forms(hidden: tuple[int, ...], optimizer: LocalOptimizer, tmp_path: Path) -> None:
    chain = program(hidden, optimizer)
    assert spilled(chain.forward, tmp_path) == 0
    assert spilled(chain.update, tmp_path) == 0


@pytest.mark.parametrize(("precision", "products"), [("float32", "tf32x3"), ("tf32", "tf32")])
def test_products_are_of_the_precision_that_is_said(precision: Precision, products: str) -> None:
    (chain,) = new_programs(ProgramKind.TRITON, *parts((), sgd()), None, precision)
    assert isinstance(chain, TritonChain)
    for launch in (chain.forward, chain.update):
        assert launch.arguments["PRECISION"] == products


@with_tool
@pytest.mark.slow
def test_tf32_takes_a_third_of_the_products_and_spills_nothing(tmp_path: Path) -> None:
    products = []
    for precision in ("tf32x3", "tf32"):
        chain = program((64, 30), sgd(), products=precision)
        assert spilled(chain.forward, tmp_path) == spilled(chain.update, tmp_path) == 0
        products.append(len(re.findall(r"mma\S*tf32", compiled(chain.forward).asm["ptx"])))
    assert products[0] == 3 * products[1] > 0


def test_one_program_for_any_company() -> None:
    """Not compiled anew for other numbers of clients or sizes of batches, so that the instructions are the same."""
    chains = [program((), sgd(), clients=clients, batch=batch) for clients, batch in ((10, 64), (1, 1), (16, 9))]
    assert len({id(compiled(chain.forward)) for chain in chains}) == 1
    assert len({id(compiled(chain.update)) for chain in chains}) == 1


def test_devices_that_triton_cannot_use_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert _unfit_device(cuda) is None
    monkeypatch.setattr(triton.runtime.driver, "_active", Card(75))
    assert _unfit_device(cuda) == "the device is of sm_75, before sm_80"
    monkeypatch.setattr(triton.runtime.driver, "_active", object())  # fails in some way
    assert str(_unfit_device(cuda)).startswith("Triton cannot use the device: ")
    assert _unfit_device(torch.device("mps")) == "the device is mps"
