"""The cache of decoded data: sound or not used at all."""

import os
from pathlib import Path

import pytest
import torch

from fedsim.core.errors import DataError
from fedsim.data.cache import load_or_build, modification_key

resource = pytest.importorskip("resource")


class Builder:
    def __init__(self, size: int = 100) -> None:
        self.size = size
        self.built = 0

    def __call__(self) -> dict[str, torch.Tensor]:
        self.built += 1
        return {"a": torch.arange(self.size), "empty": torch.zeros(0)}


@pytest.mark.parametrize("position", [3, 60, -1])
def test_a_damaged_cache_is_never_used(tmp_path: Path, position: int) -> None:
    path, builder = tmp_path / "deep" / "x.safetensors", Builder()
    for _ in range(2):
        assert torch.equal(load_or_build(path, builder)["a"], torch.arange(100))
    assert builder.built == 1
    content = bytearray(path.read_bytes())
    content[position] ^= 0x55
    path.write_bytes(content)
    assert torch.equal(load_or_build(path, builder)["a"], torch.arange(100))
    assert builder.built == 2
    load_or_build(path, builder)
    assert builder.built == 2


@pytest.mark.parametrize("length", [0, 5, 500])
def test_a_truncated_cache_is_never_used(tmp_path: Path, length: int) -> None:
    path, builder = tmp_path / "x.safetensors", Builder()
    load_or_build(path, builder)
    path.write_bytes(path.read_bytes()[:length])
    assert torch.equal(load_or_build(path, builder)["a"], torch.arange(100))
    assert builder.built == 2


def test_the_litter_of_a_killed_process_does_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    (tmp_path / "x.safetensors.tmp").write_bytes(b"half a file")
    load_or_build(path, Builder())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.safetensors", "x.safetensors.lock"]


def test_a_cache_folder_that_cannot_be_written_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cache_dir: cannot write .*FEDSIM_CACHE"):
        load_or_build(tmp_path / "file" / "x.safetensors", Builder())


def test_a_full_disk_names_the_key_and_leaves_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        with pytest.raises(DataError, match=r"cache_dir: cannot write .*x\.safetensors"):
            load_or_build(tmp_path / "x.safetensors", Builder(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "x.safetensors").exists()
    assert not list(tmp_path.glob("*.tmp"))


def test_a_stamp_notices_place_size_time_and_facts(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for file in (first, second):
        file.write_text("abc")
        os.utime(file, ns=(1, 1))
    original = modification_key([first], 32)
    assert modification_key([first], 32) == original
    changed = {modification_key([second], 32), modification_key([first], 33), modification_key([first, second], 32)}
    os.utime(first, ns=(1, 2))
    changed.add(modification_key([first], 32))
    os.utime(first, ns=(1, 1))
    first.write_text("abcd")
    os.utime(first, ns=(1, 1))
    changed.add(modification_key([first], 32))
    assert len(changed | {original}) == 6
