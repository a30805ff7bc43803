"""FEMNIST from LEAF's files and from the Hub's files, and generated handwriting."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from fedsim.core.errors import DataError
from fedsim.data import femnist
from fedsim.data.base import LoadedData
from tests.dataset_toys import build, check_sound, table, write_leaf


def user(*labels: int, value: float = 1.0) -> dict[str, Any]:
    """Return a writer's images, all of whose pixels have one value, and their labels."""
    return {"x": [[value] * 784 for _ in labels], "y": list(labels)}


# --- LEAF's files --------------------------------------------------------------------------------


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    """Three writers in two files of the training split; f9 is only in the test split."""
    folder = tmp_path / "femnist"
    write_leaf(folder, "train", {"f2": user(2, 61, value=0.0), "f0": user(0, 10, 9)})
    write_leaf(folder, "train", {"f1": user(36, value=0.5)}, number=1)
    write_leaf(folder, "test", {"f2": user(2), "f9": user(40)})
    return tmp_path


def test_leafs_samples_keep_their_writers(leaf: Path) -> None:
    data = build("femnist", leaf, source="leaf").load()
    check_sound(data)
    assert (data.num_classes, data.input_shape) == (62, (1, 28, 28))
    assert data.train.y.tolist() == [2, 61, 0, 10, 9, 36]
    assert data.owners.tolist() == [2, 2, 0, 0, 0, 1]
    assert data.test.y.tolist() == [2, 40]
    assert data.test_owners.tolist() == [2, -1]  # f9 has no training sample


def test_leafs_paper_stays_white(leaf: Path) -> None:
    """Value 1 is white paper and becomes 255."""
    data = build("femnist", leaf, source="leaf").load()
    assert data.train.tensor[:, 0, 0, 0].tolist() == [0, 0, 255, 255, 255, 128]


def test_femnist_may_be_restricted_to_digits(leaf: Path) -> None:
    data = build("femnist", leaf, source="leaf", classes="digits").load()
    check_sound(data)
    assert data.num_classes == 10
    assert data.train.y.tolist() == [2, 0, 9]
    assert data.owners.tolist() == [2, 0, 0]
    assert data.test_owners.tolist() == [2]
    assert data.fingerprint != build("femnist", leaf, source="leaf").load().fingerprint


def test_digits_of_a_writer_who_trains_with_letters_only_have_no_owner(leaf: Path) -> None:
    write_leaf(leaf / "femnist", "test", {"f1": user(3)}, number=1)
    data = build("femnist", leaf, source="leaf", classes="digits").load()
    assert data.test.y.tolist() == [2, 3]
    assert data.test_owners.tolist() == [2, -1]


def content_of(writer: dict[str, Any]) -> str:
    return json.dumps({"user_data": {"ann": writer}})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{}", "KeyError: 'user_data'"),
        ('{"user_data": ' + "[" * 100_000, "RecursionError"),
        (content_of(user(10**30)), "OverflowError"),
        (content_of({"x": [[0.5] * 784], "y": [1, 2]}), "a writer has 1 images and 2 labels"),
        (content_of({"x": [[0.5] * 783], "y": [1]}), "cannot reshape"),
        (content_of(user(62)), r"labels must lie in 0\.\.61 and"),
        (content_of(user(1, value=255.0)), r"pixels in 0\.\.1"),
        (content_of({"x": [[0.5] * 784], "y": [4.7]}), "(Value|Type)Error: "),
        (content_of({"x": [[0.5] * 784] * 2, "y": [True, 0.5]}), "(Value|Type)Error: "),
        (content_of({"x": [[0.5] * 784], "y": [None]}), "(Value|Type)Error: "),
    ],
    ids=lambda text: text[:20],
)
def test_an_unsound_leaf_file_is_named(leaf: Path, content: str, reason: str) -> None:
    (leaf / "femnist" / "train" / "all_data_1.json").write_text(content)
    rule = rf"all_data_1\.json is not a sound LEAF file \(.*{reason}"
    with pytest.raises(DataError, match=rule):
        build("femnist", leaf, source="leaf").load()


def test_absent_leaf_files_are_named_with_their_folder(tmp_path: Path) -> None:
    rule = r"source=leaf: is missing LEAF's JSON files in .*femnist/train, .*FEDSIM_DATA"
    with pytest.raises(DataError, match=rule):
        build("femnist", tmp_path, source="leaf").load()
    assert build("femnist", tmp_path, source="hub").absent() == []  # it is fetched


def test_leaf_files_without_images_are_rejected(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_leaf(tmp_path / "femnist", split, {"ann": user()})
    with pytest.raises(DataError, match=r"no user has a sample in .*all_data_0\.json"):
        build("femnist", tmp_path, source="leaf").load()


def test_a_writer_in_two_leaf_files_is_rejected(leaf: Path) -> None:
    write_leaf(leaf / "femnist", "train", {"f0": user(3)}, number=7)
    rule = r"all_data_0\.json and .*all_data_7\.json both have the user f0; move one"
    with pytest.raises(DataError, match=rule):
        build("femnist", leaf, source="leaf").load()


def test_hidden_leaf_files_are_skipped(leaf: Path) -> None:
    (leaf / "femnist" / "train" / "._all_data_0.json").write_bytes(b"\0\5\x16\7")
    assert len(build("femnist", leaf, source="leaf").load().train) == 6


# --- the Hub's files -----------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The Hub's answers by address: a list of two files, of which only the first is there."""
    listing = json.dumps(["https://first", "https://second"]).encode()
    answers = {femnist.HUB_LISTING_URL: listing, "https://first": hub_file(seed=0)}

    def download(address: str) -> bytes:
        if address not in answers:
            raise OSError("cut off")
        return answers[address]

    monkeypatch.setattr(femnist, "_download", download)
    return answers


def hub_file(seed: int) -> bytes:
    """Return the content of a parquet file with 20 images of four writers."""
    writers = [f"f{number % 4:04d}_14" for number in range(20)]
    rows = table(20, grey=True, side=28, seed=seed, writer_id=writers)
    buffer = io.BytesIO()
    pq.write_table(rows.rename_columns(["image", "character", "writer_id"]), buffer)
    return buffer.getvalue()


@pytest.mark.usefixtures("hub")
def test_the_hubs_files_are_fetched_as_a_whole(tmp_path: Path) -> None:
    rule = r"flwrlabs/femnist \(or dataset\.source=leaf\) in .*\(cut off\).*FEDSIM_DATA"
    with pytest.raises(DataError, match=rule):
        build("femnist", tmp_path).load()
    assert not (tmp_path / "femnist").exists()


def test_the_hubs_files_are_fetched_once(tmp_path: Path, hub: dict[str, bytes]) -> None:
    data_dir = tmp_path / "new"
    hub["https://second"] = hub_file(seed=1)
    data = build("femnist", data_dir, tmp_path, test_fraction=0.1).load()
    check_sound(data)
    assert (len(data.train), len(data.test), data.input_shape) == (36, 4, (1, 28, 28))
    assert set(data.owners) == {0, 1, 2, 3}
    assert [path.name for path in data_dir.glob("[!.]*")] == ["femnist"]
    hub.clear()
    assert build("femnist", data_dir, tmp_path).load().fingerprint == data.fingerprint


# --- generated handwriting -----------------------------------------------------------------------


def load(folder: Path, **values: Any) -> LoadedData:
    """Load generated handwriting of 12 writers."""
    small = {"num_writers": 12, "samples_per_writer": 20.0, "test_samples": 100}
    return build("femnist_generated", folder, **small | values).load()


def test_generated_handwriting_has_the_form_of_femnist(tmp_path: Path) -> None:
    data = load(tmp_path, num_classes=62)
    check_sound(data)
    assert (data.num_classes, data.input_shape) == (62, (1, 28, 28))
    assert set(data.owners) == set(range(12))
    assert len(data.train) == pytest.approx(12 * 20, rel=0.4)
    assert data.train.tensor.float().mean() > 200  # dark on light
    assert data.train.tensor.min() < 30


def test_writers_know_some_classes_and_the_test_set_has_all(tmp_path: Path) -> None:
    data = load(tmp_path, classes_per_writer=3, samples_per_writer=60.0)
    classes = [set(data.train.y[data.owners == writer].tolist()) for writer in range(12)]
    assert max(map(len, classes)) == 3
    assert len(set.union(*classes)) > 3
    assert np.bincount(data.test.y).tolist() == [10] * 10


def nearest_accuracy(data: LoadedData, rows: np.ndarray) -> float:
    """Return the test accuracy of the nearest neighbour among some training images."""
    images = data.train.tensor[rows].flatten(1).float().numpy()
    test_images = data.test.tensor.flatten(1).float().numpy()
    distances = np.linalg.norm(test_images[:, None] - images, axis=2)
    predictions = data.train.y[rows][distances.argmin(1)]
    return float((predictions == data.test.y).float().mean())


def test_handwriting_can_be_learned_and_writers_differ(tmp_path: Path) -> None:
    data = load(
        tmp_path,
        classes_per_writer=10,
        size_deviation=0.0,
        samples_per_writer=40.0,
        test_samples=60,
    )
    of_all_writers = nearest_accuracy(data, data.owners >= 0)
    assert of_all_writers > 0.8
    assert nearest_accuracy(data, data.owners == 0) < of_all_writers - 0.1
