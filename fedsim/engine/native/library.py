"""The C sources of this folder as a library, compiled once per machine and kept in the user's
cache.

A library is code that this process runs. So fedsim loads it only if nobody else can write to the
file or its folder. Otherwise fedsim compiles it again, if necessary for this process only.
"""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
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
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
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
    folder = platformdirs.user_cache_path("fedsim") / "compiled"
    try:
        if _make_private(folder):
            path = folder / name
            if not _is_as_compiled(path):
                _build(command, path)
            return ctypes.CDLL(str(path))
        # The temporary folder may go once the library is loaded.
        with tempfile.TemporaryDirectory(prefix="fedsim-native-") as temporary:
            path = Path(temporary) / name
            _build(command, path)
            return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotCompiledError(str(error)) from error


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


def _make_private(folder: Path) -> bool:
    """Make `folder` if necessary, and forbid others to write to it and to its parent.

    Returns False if that is impossible: one belongs to another user, or is a link or a file.
    """
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for path in (folder.parent, folder):
            status = path.lstat()
            is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_own_folder and status.st_mode & OTHERS_WRITE:
                path.chmod(0o700)
        return _is_private(folder.parent, stat.S_ISDIR) and _is_private(folder, stat.S_ISDIR)
    except OSError:
        return False


def _is_private(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Return whether the user owns `path`, nobody else can write to it, and it is of this kind."""
    status = path.lstat()
    owned = status.st_uid == os.getuid() and not status.st_mode & OTHERS_WRITE
    return owned and is_kind(status.st_mode)


def _is_as_compiled(path: Path) -> bool:
    """Return whether there is a library with the SHA-256 in the file next to it."""
    checksum = path.with_suffix(".sha256")
    for file in (path, checksum):
        if not os.path.lexists(file) or not _is_private(file, stat.S_ISREG):
            return False
    return checksum.read_text(encoding="ascii", errors="replace") == _sha256(path)


def _build(command: list[str], path: Path) -> None:
    """Compile to temporary files, and move them to `path` and its checksum.

    Processes that build at the same time do not disturb each other. Nothing is written in place,
    because another process may have loaded the file.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compiled, checksum = Path(folder) / "native.so", Path(folder) / "native.sha256"
        _run([*command, "-o", str(compiled), str(SOURCES / "native.c"), "-lm"])
        checksum.write_text(_sha256(compiled), encoding="ascii")
        for file, target in ((checksum, path.with_suffix(".sha256")), (compiled, path)):
            file.chmod(0o600)
            file.replace(target)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


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
