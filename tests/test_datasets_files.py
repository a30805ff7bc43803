"""Parquet files in the Hub's layout, folders of images; checksums, and files that are damaged or
hostile: nothing is trained on them, nothing hangs, nothing in them is run."""

import hashlib
import json
import os
import shutil
import subprocess
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
from fedsim.data import images, parquet
from fedsim.data.base import LoadedData
from fedsim.data.images import decode
from tests.dataset_toys import build, check_sound, encoded, table


def test_splits_are_told_by_name_columns_by_type_and_pixels_are_exact(tmp_path: Path) -> None:
    (train, pixels), (test, test_pixels) = table(12), table(5, seed=1)
    pq.write_table(train, tmp_path / "constraints-train.parquet")
    pq.write_table(test, tmp_path / "constraints-test.parquet")
    data = build("parquet", tmp_path, path=str(tmp_path)).load()
    check_sound(data)
    assert (data.num_classes, data.mean, data.std) == (3, (0.5,) * 3, (0.5,) * 3)
    assert np.array_equal(data.train.x.permute(0, 2, 3, 1).numpy(), pixels)
    assert np.array_equal(data.test.x.permute(0, 2, 3, 1).numpy(), test_pixels)
    assert data.train.y.tolist() == [i % 3 for i in range(12)]


def write_shards(folder: Path, split: str, rows: int, shards: tuple[int, ...], count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for shard in shards:
        pq.write_table(
            table(rows, seed=shard)[0], folder / f"{split}-{shard:05d}-of-{count:05d}.parquet"
        )


def test_shards_are_read_in_order_and_a_test_split_goes_before_a_validation_split(
    tmp_path: Path,
) -> None:
    write_shards(tmp_path / "set" / "data", "train", 6, (0, 1), 2)
    write_shards(tmp_path / "set" / "data", "validation", 4, (0,), 1)
    data = build("parquet", tmp_path, path="set").load()
    assert (len(data.train), len(data.test)) == (12, 4)
    assert np.array_equal(data.train.x[6:].permute(0, 2, 3, 1).numpy(), table(6, seed=1)[1])
    for split, rows in (("train", 6), ("valid", 5), ("test", 4)):
        (tmp_path / "folders" / split).mkdir(parents=True)
        pq.write_table(table(rows)[0], tmp_path / "folders" / split / "0000.parquet")
    data = build("parquet", tmp_path / "elsewhere", path=str(tmp_path / "folders")).load()
    assert (len(data.train), len(data.test)) == (6, 4)


def test_absent_files_and_shards_are_named_without_reading_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_open", lambda *_: pytest.fail("files are read"))
    absent = build("parquet", tmp_path, path="set").absent()
    assert absent == [f"a parquet file at {Path('set').absolute()} or {tmp_path / 'set'}"]
    write_shards(tmp_path / "set", "train", 3, (0, 2), 4)
    absent = build("parquet", tmp_path, path="set").absent()
    assert absent == [f"shards 1, 3 of the 4 of 'train' in {tmp_path / 'set'}"]
    with pytest.raises(
        DataError, match=r"path=set: is missing shards 1, 3 of the 4 of 'train' in .*; correct"
    ):
        build("parquet", tmp_path, path="set").load()
    monkeypatch.undo()
    write_shards(tmp_path / "set", "train", 3, (1, 3), 4)
    assert build("parquet", tmp_path, path="set").absent() == []
    for name in ("extra", "train-test"):
        (tmp_path / name).mkdir()
        for file in ("train", name):
            pq.write_table(table(4)[0], tmp_path / name / f"{file}.parquet")
        with pytest.raises(
            DataError,
            match=rf"{name}\.parquet: its name, or its folder's, must have a word of one split",
        ):
            build("parquet", tmp_path, path=name).load()


@pytest.fixture
def lone(tmp_path: Path) -> Path:
    """20 grey images in one file, as bytes, with string labels in a dictionary and owners."""
    rows, pixels = table(20, grey=True, writer_id=[f"w{i % 4}" for i in range(20)])
    rows = rows.drop_columns(["label", "img"]).append_column(
        "class", pa.array(["cat", "ant"] * 10).dictionary_encode()
    )
    rows = rows.append_column("png", pa.array([encoded(p) for p in pixels]))
    pq.write_table(rows, tmp_path / "all.parquet")
    return tmp_path / "all.parquet"


def test_owners_string_labels_bytes_and_a_share_for_testing(tmp_path: Path, lone: Path) -> None:
    data = build(
        "parquet", tmp_path, path=str(lone), test_fraction=0.25, client_column="writer_id"
    ).load()
    check_sound(data)
    assert (len(data.train), len(data.test), data.input_shape) == (15, 5, (1, 6, 6))
    position = {p.tobytes(): i for i, p in enumerate(table(20, grey=True)[1])}
    train = [position[x.numpy().tobytes()] for x in data.train.x]
    test = [position[x.numpy().tobytes()] for x in data.test.x]
    assert sorted(train + test) == list(range(20))
    assert data.train.y.tolist() == [(i + 1) % 2 for i in train]  # ant 0, cat 1
    assert data.test.y.tolist() == [(i + 1) % 2 for i in test]
    assert data.owners is not None
    assert data.owners.tolist() == [i % 4 for i in train]
    assert data.test_owners is not None
    assert data.test_owners.tolist() == [i % 4 for i in test]
    with pytest.raises(
        DataError, match=r"dataset\.test_fraction=0\.0: .* has no test split.* its 20 rows"
    ):
        build("parquet", tmp_path, path=str(lone)).load()
    with pytest.raises(
        ConfigError, match=r"dataset\.mean=\[0\.5, 0\.5, 0\.5\]: must have 1 values"
    ):
        build(
            "parquet", tmp_path, path=str(lone), test_fraction=0.25, mean=[0.5] * 3, std=[0.5] * 3
        ).load()


def test_owners_of_test_rows_have_the_numbers_of_the_training_rows_if_there_are_any(
    tmp_path: Path,
) -> None:
    pq.write_table(table(4, who=[7, 5, 7, 9])[0], tmp_path / "train.parquet")
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"who": [9, 4, 5, 6, 10]}, [2, -1, 0, -1, -1]),
        ({}, None),
    ]
    for who, expected in cases:
        pq.write_table(table(5, **who)[0], tmp_path / "test.parquet")
        data = build("parquet", tmp_path, path=str(tmp_path), client_column="who").load()
        assert data.owners is not None
        assert data.owners.tolist() == [1, 0, 1, 2]
        assert (None if data.test_owners is None else data.test_owners.tolist()) == expected


def test_the_hubs_description_tells_the_number_of_classes(tmp_path: Path) -> None:
    features = {"label": {"names": ["a", "b", "c", "d", "e"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table(6)[0].replace_schema_metadata(metadata), tmp_path / "train.parquet")
    assert build("parquet", tmp_path, path=str(tmp_path), test_fraction=0.5).load().num_classes == 5


def test_decoded_once_and_again_when_content_or_split_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, original = [], parquet.decode
    monkeypatch.setattr(parquet, "decode", lambda *a, **k: decoded.append(1) or original(*a, **k))
    for folder in ("1-train", "2-test"):
        (tmp_path / "set" / folder).mkdir(parents=True)
        pq.write_table(table(6, seed=len(folder))[0], tmp_path / "set" / folder / "0.parquet")

    def load(**values: Any) -> str:
        return build("parquet", tmp_path, path="set", **values).load().fingerprint

    first = load()
    assert (load(), len(decoded)) == (first, 1)
    (tmp_path / "set" / "1-train").rename(tmp_path / "set" / "1-test")
    (tmp_path / "set" / "2-test").rename(tmp_path / "set" / "2-train")
    second = load()
    pq.write_table(table(6, seed=9)[0], tmp_path / "set" / "2-train" / "0.parquet")
    prints = {first, second, load(), load(size=4)}
    assert (len(prints), len(decoded)) == (4, 4)
    (tmp_path / "set").rename(tmp_path / "moved")
    assert build("parquet", tmp_path, path="moved", size=4).load().fingerprint in prints
    assert len(decoded) == 4


def test_mistakes_are_named(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    paths = pa.array([{"bytes": None, "path": "x.png"}] * 12, kind)
    rows, _ = table(
        12,
        odd=[0.5] * 12,
        gaps=[1] + [None] * 11,
        minus=[-1] * 12,
        paths=paths,
        many=[0, *[10**6] * 11],
    )
    path = tmp_path / "train.parquet"
    pq.write_table(rows, path)
    for key, value, told in (
        ("path", "nowhere", "is missing a parquet file at .*nowhere or .*nowhere"),
        (
            "label_column",
            "lable",
            rf"the columns are img, label, .* in {path}, and none of them may be meant; set it",
        ),
        ("label_column", "odd", "must hold integers or strings, not double"),
        ("label_column", "gaps", "11 of its 12 values are missing"),
        (
            "label_column",
            "minus",
            "12 of 12 labels are -1, as in a test split that hides them; move its files away",
        ),
        (
            "label_column",
            "many",
            r"labels are numbers of classes and must lie in 0\.\.999999, found 0\.\.1000000",
        ),
        ("client_column", "who", "no file has this column"),
        (
            "image_column",
            "label",
            f"must hold the encoded images themselves in every row, not int64 as in {path}",
        ),
        (
            "image_column",
            "paths",
            f"must hold the encoded images themselves in every row; 12 are missing in {path}",
        ),
    ):
        values = {"path": str(tmp_path), "test_fraction": 0.5, "image_column": "img", key: value}
        with pytest.raises(DataError, match=rf"dataset\.{key}={value}: {told}"):
            build("parquet", tmp_path, **values).load()


def write_images(path: Path, *images: bytes) -> None:
    pq.write_table(pa.table({"image": list(images), "label": [0] * len(images)}), path)


GREY, COLOUR = np.full((6, 6), 7, np.uint8), np.full((6, 6, 3), (1, 2, 3), np.uint8)


def test_one_colour_image_makes_all_of_them_colour_images_and_one_size_all_of_that_size(
    tmp_path: Path,
) -> None:
    for first in (GREY, COLOUR):
        write_images(
            tmp_path / "train.parquet", *[encoded(first)] * 600, encoded(GREY), encoded(COLOUR)
        )
        write_images(tmp_path / "test.parquet", encoded(GREY))
        data = build("parquet", tmp_path, path=str(tmp_path)).load()
        assert data.input_shape == (3, 6, 6)
        assert data.train.x[-2:, :, 0, 0].tolist() == [[7, 7, 7], [1, 2, 3]]
    (tmp_path / "test.parquet").unlink()
    write_images(tmp_path / "train.parquet", encoded(GREY), encoded(np.full((7, 5), 9, np.uint8)))
    data = build("parquet", tmp_path, path=str(tmp_path), test_fraction=0.5, size=4).load()
    assert data.input_shape == (1, 4, 4)
    assert sorted([*data.train.x.unique().tolist(), *data.test.x.unique().tolist()]) == [7, 9]


def test_unsound_images_and_unsound_empty_or_unlike_tables_are_named(tmp_path: Path) -> None:
    def load() -> None:
        build("parquet", tmp_path, path=str(tmp_path), test_fraction=0.5).load()

    for reason, contents in {
        "image 0 cannot be decoded": [b"not an image"],
        "image 1 cannot be decoded": [encoded(GREY), encoded(GREY)[:-30]],
        "image 1 has 5x7 pixels and the first 6x6; set": [
            encoded(GREY),
            encoded(np.zeros((7, 5), np.uint8)),
        ],
        "image 0 has more than 8 bits per pixel": [encoded(np.full((6, 6), 60000, np.uint16))],
    }.items():
        write_images(tmp_path / "train.parquet", *contents, encoded(GREY))
        with pytest.raises(DataError, match=rf"dataset\.path=.*: {reason}"):
            load()
    train, test = tmp_path / "train.parquet", tmp_path / "test.parquet"
    pq.write_table(table(4)[0], train)
    pq.write_table(table(4)[0].slice(0, 0), test)
    with pytest.raises(DataError, match="the test split has no rows"):
        load()
    pq.write_table(table(4)[0].set_column(1, "label", pa.array(["a"] * 4)), test)
    differ = rf"{test}: a column differs from .*label has incompatible types: int64 vs string\); write the files"
    with pytest.raises(DataError, match=differ):
        load()
    for content in (b"<html>", b"", train.read_bytes()[:-9]):
        train.write_bytes(content)
        with pytest.raises(DataError, match=r"train\.parquet is no sound parquet file"):
            load()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 6\n%%EndComments\n%%EndProlog\nshowpage\n%%EOF\n"


def test_an_eps_file_named_png_starts_no_other_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("Ghostscript is asked for")
    )
    write_images(tmp_path / "all.parquet", EPS, EPS)
    with pytest.raises(
        DataError, match=r"image 0 cannot be decoded \(in none of the formats PNG, JPEG"
    ):
        load_lone(tmp_path / "all.parquet")


def test_a_flipped_bit_in_a_png_is_found_by_its_checksum() -> None:
    sound = encoded((np.add.outer(np.arange(64), np.arange(64)) * 3 % 256).astype(np.uint8))
    for position in range(sound.index(b"IDAT") + 4, sound.index(b"IEND") - 8):
        damaged = bytearray(sound)
        damaged[position] ^= 4
        with pytest.raises(DataError, match="toy: image 0 cannot be decoded"):
            decode(bytes, [bytes(damaged)], mode="L", size=None, name="toy")


# --- checksums -----------------------------------------------------------------------------------------------------


def load_lone(path: Path, **values: Any) -> LoadedData:
    return build("parquet", path.parent, path=str(path), test_fraction=0.5, **values).load()


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def test_a_parquet_file_of_another_checksum_is_refused_and_several_have_that_of_sha256sum(
    tmp_path: Path,
) -> None:
    path = tmp_path / "all.parquet"
    pq.write_table(table(40)[0], path)
    sound = hashlib.sha256(path.read_bytes()).hexdigest()
    assert load_lone(path).sha256 == load_lone(path, sha256=sound).sha256 == sound
    flip(path, 1000)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(DataError, match=rf"dataset\.sha256={sound}: the files of .* have {found}"):
        load_lone(path, sha256=sound)
    (tmp_path / "set" / "b").mkdir(parents=True)
    pq.write_table(table(6)[0], tmp_path / "set" / "b" / "train.parquet")
    pq.write_table(table(4, seed=1)[0], tmp_path / "set" / "a-test.parquet")
    data = build("parquet", tmp_path, path="set").load()
    command = "sha256sum a-test.parquet b/train.parquet | sha256sum"
    printed = subprocess.run(
        command, shell=True, cwd=tmp_path / "set", capture_output=True, text=True, check=True
    )
    assert data.sha256 == printed.stdout.split()[0]


def test_page_checksums_are_verified_where_a_file_has_them(tmp_path: Path) -> None:
    """Labels are not compressed here: without the checksum of their page a flipped bit is another
    label."""
    path = tmp_path / "all.parquet"
    rows = table(40)[0].set_column(1, "label", pa.array([7] * 39 + [1], pa.int64()))
    for checked in (False, True):
        pq.write_table(
            rows, path, compression="none", use_dictionary=False, write_page_checksum=checked
        )
        flip(path, path.read_bytes().index(np.full(39, 7, "<i8").tobytes()))
        if not checked:
            data = load_lone(path)
            assert 3 in torch.cat([data.train.y, data.test.y])
    with pytest.raises(DataError, match=r"all\.parquet is no sound parquet file .*fetch it again"):
        load_lone(path)


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
        with pytest.raises(
            DataError, match=rf"dataset\.sha256=0{{64}}: the files of .* have {found}"
        ):
            build(choice, tmp_path, **values, sha256="0" * 64).load()
    assert hash_config({"dataset": {"path": "x", "sha256": None}}) == hash_config(
        {"dataset": {"path": "x"}}
    )
    assert hash_config({"dataset": {"path": "x", "sha256": "0"}}) != hash_config(
        {"dataset": {"path": "x"}}
    )


# --- what is no file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_pipes_and_dangling_links_are_named_and_not_read(tmp_path: Path, kind: str) -> None:
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "rows/train.parquet": ("parquet", {"path": "rows"}),
        "set/train/ant/0.png": ("image_folder", {"path": "set"}),
        "femnist/train/0.json": ("femnist", {"source": "leaf"}),
        "MNIST/raw/train-labels-idx1-ubyte": ("mnist", {}),
    }
    for name, (choice, values) in cases.items():
        for split in (name, name.replace("train", "test")):
            file = tmp_path / split
            file.parent.mkdir(parents=True, exist_ok=True)
            os.mkfifo(file) if kind == "pipe" else file.symlink_to(tmp_path / "nowhere")
        either = name.replace("train", "t(rain|est)")
        with pytest.raises(
            DataError, match=rf"{either} is no regular file, nor a link to one; remove it"
        ):
            build(choice, tmp_path, **values).load()


# --- folders of images, one folder a class -------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Ants of red 0 and bees of red 200, three each in each split, of several sizes."""
    root = tmp_path / "insects"
    for split in ("train", "test"):
        for number, name in enumerate(("ant", "bee")):
            (root / split / name).mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (10 + i, 12), (200 * number, 0, 0)).save(
                    root / split / name / f"{i}.png"
                )
    return root


def test_images_are_scaled_and_classes_numbered_alphabetically(
    tmp_path: Path, folders: Path
) -> None:
    data = build("image_folder", tmp_path, path="insects", size=8).load()
    check_sound(data)
    assert (data.num_classes, data.input_shape, len(data.train), len(data.test)) == (
        2,
        (3, 8, 8),
        6,
        6,
    )
    for y, red in ((0, 0), (1, 200)):
        assert data.train.x[data.train.y == y][:, 0].unique().tolist() == [red]
    grey = build("image_folder", tmp_path, path=str(folders), size=8, grey=True).load()
    assert (grey.input_shape, grey.mean) == ((1, 8, 8), (0.5,))
    assert grey.fingerprint != data.fingerprint


def test_a_folder_is_decoded_once_and_its_fingerprint_is_its_content(
    tmp_path: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, original = [], images.decode
    monkeypatch.setattr(images, "decode", lambda *a, **k: decoded.append(1) or original(*a, **k))
    first = build("image_folder", tmp_path, path="insects").load().fingerprint
    assert build("image_folder", tmp_path, path="insects").load().fingerprint == first
    assert len(decoded) == 2
    folders.rename(tmp_path / "moved")
    assert build("image_folder", tmp_path, path="moved").load().fingerprint == first
    Image.new("RGB", (9, 9)).save(tmp_path / "moved" / "train" / "bee" / "0.png")
    changed = build("image_folder", tmp_path, path="moved").load()
    assert changed.fingerprint != first
    assert 0 in changed.train.x[changed.train.y == 1][:, 0]


def test_links_to_the_same_images_with_other_labels_share_no_cache(
    tmp_path: Path, folders: Path
) -> None:
    for name in ("fine", "coarse"):
        for image in sorted((folders / "train").rglob("*.png")):
            for split in ("train", "test"):
                label = image.parent.name if name == "fine" else "insect"
                (tmp_path / name / split / label).mkdir(parents=True, exist_ok=True)
                (tmp_path / name / split / label / f"{image.parent.name}{image.name}").symlink_to(
                    image
                )
    for name in ("fine", "coarse"):
        data = build("image_folder", tmp_path, path=name).load()
        alone = build("image_folder", tmp_path, tmp_path / f"cache of {name}", path=name).load()
        assert data.num_classes == alone.num_classes == len(set(data.train.y.tolist()))
        assert torch.equal(data.train.y, alone.train.y)
        assert (data.sha256, data.fingerprint) == (alone.sha256, alone.fingerprint)


def test_folders_that_are_absent_or_differ_in_their_classes_are_named(
    tmp_path: Path, folders: Path
) -> None:
    with pytest.raises(
        DataError, match=r"dataset\.path=nowhere: is missing train/ in .*nowhere or .*nowhere"
    ):
        build("image_folder", tmp_path, path="nowhere").load()
    assert build("image_folder", tmp_path, path="insects").absent() == []
    (folders / "test" / "cow").mkdir()
    with pytest.raises(
        DataError, match=rf"dataset\.path: {folders}/test has no images of the classes cow"
    ):
        build("image_folder", tmp_path, path="insects").load()
    Image.new("L", (4, 4)).save(folders / "test" / "cow" / "0.png")
    with pytest.raises(DataError, match="train/ and test/ differ in their classes: cow"):
        build("image_folder", tmp_path, path="insects").load()
    shutil.rmtree(folders / "test")
    assert build("image_folder", tmp_path, path="insects").absent() == [f"test/ in {folders}"]
