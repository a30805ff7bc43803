"""Folders of data with copies, other versions, hidden files, files that change, and bombs.

Every case was reported to other tools. fedsim reads such data once, or rejects it with the paths
and a remedy.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torchvision
from PIL import Image

from fedsim.config.compose import search_path
from fedsim.core.errors import DataError
from fedsim.data import cache, images, parquet, torchvision_sets
from fedsim.data.base import LoadedData
from fedsim.data.images import decode
from fedsim.running import assembly
from tests.dataset_toys import (
    Hostile,
    build,
    encoded,
    load_parquet,
    table,
    write_cifar,
    write_leaf,
    write_mnist,
    write_table,
)
from tests.run_toys import plan_of

SHARD = "train-00000-of-00001.parquet"


# --- rows that would be read twice ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f"snapshots/1a2b/data/{SHARD}", f"snapshots/3c4d/data/{SHARD}"),
        (f"snapshots/1a2b/{SHARD}", "snapshots/3c4d/train.parquet"),
        (f"plain/{SHARD}", f"fine/{SHARD}"),
        (SHARD, "train-00000-of-00002.parquet"),
        (SHARD, "train.parquet"),
        ("train.parquet", "train (1).parquet"),
        ("train.parquet", "train - Copy.parquet"),
        ("train.parquet", "train copy 2.parquet"),
        ("train.parquet", "train_copy.parquet"),
        (SHARD, "train-00000-of-00001 (1).parquet"),
    ],
)
def test_two_versions_of_one_split_are_rejected_with_both_paths(
    tmp_path: Path, first: str, second: str
) -> None:
    write_table(tmp_path / first, 4)
    write_table(tmp_path / second, 4, seed=1)
    if "00002" in second:  # a shard alone would be rejected as incomplete
        write_table(tmp_path / "train-00001-of-00002.parquet", 4, seed=2)
    with pytest.raises(DataError) as caught:
        load_parquet(tmp_path)
    message = str(caught.value)
    assert "would be read as one train split, its rows twice" in message
    for text in (str(tmp_path / first), str(tmp_path / second), "dataset.path"):
        assert text in message
    remedy = tmp_path / first
    if remedy.parent != tmp_path:
        remedy = remedy.parent
    assert len(load_parquet(remedy).train) == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("train/0000.parquet", "train/0001.parquet"),
        ("train-a.parquet", "train-b.parquet"),
        ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet"),
    ],
)
def test_shards_of_one_version_are_read_together(tmp_path: Path, first: str, second: str) -> None:
    write_table(tmp_path / first, 4)
    write_table(tmp_path / second, 4, seed=1)
    assert len(load_parquet(tmp_path).train) == 4


@pytest.mark.parametrize(
    "name",
    [".ipynb_checkpoints/train-checkpoint.parquet", ".~train.parquet", "__MACOSX/._train.parquet"],
)
def test_hidden_parquet_files_are_skipped(tmp_path: Path, name: str) -> None:
    folder = tmp_path / ".cache" / "set"  # the folder of the data itself may be hidden
    write_table(folder / "train.parquet", 4)
    write_table(folder / name, 4)
    assert len(load_parquet(folder).train) == 2


# --- folders of images ---------------------------------------------------------------------------


@pytest.fixture
def insects(tmp_path: Path) -> Path:
    """An ant and a bee in each split."""
    for split in ("train", "test"):
        for name in ("ant", "bee"):
            write_image(tmp_path / "insects" / split / name / "0.png")
    return tmp_path / "insects"


def write_image(path: Path, kind: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 6)).save(path, kind)


def load_insects(tmp_path: Path) -> LoadedData:
    return build("image_folder", tmp_path, path="insects").load()


def test_hidden_folders_and_files_are_no_classes_and_images(tmp_path: Path, insects: Path) -> None:
    before = load_insects(tmp_path)
    train = insects / "train"
    for folder in (".ipynb_checkpoints", "__MACOSX", "ant/.thumbnails"):
        write_image(train / folder / "0.png")
    for name in ("ant/._0.png", "bee/Thumbs.db", "bee/.DS_Store"):
        (train / name).write_bytes(b"?")
    data = load_insects(tmp_path)
    assert (data.num_classes, len(data.train)) == (2, 2)
    assert data.fingerprint == before.fingerprint


def test_images_are_listed_as_torchvision_lists_them(insects: Path) -> None:
    train = insects / "train"
    for name in ("ant/b/1.PNG", "ant/a/2.jpg", "bee/10.png", "bee/9.png"):
        write_image(train / name)
    (train / "cow").symlink_to(train / "ant")
    theirs = torchvision.datasets.ImageFolder(str(train))
    listing = images._list_images(train)
    assert listing.classes == theirs.classes == ["ant", "bee", "cow"]
    assert list(zip(map(str, listing.files), listing.labels, strict=True)) == theirs.samples


def test_files_whose_names_are_not_those_of_images_are_rejected(
    tmp_path: Path, insects: Path
) -> None:
    for name in ("1.jfif", "2.jfif", "3"):
        write_image(insects / "train" / "ant" / name, "JPEG")
    counts = r"2 with \.jfif, 1 with no suffix, the first is .*/ant/1\.jfif"
    with pytest.raises(DataError, match=rf"insects/train has files .*: {counts}; let names"):
        load_insects(tmp_path)


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_image_next_to_the_folders_of_classes_is_rejected(
    tmp_path: Path, insects: Path, split: str
) -> None:
    """Hidden files, and files whose names are not those of images, may be there."""
    for name in ("._0.png", ".DS_Store", "labels.csv"):
        (insects / split / name).write_bytes(b"?")
    load_insects(tmp_path)
    for name in ("stray.PNG", "other.jpg"):
        write_image(insects / split / name)
    first = rf"the first is {insects}/{split}/other\.jpg; move each"
    text = rf"{insects}/{split} has 2 images outside the folders of classes, {first}"
    with pytest.raises(DataError, match=rf"dataset\.path: {text}"):
        load_insects(tmp_path)


def test_images_whose_names_are_not_utf_8_have_the_checksum_of_sha256sum(
    tmp_path: Path, insects: Path
) -> None:
    write_image(insects / "train" / "ant" / os.fsdecode(b"caf\xe9.png"))
    data = load_insects(tmp_path)
    assert len(data.train) == 3
    list_files = "find . -name '*.png' -printf '%P\\0' | LC_ALL=C sort -z"
    command = f"{list_files} | xargs -0 sha256sum | sha256sum"
    printed = subprocess.check_output(command, shell=True, cwd=insects)
    assert printed[:64].decode() == data.sha256


def test_parquet_files_whose_names_are_not_utf_8_are_read(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"na\xefve")
    folder.mkdir()
    for rows, name in ((4, "train.parquet"), (2, os.fsdecode(b"test-\xe9.parquet"))):
        content = write_table(tmp_path / "table.parquet", rows).read_bytes()
        (folder / name).write_bytes(content)
    data = load_parquet(folder)
    assert (len(data.train), len(data.test)) == (4, 2)


# --- columns -------------------------------------------------------------------------------------


def labelled(kind: pa.DataType, labels: list[Any], **columns: Any) -> pa.Table:
    """Return a `table` with these labels, stored as this type."""
    rows = table(len(labels), **columns)
    return rows.set_column(1, "label", pa.array(labels, kind))


@pytest.mark.parametrize(
    ("train_type", "test_type", "labels"),
    [
        (pa.int64(), pa.int32(), [2, 0, 1, 1]),
        (pa.uint8(), pa.int64(), [2, 0, 1, 1]),
        (pa.string(), pa.large_string(), ["c", "a", "b", "b"]),
        (pa.dictionary(pa.int8(), pa.string()), pa.string(), ["c", "a", "b", "b"]),
    ],
)
def test_files_may_differ_in_the_type_of_labels_and_in_columns_that_are_not_read(
    tmp_path: Path, train_type: pa.DataType, test_type: pa.DataType, labels: list[Any]
) -> None:
    train = labelled(train_type, labels, note=["x"] * 4)
    test = labelled(test_type, labels, note=[1] * 4, extra=[None] * 4)
    pq.write_table(train, tmp_path / "train.parquet")
    pq.write_table(test, tmp_path / "test.parquet")
    data = load_parquet(tmp_path)
    assert data.train.y.tolist() == data.test.y.tolist() == [2, 0, 1, 1]
    assert data.num_classes == 3


def test_columns_that_are_not_read_may_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    rows = table(4, note=[b"\x07" * 5000] * 4)
    pq.write_table(rows, path, compression="none", use_dictionary=False, write_page_checksum=True)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"\x07" * 10, b"\x07" * 9 + b"\x03", 1))
    assert len(load_parquet(tmp_path, image_column="img").train) == 2


def test_a_column_is_required_if_several_may_be_meant(tmp_path: Path) -> None:
    mask = [encoded(np.zeros((6, 6), np.uint8))] * 4
    rows = table(4, mask=mask, target=[0] * 4).select(["mask", "img", "label", "target"])
    pq.write_table(rows, tmp_path / "train.parquet")
    columns = r"the columns are mask, img, .*train\.parquet, and mask and img may be meant"
    with pytest.raises(DataError, match=rf"dataset\.image_column=None: {columns}"):
        load_parquet(tmp_path)
    columns = "label and target may be meant; set it"
    with pytest.raises(DataError, match=rf"dataset\.label_column=None: .* {columns}"):
        load_parquet(tmp_path, image_column="img")
    data = load_parquet(tmp_path, image_column="img", label_column="label")
    assert int(data.train.tensor.max()) > 0  # all pixels of the mask are 0


@pytest.mark.parametrize("key", ["label_column", "client_column"])
def test_the_column_of_images_cannot_have_labels_or_clients(tmp_path: Path, key: str) -> None:
    write_table(tmp_path / "train.parquet", 4)
    rule = rf"dataset\.{key}=img: is the column of samples in .*train\.parquet; set it to another"
    with pytest.raises(DataError, match=rule):
        load_parquet(tmp_path, **{key: "img"})


@pytest.mark.parametrize(
    ("key", "name", "values"),
    [
        ("label_column", "label", {}),
        ("client_column", "user", {"client_column": "user"}),
    ],
)
def test_two_columns_of_one_name_are_rejected(
    tmp_path: Path, key: str, name: str, values: dict[str, str]
) -> None:
    rows = table(4, user=["a", "b"] * 2)
    pq.write_table(rows.append_column(name, rows[name]), tmp_path / "train.parquet")
    rule = rf"dataset\.{key}={name}: .*train\.parquet has 2 columns of this name; rename"
    with pytest.raises(DataError, match=rule):
        load_parquet(tmp_path, **values)


def test_clients_may_be_divided_by_their_labels(tmp_path: Path) -> None:
    write_table(tmp_path / "train.parquet", 12)
    data = load_parquet(tmp_path, client_column="label")
    assert data.owners is not None
    assert data.owners.tolist() == data.train.y.tolist()


# --- sizes ---------------------------------------------------------------------------------------


def test_an_image_in_many_rows_is_in_memory_once(tmp_path: Path) -> None:
    """The file has 1.4 kB. It needs 20 GB if each row holds its own copy; 1 GB is allowed."""
    rows = pa.array([0] * 1000, pa.int32())
    image = pa.DictionaryArray.from_arrays(rows, pa.array([bytes(20_000_000)]))
    path = tmp_path / "train.parquet"
    content = pa.table({"image": image, "label": [0] * 1000})
    pq.write_table(content, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 2000
    code = (
        "import resource, sys; from pathlib import Path; from tests.dataset_toys import build\n"
        "from fedsim.core.errors import DataError; import torchvision, pyarrow.parquet\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, -1))\n"
        "try: build('parquet', Path(sys.argv[1]), path=sys.argv[1], test_fraction=0.5).load()\n"
        "except DataError as error: print(error)"
    )
    printed = subprocess.check_output([sys.executable, "-c", code, str(tmp_path)], text=True)
    assert "image 0 cannot be decoded" in printed


def test_rows_that_expand_too_much_are_rejected_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit, 1 GB by default, is 16 MB here. The rows need 20 MB, and the file has a few kB."""
    monkeypatch.setattr(parquet, "LARGE_BYTES", 16_000_000)
    rows = pa.table({"image": [bytes(50_000)] * 400, "label": [0] * 400})
    path = tmp_path / "train.parquet"
    pq.write_table(rows, path, compression="zstd", use_dictionary=False)
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda *_, **__: pytest.fail("rows are read")
    )
    rule = r"train\.parquet: needs 0\.0 GB of memory, and may use 0\.0 GB; use smaller"
    with pytest.raises(DataError, match=rule):
        load_parquet(tmp_path)


def test_files_larger_than_the_memory_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "train.parquet", 4)
    monkeypatch.setattr(cache, "memory_of_machine", lambda: 1000)
    rule = r"train\.parquet: needs 0\.0 GB of memory, and may use 0\.0 GB"
    with pytest.raises(DataError, match=rule):
        load_parquet(tmp_path)


def test_a_sparse_file_of_terabytes_is_rejected(tmp_path: Path) -> None:
    with (tmp_path / "train.parquet").open("wb") as file:
        file.truncate(2**43)
    rule = r"train\.parquet is no sound parquet file \(Parquet magic bytes not found in footer"
    with pytest.raises(DataError, match=rule):
        load_parquet(tmp_path)


def test_images_that_decode_to_more_than_the_memory_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "memory_of_machine", lambda: 1_000_000)
    content = [encoded(np.zeros((6, 6), np.uint8))] * 1000
    rule = r"toy: 1,000 images of 40x40 pixels: needs 0\.0 GB of memory"
    with pytest.raises(DataError, match=rule):
        decode(bytes, content, mode="L", size=40, name="toy")


def test_a_lack_of_memory_is_reported_with_the_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "train.parquet", 4)
    error = pa.ArrowMemoryError("malloc of size 20000000000 failed")
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", Mock(side_effect=error))
    words = ["dataset=parquet", f"dataset.path={tmp_path}", "dataset.test_fraction=0.5"]
    with search_path():
        plan = plan_of(*words, f"cache_dir={tmp_path}/cache")
        rule = r"dataset: the data do not fit into memory \(malloc of size 20000000000 failed\)"
        with pytest.raises(DataError, match=rule):
            assembly.build(plan)


# --- files that change ---------------------------------------------------------------------------


def replace_after_read(monkeypatch: pytest.MonkeyPatch, name: str, content: bytes) -> list[Path]:
    """Replace the content of files with this name as soon as they were read.

    Return a list that gets the path of every read.
    """
    reads: list[Path] = []
    read_bytes = Path.read_bytes

    def read_and_replace(path: Path) -> bytes:
        original = read_bytes(path)
        if path.name == name:
            reads.append(path)
            path.write_bytes(content)
        return original

    monkeypatch.setattr(Path, "read_bytes", read_and_replace)
    return reads


def test_cifars_pickles_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "marker"
    write_cifar(tmp_path, "CIFAR10", "labels", monkeypatch)
    reads = replace_after_read(monkeypatch, "data_batch_1", pickle.dumps(Hostile(marker)))
    assert len(build("cifar10", tmp_path).load().train) == 20
    assert len(reads) == 1
    with pytest.raises(DataError, match="data_batch_1 is damaged"):
        build("cifar10", tmp_path).load()
    assert not marker.exists()


@pytest.mark.usefixtures("insects")
@pytest.mark.parametrize(
    ("name", "choice", "values"),
    [
        ("train-labels-idx1-ubyte", "mnist", {}),
        ("all_data_0.json", "femnist", {"source": "leaf"}),
        ("0.png", "image_folder", {"path": "insects"}),
    ],
)
def test_files_are_read_once_and_have_the_checksum_of_the_bytes_that_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, choice: str, values: dict[str, Any]
) -> None:
    monkeypatch.delitem(torchvision_sets.MD5, "MNIST")
    write_mnist(tmp_path / "MNIST" / "raw")
    for split in ("train", "test"):
        write_leaf(tmp_path / "femnist", split, {"ann": {"x": [[0.5] * 784], "y": [3]}})
    sound = build(choice, tmp_path, tmp_path / "first cache", **values).load()
    reads = replace_after_read(monkeypatch, name, b"other content")
    data = build(choice, tmp_path, tmp_path / "second cache", **values).load()
    assert (data.sha256, data.fingerprint) == (sound.sha256, sound.fingerprint)
    assert torch.equal(data.train.tensor, sound.train.tensor)
    assert len(reads) == len(list(tmp_path.rglob(name)))


def test_a_parquet_file_that_changes_after_its_checksum_was_computed_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "set" / "train.parquet", 4)
    changed = write_table(tmp_path / "changed.parquet", 4, seed=1).read_bytes()
    replace_after_read(monkeypatch, "train.parquet", changed)
    rule = rf"{path} changed while it was read; run again when nothing writes to it"
    with pytest.raises(DataError, match=rule):
        load_parquet(path.parent)
