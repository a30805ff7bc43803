"""Local data sets of the Hugging Face Hub: their description names the columns; and CIFAR in
parquet files."""

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedsim.core.errors import DataError
from fedsim.data.base import LoadedData, TokenShape
from fedsim.data.hf_description import Description
from tests.dataset_toys import build, check_sound, encoded, random_pixels, write_table

CLASSES = {"_type": "ClassLabel", "names": ["ant", "bee", "cat"]}
IMAGE = {"_type": "Image"}
STRING = {"_type": "Value", "dtype": "string"}


def described(columns: dict[str, Any], features: dict[str, Any]) -> pa.Table:
    """Return a table with the Hub's description of its columns."""
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.table(columns).replace_schema_metadata(metadata)


def images(count: int) -> pa.Array:
    pixels = random_pixels(count, grey=True)
    return pa.array([{"bytes": encoded(image), "path": None} for image in pixels])


def texts_table(texts: list[str | None], labels: list[int], **columns: Any) -> pa.Table:
    features = {"body": STRING, "kind": CLASSES}
    return described({"body": texts, "kind": labels} | columns, features)


def write(path: Path, table: pa.Table) -> None:
    """Write a table. The file's name is among its metadata, so that no two files are equal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), b"file": str(path)})
    if path.suffix == ".arrow":
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    else:
        pq.write_table(table, path)


def load(folder: Path, **values: Any) -> LoadedData:
    return build("hf_folder", folder, folder.parent / "cache", path=str(folder), **values).load()


# --- columns -------------------------------------------------------------------------------------


def test_the_description_finds_columns_whose_names_and_types_do_not(tmp_path: Path) -> None:
    columns = {
        "thumbnail": [b"not an image"] * 3,
        "photo": images(3),
        "target": [7, 8, 9],  # by its name a label, but not by the description
        "species": [2, 0, 1],
    }
    features = {"photo": IMAGE, "species": CLASSES, "target": {"_type": "Value", "dtype": "int64"}}
    for split in ("train", "test"):
        write(
            tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet",
            described(columns, features),
        )
    data = load(tmp_path / "set")
    check_sound(data)
    assert data.train.y.tolist() == [2, 0, 1]
    assert (data.num_classes, data.input_shape) == (3, (1, 6, 6))


def test_several_columns_of_classes_must_be_chosen_from(tmp_path: Path) -> None:
    columns = {"img": images(3), "fine": [0, 1, 2], "coarse": [0, 0, 1]}
    features = {"img": IMAGE, "fine": CLASSES, "coarse": CLASSES}
    for split in ("train", "test"):
        write(tmp_path / "set" / f"{split}.parquet", described(columns, features))
    rule = r"dataset\.label_column=None: the columns are img, fine, coarse in .*, and fine and coarse may be meant; set it"
    with pytest.raises(DataError, match=rule):
        load(tmp_path / "set")
    assert load(tmp_path / "set", label_column="coarse").test.y.tolist() == [0, 0, 1]


def test_several_columns_of_texts_must_be_chosen_from(tmp_path: Path) -> None:
    table = texts_table(["a", "b"], [0, 1], title=["c", "d"], user=["x", "y"])
    write(tmp_path / "set" / "train.parquet", table)
    values = {"test_fraction": 0.5, "client_column": "user"}
    rule = r"dataset\.text_column=None: .* body and title may be meant"
    with pytest.raises(DataError, match=rule):
        load(tmp_path / "set", **values)
    assert len(load(tmp_path / "set", text_column="title", **values).train) == 1


def test_a_column_names_the_clients(tmp_path: Path) -> None:
    write(
        tmp_path / "set" / "train.parquet",
        texts_table(["a", "b", "c"], [0, 1, 2], user=["y", "x", "y"]),
    )
    write(tmp_path / "set" / "test.parquet", texts_table(["a", "b"], [0, 1], user=["z", "y"]))
    data = load(tmp_path / "set", client_column="user")
    assert data.owners is not None
    assert data.test_owners is not None
    assert (data.owners.tolist(), data.test_owners.tolist()) == ([1, 0, 1], [-1, 1])


# --- README.md and dataset_info.json -------------------------------------------------------------

CARD = """---
license: mit
configs:
- config_name: small
  data_files: small/*.parquet
- config_name: default
  data_files:
  - split: train
    path: data/part-*
  - split: unseen
    path: [data/last.parquet]
dataset_info:
  config_name: default
  features:
  - name: photo
    dtype: image
  - name: thumbnail
    dtype: binary
  - name: species
    dtype:
      class_label:
        names:
          '0': ant
          '1': bee
          '2': cat
          '3': dog
---
# Insects
"""


def undescribed(labels: list[int]) -> pa.Table:
    """Return a table as other programs than the library datasets write it."""
    bytes_of = [encoded(image) for image in random_pixels(len(labels), grey=True)]
    return pa.table({"thumbnail": bytes_of, "photo": bytes_of, "species": labels})


def write_insects(folder: Path) -> None:
    for name, labels in (("part-0", [0, 1]), ("part-1", [1, 0]), ("last", [2])):
        write(folder / "data" / f"{name}.parquet", undescribed(labels))
    write(folder / "small" / "train.parquet", undescribed([0]))


def test_the_head_of_the_readme_names_columns_classes_and_splits(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    write_insects(folder)
    values = {"test_split": "unseen"}
    with pytest.raises(DataError, match="thumbnail and photo may be meant"):
        load(folder, **values)
    (folder / "README.md").write_text(CARD)
    data = load(folder, **values)
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([0, 1, 1, 0], [2])
    assert data.num_classes == 4  # although no sample is a dog
    lines = build("hf_folder", tmp_path, path=str(folder), **values).describe()
    assert lines[2] == "column species: int64, 4 classes (ant, bee, cat, dog) (the label)"
    # Another number of classes is other data.
    (folder / "README.md").write_text(CARD.replace("'3': dog", "'3': dog\n          '4': eel"))
    assert load(folder, **values).num_classes == 5


@pytest.mark.parametrize(
    ("pattern", "files"),
    [
        ("*.parquet", ["top.parquet"]),
        ("**/*.parquet", ["top.parquet", "data/a.parquet", "data/en/b.parquet"]),
        ("data/**", ["data/a.parquet", "data/en/b.parquet"]),
        ("data/**/b.parquet", ["data/en/b.parquet"]),
        ("data/**/a.parquet", ["data/a.parquet"]),
        ("data/*", ["data/a.parquet"]),
        ("./data//[a-c].parquet", ["data/a.parquet"]),
        ("*/*/*", ["data/en/b.parquet"]),
        ("data", []),
        ("", []),
    ],
)
def test_patterns_of_the_readme_are_those_of_paths(pattern: str, files: list[str]) -> None:
    description = Description(data_files={"train": [pattern]})
    candidates = ["top.parquet", "data/a.parquet", "data/en/b.parquet"]
    assert [file for file in candidates if description.split_of(Path(file))] == files


def test_dataset_info_next_to_files_without_a_description_names_columns(tmp_path: Path) -> None:
    features = {"photo": IMAGE, "thumbnail": {"_type": "Value"}, "species": CLASSES}
    for split, labels in (("train", [0, 1]), ("test", [1])):
        write(tmp_path / "set" / split / "data.arrow", undescribed(labels))
        info = json.dumps({"features": features, "splits": {}})
        (tmp_path / "set" / split / "dataset_info.json").write_text(info)
    data = load(tmp_path / "set")
    assert (data.train.y.tolist(), data.num_classes) == ([0, 1], 3)
    for path in (tmp_path / "set").glob("*/dataset_info.json"):
        path.write_text(path.read_text().replace('"cat"', '"cat", "dog"'))
    assert load(tmp_path / "set").num_classes == 4


def test_the_description_in_a_file_comes_before_that_of_its_folder(tmp_path: Path) -> None:
    table = described({"photo": images(2), "species": [0, 1]}, {"photo": IMAGE, "species": CLASSES})
    four_classes = {"_type": "ClassLabel", "names": ["ant", "bee", "cat", "dog"]}
    info = json.dumps({"features": {"photo": IMAGE, "species": four_classes}})
    for split in ("train", "test"):
        write(tmp_path / "set" / split / "data.parquet", table)
        (tmp_path / "set" / split / "dataset_info.json").write_text(info)
    assert load(tmp_path / "set").num_classes == 3


@pytest.mark.parametrize(
    "text",
    [
        "no head",
        "---\nconfigs: [\n---\n",
        "---\n- a\n---\n",
        "---\nconfigs: 3\ndataset_info: {features: [1, {name: 2}, {name: x, dtype: [1]}]}\n---\n",
        "---\nconfigs: [{data_files: [{split: 1, path: a}, {path: b}, 3]}]\n---\n",
    ],
)
def test_a_readme_that_describes_nothing_changes_nothing(tmp_path: Path, text: str) -> None:
    write(tmp_path / "set" / "train.parquet", texts_table(["a", "b"], [0, 1]))
    write(tmp_path / "set" / "test.parquet", texts_table(["a"], [1]))
    fingerprint = load(tmp_path / "set").fingerprint
    (tmp_path / "set" / "README.md").write_text(text)
    (tmp_path / "set" / "dataset_info.json").write_text(text)
    assert load(tmp_path / "set").fingerprint == fingerprint


# --- texts ---------------------------------------------------------------------------------------


def test_words_are_hashed_and_short_texts_begin_with_zeros(tmp_path: Path) -> None:
    texts = ["One, two", "one two three four", None]
    for split in ("train", "test"):
        write(tmp_path / "set" / f"{split}.parquet", texts_table(texts, [0, 1, 2]))
    data = load(tmp_path / "set", length=3, vocabulary=1000)
    one, comma, two, three = (1 + crc32(word) % 999 for word in (b"one", b",", b"two", b"three"))
    assert data.train.tensor.tolist() == [[one, comma, two], [one, two, three], [0, 0, 0]]
    assert isinstance(data.input_shape, TokenShape)
    assert (data.input_shape, data.input_shape.vocabulary, data.num_classes) == ((3,), 1000, 3)
    assert data.fingerprint != load(tmp_path / "set", length=3, vocabulary=999).fingerprint


# --- files and splits ----------------------------------------------------------------------------


def test_arrow_files_in_folders_of_splits_are_read(tmp_path: Path) -> None:
    for split, labels in (("train", [0, 1, 2, 0]), ("test", [2, 1])):
        table = texts_table(["a b"] * len(labels), labels)
        middle = len(labels) // 2
        write(tmp_path / "set" / split / "data-00000-of-00002.arrow", table.slice(0, middle))
        write(tmp_path / "set" / split / "data-00001-of-00002.arrow", table.slice(middle))
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    data = load(tmp_path / "set")
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([0, 1, 2, 0], [2, 1])


@pytest.mark.parametrize(
    ("values", "train", "test"),
    [
        ({}, [0], [2]),  # without a split named test, validation
        ({"test_split": "extra"}, [0], [1]),
        ({"train_split": "extra", "test_split": "train"}, [1], [0]),
    ],
)
def test_splits_are_chosen_by_their_names(
    tmp_path: Path, values: dict[str, str], train: list[int], test: list[int]
) -> None:
    for label, split in enumerate(("train", "extra", "validation")):
        write(
            tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet",
            texts_table(["a"], [label]),
        )
    data = load(tmp_path / "set", **values)
    assert (data.train.y.tolist(), data.test.y.tolist()) == (train, test)


@pytest.mark.parametrize("name_of_folder", ["train", "test", "dev"])
def test_the_name_of_the_data_sets_own_folder_is_no_split(
    tmp_path: Path, name_of_folder: str
) -> None:
    for label, split in enumerate(("train", "validation", "test")):
        file = tmp_path / name_of_folder / f"{split}-00000-of-00001.parquet"
        write(file, texts_table(["a"] * (label + 1), [label] * (label + 1)))
    data = load(tmp_path / name_of_folder)
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([0], [2, 2, 2])


@pytest.mark.parametrize(
    ("name_of_folder", "values"),
    [
        ("train", {}),
        ("set", {}),
        ("test", {}),
        ("extra", {"train_split": "extra"}),
    ],
)
def test_shards_without_a_split_are_for_training(
    tmp_path: Path, name_of_folder: str, values: dict[str, str]
) -> None:
    for label in (0, 1):
        file = tmp_path / name_of_folder / f"data-{label:05d}-of-00002.arrow"
        write(file, texts_table(["a"] * 2, [label] * 2))
    data = load(tmp_path / name_of_folder, test_fraction=0.5, **values)
    assert (len(data.train), len(data.test)) == (2, 2)


def test_the_name_of_the_data_sets_own_folder_does_not_count_next_to_splits(
    tmp_path: Path,
) -> None:
    for label, name in enumerate(("validation", "extra")):
        write(tmp_path / "train" / f"{name}.parquet", texts_table(["a"], [label]))
    with pytest.raises(DataError, match="no file is a training split"):
        load(tmp_path / "train")


def test_the_name_of_a_file_comes_before_that_of_its_folder(tmp_path: Path) -> None:
    for label, split in enumerate(("train", "test")):
        write(tmp_path / "set" / "train" / f"{split}.parquet", texts_table(["a"], [label]))
    data = load(tmp_path / "set")
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([0], [1])


def test_a_word_of_a_files_name_is_its_split(tmp_path: Path) -> None:
    for label, name in enumerate(("train_0", "train_1", "my_test")):
        write(tmp_path / "set" / f"{name}.parquet", texts_table(["a"], [label]))
    data = load(tmp_path / "set")
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([0, 1], [2])


def test_a_name_of_two_splits_is_rejected(tmp_path: Path) -> None:
    write(tmp_path / "set" / "train_test.parquet", texts_table(["a"], [0]))
    write(tmp_path / "set" / "test.parquet", texts_table(["b"], [0]))
    with pytest.raises(DataError, match=r"train_test\.parquet: .* of the splits test and train"):
        load(tmp_path / "set")


def test_shards_of_a_split_with_a_longer_name_are_not_read(tmp_path: Path) -> None:
    for label, split in enumerate(("train", "test", "test_hard")):
        file = tmp_path / "set" / f"{split}-00000-of-00001.parquet"
        write(file, texts_table(["a"], [label]))
    assert load(tmp_path / "set").test.y.tolist() == [1]
    dataset = build("hf_folder", tmp_path, path=str(tmp_path / "set"))
    assert dataset.describe()[-1] == "not read: test_hard-00000-of-00001.parquet"


def test_shards_of_a_split_that_is_not_read_may_be_missing(tmp_path: Path) -> None:
    names = ("train-00000-of-00001", "test-00000-of-00001", "unsupervised-00000-of-00002")
    for label, name in enumerate(names):
        write(tmp_path / "set" / f"{name}.parquet", texts_table(["a"], [label]))
    assert load(tmp_path / "set").test.y.tolist() == [1]


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"train_split": "trian"}, "no file is a training split"),
        ({"test_split": "tset"}, r"test_split=tset: no file of .* belongs to this split"),
    ],
)
def test_a_mistyped_split_is_reported(tmp_path: Path, values: dict[str, str], rule: str) -> None:
    write(tmp_path / "set" / "rows.parquet", texts_table(["a", "b"], [0, 1]))
    with pytest.raises(DataError, match=rule):
        load(tmp_path / "set", test_fraction=0.5, **values)


def test_caches_of_the_library_datasets_are_no_data(tmp_path: Path) -> None:
    for split, label in (("train", 0), ("test", 1)):
        folder = tmp_path / "set" / split
        write(folder / "data-00000-of-00001.arrow", texts_table(["a"], [label]))
        write(folder / "cache-1a2b3c4d5e6f7081.arrow", texts_table(["b"], [label]))
    data = load(tmp_path / "set")
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([0], [1])


def test_names_of_classes_may_be_described_in_a_later_file_alone(tmp_path: Path) -> None:
    table = described({"body": ["a"], "kind": [1]}, {"body": STRING})
    write(tmp_path / "set" / "train.parquet", table)
    features = {"body": STRING, "kind": {"_type": "ClassLabel", "names": ["ant", "bee", "cat"]}}
    table = described({"body": ["b"], "kind": [0]}, features)
    write(tmp_path / "set" / "test.parquet", table)
    assert load(tmp_path / "set", label_column="kind").num_classes == 3


def test_files_must_have_their_labels_in_one_column(tmp_path: Path) -> None:
    write(tmp_path / "set" / "train.parquet", described({"body": ["a"], "label": [0]}, {}))
    write(tmp_path / "set" / "test.parquet", described({"body": ["b"], "labels": [0]}, {}))
    rule = r"the column label of .*train\.parquet, and in labels of .*test\.parquet"
    with pytest.raises(DataError, match=rule):
        load(tmp_path / "set")


def test_files_must_number_the_classes_alike(tmp_path: Path) -> None:
    """In the test file "cat" has the number 1, which is "bee" in the training file."""
    write(tmp_path / "set" / "train.parquet", texts_table(["a", "b", "c"], [0, 1, 2]))
    features = {"body": STRING, "kind": {"_type": "ClassLabel", "names": ["ant", "cat"]}}
    table = described({"body": ["c"], "kind": [1]}, features)
    write(tmp_path / "set" / "test.parquet", table)
    rule = r"train\.parquet and .*test\.parquet number the classes differently: ant, bee, cat and ant, cat"
    with pytest.raises(DataError, match=rule):
        load(tmp_path / "set")


def test_a_label_beyond_the_names_of_classes_is_rejected(tmp_path: Path) -> None:
    write(tmp_path / "set" / "train.parquet", texts_table(["a", "b"], [0, 3]))
    with pytest.raises(DataError, match=r"has the label 3, but its description names only 3"):
        load(tmp_path / "set", test_fraction=0.5)


def test_the_doctor_describes_an_empty_shard_and_a_test_split_without_clients(
    tmp_path: Path,
) -> None:
    full = texts_table(["a", "b"], [0, 1], user=["x", "y"])
    write(tmp_path / "set" / "train-00000-of-00002.parquet", full.slice(0, 0))
    write(tmp_path / "set" / "train-00001-of-00002.parquet", full)
    write(tmp_path / "set" / "test-00000-of-00001.parquet", texts_table(["c"], [0]))
    values = {"path": str(tmp_path / "set"), "client_column": "user"}
    lines = build("hf_folder", tmp_path, **values).describe()
    assert lines[-2:] == ["split test: 1 samples", "split train: 2 samples of 2 clients"]


def test_a_damaged_arrow_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.arrow").write_bytes(b"no table")
    with pytest.raises(DataError, match=r"train\.arrow is no sound parquet file"):
        load(tmp_path / "set", test_fraction=0.5)


# --- CIFAR in parquet files ----------------------------------------------------------------------


def test_cifar_is_read_from_parquet_files_where_torchvisions_are_absent(tmp_path: Path) -> None:
    for split, count in (("train", 6), ("test", 3)):
        write_table(tmp_path / "cifar10" / f"{split}-00000-of-00001.parquet", count, side=32)
    dataset = build("cifar10", tmp_path)
    assert dataset.source_problem() is None
    assert dataset.files_to_fetch() == []  # type: ignore[attr-defined]
    data = dataset.load()
    check_sound(data)
    assert np.array_equal(data.train.tensor.permute(0, 2, 3, 1), random_pixels(6, side=32))
    assert (len(data.test), data.num_classes) == (3, 10)  # although labels are 0 to 2 here


def test_cifar_without_a_test_file_is_rejected(tmp_path: Path) -> None:
    write_table(tmp_path / "cifar10" / "train-00000-of-00001.parquet", 6, side=32)
    with pytest.raises(DataError, match=r"for training and none for testing; fetch the Hub's file"):
        build("cifar10", tmp_path).load()


def test_the_fine_labels_of_cifar100_are_the_classes(tmp_path: Path) -> None:
    for split in ("train", "test"):
        pixels = pa.array([encoded(image) for image in random_pixels(2, side=32)])
        table = pa.table({"img": pixels, "fine_label": [98, 3], "coarse_label": [1, 2]})
        write(tmp_path / "cifar100" / f"{split}.parquet", table)
    data = build("cifar100", tmp_path).load()
    assert (data.train.y.tolist(), data.num_classes) == ([98, 3], 100)


def test_the_doctor_finds_a_damaged_parquet_file_of_cifar(tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "train.parquet").touch()
    with pytest.raises(DataError, match=r"train\.parquet is no sound parquet file"):
        build("cifar10", tmp_path).describe()


# --- descriptions, for `fedsim doctor` -----------------------------------------------------------


def test_columns_splits_and_clients_are_described(tmp_path: Path) -> None:
    long = "a word " * 20
    table = texts_table([long, "b", "c"], [0, 1, 2], user=["y", "x", "y"])
    write(tmp_path / "set" / "train-00000-of-00002.parquet", table)
    write(tmp_path / "set" / "train-00001-of-00002.parquet", texts_table(["d"], [0], user=["z"]))
    write(tmp_path / "set" / "test.parquet", table.slice(1))
    dataset = build("hf_folder", tmp_path, path=str(tmp_path / "set"), client_column="user")
    assert dataset.describe() == [
        "column body: string, for example a word a word a word a word a word [...] (the sample)",
        "column kind: int64, 3 classes (ant, bee, cat) (the label)",
        "column user: string, for example y (the client)",
        "split test: 2 samples of 2 clients",
        "split train: 4 samples of 3 clients",
    ]
