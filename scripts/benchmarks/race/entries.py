"""Whom the speed race compares, and the environments that they run in."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "outputs" / "benchmark"
DATA = FOLDER / "data"


@dataclass(frozen=True)
class Peer:
    """A script of scripts/benchmarks/peers. `environment`: whose packages it needs (None: the
    project's own). `cuda`: whether it can run on a GPU."""

    script: str
    environment: str | None = None
    package: str = "torch"
    framework: bool = False
    processes: int = 1
    cuda: bool = False

    @property
    def python(self) -> Path:
        return Path(sys.executable) if self.environment is None else python_of(self.environment)


PEERS = {
    "fedsim": Peer("run_fedsim", package="fedsim-selection", cuda=True),
    "loop": Peer("run_loop", cuda=True),
    "jax": Peer("run_jax", "jax", "jax"),
    "pfl": Peer("run_pfl", "pfl", "pfl", framework=True),
    "pfl2": Peer("run_pfl", "pfl", "pfl", framework=True, processes=2),
    "fedjax": Peer("run_fedjax", "fedjax", "fedjax", framework=True),
    "flower": Peer("run_flower", "flower", "flwr", framework=True),
    "fedlab": Peer("run_fedlab", "fedlab", "fedlab", framework=True),
}
TITLES = {"loop": "PyTorch by hand", "jax": "JAX by hand", "pfl2": "pfl, 2 processes"}
CEILING = Peer("run_ceiling")
REQUIREMENTS = {
    "jax": ("jax==0.10.2",),
    "pfl": ("pfl[pytorch]==0.6.0", "torch=={torch}"),
    "fedjax": ("fedjax==0.0.17", "dm-haiku==0.0.17", "jax==0.10.2"),
    "flower": ("flwr[simulation]==1.41.0", "torch=={torch}"),
    "fedlab": ("fedlab==1.3.0", "torch=={torch}"),
}
"""What goes into each environment; torch in the version that fedsim runs with here."""


@dataclass(frozen=True)
class Entry:
    """A line of the table."""

    peer: str
    words: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return " ".join([TITLES.get(self.peer, self.peer), *self.words])

    @property
    def precision(self) -> str:
        return "bf16" if "engine.precision=bf16" in self.words else "float32"


def python_of(environment: str) -> Path:
    return FOLDER / f"env-{environment}" / "bin" / "python"


def requirements_of(environment: str) -> list[str]:
    torch = version("torch").split("+")[0]
    return [requirement.format(torch=torch) for requirement in REQUIREMENTS[environment]]


def install(peers: Sequence[str]) -> int:
    """Make the environments of `peers`. The number of those that failed."""
    environments = dict.fromkeys(e for name in peers if (e := PEERS[name].environment) is not None)
    return sum(not _install_one(environment) for environment in environments)


def _install_one(environment: str) -> bool:
    requirements, target = requirements_of(environment), python_of(environment)
    print(f"{environment}: {' '.join(requirements)}", flush=True)
    commands = (
        [
            "uv",
            "venv",
            "--quiet",
            "--allow-existing",
            "--python",
            sys.executable,
            str(target.parents[1]),
        ],
        ["uv", "pip", "install", "--quiet", "--python", str(target), *requirements],
    )
    for command in commands:  # elsewhere, because uv would apply this project's pins here
        if subprocess.run(command, cwd=tempfile.gettempdir(), check=False).returncode:
            print(f"{environment}: failed", flush=True)
            return False
    return True
