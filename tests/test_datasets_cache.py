"""The cache of decoded data: a file is sound, or it is made again."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from fedsim.core.errors import DataError
from fedsim.data.cache import SourceFiles, load_or_build, load_or_decode

resource = pytest.importorskip("resource")
NUMBERS = torch.arange(100)


def builder(size: int = 100) -> Mock:
    """Return a function that builds `size` numbers and an empty tensor, and counts its calls."""
    return Mock(side_effect=lambda: {"a": torch.arange(size), "empty": torch.zeros(0)})


def check_built_once(path: Path) -> None:
    """Load a file twice: it is built the first time only, and has the right tensors."""
    build = builder()
    for _ in range(2):
        assert torch.equal(load_or_build(path, build)["a"], NUMBERS)
    build.assert_called_once()


def test_tensors_are_built_once_and_rests_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors.tmp").write_bytes(b"half a file")
    check_built_once(tmp_path / "x.safetensors")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"x.safetensors", "x.safetensors.lock"}


def test_absent_folders_are_created(tmp_path: Path) -> None:
    check_built_once(tmp_path / "a" / "b" / "x.safetensors")


def flip(content: bytes, position: int) -> bytes:
    damaged = bytearray(content)
    damaged[position] ^= 0x55
    return bytes(damaged)


@pytest.mark.parametrize(
    "damage",
    [
        lambda sound: flip(sound, 3),
        lambda sound: flip(sound, 60),
        lambda sound: flip(sound, -1),
        lambda sound: b"",
        lambda sound: sound[:5],
        lambda sound: sound[:500],
    ],
)
def test_a_damaged_file_is_built_again(tmp_path: Path, damage: Mock) -> None:
    path = tmp_path / "x.safetensors"
    load_or_build(path, builder())
    path.write_bytes(damage(path.read_bytes()))
    check_built_once(path)


def test_a_folder_that_cannot_be_written_is_named_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cache_dir: cannot write .*FEDSIM_CACHE"):
        load_or_build(tmp_path / "file" / "x.safetensors", builder())


def test_an_error_of_building_is_not_reported_as_one_of_writing(tmp_path: Path) -> None:
    error = PermissionError(13, "Permission denied", "weights.pth")
    path = tmp_path / "x.safetensors"
    with pytest.raises(PermissionError, match=r"weights\.pth"):
        load_or_build(path, Mock(side_effect=error))
    check_built_once(path)


def test_a_full_disk_leaves_no_half_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        with pytest.raises(DataError, match=r"cache_dir: cannot write .*x\.safetensors"):
            load_or_build(tmp_path / "x.safetensors", builder(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors.lock"]


def test_files_are_decoded_again_if_path_size_time_or_facts_change(tmp_path: Path) -> None:
    first = tmp_path / "first"
    second = tmp_path / "second"

    def write(file: Path, text: str, time: int) -> None:
        file.write_text(text)
        os.utime(file, ns=(time, time))

    def decode(sources: SourceFiles) -> dict[str, torch.Tensor]:
        sources.read(first)
        return {"a": NUMBERS}

    def count_caches(*files: Path, facts: int = 32) -> int:
        load_or_decode(tmp_path / "x", tmp_path, files, facts, decode)
        return len(list(tmp_path.glob("x-*.safetensors")))

    write(first, "abc", 1)
    write(second, "abc", 1)
    assert count_caches(first) == 1
    assert count_caches(first) == 1
    assert count_caches(second) == 2
    assert count_caches(first, facts=33) == 3
    assert count_caches(first, second) == 4
    write(first, "abc", 2)
    assert count_caches(first) == 5
    write(first, "abcd", 1)
    assert count_caches(first) == 6
