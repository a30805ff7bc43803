"""What folders of data hold besides the data: copies, other versions, hidden files, files that
changed, bombs.

Each case was reported to other tools. It is read once, or rejected with the paths and a remedy.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torchvision
from PIL import Image

from fedsim.config.compose import search_path
from fedsim.core.errors import DataError
from fedsim.data import cache, images, torchvision_sets
from fedsim.data.base import LoadedData, Samples
from fedsim.data.images import decode
from fedsim.running import assembly
from tests.dataset_toys import build, encoded, table, write_leaf
from tests.run_toys import plan_of
from tests.test_datasets import write_cifar, write_mnist

SHARD = "train-00000-of-00001.parquet"


def write_rows(path: Path, rows: int = 4, seed: int = 0, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table(rows, seed=seed, **columns), path)
    return path


def load_set(folder: Path, **values: Any) -> LoadedData:
    cache_dir = (folder.parent if folder.is_file() else folder) / "cache"
    return build(
        "parquet", folder, cache_dir, path=str(folder), **{"test_fraction": 0.5, **values}
    ).load()


# --- rows that would be read twice ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (f"snapshots/1a2b/data/{SHARD}", f"snapshots/3c4d/data/{SHARD}"),
        (f"snapshots/1a2b/{SHARD}", "snapshots/3c4d/train.parquet"),
        (f"plain/{SHARD}", f"fine/{SHARD}"),
        (SHARD, "train-00000-of-00002.parquet"),
        (SHARD, "train.parquet"),
        ("train.parquet", "train (1).parquet"),
        ("train.parquet", "train - Copy.parquet"),
        ("train.parquet", "train copy 2.parquet"),
        (SHARD, "train-00000-of-00001 (1).parquet"),
    ],
)
def test_two_readings_of_one_split_are_rejected_with_both_paths(
    tmp_path: Path, first: str, other: str
) -> None:
    for number, name in enumerate((first, other)):
        write_rows(tmp_path / name, seed=number)
    if "00002" in other:
        write_rows(tmp_path / "train-00001-of-00002.parquet", seed=2)
    paths = {str(tmp_path / first), str(tmp_path / other)}
    with pytest.raises(
        DataError, match="would be read as one train split, its rows twice"
    ) as caught:
        load_set(tmp_path)
    assert all(path in str(caught.value) for path in paths)
    assert "dataset.path" in str(caught.value)
    assert len(load_set((tmp_path / first).parent if "/" in first else tmp_path / first).train) == 2


@pytest.mark.parametrize(
    "name", ["train/0000.parquet", "train-a.parquet", "train-00000-of-00002.parquet"]
)
def test_shards_of_one_reading_are_read_together(tmp_path: Path, name: str) -> None:
    for number, part in enumerate(
        (name, name.replace("-a", "-b").replace("0000.", "0001.").replace("00000-", "00001-"))
    ):
        write_rows(tmp_path / part, seed=number)
    assert len(load_set(tmp_path).train) == 4


@pytest.mark.parametrize(
    "name",
    [".ipynb_checkpoints/train-checkpoint.parquet", ".~train.parquet", "__MACOSX/._train.parquet"],
)
def test_hidden_parquet_files_are_skipped(tmp_path: Path, name: str) -> None:
    write_rows(tmp_path / ".cache" / "set" / "train.parquet")
    write_rows(tmp_path / ".cache" / "set" / name)
    assert len(load_set(tmp_path / ".cache" / "set").train) == 2


def test_a_leaf_writer_in_two_files_is_rejected_and_hidden_files_are_skipped(
    tmp_path: Path,
) -> None:
    ann = {"ann": {"x": [[0.5] * 784], "y": [3]}}
    for split in ("train", "test"):
        write_leaf(tmp_path / "femnist", split, ann)
    (tmp_path / "femnist" / "train" / "._all_data_0.json").write_bytes(b"\0\5\x16\7")
    assert len(build("femnist", tmp_path, source="leaf").load().train) == 1
    write_leaf(tmp_path / "femnist", "train", ann, number=7)
    with pytest.raises(
        DataError,
        match=r"all_data_0\.json and .*all_data_7\.json both have the writer ann; move one",
    ):
        build("femnist", tmp_path, source="leaf").load()


@pytest.mark.parametrize("labels", [[4.7], [True, 0.5], [None]])
def test_leaf_labels_that_are_no_integers_are_rejected(tmp_path: Path, labels: list[Any]) -> None:
    for split in ("train", "test"):
        write_leaf(
            tmp_path / "femnist", split, {"ann": {"x": [[0.5] * 784 for _ in labels], "y": labels}}
        )
    with pytest.raises(
        DataError, match=r"all_data_0\.json is not a sound LEAF file \((Value|Type)Error: "
    ):
        build("femnist", tmp_path, source="leaf").load()


# --- folders of images ---------------------------------------------------------------------------


@pytest.fixture
def insects(tmp_path: Path) -> Path:
    for split in ("train", "test"):
        for name in ("ant", "bee"):
            (tmp_path / "insects" / split / name).mkdir(parents=True)
            Image.new("RGB", (6, 6)).save(tmp_path / "insects" / split / name / "0.png")
    return tmp_path / "insects"


def test_hidden_folders_are_no_classes_and_hidden_files_no_images(
    tmp_path: Path, insects: Path
) -> None:
    before = build("image_folder", tmp_path, path="insects").load()
    for name in (".ipynb_checkpoints", "__MACOSX", "ant/.thumbnails"):
        (insects / "train" / name).mkdir()
        Image.new("RGB", (6, 6)).save(insects / "train" / name / "0.png")
    for name in ("ant/._0.png", "bee/Thumbs.db", "bee/.DS_Store"):
        (insects / "train" / name).write_bytes(b"?")
    data = build("image_folder", tmp_path, path="insects").load()
    assert (data.num_classes, len(data.train), data.fingerprint) == (2, 2, before.fingerprint)


def test_images_are_listed_as_torchvision_lists_them(tmp_path: Path, insects: Path) -> None:
    for name in ("ant/b/1.PNG", "ant/a/2.jpg", "bee/10.png", "bee/9.png"):
        (insects / "train" / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (6, 6)).save(insects / "train" / name)
    (insects / "train" / "cow").symlink_to(insects / "train" / "ant")
    theirs = torchvision.datasets.ImageFolder(str(insects / "train"))
    listing = images._list_images(insects / "train")
    assert listing.classes == theirs.classes == ["ant", "bee", "cow"]
    assert list(zip(map(str, listing.files), listing.labels, strict=True)) == theirs.samples


def test_files_that_are_no_images_by_their_names_are_counted_and_named(
    tmp_path: Path, insects: Path
) -> None:
    for name in ("1.jfif", "2.jfif", "3"):
        Image.new("RGB", (6, 6)).save(insects / "train" / "ant" / name, "JPEG")
    told = r"insects/train has files .*: 2 with \.jfif, 1 with no suffix, the first is .*/ant/1\.jfif; let names"
    with pytest.raises(DataError, match=told):
        build("image_folder", tmp_path, path="insects").load()


def test_names_that_are_not_utf_8_are_read_and_have_sha256sums_checksum(
    tmp_path: Path, insects: Path
) -> None:
    odd = os.fsdecode(b"caf\xe9.png")
    Image.new("RGB", (6, 6)).save(insects / "train" / "ant" / odd)
    data = build("image_folder", tmp_path, path="insects").load()
    command = (
        "find . -name '*.png' -printf '%P\\0' | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
    )
    printed = subprocess.run(command, shell=True, cwd=insects, capture_output=True, check=True)
    assert (len(data.train), data.sha256) == (3, printed.stdout[:64].decode())
    folder = tmp_path / os.fsdecode(b"na\xefve")
    folder.mkdir()
    for name in (b"train.parquet", b"test-\xe9.parquet"):
        with (folder / os.fsdecode(name)).open("wb") as file:  # pyarrow takes no such name
            pq.write_table(table(4, seed=len(name)), file)
    assert len(load_set(folder).train) == 4


# --- columns -------------------------------------------------------------------------------------


def labelled(kind: pa.DataType, labels: list[Any], **columns: Any) -> pa.Table:
    rows = table(len(labels), **columns)
    return rows.set_column(1, "label", pa.array(labels, kind))


@pytest.mark.parametrize(
    ("kinds", "labels"),
    [
        ((pa.int64(), pa.int32()), [2, 0, 1, 1]),
        ((pa.uint8(), pa.int64()), [2, 0, 1, 1]),
        ((pa.string(), pa.large_string()), ["c", "a", "b", "b"]),
        ((pa.dictionary(pa.int8(), pa.string()), pa.string()), ["c", "a", "b", "b"]),
    ],
)
def test_files_may_store_labels_in_different_types_and_differ_in_columns_that_are_not_read(
    tmp_path: Path, kinds: tuple[pa.DataType, pa.DataType], labels: list[Any]
) -> None:
    pq.write_table(labelled(kinds[0], labels, note=["x"] * 4), tmp_path / "train.parquet")
    pq.write_table(
        labelled(kinds[1], labels, note=[1] * 4, extra=[None] * 4), tmp_path / "test.parquet"
    )
    data = load_set(tmp_path)
    assert data.train.y.tolist() == data.test.y.tolist() == [2, 0, 1, 1]
    assert data.num_classes == 3


def test_columns_that_are_not_read_may_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    rows = table(4, note=[b"\x07" * 5000] * 4)
    pq.write_table(rows, path, compression="none", use_dictionary=False, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    place = content.index(b"\x07" * 10)
    content[place] ^= 4
    path.write_bytes(content)
    assert len(load_set(tmp_path, image_column="img").train) == 2


def test_of_several_columns_that_may_be_meant_none_is_taken(tmp_path: Path) -> None:
    mask = [encoded(np.zeros((6, 6), np.uint8))] * 4
    rows = table(4, mask=mask, target=[0] * 4).select(["mask", "img", "label", "target"])
    pq.write_table(rows, tmp_path / "train.parquet")
    told = r"dataset\.image_column=None: the columns are mask, img, .*train\.parquet, and mask and img may be meant"
    with pytest.raises(DataError, match=told):
        load_set(tmp_path)
    with pytest.raises(
        DataError, match=r"dataset\.label_column=None: .* label and target may be meant; set it"
    ):
        load_set(tmp_path, image_column="img")
    data = load_set(tmp_path, image_column="img", label_column="label")
    assert int(data.train.x.max()) > 0


def test_hidden_test_labels_are_not_made_a_class(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.parquet")
    pq.write_table(labelled(pa.int64(), [-1] * 4), tmp_path / "test.parquet")
    told = r"4 of 8 labels are -1, .* hides them; move its files away: the validation split, or a dataset\.test_fraction"
    with pytest.raises(DataError, match=told):
        load_set(tmp_path)
    (tmp_path / "test.parquet").unlink()
    assert len(load_set(tmp_path).test) == 2


# --- sizes ---------------------------------------------------------------------------------------


def test_an_image_in_many_rows_is_in_memory_once(tmp_path: Path) -> None:
    """1.4 kB, which are 20 GB if each row holds its own copy."""
    large = pa.DictionaryArray.from_arrays(
        pa.array([0] * 1000, pa.int32()), pa.array([bytes(20_000_000)])
    )
    pq.write_table(
        pa.table({"image": large, "label": [0] * 1000}),
        tmp_path / "train.parquet",
        compression="zstd",
        store_schema=False,
    )
    assert (tmp_path / "train.parquet").stat().st_size < 2000
    code = (
        "import resource, sys; from pathlib import Path; from tests.dataset_toys import build\n"
        "from fedsim.core.errors import DataError; import torchvision, pyarrow.parquet\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, -1))\n"
        "try: build('parquet', Path(sys.argv[1]), path=sys.argv[1], test_fraction=0.5).load()\n"
        "except DataError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "image 0 cannot be decoded" in done.stdout


def test_what_does_not_fit_into_memory_is_found_in_the_footer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pa.table({"image": [bytes(3_000_000)] * 400, "label": [0] * 400})
    pq.write_table(rows, tmp_path / "train.parquet", compression="zstd", use_dictionary=False)
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *_, **__: pytest.fail("rows are read"))
    with pytest.raises(
        DataError,
        match=r"train\.parquet: needs 1\.2 GB of memory, and may need 1\.1 GB; use smaller",
    ):
        load_set(tmp_path)
    write_rows(tmp_path / "train.parquet")
    monkeypatch.setattr(cache, "memory_of_machine", lambda: 1000)
    with pytest.raises(
        DataError, match=r"train\.parquet: needs 0\.0 GB of memory, and may need 0\.0 GB"
    ):
        load_set(tmp_path)


def test_a_sparse_file_of_a_terabyte_and_images_that_decode_to_more_than_the_memory_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "train.parquet").open("wb") as file:
        file.truncate(2**43)
    with pytest.raises(DataError, match=r"train\.parquet"):
        load_set(tmp_path)
    monkeypatch.setattr(cache, "memory_of_machine", lambda: 1_000_000)
    with pytest.raises(
        DataError, match=r"toy: 1,000 images of 40x40 pixels: needs 0\.0 GB of memory"
    ):
        decode(bytes, [encoded(np.zeros((6, 6), np.uint8))] * 1000, mode="L", size=40, name="toy")


def test_running_out_of_memory_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any, **__: Any) -> None:
        raise pa.ArrowMemoryError("malloc of size 20000000000 failed")

    write_rows(tmp_path / "train.parquet")
    words = (
        "dataset=parquet",
        f"dataset.path={tmp_path}",
        "dataset.test_fraction=0.5",
        f"cache_dir={tmp_path}/cache",
    )
    monkeypatch.setattr(pq.ParquetFile, "read", out_of_memory)
    with (
        pytest.raises(
            DataError,
            match=r"dataset: the data do not fit into memory \(malloc of size 20000000000 failed\)",
        ),
        search_path(),
    ):
        assembly.build(plan_of(*words))


# --- files that change, and what is no file -----------------------------------------------------


def swapped_after_read(
    monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> Callable[[], int]:
    """Put other content into the file `name` as soon as it was read; returns how often it was."""
    reads, original = [], Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        found = original(path)
        if path.name == name:
            reads.append(path)
            path.write_bytes(content)
        return found

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    return lambda: len(reads)


class Planted:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_cifars_pickles_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, marker = torchvision.datasets.CIFAR10, tmp_path / "marker"
    write_cifar(tmp_path / kind.base_folder, kind, "labels", monkeypatch)
    count = swapped_after_read(monkeypatch, "data_batch_1", pickle.dumps(Planted(marker)))
    assert len(build("cifar10", tmp_path).load().train) == 20
    assert count() == 1
    assert not marker.exists()
    with pytest.raises(DataError, match="data_batch_1 is damaged"):
        build("cifar10", tmp_path).load()
    assert not marker.exists()


def test_mnist_leaf_and_images_are_read_once_and_have_the_checksum_of_what_was_read(
    tmp_path: Path, insects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(torchvision_sets.MD5, "MNIST")
    write_mnist(tmp_path / "MNIST" / "raw")
    for split in ("train", "test"):
        write_leaf(tmp_path / "femnist", split, {"ann": {"x": [[0.5] * 784], "y": [3]}})
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "train-labels-idx1-ubyte": ("mnist", {}),
        "all_data_0.json": ("femnist", {"source": "leaf"}),
        "0.png": ("image_folder", {"path": "insects"}),
    }
    for name, (choice, values) in cases.items():
        sound = build(choice, tmp_path, tmp_path / "first cache", **values).load()
        with monkeypatch.context() as patched:
            count = swapped_after_read(patched, name, b"other content")
            data = build(choice, tmp_path, tmp_path / "second cache", **values).load()
        assert (data.sha256, data.fingerprint) == (sound.sha256, sound.fingerprint)
        assert torch.equal(data.train.tensor, sound.train.tensor)
        assert count() == {"train-labels-idx1-ubyte": 1, "all_data_0.json": 2, "0.png": 4}[name]


def test_a_parquet_file_that_changes_after_its_checksum_was_taken_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "train.parquet")
    other = write_rows(tmp_path / "other" / "train.parquet", seed=1).read_bytes()
    (tmp_path / "other" / "train.parquet").unlink()
    swapped_after_read(monkeypatch, "train.parquet", other)
    with pytest.raises(
        DataError, match=rf"{path} changed while it was read; run again when nothing writes to it"
    ):
        load_set(tmp_path)


# --- values that are no numbers ------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_features_that_are_no_numbers_are_found_when_they_are_loaded(value: float) -> None:
    """As in a CSV file with an empty cell, which a run blamed on its learning rate."""
    sound = Samples(torch.zeros(9, 2, 3), torch.zeros(9, dtype=torch.int64))
    x = torch.zeros(9, 2, 3)
    x[7, 1, 0] = x[8, 0, 0] = value
    told = "the test samples hold 2 values that are nan or infinite, the first in row 7, column 3, both from 0; correct"
    with pytest.raises(DataError, match=told):
        LoadedData(sound, Samples(x, sound.y), 2, None, None, "toy")
    x[7:] = 3e38
    assert len(LoadedData(Samples(x, sound.y), sound, 2, None, None, "toy").train) == 9


# --- the same data in another form -----------------------------------------------------------------


def test_parquet_files_of_the_same_name_are_pointed_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(torchvision_sets, "_fetch", offline)
    with pytest.raises(DataError) as caught:
        build("cifar10", tmp_path).load()
    assert "dataset=parquet" not in str(caught.value)
    write_rows(tmp_path / "cifar10" / "cifar10-train.parquet")
    with pytest.raises(
        DataError,
        match=r"; dataset=parquet dataset\.path=cifar10 reads the parquet files in cifar10/",
    ):
        build("cifar10", tmp_path).load()
