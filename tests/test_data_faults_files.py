"""Damaged and hostile data files: nothing is trained on them, nothing hangs, nothing in them is run."""

import contextlib
import hashlib
import io
import json
import os
import subprocess
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import EpsImagePlugin, Image

from fedsim.config.plan import hash_config
from fedsim.core.errors import ConfigError, DataError
from fedsim.data.base import LoadedData
from fedsim.data.images import decode
from tests.dataset_toys import build, encoded, table

SMALL = {"test_fraction": 0.5}


def load(path: Path, **values: Any) -> LoadedData:
    return build("parquet", path.parent, path=str(path), **SMALL, **values).load()


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


# --- checksums -----------------------------------------------------------------------------------------------------


def test_a_parquet_file_of_another_checksum_is_refused_and_what_was_found_is_told(tmp_path: Path) -> None:
    path = tmp_path / "all.parquet"
    pq.write_table(table(40)[0], path)
    sound = hashlib.sha256(path.read_bytes()).hexdigest()
    assert load(path).sha256 == load(path, sha256=sound).sha256 == sound
    positions = np.random.default_rng(0).integers(path.stat().st_size, size=3)
    for position in positions.tolist():
        flip(path, position)
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        with pytest.raises(DataError, match=rf"dataset\.sha256={sound}: the files of .* have {found}"):
            load(path, sha256=sound)
        flip(path, position)


def test_the_checksum_of_several_files_is_that_of_sha256sums_list(tmp_path: Path) -> None:
    (tmp_path / "set" / "b").mkdir(parents=True)
    pq.write_table(table(6)[0], tmp_path / "set" / "b" / "train.parquet")
    pq.write_table(table(4, seed=1)[0], tmp_path / "set" / "a-test.parquet")
    data = build("parquet", tmp_path, path="set").load()
    command = "sha256sum a-test.parquet b/train.parquet | sha256sum"
    printed = subprocess.run(command, shell=True, cwd=tmp_path / "set", capture_output=True, text=True, check=True)
    assert data.sha256 == printed.stdout.split()[0]


@pytest.mark.parametrize("checked", [True, False])
def test_page_checksums_are_verified_where_a_file_has_them(tmp_path: Path, checked: bool) -> None:
    """Labels are not compressed here: without the checksum of their page a flipped bit is another label."""
    path = tmp_path / "all.parquet"
    rows = table(40)[0].set_column(1, "label", pa.array([7] * 39 + [1], pa.int64()))
    pq.write_table(rows, path, compression="none", use_dictionary=False, write_page_checksum=checked)
    flip(path, path.read_bytes().index(np.full(39, 7, "<i8").tobytes()))
    if checked:
        with pytest.raises(DataError, match=r"all\.parquet is no sound parquet file .*fetch it again"):
            load(path)
    else:
        data = load(path)
        assert 3 in torch.cat([data.train.y, data.test.y])


def test_other_data_sets_compare_their_checksum_too(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "set" / split / "ant").mkdir(parents=True)
        Image.new("L", (6, 6), 7).save(tmp_path / "set" / split / "ant" / "0.png")
    for split in ("train", "test"):
        (tmp_path / "femnist" / split).mkdir(parents=True)
        (tmp_path / "femnist" / split / "0.json").write_text(
            json.dumps({"user_data": {"ann": {"x": [[0.5] * 784], "y": [3]}}})
        )
    for choice, values in (("image_folder", {"path": "set"}), ("femnist", {"source": "leaf"})):
        found = build(choice, tmp_path, **values).load().sha256
        assert found is not None
        assert build(choice, tmp_path, **values, sha256=found).load().sha256 == found
        with pytest.raises(DataError, match=rf"dataset\.sha256=0{{64}}: the files of .* have {found}"):
            build(choice, tmp_path, **values, sha256="0" * 64).load()
        with pytest.raises(ConfigError, match=r"dataset\.sha256='abc': must be null or 64 hexadecimal digits"):
            build(choice, tmp_path, **values, sha256="abc")


def test_a_checksum_that_is_not_given_does_not_change_the_hash_of_a_config() -> None:
    assert hash_config({"dataset": {"path": "x", "sha256": None}}) == hash_config({"dataset": {"path": "x"}})
    assert hash_config({"dataset": {"path": "x", "sha256": "0"}}) != hash_config({"dataset": {"path": "x"}})


# --- what is no file -----------------------------------------------------------------------------------------------


def fifo(path: Path) -> None:
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


@pytest.mark.parametrize(("make", "kind"), [(fifo, "no regular file"), (dangling, "a link to nothing")])
def test_pipes_and_dangling_links_are_named_and_not_read(tmp_path: Path, make: Any, kind: str) -> None:
    pq.write_table(table(4)[0], tmp_path / "train.parquet")
    make(tmp_path / "test.parquet")
    for split in ("train", "test"):
        (tmp_path / "set" / split / "ant").mkdir(parents=True)
        make(tmp_path / "set" / split / "ant" / "0.png")
    (tmp_path / "femnist" / "train").mkdir(parents=True)
    make(tmp_path / "femnist" / "train" / "0.json")
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    make(tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("parquet", {"path": str(tmp_path)}, "test.parquet"),
        ("image_folder", {"path": "set"}, "0.png"),
        ("femnist", {"source": "leaf"}, "0.json"),
        ("mnist", {}, "train-labels-idx1-ubyte"),
    ]
    for choice, values, name in cases:
        with pytest.raises(DataError, match=rf"{name} is {kind}; remove it"):
            build(choice, tmp_path, **values).load()


# --- labels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (pa.array([0, 1, 2, 10**6]), r"label_column=label: labels .* must lie in 0\.\.999999, found 0\.\.1000000;"),
        (pa.array([0, 1, 2, 2**63], pa.uint64()), r"label_column=label: labels .* 0\.\.999999, found 0\.\.92233"),
        (pa.array([0, 1, 2, 10**30], pa.decimal128(38)), r"label_column=label: must hold integers or strings"),
    ],
)
def test_labels_far_beyond_any_number_of_classes_are_refused(tmp_path: Path, labels: Any, reason: str) -> None:
    pq.write_table(table(4)[0].set_column(1, "label", labels), tmp_path / "all.parquet")
    with pytest.raises(DataError, match=reason):
        load(tmp_path / "all.parquet")


# --- images --------------------------------------------------------------------------------------------------------

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 6\n%%EndComments\n%%EndProlog\nshowpage\n%%EOF\n"


def parquet_of(path: Path, *images: bytes) -> Path:
    pq.write_table(pa.table({"image": list(images), "label": [0] * len(images)}), path)
    return path


def image_folder_of(root: Path, content: bytes) -> None:
    for split in ("train", "test"):
        (root / "set" / split / "ant").mkdir(parents=True)
        (root / "set" / split / "ant" / "0.png").write_bytes(content)


def test_an_eps_file_named_png_starts_no_other_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def ghostscript(*_: Any, **__: Any) -> Any:
        started.append(1)
        raise OSError("Ghostscript was asked for")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", ghostscript)
    image_folder_of(tmp_path, EPS)
    with pytest.raises(DataError, match=r"image 0 cannot be decoded \(.*0\.png: in none of the formats PNG, JPEG"):
        build("image_folder", tmp_path, path="set").load()
    with pytest.raises(DataError, match=r"image 0 cannot be decoded \(in none of the formats PNG, JPEG"):
        load(parquet_of(tmp_path / "all.parquet", EPS, EPS))
    assert not started
    with pytest.raises(OSError, match="Ghostscript was asked for"):  # what Pillow does with its own choice of formats
        Image.open(tmp_path / "set" / "train" / "ant" / "0.png").load()
    assert started


def png(width: int, height: int) -> bytes:
    """A PNG file that claims to have so many pixels, and holds next to none."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4) + kind + content + zlib.crc32(kind + content).to_bytes(4)

    header = width.to_bytes(4) + height.to_bytes(4) + bytes((8, 0, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


def test_images_that_claim_to_be_enormous_are_refused(tmp_path: Path) -> None:
    bomb = png(60_000, 60_000)
    with pytest.raises(DataError, match=r"image 0 .*bomb"):
        load(parquet_of(tmp_path / "all.parquet", bomb, bomb), size=6)


def test_a_flipped_bit_in_a_png_is_found_by_its_checksum() -> None:
    """Pillow alone decodes some of them into other pixels."""
    pixels = (np.add.outer(np.arange(64), np.arange(64)) * 3 % 256).astype(np.uint8)
    sound, silent = encoded(pixels), 0
    for position in range(sound.index(b"IDAT") + 4, sound.index(b"IEND") - 8):
        damaged = bytearray(sound)
        damaged[position] ^= 4
        with pytest.raises(DataError, match="toy: image 0 cannot be decoded"):
            decode([bytes(damaged)], mode="L", size=None, name="toy")
        with contextlib.suppress(OSError, SyntaxError):
            silent += not np.array_equal(np.asarray(Image.open(io.BytesIO(damaged))), pixels)
    assert silent
