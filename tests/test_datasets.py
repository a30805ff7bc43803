"""Digits, MNIST and its relatives, and CIFAR, in files that the tests write."""

import pickle
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torchvision
from sklearn.datasets import load_digits

from fedsim.core.errors import ConfigError, DataError
from fedsim.data import digits, fetch, torchvision_sets
from fedsim.data.base import LoadedData, Samples
from tests.dataset_toys import build, check_sound, idx, write_cifar, write_mnist


@pytest.mark.parametrize(
    ("choice", "form"),
    [
        ("digits", ((1, 8, 8), 10)),
        ("emnist", ((1, 28, 28), 47)),
        ("femnist", ((1, 28, 28), 62)),
        ("cifar100", ((3, 32, 32), 100)),
    ],
)
def test_shapes_are_known_before_files_are_read(
    tmp_path: Path, choice: str, form: tuple[Any, int]
) -> None:
    assert build(choice, tmp_path).form() == form


@pytest.mark.parametrize(
    ("choice", "values", "rule"),
    [
        ("emnist", {"split": "x"}, r"split='x': must be one of byclass, .* for EMNIST"),
        ("mnist", {"split": "letters"}, r"split='letters': must be one of null for MNIST"),
        ("digits", {"mean": [0.5, 0.5]}, r"mean=.*: must have 1 values, one for each channel"),
        ("mnist", {"std": [0.0]}, r"std=\[0\.0\]: must be finite and > 0"),
        ("cifar10", {"std": [1.0]}, r"std=\[1\.0\]: must have 3 values"),
        ("femnist", {"mean": [float("nan")]}, r"mean=\[nan\]: must lie in \[0, 1\]"),
        (
            "cifar10",
            {"mean": [125.3, 123, 113.9]},
            r"mean=.*: must lie in .*\n    divide it by 255",
        ),
        ("parquet", {"mean": [0.5]}, "std=None: must be null exactly where mean is"),
        ("image_folder", {"mean": [0.5], "std": [0.5]}, r"mean=\[0\.5\]: must have 3 values"),
        ("image_folder", {"path": ""}, "path='': must name a file or folder"),
        ("parquet", {"test_fraction": 1.0}, r"test_fraction=1\.0: must lie in \[0, 1\)"),
        ("parquet", {"sha256": "abc"}, "sha256='abc': must be null or 64 hexadecimal digits"),
        ("femnist", {"test_fraction": -0.1}, r"test_fraction=-0\.1: must lie in \[0, 1\)"),
        ("femnist_generated", {"classes_per_writer": 11}, "r_writer=11: must be at most 10"),
        ("femnist_generated", {"size_deviation": 1e200}, r"1e\+200: must lie in \[0, 3\]"),
        ("text_generated", {"num_speakers": 100_001}, r"100001: must lie in \[1, 100000\]"),
        # A split has at most 10^9 characters in texts of 20.
        ("text_generated", {"samples_per_speaker": 5e5 + 1}, "must be at most 500000"),
        ("text_generated", {"test_samples": 50_000_001}, "must be at most 50000000"),
        ("text_generated", {"length": 0}, r"length=0: must lie in \[1, 10000\]"),
    ],
)
def test_parameters_out_of_range_are_rejected_with_their_key(
    tmp_path: Path, choice: str, values: dict[str, Any], rule: str
) -> None:
    if choice in ("parquet", "image_folder"):
        values = {"path": "x"} | values
    with pytest.raises(ConfigError, match=rf"dataset\..*{rule}"):
        build(choice, tmp_path, **values)


@pytest.mark.parametrize(
    ("choice", "values", "fingerprint"),
    [
        (
            "synthetic",
            {"num_owners": 9, "alpha": 0.5, "beta": 2.0, "size_deviation": 0.5},
            "d5029e4e022da7a9",
        ),
        ("femnist_generated", {"num_writers": 9, "style": 0.4, "noise": 0.1}, "b85a17e7c0b37849"),
        ("text_generated", {"num_speakers": 9, "style": 0.7}, "90c51d20427cf444"),
    ],
)
def test_generators_still_generate_the_same_data(
    tmp_path: Path, choice: str, values: dict[str, Any], fingerprint: str
) -> None:
    """If this change is meant, increase GENERATOR_VERSION and insert the new fingerprint."""
    data = build(choice, tmp_path, test_samples=90, seed=3, **values).load()
    assert data.fingerprint.startswith(f"{choice} {fingerprint}")


@pytest.mark.parametrize(
    ("choice", "size", "change"),
    [
        ("femnist_generated", {"num_writers": 9}, {"seed": 1}),
        ("femnist_generated", {"num_writers": 9}, {"style": 0.1}),
        ("femnist_generated", {"num_writers": 9}, {"noise": 0.1}),
        ("text_generated", {"num_speakers": 9}, {"seed": 1}),
    ],
)
def test_generated_data_are_cached_by_their_parameters(
    tmp_path: Path, choice: str, size: dict[str, int], change: dict[str, float]
) -> None:
    fingerprints = []
    for values in (size, size, size | change):
        fingerprints.append(build(choice, tmp_path, **values).load().fingerprint)
    generated, cached, changed = fingerprints
    assert generated == cached != changed


# --- digits --------------------------------------------------------------------------------------


def test_digits_are_sklearns() -> None:
    images_and_labels = load_digits(return_X_y=True)
    assert np.array_equal(digits.read_table(), np.column_stack(images_and_labels))


def test_a_fifth_of_each_digit_is_the_test_set(tmp_path: Path) -> None:
    data = build("digits", tmp_path).load()
    check_sound(data)
    assert (len(data.train), len(data.test), data.input_shape) == (1438, 359, (1, 8, 8))
    test_counts = np.bincount(data.test.y)
    totals = np.bincount(data.train.y) + test_counts
    assert test_counts.tolist() == np.round(0.2 * totals).tolist()
    assert torch.equal(data.test.x, build("digits", tmp_path).load().test.x)


def test_normalised_digits_have_mean_0_and_deviation_1(tmp_path: Path) -> None:
    data = build("digits", tmp_path).load()
    assert data.train.tensor.max() == 255
    pixels = data.normalise(torch.cat([data.train.tensor, data.test.tensor]))
    assert float(pixels.mean()) == pytest.approx(0, abs=0.001)
    assert float(pixels.std()) == pytest.approx(1, abs=0.001)


def test_digits_need_neither_files_nor_sklearn(tmp_path: Path) -> None:
    code = """
        import sys
        from fedsim.data.digits import Digits
        Digits("absent", "absent", mean=[0.0], std=[1.0]).load()
        assert "sklearn" not in sys.modules
    """
    script = code.replace("\n        ", "\n")
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


# --- MNIST and its relatives ---------------------------------------------------------------------


@pytest.fixture
def any_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept any checksum of MNIST's files."""
    monkeypatch.delitem(torchvision_sets.MD5, "MNIST")


@pytest.mark.usefixtures("any_mnist")
def test_mnist_is_read_as_torchvision_reads_it(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    data = build("mnist", tmp_path).load()
    check_sound(data)
    for samples, train in ((data.train, True), (data.test, False)):
        theirs = torchvision.datasets.MNIST(str(tmp_path), train=train)
        assert torch.equal(samples.tensor[:, 0], theirs.data)
        assert torch.equal(samples.y, theirs.targets)


def test_emnists_letters_begin_at_0_and_are_upright(tmp_path: Path) -> None:
    names = ("emnist-letters-train", "emnist-letters-test")
    images = write_mnist(tmp_path / "EMNIST" / "raw", names, first_label=1)
    data = build("emnist", tmp_path, split="letters").load()
    check_sound(data)
    assert data.num_classes == 26
    assert data.train.y[:3].tolist() == [0, 1, 2]
    assert data.train.tensor[3, 0].tolist() == images[3].T.tolist()


@pytest.mark.usefixtures("any_mnist")
@pytest.mark.parametrize(
    "damage",
    [
        lambda sound: sound[:-1],
        lambda sound: sound[:7],
        lambda sound: b"",
        lambda sound: b"<html>not found</html>" * 9,
        lambda sound: idx(np.zeros((20, 27, 28))),
    ],
)
def test_a_damaged_file_of_mnist_is_named(tmp_path: Path, damage: Any) -> None:
    raw = tmp_path / "MNIST" / "raw"
    write_mnist(raw)
    file = raw / "train-images-idx3-ubyte"
    file.write_bytes(damage(file.read_bytes()))
    rule = r"train-images-idx3-ubyte is damaged: expected IDX, .* nx28x28; .*fetch"
    with pytest.raises(DataError, match=rule):
        build("mnist", tmp_path).load()


def test_a_file_with_another_checksum_is_named(tmp_path: Path) -> None:
    write_mnist(tmp_path / "FashionMNIST" / "raw")
    rule = "is damaged: expected md5 f4a8712d7a061bf5bd6d2ca38dc4d50a; delete it"
    with pytest.raises(DataError, match=rule):
        build("fashion_mnist", tmp_path).load()


# --- CIFAR ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "label_key", "num_classes"),
    [("CIFAR10", "labels", 10), ("CIFAR100", "fine_labels", 100)],
)
def test_cifar_is_read_as_torchvision_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, label_key: str, num_classes: int
) -> None:
    kind = write_cifar(tmp_path, name, label_key, monkeypatch)
    data = build(name.lower(), tmp_path).load()
    check_sound(data)
    assert (data.num_classes, data.input_shape) == (num_classes, (3, 32, 32))
    for samples, train in ((data.train, True), (data.test, False)):
        theirs = kind(str(tmp_path), train=train)
        assert np.array_equal(samples.tensor.permute(0, 2, 3, 1), theirs.data)
        assert samples.y.tolist() == theirs.targets


def test_a_pickle_with_another_checksum_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickle, "loads", lambda *_, **__: pytest.fail("a pickle is opened"))
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickle.dumps({}))
    rule = "data_batch_1 is damaged: expected md5 c99cafc152244af753f735de768cd75f;"
    with pytest.raises(DataError, match=rule):
        build("cifar10", tmp_path).load()


# --- fetching ------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision_sets, "_fetch", Mock(side_effect=OSError("no network\nat all")))


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("choice", "files", "folder"),
    [
        ("mnist", "t10k-labels-idx1-ubyte", "MNIST/raw"),
        ("emnist", "emnist-balanced-train-images-idx3-ubyte.*", "EMNIST/raw"),
        ("cifar10", "data_batch_1, data_batch_2.*", "cifar-10-batches-py"),
        ("cifar100", "train, test", "cifar-100-python"),
    ],
)
def test_without_network_missing_files_are_named_with_their_folder(
    tmp_path: Path, choice: str, files: str, folder: str
) -> None:
    raw = tmp_path / "MNIST" / "raw"
    write_mnist(raw)
    (raw / "t10k-labels-idx1-ubyte").unlink()
    reason = r"\(no network at all\).*the files there.*FEDSIM_DATA"
    with pytest.raises(DataError, match=rf"data_dir=.*: no {files} in .*{folder}.*{reason}"):
        build(choice, tmp_path).load()
    assert len(list(raw.iterdir())) == 3, "files that are there were removed"


@pytest.mark.usefixtures("offline")
def test_parquet_files_in_a_folder_of_the_same_name_are_mentioned(tmp_path: Path) -> None:
    hint = "; dataset=parquet dataset.path=mnist reads the parquet files in mnist/"
    with pytest.raises(DataError) as without_files:
        build("mnist", tmp_path).load()
    assert "dataset=parquet" not in str(without_files.value)
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "mnist-train.parquet").touch()
    with pytest.raises(DataError) as with_files:
        build("mnist", tmp_path).load()
    assert str(with_files.value).endswith(hint)


@pytest.mark.parametrize("choice", ["mnist", "cifar10"])
def test_fetching_stops_if_the_server_never_answers(
    tmp_path: Path, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "STALL_SECONDS", 0.3)
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts connections and sends nothing
        _, port = server.getsockname()
        address = f"http://127.0.0.1:{port}/"
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [address])
        monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", address + "cifar-10-python.tar.gz")
        with pytest.raises(DataError, match=r"fetching failed \(.*timed out"):
            build(choice, tmp_path / "new").load()
    assert socket.getdefaulttimeout() is None


@pytest.mark.usefixtures("any_mnist")
def test_one_of_several_processes_fetches_and_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []
    barrier = threading.Barrier(4)

    def fetch(source: str, data_dir: Path) -> None:
        fetched.append(source)
        threading.Event().wait(0.1)
        write_mnist(data_dir / source / "raw")

    def load(_: int) -> None:
        barrier.wait()
        check_sound(build("mnist", tmp_path / "new").load())

    monkeypatch.setattr(torchvision_sets, "_fetch", fetch)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(load, range(4)))
    assert fetched == ["MNIST"]
    assert [path.name for path in (tmp_path / "new").glob("[!.]*")] == ["MNIST"]


# --- checks of loaded data -----------------------------------------------------------------------

X = torch.zeros(3, 2)
Y = torch.tensor([0, 1, 1])


@pytest.mark.parametrize(
    ("x", "y", "num_owners", "rule"),
    [
        (X, torch.tensor([0, -1, 1]), 3, r"labels of the S samples .* 0\.\.1, found -1\.\.1"),
        (X, torch.tensor([0, 2, 1]), 3, r"labels of the S samples .* 0\.\.1, found 0\.\.2"),
        (X, torch.zeros(3), 3, "labels of the S samples must be int64, not torch.float32"),
        (np.zeros((3, 2)), Y, 3, "S samples must be a torch tensor, not ndarray; torch.as_tensor"),
        (X, np.zeros(3), 3, "the S labels must be a torch tensor, not ndarray; torch.as_tensor"),
        (torch.zeros(4, 2), Y, 4, "must have one label .*; found 4 samples, 3 labels, 4 owners"),
        (X[:0], Y[:0], 0, "at least one sample; found 0 samples"),
        (X, Y, 2, "found 3 samples, 3 labels, 2 owners"),
        (X, Y[:, None], 3, r"the S labels must be \[n\], not \(3, 1\)"),
    ],
)
@pytest.mark.parametrize("split", ["training", "test"])
def test_unsound_data_sets_are_rejected(
    split: str, x: Any, y: Any, num_owners: int, rule: str
) -> None:
    sound = (Samples(X, Y), np.zeros(3, np.int64))
    unsound = (Samples(x, y), np.zeros(num_owners, np.int64))
    (train, owners), (test, test_owners) = (
        (unsound, sound) if split == "training" else (sound, unsound)
    )
    with pytest.raises(DataError, match=rule.replace("S ", f"{split} ")):
        LoadedData(train, test, 2, None, None, "", owners, test_owners=test_owners)


PIXELS = torch.zeros(3, 2, 4, 4, dtype=torch.uint8)
HALF = (0.5, 0.5)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"train": Samples(PIXELS.float(), Y)}, "training samples are .* torch.float32 and test"),
        (
            {"test": Samples(PIXELS[:, :, 1:], Y)},
            r"test samples \(2, 3, 4\) torch.uint8; give both",
        ),
        ({"mean": None, "std": None}, "uint8 samples are pixels and need mean and std"),
        ({"mean": (0.5,)}, r"mean=\[0.5\]: must have 2 values, one for each channel"),
        ({"std": (0.5, 0.0)}, r"std=\[0.5, 0.0\]: must be finite and > 0"),
        ({"num_classes": 2.0}, "num_classes=2.0: must be an int, not float"),
        ({"fingerprint": None}, "fingerprint=None: must be a str that identifies the .*, not None"),
        (
            {"train": Samples(PIXELS, Y[:2])},
            "the training set must have one label .*; found 3 samples, 2 labels$",
        ),
        ({"owners": torch.zeros(3)}, "training owners must be a NumPy array .* not Tensor"),
        ({"owners": [0, 1, 1]}, "training owners must be a NumPy array .* not list"),
        (
            {"train": Samples(PIXELS.float(), Y), "test": Samples(PIXELS.float(), Y)},
            "mean and std are for uint8 pixels, which are divided by 255, and .* torch.float32",
        ),
    ],
)
def test_samples_that_do_not_fit_their_normalisation_or_each_other_are_rejected(
    values: dict[str, Any], rule: str
) -> None:
    sound: dict[str, Any] = {
        "train": Samples(PIXELS, Y),
        "test": Samples(PIXELS, Y),
        "num_classes": 2,
        "mean": HALF,
        "std": HALF,
        "fingerprint": "",
    }
    LoadedData(**sound)
    with pytest.raises(DataError, match=rule):
        LoadedData(**sound | values)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_features_that_are_nan_or_infinite_are_rejected(value: float) -> None:
    """Training on them would diverge, and the learning rate would be blamed."""
    y = torch.zeros(9, dtype=torch.int64)
    sound = torch.full((9, 2, 3), 3e38)
    x = sound.clone()
    x[7, 1, 0] = value  # column 3 of the flattened row
    x[8, 0, 0] = value
    rule = "hold 2 values that are nan or infinite, the first in row 7, column 3, both from 0"
    with pytest.raises(DataError, match=f"the test samples {rule}; correct"):
        LoadedData(Samples(sound, y), Samples(x, y), 2, None, None, "")
