"""The C sources of this folder as a library, compiled once per machine and kept in the user's
cache.

A library is code that this process runs, so it is loaded only from a folder that nobody else can
write to, and only if nobody else can write to the file. Else it is compiled anew, if need be for
this process alone.
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
"""`-march` is that of CC, if it names one. What the library computes depends on none of these:
simd.h."""
REALS = {torch.float32: "float", torch.float64: "double"}
"""C's names of the types that a library can be compiled for."""
TIMEOUT = 120
"""Seconds that a compiler gets."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
ENVIRONMENT = dict(os.environ)
"""The user's environment when the process began: the compiler is that of the user, whatever a
config does later."""


class NotCompiledError(Exception):
    """Why there is no library, in one line."""


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """`native.c` for `dtype`. Raises `NotCompiledError` where it cannot be built or loaded."""
    compiler = _compiler()
    flags = [
        flag
        for flag in FLAGS
        if not (flag.startswith("-march") and any("-march" in word for word in compiler))
    ]
    command = [*compiler, *flags, f"-DREAL={REALS[dtype]}"]
    name = f"native-{_fingerprint(command)}.so"
    try:
        folder = _folder()
        if not _is_private(folder):
            with tempfile.TemporaryDirectory(
                prefix="fedsim-native-"
            ) as own:  # gone once the library is loaded
                _build(command, Path(own) / name)
                return ctypes.CDLL(str(Path(own) / name))
        path = folder / name
        if not _is_as_compiled(path):
            _build(command, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotCompiledError(str(error)) from error


def library_description(dtype: torch.dtype) -> str:
    """Compiler, its version and the instruction set of `library(dtype)`: "gcc 12.2.0, AVX-512"."""
    text = ctypes.c_char_p.in_dll(library(dtype), "description").value
    assert text is not None
    return text.decode()


def _compiler() -> list[str]:
    """`CC` of the environment, or the first C compiler of the path."""
    if chosen := ENVIRONMENT.get("CC"):
        try:
            return shlex.split(chosen)
        except ValueError as error:
            raise NotCompiledError(f"CC={chosen}: {error}") from error
    path = ENVIRONMENT.get("PATH")
    found = next(
        filter(None, (shutil.which(name, path=path) for name in ("cc", "gcc", "clang"))), None
    )
    if found is None:
        raise NotCompiledError("there is no C compiler (cc, gcc, clang or CC)")
    return [found]


def _folder() -> Path:
    return platformdirs.user_cache_path("fedsim") / "compiled"


def _fingerprint(command: list[str]) -> str:
    """Of sources, command, compiler and the processor that it compiles for: its predefined macros
    name both."""
    macros = _run([*command, "-E", "-dM", "-x", "c", os.devnull])
    sources = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    return hashlib.sha256(b"\0".join([*sources, macros, " ".join(command).encode()])).hexdigest()[
        :32
    ]


def _is_private(folder: Path) -> bool:
    """Make `folder` if need be, and take others' right to write to it and to the folder that it is
    in.

    False where that cannot be: it belongs to another user, is a link or a file, or cannot be made.
    """
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for own in (folder.parent, folder):
            status = own.lstat()
            if (
                status.st_mode & OTHERS_WRITE
                and status.st_uid == os.getuid()
                and stat.S_ISDIR(status.st_mode)
            ):
                own.chmod(0o700)
        return all(_is_own(own, stat.S_ISDIR) for own in (folder.parent, folder))
    except OSError:
        return False


def _is_own(path: Path, is_kind: Callable[[int], bool]) -> bool:
    status = path.lstat()
    return (
        is_kind(status.st_mode)
        and status.st_uid == os.getuid()
        and not status.st_mode & OTHERS_WRITE
    )


def _is_as_compiled(path: Path) -> bool:
    """Whether a library is there, and has the SHA-256 that was written beside it."""
    checksum = path.with_suffix(".sha256")
    if not all(os.path.lexists(file) and _is_own(file, stat.S_ISREG) for file in (path, checksum)):
        return False
    return (
        checksum.read_text(encoding="ascii", errors="replace")
        == hashlib.sha256(path.read_bytes()).hexdigest()
    )


def _build(command: list[str], path: Path) -> None:
    """To files of its own first, so that processes that build at once do not disturb each other."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, checksum = Path(folder) / "native.so", Path(folder) / "native.sha256"
        _run([*command, "-o", str(made), str(SOURCES / "native.c"), "-lm"])
        checksum.write_text(hashlib.sha256(made.read_bytes()).hexdigest(), encoding="ascii")
        for file, place in ((checksum, path.with_suffix(".sha256")), (made, path)):
            file.chmod(0o600)
            file.replace(place)  # never in place: another process may have the old one loaded


def _run(command: list[str]) -> bytes:
    try:
        return subprocess.run(
            command, check=True, capture_output=True, timeout=TIMEOUT, env=ENVIRONMENT
        ).stdout
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or [
            f"exit status {error.returncode}"
        ]
        raise NotCompiledError(f"{command[0]}: {lines[0][:200]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiledError(f"{command[0]}: {error}") from error
