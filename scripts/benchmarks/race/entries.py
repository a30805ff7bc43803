"""The frameworks that the speed race compares, and the environments that they run in."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from scripts.benchmarks.processes import ROOT

FOLDER = ROOT / "outputs" / "benchmark"
DATA = FOLDER / "data"
REQUIREMENTS = {
    "jax": ("jax==0.10.2",),
    "pfl": ("pfl[pytorch]==0.6.0", "torch=={torch}"),
    "fedjax": ("fedjax==0.0.17", "dm-haiku==0.0.17", "jax==0.10.2"),
    "flower": ("flwr[simulation]==1.41.0", "torch=={torch}"),
    "fedlab": ("fedlab==1.3.0", "torch=={torch}"),
}
"""Packages of each environment. `{torch}` is the version that fedsim runs with."""


@dataclass(frozen=True)
class Peer:
    """A script of scripts/benchmarks/peers that takes part.

    `environment` is None for the project's own environment, `package` names the version that the
    table shows, and `cuda` says whether the peer can run on a GPU.
    """

    script: str
    environment: str | None = None
    package: str = "torch"
    is_framework: bool = False
    processes: int = 1
    cuda: bool = False
    title: str = ""

    @property
    def python(self) -> Path:
        if self.environment is None:
            return Path(sys.executable)
        return FOLDER / f"env-{self.environment}" / "bin" / "python"

    @property
    def command(self) -> list[str]:
        """The command that runs the script, without its options."""
        launcher = []
        if self.processes > 1:
            number = f"--nproc-per-node={self.processes}"
            launcher = ["-m", "torch.distributed.run", "--standalone", number]
        script = ["-m", f"scripts.benchmarks.peers.{self.script}"]
        return [str(self.python), *launcher, *script]


def _framework(name: str, package: str, processes: int = 1, title: str = "") -> Peer:
    return Peer(f"run_{name}", name, package, True, processes, title=title)


PEERS = {
    "fedsim": Peer("run_fedsim", package="fedsim-selection", cuda=True),
    "loop": Peer("run_loop", cuda=True, title="PyTorch by hand"),
    "jax": Peer("run_jax", "jax", "jax", title="JAX by hand"),
    "pfl": _framework("pfl", "pfl"),
    "pfl2": _framework("pfl", "pfl", processes=2, title="pfl, 2 processes"),
    "fedjax": _framework("fedjax", "fedjax"),
    "flower": _framework("flower", "flwr"),
    "fedlab": _framework("fedlab", "fedlab"),
}
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


def requirements_of(environment: str) -> list[str]:
    torch = version("torch").split("+")[0]
    return [requirement.format(torch=torch) for requirement in REQUIREMENTS[environment]]


def install(names: Sequence[str]) -> bool:
    """Make the environments of some peers. Return whether all succeeded."""
    succeeded = True
    for name in names:
        peer = PEERS[name]
        assert peer.environment is not None
        requirements = requirements_of(peer.environment)
        print(f"{peer.environment}: {' '.join(requirements)}", flush=True)
        folder = str(peer.python.parents[1])
        make = ["venv", "--quiet", "--allow-existing", "--python", sys.executable, folder]
        fill = ["pip", "install", "--quiet", "--python", str(peer.python), *requirements]
        for words in (make, fill):
            # in another folder, because uv would apply the project's pins in this one
            finished = subprocess.run(["uv", *words], cwd=tempfile.gettempdir(), check=False)
            if finished.returncode:
                print(f"{peer.environment}: failed", flush=True)
                succeeded = False
                break
    return succeeded
