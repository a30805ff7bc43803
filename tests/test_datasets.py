"""Data sets on files that the tests make; real ones where they lie beside the checkout."""

import io
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torchvision
import yaml
from PIL import Image

from fedsim.data.base import Dataset, LoadedData
from fedsim.data.cache import load_or_build
from fedsim.data.femnist import fetch_hub
from fedsim.errors import ConfigError, DataError
from fedsim.make import make

FOLDER = Path(__file__).parents[1] / "conf" / "dataset"
REAL = Path(__file__).parents[2] / "shared" / "data"


def build(choice: str, data_dir: Path, cache_dir: Path | None = None, **values: Any) -> Dataset:
    node = yaml.safe_load((FOLDER / f"{choice}.yaml").read_text())
    return make({**node, **values}, Dataset, "dataset", data_dir, cache_dir or data_dir / "cache")


def check_sound(data: LoadedData) -> None:
    for samples in (data.train, data.test):
        assert samples.x.dtype == torch.uint8
        assert samples.y.dtype == torch.int64
        assert len(samples.x) == len(samples.y) > 0
        assert int(samples.y.min()) >= 0
        assert int(samples.y.max()) < data.num_classes
    assert data.test.x.shape[1:] == data.train.x.shape[1:]
    assert data.mean is not None
    assert len(data.mean) == data.train.x.shape[1]


def test_digits_need_nothing_and_are_normalised(tmp_path: Path) -> None:
    data = build("digits", tmp_path / "absent").load()
    check_sound(data)
    assert (len(data.train) + len(data.test), data.input_shape) == (1797, (1, 8, 8))
    assert min(np.bincount(data.test.y)) >= 34
    everything = data.normalise(torch.cat([data.train.x, data.test.x]))
    assert float(everything.mean()) == pytest.approx(0, abs=0.001)
    assert float(everything.std()) == pytest.approx(1, abs=0.001)
    assert data.train.x.max() == 255
    assert data.fingerprint == build("digits", tmp_path).load().fingerprint


# --- MNIST and its relatives ---------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_mnist(raw: Path, names: tuple[str, str] = ("train", "t10k"), classes: int = 10) -> None:
    raw.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for name, n in zip(names, (20, 6), strict=True):
        (raw / f"{name}-images-idx3-ubyte").write_bytes(idx(rng.integers(256, size=(n, 28, 28))))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(idx(np.arange(n) % classes))


def test_mnist_files_are_read_from_torchvisions_layout(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    data = build("mnist", tmp_path).load()
    check_sound(data)
    assert data.input_shape == (1, 28, 28)
    ours = data.train.x[:, 0]
    theirs = torchvision.datasets.MNIST(str(tmp_path), train=True).data
    assert torch.equal(ours, theirs)


def test_emnist_letters_start_at_zero_and_stand_upright(tmp_path: Path) -> None:
    raw = tmp_path / "EMNIST" / "raw"
    write_mnist(raw, ("emnist-letters-train", "emnist-letters-test"))
    labels = np.arange(20) % 26 + 1
    (raw / "emnist-letters-train-labels-idx1-ubyte").write_bytes(idx(labels))
    (raw / "emnist-letters-test-labels-idx1-ubyte").write_bytes(idx(labels[:6]))
    data = build("emnist", tmp_path, split="letters").load()
    check_sound(data)
    assert (data.num_classes, int(data.train.y[0])) == (26, 0)
    stored = np.random.default_rng(0).integers(256, size=(20, 28, 28))
    assert data.train.x[3, 0].tolist() == stored[3].T.tolist()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:-1], r"expected 15696 bytes, found 15695 bytes"),
        (lambda content: b"<html>not found</html>" * 9, "expected first bytes 00000803"),
        (lambda content: b"", "expected first bytes"),
        (lambda content: idx(np.zeros((20, 27, 28))), "expected dimensions anyx28x28, found 20x27x28"),
    ],
)
def test_a_damaged_file_is_named_with_what_was_expected_and_found(tmp_path: Path, damage: Any, reason: str) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    file = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=rf"train-images-idx3-ubyte is damaged: {reason}.*fetch it again"):
        build("mnist", tmp_path).load()


def test_fashion_mnist_of_other_content_fails_its_checksum(tmp_path: Path) -> None:
    write_mnist(tmp_path / "FashionMNIST" / "raw")
    with pytest.raises(DataError, match="expected md5 f4a8712d7a061bf5bd6d2ca38dc4d50a, found"):
        build("fashion_mnist", tmp_path).load()


@pytest.mark.parametrize(("choice", "file"), [("mnist", "train-images-idx3-ubyte"), ("cifar10", "data_batch_1")])
def test_absent_data_without_network_say_which_files_go_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, file: str
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("fedsim.data.torchvision_sets._fetch", offline)
    with pytest.raises(DataError, match=rf"data_dir=.*no {file}, .*no network.*FEDSIM_DATA"):
        build(choice, tmp_path).load()


def test_absent_data_are_fetched_where_there_is_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def online(source: str, data_dir: Path, **_: Any) -> None:
        fetched.append(source)
        write_mnist(data_dir / source / "raw")

    monkeypatch.setattr("fedsim.data.torchvision_sets._fetch", online)
    for _ in range(2):
        check_sound(build("mnist", tmp_path / "new").load())
    assert fetched == ["MNIST"]


def test_a_split_that_emnist_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.split='klingon': must be one of byclass"):
        build("emnist", tmp_path, split="klingon")


# --- CIFAR ---------------------------------------------------------------------------------------------------------


def test_cifar_pickles_are_checked_before_they_are_opened(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    marker = tmp_path / "marker"

    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]:
        (folder / name).write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(DataError, match="data_batch_1 is damaged: its md5 is not c99cafc152244af753f735de768cd75f"):
        build("cifar10", tmp_path).load()
    assert not marker.exists()


# --- parquet -------------------------------------------------------------------------------------------------------


def encoded(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def table(n: int, *, grey: bool = False, seed: int = 0, side: int = 6, **columns: Any) -> tuple[pa.Table, np.ndarray]:
    shape = (n, side, side) if grey else (n, side, side, 3)
    pixels = np.random.default_rng(seed).integers(256, size=shape).astype(np.uint8)
    images = pa.array([{"bytes": encoded(p), "path": None} for p in pixels])
    return pa.table({"img": images, "label": [i % 3 for i in range(n)], **columns}), pixels


def test_parquet_splits_by_name_columns_by_type_pixels_exact(tmp_path: Path) -> None:
    (train, pixels), (test, _) = table(12), table(5, seed=1)
    pq.write_table(train, tmp_path / "some-train.parquet")
    pq.write_table(test, tmp_path / "some-test.parquet")
    data = build("parquet", tmp_path, path=str(tmp_path)).load()
    check_sound(data)
    assert (len(data.train), len(data.test), data.num_classes) == (12, 5, 3)
    assert np.array_equal(data.train.x.permute(0, 2, 3, 1).numpy(), pixels)


def test_parquet_shards_in_split_folders_and_relative_to_data_dir(tmp_path: Path) -> None:
    for split, n in (("train", 6), ("validation", 4)):
        (tmp_path / "set" / split).mkdir(parents=True)
        for shard in range(2):
            pq.write_table(table(n, seed=shard)[0], tmp_path / "set" / split / f"{shard:04d}.parquet")
    data = build("parquet", tmp_path, path="set").load()
    assert (len(data.train), len(data.test)) == (12, 8)


def test_parquet_owners_string_labels_bytes_and_a_share_for_testing(tmp_path: Path) -> None:
    whole, pixels = table(20, grey=True, writer_id=[f"w{i % 4}" for i in range(20)])
    whole = whole.drop_columns(["label", "img"])
    whole = whole.append_column("class", pa.array(["cat", "ant"] * 10)).append_column(
        "png", pa.array([encoded(p) for p in pixels])
    )
    pq.write_table(whole, tmp_path / "all.parquet")
    path = str(tmp_path / "all.parquet")
    with pytest.raises(DataError, match=r"dataset\.test_fraction=0\.0: .* has no test split"):
        build("parquet", tmp_path, path=path).load()
    data = build("parquet", tmp_path, path=path, test_fraction=0.25, client_column="writer_id").load()
    assert (len(data.train), len(data.test), data.input_shape) == (15, 5, (1, 6, 6))
    assert data.owners is not None
    assert len(data.owners) == 15
    by_bytes = {p.tobytes(): i for i, p in enumerate(pixels)}
    for image, label, owner in zip(data.train.x, data.train.y, data.owners, strict=True):
        i = by_bytes[image[0].numpy().tobytes()]
        assert (int(label), int(owner)) == ((i + 1) % 2, i % 4)  # ant 0, cat 1


def test_parquet_is_decoded_once_and_again_when_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.parquet"
    decoded = []
    monkeypatch.setattr(
        "fedsim.data.parquet.decode", lambda *a, **k: decoded.append(1) or torch.zeros(12, 1, 2, 2, dtype=torch.uint8)
    )
    for seed, expected in ((0, 1), (0, 1), (1, 2)):
        pq.write_table(table(12, seed=seed)[0], path)
        build("parquet", tmp_path, path=str(path), test_fraction=0.5).load()
        assert len(decoded) == expected


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"path": "nowhere"}, r"dataset\.path=nowhere: no parquet file at"),
        ({"label_column": "lable"}, r"dataset\.label_column=lable: the columns are img, label"),
        ({"client_column": "who"}, r"dataset\.client_column=who: the columns are"),
    ],
)
def test_parquet_mistakes_are_named(tmp_path: Path, values: dict[str, Any], reason: str) -> None:
    pq.write_table(table(12)[0], tmp_path / "train.parquet")
    with pytest.raises(DataError, match=reason):
        build("parquet", tmp_path, **{"path": str(tmp_path), "test_fraction": 0.5, **values}).load()


def test_parquet_damage_and_images_of_several_sizes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"train\.parquet is no sound parquet file"):
        build("parquet", tmp_path, path=str(path), test_fraction=0.5).load()
    mixed = pa.concat_tables([table(4)[0], table(4, side=7)[0]])
    pq.write_table(mixed, path)
    with pytest.raises(DataError, match=r"has 7x7 pixels and the first 6x6; set dataset\.size"):
        build("parquet", tmp_path, path=str(path), test_fraction=0.5).load()
    assert build("parquet", tmp_path, path=str(path), test_fraction=0.5, size=5).load().input_shape == (3, 5, 5)
    broken = table(4)[0].to_pydict()
    broken["img"][2]["bytes"] = b"not an image"
    pq.write_table(pa.table(broken), path)
    with pytest.raises(DataError, match=r"image \d cannot be decoded"):
        build("parquet", tmp_path, path=str(path), test_fraction=0.25).load()


# --- FEMNIST -------------------------------------------------------------------------------------------------------


def write_leaf(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        users = {f"f{w:04d}": {"x": rng.random((5, 784)).round(3).tolist(), "y": [w, 1, 12, 61, 9]} for w in range(3)}
        content = {"users": list(users), "num_samples": [5] * 3, "user_data": users}
        (folder / split / "all_data_0.json").write_text(json.dumps(content))


def test_leafs_files_give_writers_and_digits_can_be_picked(tmp_path: Path) -> None:
    write_leaf(tmp_path / "femnist")
    data = build("femnist", tmp_path, source="leaf").load()
    check_sound(data)
    assert (len(data.train), data.num_classes, data.input_shape) == (15, 62, (1, 28, 28))
    assert data.owners is not None
    assert np.bincount(data.owners).tolist() == [5, 5, 5]
    digits = build("femnist", tmp_path, source="leaf", classes="digits").load()
    assert (len(digits.train), digits.num_classes, int(digits.train.y.max())) == (9, 10, 9)
    assert digits.owners is not None
    assert np.bincount(digits.owners).tolist() == [3, 3, 3]


def test_leafs_absent_or_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dataset\.source=leaf: no JSON file in .*femnist/train"):
        build("femnist", tmp_path, source="leaf").load()
    write_leaf(tmp_path / "femnist")
    (tmp_path / "femnist" / "train" / "all_data_0.json").write_text("{}")
    with pytest.raises(DataError, match=r"all_data_0\.json is not a sound LEAF file"):
        build("femnist", tmp_path, source="leaf").load()


def test_femnist_of_the_hub_is_fetched_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "femnist"
    whole, _ = table(20, grey=True, side=28, writer_id=[f"w{i % 4}" for i in range(20)])
    buffer = io.BytesIO()
    pq.write_table(whole.rename_columns(["image", "character", "writer_id"]), buffer)
    answers = {"first": buffer.getvalue()}

    def get(address: str) -> bytes:
        if address not in answers and "api" not in address:
            raise OSError("cut off")
        return answers.get(address) or json.dumps(["first", "second"]).encode()

    with pytest.raises(DataError, match=r"fetching flwrlabs/femnist failed \(cut off\).*dataset\.source=leaf"):
        fetch_hub(folder, get)
    assert not list(folder.glob("*")) if folder.exists() else True
    answers["second"] = answers["first"]
    fetch_hub(folder, get)
    data = build("femnist", tmp_path, test_fraction=0.1).load()
    check_sound(data)
    assert (len(data.train), len(data.test)) == (36, 4)
    assert data.owners is not None
    assert len(np.unique(data.owners)) == 4


# --- folders of images ---------------------------------------------------------------------------------------------


def test_image_folders_are_scaled_and_their_classes_named_alphabetically(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for c, name in enumerate(("ant", "bee")):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (10 + i, 12), (200 * c, 0, 0)).save(tmp_path / split / name / f"{i}.png")
    data = build("image_folder", tmp_path, path=str(tmp_path), size=8).load()
    check_sound(data)
    assert (data.num_classes, data.input_shape, len(data.train)) == (2, (3, 8, 8), 6)
    assert data.train.x[data.train.y == 1][:, 0].unique().tolist() == [200]
    assert build("image_folder", tmp_path, path=str(tmp_path), size=8, grey=True).load().input_shape == (1, 8, 8)
    (tmp_path / "test" / "cow").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "test" / "cow" / "0.png")
    with pytest.raises(DataError, match="differ in their classes: cow"):
        build("image_folder", tmp_path, path=str(tmp_path)).load()
    with pytest.raises(DataError, match=r"dataset\.path=nowhere: no folder train/"):
        build("image_folder", tmp_path, path="nowhere").load()


# --- the cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [3, 60, -1])
def test_a_damaged_cache_is_never_used(tmp_path: Path, position: int) -> None:
    path, built = tmp_path / "deep" / "x.safetensors", []

    def make_it() -> dict[str, torch.Tensor]:
        built.append(1)
        return {"a": torch.arange(100), "empty": torch.zeros(0)}

    for _ in range(2):
        assert torch.equal(load_or_build(path, make_it)["a"], torch.arange(100))
    assert len(built) == 1
    content = bytearray(path.read_bytes())
    content[position] ^= 0x55
    path.write_bytes(content)
    assert torch.equal(load_or_build(path, make_it)["a"], torch.arange(100))
    assert len(built) == 2
    assert not list(path.parent.glob("*.tmp"))


def test_a_cache_folder_that_cannot_be_written_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cache_dir: cannot write .*FEDSIM_CACHE"):
        load_or_build(tmp_path / "file" / "x.safetensors", lambda: {})


# --- real data -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not (REAL / "FashionMNIST").is_dir(), reason="Fashion-MNIST is not beside the checkout")
def test_real_fashion_mnist() -> None:
    data = build("fashion_mnist", REAL).load()
    check_sound(data)
    assert np.bincount(data.train.y).tolist() == [6000] * 10
    assert np.bincount(data.test.y).tolist() == [1000] * 10


@pytest.mark.skipif(not (REAL / "cifar10").is_dir(), reason="CIFAR-10 is not beside the checkout")
def test_real_cifar10_in_parquet(tmp_path: Path) -> None:
    data = build("parquet", REAL, tmp_path, path="cifar10").load()
    check_sound(data)
    assert data.input_shape == (3, 32, 32)
    assert np.bincount(data.train.y).tolist() == [5000] * 10
    assert np.bincount(data.test.y).tolist() == [1000] * 10
