"""The compiled library is kept in the user's cache."""

import ctypes
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


def test_it_is_built_once(folder: Path, builds: list[Path]) -> None:
    assert answer() == answer() == 42
    assert [path.parent for path in builds] == [folder]


@pytest.mark.parametrize("cache", ["a file in place of the folder", "an empty library"])
def test_without_a_cache_it_is_built_for_this_process(
    cache: str, folder: Path, builds: list[Path]
) -> None:
    folder.parent.mkdir()
    if cache == "an empty library":
        folder.mkdir()
        name = module._fingerprint(module._compile_command(torch.float32))
        (folder / f"native-{name}.so").touch()
    else:
        folder.touch()
    assert answer() == 42
    (path,) = builds
    assert path.parent.name.startswith("fedsim-native-")
    assert not path.exists()


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
