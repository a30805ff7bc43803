"""The C sources of this folder as a library, compiled once per machine and kept in the user's
cache.

If the cache cannot be used, fedsim compiles the library for this process only.
"""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import platformdirs
import torch

SOURCES = Path(__file__).parent
FLAGS = [
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
    "-pthread",
]
"""Flags for the compiler. A `-march` in CC takes precedence. No flag changes a result (simd.h)."""
REALS = {torch.float32: "float", torch.float64: "double"}
"""C's names of the types for which a library can be compiled."""
TIMEOUT = 120
"""Seconds that a compiler may take."""
ENVIRONMENT = dict(os.environ)
"""The user's environment when the process started. It names the user's compiler, whatever a config
changes later."""


class NotCompiledError(Exception):
    """The reason in one line why there is no library."""


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """Return `native.c`, compiled for `dtype`.

    Raises `NotCompiledError` if it cannot be built or loaded.
    """
    command = _compile_command(dtype)
    name = f"native-{_fingerprint(command)}.so"
    path = platformdirs.user_cache_path("fedsim") / "compiled" / name
    with suppress(OSError):  # The folder cannot be written, or the file is damaged.
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _build(command, path)
        return ctypes.CDLL(str(path))
    try:
        # The temporary folder may go once the library is loaded.
        with tempfile.TemporaryDirectory(prefix="fedsim-native-") as temporary:
            path = Path(temporary) / name
            _build(command, path)
            return ctypes.CDLL(str(path))
    except OSError as error:
        # Without the temporary folder, so that the reason stays the same and is told once.
        raise NotCompiledError(str(error).replace(str(path), name)) from error


def library_description(dtype: torch.dtype) -> str:
    """Return compiler, version and instruction set of `library(dtype)`: "gcc 12.2.0, AVX-512"."""
    text = ctypes.c_char_p.in_dll(library(dtype), "description").value
    assert text is not None
    return text.decode()


def _compile_command(dtype: torch.dtype) -> list[str]:
    compiler = _compiler()
    flags = list(FLAGS)
    if any("-march" in word for word in compiler):
        flags.remove("-march=native")
    return [*compiler, *flags, f"-DREAL={REALS[dtype]}"]


def _compiler() -> list[str]:
    """Return `CC` of the environment, or the first C compiler of the path."""
    if chosen := ENVIRONMENT.get("CC"):
        try:
            return shlex.split(chosen)
        except ValueError as error:
            raise NotCompiledError(f"CC={chosen}: {error}") from error
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name, path=ENVIRONMENT.get("PATH"))
        if path is not None:
            return [path]
    raise NotCompiledError("there is no C compiler (cc, gcc, clang or CC)")


def _fingerprint(command: list[str]) -> str:
    """Return a hash of the sources, the command, the compiler and the processor.

    The compiler's predefined macros name the last two.
    """
    macros = _run([*command, "-E", "-dM", "-x", "c", os.devnull])
    sources = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    content = b"\0".join([*sources, macros, " ".join(command).encode()])
    return hashlib.sha256(content).hexdigest()[:32]


def _build(command: list[str], path: Path) -> None:
    """Compile to a temporary file, and move it to `path`.

    Processes that build at the same time do not disturb each other. Nothing is written in place,
    because another process may have loaded the file.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compiled = Path(folder) / "native.so"
        _run([*command, "-o", str(compiled), str(SOURCES / "native.c"), "-lm"])
        compiled.replace(path)


def _run(command: list[str]) -> bytes:
    try:
        return subprocess.run(
            command, check=True, capture_output=True, timeout=TIMEOUT, env=ENVIRONMENT
        ).stdout
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[0][:200] if lines else f"exit status {error.returncode}"
        raise NotCompiledError(f"{command[0]}: {reason}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiledError(f"{command[0]}: {error}") from error
