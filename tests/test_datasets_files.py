"""Parquet files in the Hub's layout, and folders of images.

Damaged or hostile files are rejected with their path: nothing is trained on them, nothing hangs,
and nothing in them is run.
"""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import EpsImagePlugin, Image
from pyarrow import compute

from fedsim.config.plan import hash_config
from fedsim.core.errors import ConfigError, DataError
from fedsim.data import images, parquet
from fedsim.data.images import decode
from tests.dataset_toys import (
    build,
    check_sound,
    encoded,
    load_parquet,
    random_pixels,
    table,
    write_table,
)

GREY = encoded(np.full((6, 6), 7, np.uint8))
COLOUR = encoded(np.full((6, 6, 3), (1, 2, 3), np.uint8))
TALL = encoded(np.full((7, 5), 9, np.uint8))


def write_images(path: Path, *images: bytes) -> None:
    pq.write_table(pa.table({"image": list(images), "label": [0] * len(images)}), path)


def channels_last(x: Any) -> np.ndarray:
    return x.permute(0, 2, 3, 1).numpy()


# --- parquet files: splits -----------------------------------------------------------------------


def test_names_say_the_split_types_find_the_columns_and_pixels_are_exact(tmp_path: Path) -> None:
    write_table(tmp_path / "constraints-train.parquet", 12)
    write_table(tmp_path / "constraints-test.parquet", 5, seed=1)
    data = load_parquet(tmp_path)
    check_sound(data)
    assert data.num_classes == 3
    assert data.mean == data.std == (0.5, 0.5, 0.5)
    assert np.array_equal(channels_last(data.train.x), random_pixels(12))
    assert np.array_equal(channels_last(data.test.x), random_pixels(5, seed=1))
    assert data.train.y.tolist() == [0, 1, 2] * 4


@pytest.mark.parametrize("hashes", [("", ""), ("-b42a775f407cee45", "-9d1f0a63c2e85b47")])
def test_shards_are_read_in_order_and_a_validation_split_serves_as_test_split(
    hashes: tuple[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "set" / "data"
    for number, code in enumerate(hashes):
        write_table(folder / f"train-0000{number}-of-00002{code}.parquet", 6, seed=number)
    write_table(folder / "validation-00000-of-00001.parquet", 4)
    data = build("parquet", tmp_path, path="set").load()
    assert (len(data.train), len(data.test)) == (12, 4)
    assert np.array_equal(channels_last(data.train.x[6:]), random_pixels(6, seed=1))


def test_folders_say_the_split_and_a_test_split_goes_before_a_validation_split(
    tmp_path: Path,
) -> None:
    for folder, rows in (("train", 6), ("valid", 5), ("test", 4)):
        write_table(tmp_path / folder / "0000.parquet", rows)
    data = load_parquet(tmp_path)
    assert (len(data.train), len(data.test)) == (6, 4)


def test_a_validation_split_next_to_a_test_split_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for split, rows in (("train", 6), ("test", 4)):
        write_table(folder / f"{split}.parquet", rows)
    before = load_parquet(folder)
    (folder / "validation-00000-of-00002.parquet").write_bytes(b"damaged")
    shutil.copy(folder / "test.parquet", folder / "dev.parquet")
    data = load_parquet(folder)
    assert (data.fingerprint, data.sha256) == (before.fingerprint, before.sha256)
    described = build("parquet", tmp_path, path=str(folder)).describe()
    assert described[-1] == "not read: dev.parquet, validation-00000-of-00002.parquet"


@pytest.mark.parametrize(
    ("root", "names"),
    [
        ("train", ("0000", "0001")),
        ("train", ("data-00000-of-00002", "data-00001-of-00002")),
        ("set", ("data-00000-of-00002", "data-00001-of-00002")),
        ("test-data", ("data-00000-of-00002", "data-00001-of-00002")),
        ("test-data", ("data",)),
        ("test-data", ("train-a", "train-b")),
    ],
)
def test_files_without_a_split_are_for_training_if_their_root_says_so_or_they_are_one(
    tmp_path: Path, root: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, name in enumerate(names):
        write_table(tmp_path / root / f"{name}.parquet", 4, seed=seed)
    assert len(load_parquet(tmp_path / root).train) == 2 * len(names)
    monkeypatch.chdir(tmp_path / root)
    assert len(load_parquet(Path()).train) == 2 * len(names)


@pytest.mark.parametrize("root", ["set", "test"])
def test_files_whose_root_does_not_say_that_they_are_for_training_are_rejected(
    tmp_path: Path, root: str
) -> None:
    for seed, name in enumerate(("0000", "0001")):
        write_table(tmp_path / root / f"{name}.parquet", 4, seed=seed)
    with pytest.raises(DataError, match=r"0000\.parquet: its name, or its folder's, must have"):
        load_parquet(tmp_path / root)


@pytest.mark.parametrize("as_structs", [True, False])
def test_files_of_several_groups_of_rows_are_read(tmp_path: Path, as_structs: bool) -> None:
    rows = table(10)
    if not as_structs:
        rows = rows.set_column(0, "img", compute.struct_field(rows["img"], "bytes"))
    pq.write_table(rows, tmp_path / "train.parquet", row_group_size=4)
    pq.write_table(rows.slice(0, 4), tmp_path / "test.parquet")
    data = load_parquet(tmp_path)
    assert np.array_equal(channels_last(data.train.x), random_pixels(10))
    assert data.train.y.tolist() == [number % 3 for number in range(10)]


def test_a_file_without_groups_of_rows_is_an_empty_split(tmp_path: Path) -> None:
    write_table(tmp_path / "train.parquet", 4)
    with pq.ParquetWriter(tmp_path / "test.parquet", table(1).schema):
        pass
    with pytest.raises(DataError, match="the test split has no rows"):
        load_parquet(tmp_path)


def test_absent_files_and_shards_are_named_without_reading_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> list[str]:
        return build("parquet", tmp_path, path="set").absent()

    folder = tmp_path / "set"
    for shard in (0, 1, 2, 3):
        write_table(folder / f"train-{shard:05d}-of-00004.parquet", 3, seed=shard)
    assert absent() == []
    (folder / "train-00001-of-00004.parquet").unlink()
    (folder / "train-00003-of-00004.parquet").unlink()
    monkeypatch.setattr(parquet, "open_table", lambda *_: pytest.fail("a file is read"))
    missing = f"shards 1, 3 of the 4 of 'train' in {folder}"
    assert absent() == [missing]
    with pytest.raises(DataError, match=rf"path=set: is missing {missing}; correct"):
        build("parquet", tmp_path, path="set").load()
    shutil.rmtree(folder)
    assert absent() == [f"a parquet file at {Path('set').absolute()} or {folder}"]


@pytest.mark.parametrize("name", ["extra", "train-test"])
def test_one_of_several_files_that_names_no_split_or_two_is_rejected(
    tmp_path: Path, name: str
) -> None:
    write_table(tmp_path / "train.parquet", 4)
    write_table(tmp_path / f"{name}.parquet", 4)
    rule = rf"{name}\.parquet: its name, or its folder's, must have a word of one split"
    with pytest.raises(DataError, match=rule):
        load_parquet(tmp_path)


# --- parquet files: rows -------------------------------------------------------------------------


@pytest.fixture
def one_file(tmp_path: Path) -> Path:
    """20 grey images as bytes, labels cat and ant by turns in a dictionary, and four owners."""
    pixels = random_pixels(20, grey=True)
    rows = pa.table(
        {
            "png": [encoded(image) for image in pixels],
            "class": pa.array(["cat", "ant"] * 10).dictionary_encode(),
            "writer_id": [f"w{number % 4}" for number in range(20)],
        }
    )
    pq.write_table(rows, tmp_path / "all.parquet")
    return tmp_path / "all.parquet"


def test_string_labels_owners_and_a_share_for_testing(one_file: Path) -> None:
    data = load_parquet(one_file, test_fraction=0.25, client_column="writer_id")
    check_sound(data)
    assert (len(data.train), len(data.test), data.input_shape) == (15, 5, (1, 6, 6))
    rows = {image.tobytes(): row for row, image in enumerate(random_pixels(20, grey=True))}
    train = [rows[image.numpy().tobytes()] for image in data.train.x]
    test = [rows[image.numpy().tobytes()] for image in data.test.x]
    assert sorted(train + test) == list(range(20))
    assert data.train.y.tolist() == [(row + 1) % 2 for row in train]  # ant is 0, cat 1
    assert data.test.y.tolist() == [(row + 1) % 2 for row in test]
    assert data.owners is not None
    assert data.owners.tolist() == [row % 4 for row in train]
    assert data.test_owners is not None
    assert data.test_owners.tolist() == [row % 4 for row in test]


def test_a_share_for_testing_is_required_without_a_test_split(one_file: Path) -> None:
    rule = r"dataset\.test_fraction=0\.0: .* has no test split.* its 20 rows"
    with pytest.raises(DataError, match=rule):
        load_parquet(one_file, test_fraction=0.0)


def test_means_for_another_number_of_channels_are_rejected(one_file: Path) -> None:
    rule = r"dataset\.mean=\[0\.5, 0\.5, 0\.5\]: must have 1 values"
    with pytest.raises(ConfigError, match=rule):
        load_parquet(one_file, mean=[0.5] * 3, std=[0.5] * 3)


@pytest.mark.parametrize(
    ("test_columns", "test_owners"),
    [
        ({"who": [9, 4, 5, 6, 10]}, [2, -1, 0, -1, -1]),  # 4, 6 and 10 own no training row
        ({}, None),
    ],
)
def test_owners_of_test_rows_have_the_numbers_of_the_training_rows(
    tmp_path: Path, test_columns: dict[str, Any], test_owners: list[int] | None
) -> None:
    write_table(tmp_path / "train.parquet", 4, who=[7, 5, 7, 9])
    write_table(tmp_path / "test.parquet", 5, **test_columns)
    data = load_parquet(tmp_path, client_column="who")
    assert data.owners is not None
    assert data.owners.tolist() == [1, 0, 1, 2]  # owners 5, 7 and 9 in this order
    assert (None if data.test_owners is None else data.test_owners.tolist()) == test_owners


def test_the_hubs_description_gives_the_number_of_classes(tmp_path: Path) -> None:
    features = {"label": {"names": ["a", "b", "c", "d", "e"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table(6).replace_schema_metadata(metadata), tmp_path / "train.parquet")
    assert load_parquet(tmp_path).num_classes == 5


def test_a_path_below_a_folder_that_must_not_be_searched_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = build("parquet", tmp_path, path=str(tmp_path / "private" / "images"))
    denied = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(Path, "exists", denied)
    monkeypatch.setattr(os, "scandir", denied)
    problem = dataset.source_problem()
    assert problem is not None
    assert problem.key == "dataset.path"
    assert "(Permission denied)" in problem.rule


def test_files_are_decoded_again_only_if_content_or_split_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = parquet.decode
    calls = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return original(*args, **options)

    def fingerprint(**values: Any) -> str:
        values = {"path": "set"} | values
        return build("parquet", tmp_path, **values).load().fingerprint

    monkeypatch.setattr(parquet, "decode", counted)
    folder = tmp_path / "set"
    write_table(folder / "1-train" / "0.parquet", 6, seed=1)
    write_table(folder / "2-test" / "0.parquet", 6, seed=2)
    first = fingerprint()
    assert fingerprint() == first
    assert len(calls) == 1
    (folder / "1-train").rename(folder / "1-test")
    (folder / "2-test").rename(folder / "2-train")
    swapped = fingerprint()
    write_table(folder / "2-train" / "0.parquet", 6, seed=9)
    changed = fingerprint()
    scaled = fingerprint(size=4)
    assert len({first, swapped, changed, scaled}) == 4
    assert len(calls) == 4
    folder.rename(tmp_path / "moved")
    assert fingerprint(path="moved", size=4) == scaled
    assert len(calls) == 4


# --- parquet files: mistakes ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("path", "nowhere", "is missing a parquet file at .*nowhere or .*nowhere"),
        (
            "label_column",
            "lable",
            "the columns are img, label, .*, and none of them may be meant; set it",
        ),
        ("label_column", "halves", "must hold integers or strings, not double"),
        ("label_column", "gaps", "11 of its 12 values are missing"),
        ("label_column", "hidden", "12 of 12 labels are -1; number the classes from 0"),
        ("label_column", "large", r".* must lie in 0\.\.999999, found 0\.\.1000000"),
        ("client_column", "who", "no file has this column"),
        ("image_column", "label", "must hold the encoded images .* in every row, not int64 as in"),
        ("image_column", "paths", "must hold the encoded images .*; 12 are missing in"),
    ],
)
def test_columns_that_do_not_serve_are_named(
    tmp_path: Path, key: str, value: str, rule: str
) -> None:
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    write_table(
        tmp_path / "train.parquet",
        12,
        halves=[0.5] * 12,
        gaps=[1] + [None] * 11,
        hidden=[-1] * 12,
        paths=pa.array([{"bytes": None, "path": "x.png"}] * 12, struct),
        large=[0, *[10**6] * 11],
    )
    with pytest.raises(DataError, match=rf"dataset\.{key}={value}: {rule}"):
        load_parquet(tmp_path, **{"image_column": "img", key: value})


@pytest.mark.parametrize("first", [GREY, COLOUR])
def test_one_colour_image_makes_all_of_them_colour_images(tmp_path: Path, first: bytes) -> None:
    write_images(tmp_path / "train.parquet", *[first] * 600, GREY, COLOUR)
    write_images(tmp_path / "test.parquet", GREY)
    data = load_parquet(tmp_path)
    assert data.input_shape == (3, 6, 6)
    assert data.train.x[-2:, :, 0, 0].tolist() == [[7, 7, 7], [1, 2, 3]]


def test_size_brings_all_images_to_one_size(tmp_path: Path) -> None:
    write_images(tmp_path / "train.parquet", GREY, TALL)
    data = load_parquet(tmp_path, size=4)
    assert data.input_shape == (1, 4, 4)
    values = torch.cat([data.train.x, data.test.x]).unique()
    assert values.tolist() == [7, 9]


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ([b"not an image"], "image 0 cannot be decoded"),
        ([GREY, GREY[:-30]], "image 1 cannot be decoded"),
        ([GREY, TALL], "image 1 has 5x7 pixels and the first 6x6; set"),
        (
            [encoded(np.full((6, 6), 60000, np.uint16))],
            "image 0 has more than 8 bits per pixel",
        ),
    ],
)
def test_unsound_images_are_named(tmp_path: Path, images: list[bytes], reason: str) -> None:
    write_images(tmp_path / "train.parquet", *images, GREY)
    with pytest.raises(DataError, match=rf"dataset\.path=.*: {reason}"):
        load_parquet(tmp_path)


def test_an_empty_split_is_rejected(tmp_path: Path) -> None:
    write_table(tmp_path / "train.parquet", 4)
    pq.write_table(table(4).slice(0, 0), tmp_path / "test.parquet")
    with pytest.raises(DataError, match="the test split has no rows"):
        load_parquet(tmp_path)


def test_columns_of_unlike_types_are_rejected(tmp_path: Path) -> None:
    write_table(tmp_path / "train.parquet", 4)
    strings = table(4).set_column(1, "label", pa.array(["a"] * 4))
    pq.write_table(strings, tmp_path / "test.parquet")
    rule = r"test\.parquet: a column differs from .*label has incompatible types: int64 vs string\)"
    with pytest.raises(DataError, match=rule):
        load_parquet(tmp_path)


@pytest.mark.parametrize("damage", [lambda _: b"<html>", lambda _: b"", lambda file: file[:-9]])
def test_a_damaged_parquet_file_is_rejected(tmp_path: Path, damage: Any) -> None:
    path = write_table(tmp_path / "train.parquet", 4)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"train\.parquet is no sound parquet file"):
        load_parquet(tmp_path)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 6\n%%EndComments\n%%EndProlog\nshowpage\n%%EOF\n"


def test_an_eps_file_in_place_of_an_image_starts_no_other_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ghostscript(*_: Any, **__: Any) -> None:
        pytest.fail("Ghostscript is started")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", ghostscript)
    write_images(tmp_path / "train.parquet", EPS, EPS)
    reason = r"image 0 cannot be decoded \(in none of the formats PNG, JPEG"
    with pytest.raises(DataError, match=reason):
        load_parquet(tmp_path)


# --- checksums -----------------------------------------------------------------------------------


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def test_a_flipped_bit_in_a_png_is_found_by_its_checksum() -> None:
    sound = encoded((np.add.outer(np.arange(64), np.arange(64)) * 3 % 256).astype(np.uint8))
    for position in range(sound.index(b"IDAT") + 4, sound.index(b"IEND") - 8):
        damaged = bytearray(sound)
        damaged[position] ^= 4
        with pytest.raises(DataError, match="toy: image 0 cannot be decoded"):
            decode(bytes, [bytes(damaged)], mode="L", size=None, name="toy")


def test_a_parquet_file_with_another_checksum_is_rejected(tmp_path: Path) -> None:
    path = write_table(tmp_path / "all.parquet", 40)
    sound = hashlib.sha256(path.read_bytes()).hexdigest()
    assert load_parquet(path).sha256 == sound
    assert load_parquet(path, sha256=sound).sha256 == sound
    flip_bit(path, 1000)
    actual = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(DataError, match=rf"dataset\.sha256={sound}: the files of .* have {actual}"):
        load_parquet(path, sha256=sound)


def test_the_checksum_of_several_files_is_that_of_sha256sums_list(tmp_path: Path) -> None:
    write_table(tmp_path / "b" / "train.parquet", 6)
    write_table(tmp_path / "a-test.parquet", 4, seed=1)
    command = "sha256sum a-test.parquet b/train.parquet | sha256sum"
    printed = subprocess.check_output(command, shell=True, cwd=tmp_path, text=True)
    assert load_parquet(tmp_path).sha256 == printed.split()[0]


def test_page_checksums_are_verified_if_a_file_has_them(tmp_path: Path) -> None:
    """Labels are not compressed here: a flipped bit turns the first 7 into a 3."""
    path = tmp_path / "all.parquet"
    rows = table(40).set_column(1, "label", pa.array([7] * 39 + [1], pa.int64()))
    labels_in_file = np.full(39, 7, "<i8").tobytes()
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False}

    pq.write_table(rows, path, **options)
    flip_bit(path, path.read_bytes().index(labels_in_file))
    data = load_parquet(path)
    assert 3 in torch.cat([data.train.y, data.test.y])

    pq.write_table(rows, path, write_page_checksum=True, **options)
    flip_bit(path, path.read_bytes().index(labels_in_file))
    with pytest.raises(DataError, match=r"all\.parquet is no sound parquet file .*fetch it again"):
        load_parquet(path)


@pytest.mark.parametrize(
    ("choice", "values"), [("image_folder", {"path": "set"}), ("femnist", {"source": "leaf"})]
)
def test_other_data_sets_compare_their_checksum_too(
    tmp_path: Path, choice: str, values: dict[str, Any]
) -> None:
    for split in ("train", "test"):
        (tmp_path / "set" / split / "ant").mkdir(parents=True)
        Image.new("L", (6, 6), 7).save(tmp_path / "set" / split / "ant" / "0.png")
        (tmp_path / "femnist" / split).mkdir(parents=True)
        content = {"user_data": {"ann": {"x": [[0.5] * 784], "y": [3]}}}
        (tmp_path / "femnist" / split / "0.json").write_text(json.dumps(content))
    checksum = build(choice, tmp_path, **values).load().sha256
    assert checksum is not None
    assert build(choice, tmp_path, sha256=checksum, **values).load().sha256 == checksum
    rule = rf"dataset\.sha256=0{{64}}: the files of .* have {checksum}"
    with pytest.raises(DataError, match=rule):
        build(choice, tmp_path, sha256="0" * 64, **values).load()


def test_a_checksum_of_null_does_not_change_the_hash_of_a_config() -> None:
    without = hash_config({"dataset": {"path": "x"}})
    assert hash_config({"dataset": {"path": "x", "sha256": None}}) == without
    assert hash_config({"dataset": {"path": "x", "sha256": "0"}}) != without


# --- pipes and links -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "link"])
@pytest.mark.parametrize(
    ("name", "choice", "values"),
    [
        ("rows/train.parquet", "parquet", {"path": "rows"}),
        ("set/train/ant/0.png", "image_folder", {"path": "set"}),
        ("femnist/train/0.json", "femnist", {"source": "leaf"}),
        ("MNIST/raw/train-labels-idx1-ubyte", "mnist", {}),
    ],
)
def test_pipes_and_dangling_links_are_named_and_not_read(
    tmp_path: Path, kind: str, name: str, choice: str, values: dict[str, Any]
) -> None:
    for split_name in (name, name.replace("train", "test")):
        file = tmp_path / split_name
        file.parent.mkdir(parents=True, exist_ok=True)
        if kind == "pipe":
            os.mkfifo(file)
        else:
            file.symlink_to(tmp_path / "nowhere")
    either = name.replace("train", "t(rain|est)")
    rule = rf"{either} is no regular file, nor a link to one; remove it"
    with pytest.raises(DataError, match=rule):
        build(choice, tmp_path, **values).load()


# --- folders of images ---------------------------------------------------------------------------


@pytest.fixture
def insects(tmp_path: Path) -> Path:
    """Ants of red 0 and bees of red 200: three of each in each split, in several sizes."""
    root = tmp_path / "insects"
    for split in ("train", "test"):
        for name, red in (("ant", 0), ("bee", 200)):
            (root / split / name).mkdir(parents=True)
            for number in range(3):
                image = Image.new("RGB", (10 + number, 12), (red, 0, 0))
                image.save(root / split / name / f"{number}.png")
    return root


def test_images_are_scaled_and_classes_numbered_alphabetically(insects: Path) -> None:
    data = build("image_folder", insects.parent, path="insects", size=8).load()
    check_sound(data)
    assert (data.num_classes, data.input_shape) == (2, (3, 8, 8))
    assert len(data.train) == len(data.test) == 6
    assert data.train.x[data.train.y == 0][:, 0].unique().tolist() == [0]
    assert data.train.x[data.train.y == 1][:, 0].unique().tolist() == [200]


def test_images_may_be_converted_to_grey(insects: Path) -> None:
    colour = build("image_folder", insects.parent, path="insects", size=8).load()
    grey = build("image_folder", insects.parent, path=str(insects), size=8, grey=True).load()
    assert (grey.input_shape, grey.mean) == ((1, 8, 8), (0.5,))
    assert grey.fingerprint != colour.fingerprint


def test_a_folder_is_decoded_once_and_its_fingerprint_is_its_content(
    tmp_path: Path, insects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build("image_folder", tmp_path, path="insects").load().fingerprint
    with monkeypatch.context() as patched:
        patched.setattr(images, "decode", lambda *_, **__: pytest.fail("decoded again"))
        assert build("image_folder", tmp_path, path="insects").load().fingerprint == first
    insects.rename(tmp_path / "moved")
    assert build("image_folder", tmp_path, path="moved").load().fingerprint == first
    Image.new("RGB", (9, 9)).save(tmp_path / "moved" / "train" / "bee" / "0.png")
    changed = build("image_folder", tmp_path, path="moved").load()
    assert changed.fingerprint != first
    assert 0 in changed.train.x[changed.train.y == 1][:, 0]


def test_files_of_equal_size_and_time_that_change_places_are_decoded_again(
    tmp_path: Path, insects: Path
) -> None:
    """As after unpacking an archive whose files have one modification time."""
    train = insects / "train"
    for name, red in (("ant", 0), ("bee", 200)):
        shutil.rmtree(train / name)
        (train / name).mkdir()
        image = train / name / "0.bmp"
        Image.new("RGB", (6, 6), (red, 0, 0)).save(image)
        os.utime(image, (10**9, 10**9))
    first = build("image_folder", tmp_path, path="insects").load()
    (train / "ant").rename(tmp_path / "aside")
    (train / "bee").rename(train / "ant")
    (tmp_path / "aside").rename(train / "bee")
    second = build("image_folder", tmp_path, path="insects").load()
    assert (first.train.x[:, 0, 0, 0].tolist(), first.train.y.tolist()) == ([0, 200], [0, 1])
    assert (second.train.x[:, 0, 0, 0].tolist(), second.train.y.tolist()) == ([200, 0], [0, 1])
    assert first.sha256 != second.sha256


def test_copies_are_not_read_twice(tmp_path: Path) -> None:
    content = write_table(tmp_path / "set" / "train.parquet", 4).read_bytes()
    (tmp_path / "set" / "train_backup.parquet").write_bytes(content)
    with pytest.raises(
        DataError, match=r"train\.parquet and .*train_backup\.parquet have the same"
    ):
        load_parquet(tmp_path / "set")


def test_test_rows_of_a_class_that_no_training_row_has_are_rejected(tmp_path: Path) -> None:
    for split, labels in (("train", ["dog", "cat"]), ("test", ["Dog ", "cat"])):
        rows = table(2).set_column(1, "label", pa.array(labels))
        (tmp_path / "set").mkdir(exist_ok=True)
        pq.write_table(rows, tmp_path / "set" / f"{split}.parquet")
    with pytest.raises(DataError, match="classes that no training row has: 'Dog '; correct"):
        load_parquet(tmp_path / "set")


def test_a_file_of_another_kind_is_to_be_converted(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("image,label\n")
    with pytest.raises(DataError, match=r"own\.csv is no sound parquet file .*; convert it"):
        load_parquet(tmp_path / "own.csv")


def test_links_to_the_same_images_with_other_labels_share_no_cache(
    tmp_path: Path, insects: Path
) -> None:
    for image in sorted((insects / "train").rglob("*.png")):
        name = f"{image.parent.name}{image.name}"
        for split in ("train", "test"):
            for link in (
                tmp_path / "fine" / split / image.parent.name / name,
                tmp_path / "coarse" / split / "insect" / name,
            ):
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(image)
    for name, num_classes in (("fine", 2), ("coarse", 1)):
        shared = build("image_folder", tmp_path, path=name).load()
        separate = build("image_folder", tmp_path, tmp_path / f"cache of {name}", path=name).load()
        assert shared.num_classes == len(set(shared.train.y.tolist())) == num_classes
        assert torch.equal(shared.train.y, separate.train.y)
        assert (shared.sha256, shared.fingerprint) == (separate.sha256, separate.fingerprint)


def test_absent_folders_are_named(tmp_path: Path, insects: Path) -> None:
    assert build("image_folder", tmp_path, path="insects").absent() == []
    shutil.rmtree(insects / "test")
    assert build("image_folder", tmp_path, path="insects").absent() == [f"test/ in {insects}"]
    rule = r"dataset\.path=nowhere: is missing train/ in .*nowhere or .*nowhere"
    with pytest.raises(DataError, match=rule):
        build("image_folder", tmp_path, path="nowhere").load()


def test_a_class_without_images_is_named(tmp_path: Path, insects: Path) -> None:
    (insects / "test" / "cow").mkdir()
    rule = rf"dataset\.path: {insects}/test has no images of the classes cow"
    with pytest.raises(DataError, match=rule):
        build("image_folder", tmp_path, path="insects").load()


def test_splits_that_differ_in_their_classes_are_rejected(tmp_path: Path, insects: Path) -> None:
    (insects / "test" / "cow").mkdir()
    Image.new("L", (4, 4)).save(insects / "test" / "cow" / "0.png")
    with pytest.raises(DataError, match="train/ and test/ differ in their classes: cow"):
        build("image_folder", tmp_path, path="insects").load()
