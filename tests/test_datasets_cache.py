"""The cache of decoded data: sound or not used at all."""

import os
from pathlib import Path

import pytest
import torch

from fedsim.core.errors import DataError
from fedsim.data.cache import SourceFiles, load_or_build, load_or_decode

resource = pytest.importorskip("resource")


def built(size: int = 100) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(size), "empty": torch.zeros(0)}


def test_a_damaged_cache_is_never_used_and_what_a_killed_process_left_is_gone(
    tmp_path: Path,
) -> None:
    path, calls = tmp_path / "deep" / "x.safetensors", []
    path.parent.mkdir()
    (tmp_path / "deep" / "x.safetensors.tmp").write_bytes(b"half a file")

    def loaded_twice() -> int:
        for _ in range(2):
            assert torch.equal(
                load_or_build(path, lambda: calls.append(1) or built())["a"], torch.arange(100)
            )
        return len(calls)

    assert loaded_twice() == 1
    assert sorted(p.name for p in path.parent.iterdir()) == ["x.safetensors", "x.safetensors.lock"]
    sound = path.read_bytes()
    flipped = [
        sound[:at] + bytes([sound[at] ^ 0x55]) + sound[at + 1 :] for at in (3, 60, len(sound) - 1)
    ]
    for number, damaged in enumerate([*flipped, sound[:0], sound[:5], sound[:500]], start=2):
        path.write_bytes(damaged)
        assert loaded_twice() == number


def test_a_folder_that_cannot_be_written_or_is_full_names_its_key_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cache_dir: cannot write .*FEDSIM_CACHE"):
        load_or_build(tmp_path / "file" / "x.safetensors", built)
    (tmp_path / "file").unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        with pytest.raises(DataError, match=r"cache_dir: cannot write .*x\.safetensors"):
            load_or_build(tmp_path / "x.safetensors", lambda: built(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors.lock"]


def test_files_are_decoded_again_when_place_size_time_or_facts_change(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    first, second = tmp_path / "first", tmp_path / "second"

    def write(file: Path, text: str, time: int) -> None:
        file.write_text(text)
        os.utime(file, ns=(time, time))

    def decode(sources: SourceFiles) -> dict[str, torch.Tensor]:
        sources.read(first)
        return built()

    def caches(files: list[Path], facts: int = 32) -> int:
        load_or_decode(tmp_path / "cache" / "x", tmp_path, files, facts, decode)
        return len(list((tmp_path / "cache").glob("x-*.safetensors")))

    write(first, "abc", 1)
    write(second, "abc", 1)
    assert [caches([first]), caches([first])] == [1, 1]
    assert [caches([second]), caches([first], 33), caches([first, second])] == [2, 3, 4]
    write(first, "abc", 2)
    assert caches([first]) == 5
    write(first, "abcd", 1)
    assert caches([first]) == 6
