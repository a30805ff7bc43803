"""The C sources of this folder as a library, compiled once per machine and kept in the user's cache."""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import platformdirs
import torch

SOURCES = Path(__file__).parent
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC", "-pthread"]
REALS = {torch.float32: "float", torch.float64: "double"}
"""C's names of the types that a library can be compiled for."""
TIMEOUT = 120
"""Seconds that a compiler gets."""


class NotCompiledError(Exception):
    """Why there is no library, in one line."""


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """`native.c` for `dtype`. Raises `NotCompiledError` where it cannot be built or loaded."""
    compiler = _compiler()
    command = [*compiler, *FLAGS, f"-DREAL={REALS[dtype]}"]
    path = _folder() / f"native-{_fingerprint(command)}.so"
    try:
        if not path.exists():
            _build(command, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotCompiledError(str(error)) from error


def _compiler() -> list[str]:
    """`CC` of the environment, or the first C compiler of the path."""
    if chosen := os.environ.get("CC"):
        try:
            return shlex.split(chosen)
        except ValueError as error:
            raise NotCompiledError(f"CC={chosen}: {error}") from error
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        raise NotCompiledError("there is no C compiler (cc, gcc, clang or CC)")
    return [found]


def _folder() -> Path:
    return platformdirs.user_cache_path("fedsim") / "compiled"


def _fingerprint(command: list[str]) -> str:
    """Of sources, command, compiler and the processor that it compiles for: its predefined macros name both."""
    macros = _run([*command, "-E", "-dM", "-x", "c", os.devnull])
    sources = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    return hashlib.sha256(b"\0".join([*sources, macros, " ".join(command).encode()])).hexdigest()[:32]


def _build(command: list[str], path: Path) -> None:
    """To a file of its own first, so that processes that build at once do not disturb each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "native.so"
        _run([*command, "-o", str(made), str(SOURCES / "native.c"), "-lm"])
        made.replace(path)


def _run(command: list[str]) -> bytes:
    try:
        return subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT).stdout
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {error.returncode}"]
        raise NotCompiledError(f"{command[0]}: {lines[0][:200]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiledError(f"{command[0]}: {error}") from error
