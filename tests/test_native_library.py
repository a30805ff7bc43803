"""The compiled library is loaded only from where nobody else can write."""

import ctypes
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedsim.engine.native import library as module
from fedsim.engine.native.library import NotCompiledError, library

GOOD = b"int answer(void) { return 42; }"
load = library.__wrapped__


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries are kept, of a source that compiles in no time."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "native.c").write_bytes(GOOD)
    monkeypatch.setattr(module, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        module._compiler()
    except NotCompiledError as error:
        pytest.skip(str(error))
    return tmp_path / "fedsim" / "compiled"


def answer() -> int:
    made: ctypes.CDLL = load(torch.float32)
    return int(made.answer())


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where libraries were built."""
    found: list[Path] = []
    build = module._build
    monkeypatch.setattr(
        module, "_build", lambda command, path: (found.append(path), build(command, path))
    )
    return found


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def empty(path: Path) -> None:
    """In a file of its own: the old one is loaded here, and a change of it would be one of this
    process."""
    path.unlink()
    path.touch(0o600)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.touch(0o600)
    path.write_bytes(content)


DAMAGES: list[Callable[[Path], object]] = [
    link,
    empty,
    flip,
    lambda path: path.chmod(0o666),
    lambda path: path.unlink(),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_that_is_not_ours_alone_is_built_anew(
    damage: Callable[[Path], object], folder: Path, builds: list[Path]
) -> None:
    answer()
    assert builds[0].parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    damage(builds[0])
    assert answer() == answer() == 42
    assert len(builds) == 2
    assert not builds[0].is_symlink()


def test_a_folder_that_others_can_write_to_is_closed_and_one_of_somebody_else_not_used(
    folder: Path, builds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert answer() == 42
    assert folder.stat().st_mode & 0o777 == 0o700
    builds.clear()
    shutil.rmtree(folder)
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert answer() == 42
    assert not list((tmp_path / "elsewhere").iterdir())
    folder.unlink()
    folder.write_text("")
    assert answer() == 42
    folder.unlink()
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert answer() == 42
    assert all(
        path.parent.name.startswith("fedsim-native-") and not path.exists() for path in builds
    )


def test_the_compiler_is_that_of_the_environment_at_the_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    monkeypatch.setenv("CC", f"touch {marker}")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert answer() == 42
    assert not marker.exists()
    monkeypatch.setitem(module.ENVIRONMENT, "CC", f"touch {marker}")  # the negative control
    with pytest.raises(NotCompiledError):
        answer()
