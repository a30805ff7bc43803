"""Digits, MNIST and its relatives, CIFAR: on files that the tests make; the real ones where they
are at hand."""

import hashlib
import pickle
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from sklearn.datasets import load_digits

from fedsim.core.errors import ConfigError, DataError
from fedsim.data import digits, fetch, torchvision_sets
from fedsim.data.base import LoadedData, Samples
from tests.dataset_toys import build, check_sound


def test_shapes_are_known_before_files_are_read(tmp_path: Path) -> None:
    grey = (1, 28, 28)
    forms = {
        "digits": ((1, 8, 8), 10),
        "emnist": (grey, 47),
        "femnist": (grey, 62),
        "cifar100": ((3, 32, 32), 100),
    }
    assert {name: build(name, tmp_path).form() for name in forms} == forms


def test_digits_need_nothing_and_a_fifth_of_each_is_the_test_set(tmp_path: Path) -> None:
    data, again = (build("digits", tmp_path / "absent").load() for _ in range(2))
    check_sound(data)
    assert (len(data.train), len(data.test), data.input_shape) == (1438, 359, (1, 8, 8))
    everything = data.normalise(torch.cat([data.train.x, data.test.x]))
    assert float(everything.mean()) == pytest.approx(0, abs=0.001)
    assert float(everything.std()) == pytest.approx(1, abs=0.001)
    assert data.train.x.max() == 255
    assert torch.equal(data.test.x, again.test.x)
    assert np.array_equal(digits.read_table(), np.column_stack(load_digits(return_X_y=True)))
    totals = np.bincount(data.train.y) + np.bincount(data.test.y)
    assert np.bincount(data.test.y).tolist() == np.round(0.2 * totals).astype(int).tolist()
    assert not list(tmp_path.iterdir())
    code = "import sys; from fedsim.data.digits import Digits; Digits('', '', mean=[0.], std=[1.]).load()"
    subprocess.run(
        [sys.executable, "-c", f"{code}; assert 'sklearn' not in sys.modules"], check=True
    )


@pytest.mark.parametrize(
    ("choice", "values", "problem"),
    [
        (
            "emnist",
            {"split": "klingon"},
            r"dataset\.split='klingon': must be one of byclass, .* for EMNIST",
        ),
        ("mnist", {"split": "letters"}, r"dataset\.split='letters': must be one of null for MNIST"),
        (
            "digits",
            {"mean": [0.5, 0.5]},
            r"dataset\.mean=\[0\.5, 0\.5\]: must have 1 values, one for each channel",
        ),
        ("mnist", {"std": [0.0]}, r"dataset\.std=\[0\.0\]: must be finite and > 0"),
        ("cifar10", {"std": [1.0]}, r"dataset\.std=\[1\.0\]: must have 3 values"),
        ("femnist", {"mean": [float("nan")]}, r"dataset\.mean=\[nan\]: must be finite"),
        (
            "parquet",
            {"path": "x", "mean": [0.5]},
            r"dataset\.std=None: must be null exactly where mean is",
        ),
        (
            "image_folder",
            {"path": "x", "mean": [0.5], "std": [0.5]},
            r"dataset\.mean=\[0\.5\]: must have 3 values",
        ),
        ("image_folder", {"path": ""}, r"dataset\.path='': must name a file or folder"),
        (
            "parquet",
            {"path": "x", "test_fraction": 1.0},
            r"dataset\.test_fraction=1\.0: must lie in \[0, 1\)",
        ),
        (
            "parquet",
            {"path": "x", "sha256": "abc"},
            r"dataset\.sha256='abc': must be null or 64 hexadecimal digits",
        ),
        ("femnist", {"test_fraction": -0.1}, r"dataset\.test_fraction=-0\.1: must lie in \[0, 1\)"),
        (
            "femnist_generated",
            {"classes_per_writer": 11},
            r"classes_per_writer=11: must be at most 10",
        ),
        (
            "femnist_generated",
            {"size_deviation": 1e200},
            r"size_deviation=1e\+200: must lie in \[0, 3\]",
        ),
        (
            "text_generated",
            {"num_speakers": 100_001},
            r"num_speakers=100001: must lie in \[1, 100000\]",
        ),
        (
            "text_generated",
            {"samples_per_speaker": 5e5 + 1},
            r"must be at most 500000",
        ),  # 1e9 characters, texts of 20
        ("text_generated", {"length": 0}, r"length=0: must lie in \[1, 10000\]"),
        ("text_generated", {"test_samples": 50_000_001}, "must be at most 50000000"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(
    tmp_path: Path, choice: str, values: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        build(choice, tmp_path, **values)


# --- MNIST and its relatives ---------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    return (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def write_mnist(
    raw: Path, names: tuple[str, str] = ("train", "t10k"), first_label: int = 0
) -> np.ndarray:
    """20 training and 6 test images; returns the training images."""
    raw.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(0).integers(256, size=(26, 28, 28))
    for name, part in zip(names, (images[:20], images[20:]), strict=True):
        (raw / f"{name}-images-idx3-ubyte").write_bytes(idx(part))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(
            idx(np.arange(len(part)) % 10 + first_label)
        )
    return images[:20]


@pytest.fixture
def any_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of any content pass for MNIST."""
    monkeypatch.delitem(torchvision_sets.MD5, "MNIST")


@pytest.mark.usefixtures("any_mnist")
def test_mnist_is_read_as_torchvision_reads_it(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    data = build("mnist", tmp_path).load()
    check_sound(data)
    for ours, train in ((data.train, True), (data.test, False)):
        theirs = torchvision.datasets.MNIST(str(tmp_path), train=train)
        assert torch.equal(ours.x[:, 0], theirs.data)
        assert torch.equal(ours.y, theirs.targets)


def test_emnist_letters_start_at_zero_and_stand_upright(tmp_path: Path) -> None:
    names = ("emnist-letters-train", "emnist-letters-test")
    stored = write_mnist(tmp_path / "EMNIST" / "raw", names, first_label=1)
    data = build("emnist", tmp_path, split="letters").load()
    check_sound(data)
    assert (data.num_classes, data.train.y[:3].tolist()) == (26, [0, 1, 2])
    assert data.train.x[3, 0].tolist() == stored[3].T.tolist()


@pytest.mark.usefixtures("any_mnist")
def test_a_damaged_file_or_one_of_another_checksum_is_named(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    file = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    sound = file.read_bytes()
    for damaged in (
        sound[:-1],
        sound[:7],
        b"<html>not found</html>" * 9,
        b"",
        idx(np.zeros((20, 27, 28))),
    ):
        file.write_bytes(damaged)
        with pytest.raises(
            DataError,
            match=r"train-images-idx3-ubyte is damaged: expected IDX, .* nx28x28; .*fetch",
        ):
            build("mnist", tmp_path).load()
    write_mnist(tmp_path / "FashionMNIST" / "raw")
    with pytest.raises(
        DataError, match="is damaged: expected md5 f4a8712d7a061bf5bd6d2ca38dc4d50a; delete it"
    ):
        build("fashion_mnist", tmp_path).load()


# --- fetching ------------------------------------------------------------------------------------------------------


def test_without_network_the_files_that_are_missing_are_named_with_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no network\nat all")

    write_mnist(tmp_path / "MNIST" / "raw")
    (tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    monkeypatch.setattr(torchvision_sets, "_fetch", offline)
    for choice, wanted, folder in (
        ("mnist", "t10k-labels-idx1-ubyte", "MNIST/raw"),
        ("emnist", "emnist-balanced-train-images-idx3-ubyte.*", "EMNIST/raw"),
        ("cifar10", "data_batch_1, data_batch_2.*", "cifar-10-batches-py"),
        ("cifar100", "train, test", "cifar-100-python"),
    ):
        told = rf"data_dir=.*: no {wanted} in .*{folder}.*\(no network at all\).*the files there.*FEDSIM_DATA"
        with pytest.raises(DataError, match=told):
            build(choice, tmp_path).load()
    assert len(list((tmp_path / "MNIST" / "raw").iterdir())) == 3, "the others are not kept"


@pytest.mark.parametrize("choice", ["mnist", "cifar10"])
def test_a_server_that_never_answers_is_given_up(
    tmp_path: Path, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "STALL_SECONDS", 0.3)
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts connections and sends nothing
        address = f"http://127.0.0.1:{server.getsockname()[1]}/"
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [address])
        monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", address + "cifar-10-python.tar.gz")
        with pytest.raises(DataError, match=r"fetching failed \(.*timed out"):
            build(choice, tmp_path / "new").load()
    assert socket.getdefaulttimeout() is None


@pytest.mark.usefixtures("any_mnist")
def test_of_several_processes_one_fetches_and_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, together = [], threading.Barrier(4)

    def online(source: str, data_dir: Path) -> None:
        fetched.append(source)
        threading.Event().wait(0.1)
        write_mnist(data_dir / source / "raw")

    def load(_: int) -> None:
        together.wait()
        check_sound(build("mnist", tmp_path / "new").load())

    monkeypatch.setattr(torchvision_sets, "_fetch", online)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(load, range(4)))
    assert fetched == ["MNIST"]
    assert sorted(p.name for p in (tmp_path / "new").iterdir() if p.name[0] != ".") == ["MNIST"]


# --- CIFAR ---------------------------------------------------------------------------------------------------------


def write_cifar(folder: Path, kind: Any, label_key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four images a file, and torchvision's list of checksums to match."""
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(256, size=(4, 3072)).astype(np.uint8)

    def written(name: str, content: dict[str, Any]) -> str:
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    for names, lists in (("train_list", kind.train_list), ("test_list", kind.test_list)):
        listed = [
            [n, written(n, {"data": pixels + i, label_key: [3, 1, 0, i]})]
            for i, (n, _) in enumerate(lists)
        ]
        monkeypatch.setattr(kind, names, listed)
    meta = {kind.meta["key"]: ["a"] * 10}
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": written(kind.meta["filename"], meta)})


@pytest.mark.parametrize(
    ("kind", "key", "classes"),
    [
        (torchvision.datasets.CIFAR10, "labels", 10),
        (torchvision.datasets.CIFAR100, "fine_labels", 100),
    ],
)
def test_cifar_is_read_as_torchvision_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, key: str, classes: int
) -> None:
    write_cifar(tmp_path / kind.base_folder, kind, key, monkeypatch)
    data = build(kind.__name__.lower(), tmp_path).load()
    check_sound(data)
    assert (data.num_classes, data.input_shape) == (classes, (3, 32, 32))
    for ours, train in ((data.train, True), (data.test, False)):
        theirs = kind(str(tmp_path), train=train)
        assert np.array_equal(ours.x.permute(0, 2, 3, 1).numpy(), theirs.data)
        assert ours.y.tolist() == theirs.targets


def test_a_pickle_of_another_checksum_is_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickle, "loads", lambda *_, **__: pytest.fail("a pickle is opened"))
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(pickle.dumps({}))
    with pytest.raises(
        DataError, match="data_batch_1 is damaged: expected md5 c99cafc152244af753f735de768cd75f;"
    ):
        build("cifar10", tmp_path).load()


# --- labels --------------------------------------------------------------------------------------------------------


def labelled(x: Any, y: Any, owners: Any = None, broken: str = "training") -> LoadedData:
    """Two classes; the `broken` split has these samples, labels and owners."""
    sets = {"training": Samples(torch.zeros(3, 2), torch.tensor([0, 1, 1]))} | {
        broken: Samples(x, y)
    }
    return LoadedData(
        sets["training"], sets.get("test", sets["training"]), 2, None, None, "x", owners
    )


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"y": torch.tensor([0, -1, 1])},
            r"labels of the training samples must lie in 0\.\.1, found -1\.\.1",
        ),
        (
            {"y": torch.tensor([0, 2, 1]), "broken": "test"},
            r"labels of the test samples must .* found 0\.\.2",
        ),
        ({"y": torch.zeros(3)}, "labels of the training samples must be int64, not torch.float32"),
        (
            {"x": np.zeros((3, 2)), "broken": "test"},
            "the test samples must be a torch tensor, not ndarray; torch.as_t",
        ),
        (
            {"y": np.zeros(3, np.int64)},
            "the training labels must be a torch tensor, not ndarray; torch.as_tensor makes",
        ),
        (
            {"x": torch.zeros(4, 2)},
            "must have one label .*for each image.*found 4 images, 3 labels",
        ),
        (
            {"x": torch.zeros(0, 2), "y": torch.zeros(0, dtype=torch.int64)},
            "at least one image; found 0 images",
        ),
        ({"owners": np.zeros(2, np.int64)}, "found 3 images, 3 labels, 2 owners"),
    ],
)
def test_unsound_data_sets_are_refused(values: dict[str, Any], told: str) -> None:
    sound = {"x": torch.zeros(3, 2), "y": torch.tensor([0, 1, 1]), "owners": np.zeros(3, np.int64)}
    assert len(labelled(**sound).train) == 3
    with pytest.raises(DataError, match=told):
        labelled(**{**sound, **values})


@pytest.mark.parametrize(
    ("choice", "values", "known"),
    [
        (
            "synthetic",
            {"num_owners": 9, "alpha": 0.5, "beta": 2.0, "seed": 3, "size_deviation": 0.5},
            "d5029e4e022da7a9",
        ),
        (
            "femnist_generated",
            {"num_writers": 9, "style": 0.4, "noise": 0.1, "seed": 3},
            "b85a17e7c0b37849",
        ),
        ("text_generated", {"num_speakers": 9, "style": 0.7, "seed": 3}, "90c51d20427cf444"),
    ],
)
def test_generators_make_the_data_that_they_made(
    tmp_path: Path, choice: str, values: dict[str, Any], known: str
) -> None:
    """Otherwise their GENERATOR_VERSION is to be increased, and `known` is the new fingerprint."""
    assert (
        build(choice, tmp_path, test_samples=90, **values)
        .load()
        .fingerprint.startswith(f"{choice} {known}")
    )
