"""The cache of decoded data: sound or not used at all."""

import os
from pathlib import Path

import pytest
import torch

from fedsim.core.errors import DataError
from fedsim.data.cache import load_or_build, load_or_decode

resource = pytest.importorskip("resource")


class Builder:
    def __init__(self, size: int = 100) -> None:
        self.size = size
        self.built = 0

    def __call__(self) -> dict[str, torch.Tensor]:
        self.built += 1
        return {"a": torch.arange(self.size), "empty": torch.zeros(0)}


@pytest.mark.parametrize("damage", [3, 60, -1, "cut to 0", "cut to 5", "cut to 500"])
def test_a_damaged_cache_is_never_used(tmp_path: Path, damage: int | str) -> None:
    path, builder = tmp_path / "deep" / "x.safetensors", Builder()
    for _ in range(2):
        assert torch.equal(load_or_build(path, builder)["a"], torch.arange(100))
    assert builder.built == 1
    content = bytearray(path.read_bytes())
    if isinstance(damage, int):
        content[damage] ^= 0x55
    else:
        del content[int(damage.split()[-1]) :]
    path.write_bytes(content)
    for _ in range(2):
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
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors.lock"]


def test_files_are_decoded_again_when_place_size_time_or_facts_change(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    first, second = tmp_path / "first", tmp_path / "second"

    def write(file: Path, text: str, time: int) -> None:
        file.write_text(text)
        os.utime(file, ns=(time, time))

    def caches(files: list[Path], facts: int = 32) -> int:
        load_or_decode(tmp_path / "cache" / "x", tmp_path, files, facts, Builder())
        return len(list((tmp_path / "cache").glob("x-*.safetensors")))

    write(first, "abc", 1)
    write(second, "abc", 1)
    assert [caches([first]), caches([first])] == [1, 1]
    assert [caches([second]), caches([first], 33), caches([first, second])] == [2, 3, 4]
    write(first, "abc", 2)
    assert caches([first]) == 5
    write(first, "abcd", 1)
    assert caches([first]) == 6
