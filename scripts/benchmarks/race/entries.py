"""The frameworks that the speed race compares, and the environments that they run in."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from scripts.benchmarks.peers.workloads import Workload
from scripts.benchmarks.processes import ROOT

FOLDER = ROOT / "outputs" / "benchmark"
DATA = FOLDER / "arrays"
REQUIREMENTS = {
    "jax": ("{jax}==0.10.2",),
    "pfl": ("pfl[pytorch]==0.6.0", "torch=={torch}"),
    "fedjax": ("fedjax==0.0.17", "dm-haiku==0.0.17", "{jax}==0.10.2"),
    "flower": ("flwr[simulation]==1.41.0", "torch=={torch}"),
    "fedlab": ("fedlab==1.3.0", "torch=={torch}"),
}
"""Packages of each environment. `{torch}` is the version that fedsim runs with, and `{jax}` the
package of JAX for the device."""
JAX = {"cpu": "jax", "cuda": "jax[cuda13]"}


@dataclass(frozen=True)
class Peer:
    """A script of scripts/benchmarks/peers that takes part.

    `environment` is None for the project's own environment, and `package` names the version that
    the table shows. `cuda` says whether the peer can run on a GPU, and `only_chains` that it trains
    no residual networks. `words` are options of the script.
    """

    script: str
    environment: str | None = None
    package: str = "torch"
    is_framework: bool = False
    processes: int = 1
    cuda: bool = False
    title: str = ""
    only_chains: bool = True
    words: tuple[str, ...] = ()

    @property
    def own_python(self) -> Path:
        """The interpreter of the peer's own environment, which may not be installed."""
        return FOLDER / f"env-{self.environment}" / "bin" / "python"

    @property
    def python(self) -> Path | None:
        """The interpreter that runs the peer, or None if the peer is not installed.

        A peer without an environment of its own runs in this interpreter if its package is there.
        """
        if self.environment is None:
            return Path(sys.executable)
        if self.own_python.is_file():
            return self.own_python
        return Path(sys.executable) if find_spec(self.environment) else None

    @property
    def command(self) -> list[str]:
        """The command that runs the script, without its options."""
        launcher = []
        if self.processes > 1:
            number = f"--nproc-per-node={self.processes}"
            launcher = ["-m", "torch.distributed.run", "--standalone", number]
        script = ["-m", f"scripts.benchmarks.peers.{self.script}"]
        return [str(self.python), *launcher, *script]

    def can_train(self, workload: Workload) -> bool:
        return workload.is_chain or not self.only_chains


def _by_hand(name: str, title: str, package: str = "torch", words: tuple[str, ...] = ()) -> Peer:
    environment = None if package == "torch" else package
    return Peer(
        f"run_{name}",
        environment,
        package,
        cuda=True,
        title=title,
        only_chains=False,
        words=words,
    )


def _framework(
    name: str, package: str, processes: int = 1, title: str = "", cuda: bool = False
) -> Peer:
    return Peer(f"run_{name}", name, package, True, processes, cuda, title)


PEERS = {
    "fedsim": Peer("run_fedsim", package="fedsim-selection", cuda=True, only_chains=False),
    "loop": _by_hand("loop", "PyTorch by hand"),
    "jax": _by_hand("jax", "JAX by hand", "jax"),
    "pfl": _framework("pfl", "pfl", cuda=True),
    "pfl2": _framework("pfl", "pfl", processes=2, title="pfl, 2 processes"),
    "fedjax": _framework("fedjax", "fedjax", cuda=True),
    "flower": _framework("flower", "flwr"),
    "fedlab": _framework("fedlab", "fedlab"),
    "torch.func": _by_hand("torch_func", "torch.func by hand, compiled"),
    "torch.func-graphs": _by_hand(
        "torch_func", "torch.func by hand, CUDA graphs", words=("reduce-overhead",)
    ),
}
ON_CPU = [name for name in PEERS if name != "torch.func-graphs"]
ON_GPU = [name for name, peer in PEERS.items() if peer.cuda]
CEILING = Peer("run_ceiling")


@dataclass(frozen=True)
class Entry:
    """A row of the table: a peer with its own options."""

    name: str
    words: tuple[str, ...] = ()

    @property
    def peer(self) -> Peer:
        return PEERS[self.name]

    @property
    def label(self) -> str:
        return " ".join([self.peer.title or self.name, *self.words])

    @property
    def precision(self) -> str:
        return "bf16" if "engine.precision=bf16" in self.words else "float32"


def entries_of(names: Sequence[str], variants: Sequence[Sequence[str]]) -> list[Entry]:
    """Return an entry for each peer, and after plain fedsim its variants."""
    entries = []
    for name in names:
        entries.append(Entry(name))
        if name == "fedsim":
            entries += [Entry(name, tuple(words)) for words in variants]
    return entries


def requirements_of(environment: str, device: str) -> list[str]:
    packages = {"torch": version("torch").split("+")[0], "jax": JAX[device]}
    return [requirement.format(**packages) for requirement in REQUIREMENTS[environment]]


def install(names: Sequence[str], device: str) -> bool:
    """Make the environments of some peers for a device. Return whether all succeeded."""
    succeeded = True
    for name in names:
        peer = PEERS[name]
        assert peer.environment is not None
        requirements = requirements_of(peer.environment, device)
        print(f"{peer.environment}: {' '.join(requirements)}", flush=True)
        folder = str(peer.own_python.parents[1])
        make = ["venv", "--quiet", "--allow-existing", "--python", sys.executable, folder]
        fill = ["pip", "install", "--quiet", "--python", str(peer.own_python), *requirements]
        for words in (make, fill):
            # in another folder, because uv would apply the project's pins in this one
            finished = subprocess.run(["uv", *words], cwd=tempfile.gettempdir(), check=False)
            if finished.returncode:
                print(f"{peer.environment}: failed", flush=True)
                succeeded = False
                break
    return succeeded
