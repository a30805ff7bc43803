"""FEMNIST from LEAF's files and from the Hub's; and made-up handwriting: seeded, of its form,
learnable."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from fedsim.core.errors import DataError
from fedsim.data import femnist
from fedsim.data.base import LoadedData
from tests.dataset_toys import build, check_sound, table, write_leaf


def user(*labels: int, value: float = 1.0) -> dict[str, Any]:
    return {"x": [[value] * 784 for _ in labels], "y": list(labels)}


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    """Three writers in two files; a fourth only in the test split."""
    folder = tmp_path / "femnist"
    write_leaf(folder, "train", {"f2": user(2, 61, value=0.0), "f0": user(0, 10, 9)})
    write_leaf(folder, "train", {"f1": user(36, value=0.5)}, number=1)
    write_leaf(folder, "test", {"f2": user(2), "f9": user(40)})
    return tmp_path


def test_leafs_samples_keep_their_writers_and_paper_stays_white(leaf: Path) -> None:
    data = build("femnist", leaf, source="leaf").load()
    check_sound(data)
    assert (data.num_classes, data.input_shape) == (62, (1, 28, 28))
    assert data.train.y.tolist() == [2, 61, 0, 10, 9, 36]
    assert data.train.x[:, 0, 0, 0].tolist() == [0, 0, 255, 255, 255, 128]
    assert data.owners is not None
    assert data.owners.tolist() == [2, 2, 0, 0, 0, 1]
    assert data.test.y.tolist() == [2, 40]
    assert data.test_owners is not None
    assert data.test_owners.tolist() == [2, -1]  # of f9 there is no training sample
    digits = build("femnist", leaf, source="leaf", classes="digits").load()
    check_sound(digits)
    assert digits.owners is not None
    assert (digits.num_classes, digits.train.y.tolist(), digits.owners.tolist()) == (
        10,
        [2, 0, 9],
        [2, 0, 0],
    )
    assert digits.test_owners is not None
    assert digits.test_owners.tolist() == [2]
    assert data.fingerprint != digits.fingerprint


def test_an_unsound_leaf_file_is_named(leaf: Path) -> None:
    contents: dict[str, Any] = {
        "KeyError: 'user_data'": "{}",
        "RecursionError": '{"user_data": ' + "[" * 100_000,
        "OverflowError": {"a": {"x": [[0.5] * 784], "y": [10**30]}},
        "a writer has 1 images and 2 labels": {"a": {"x": [[0.5] * 784], "y": [1, 2]}},
        "cannot reshape": {"a": {"x": [[0.5] * 783], "y": [1]}},
        r"labels must lie in 0\.\.61 and": {"a": user(62)},
        r"pixels in 0\.\.1": {"a": user(1, value=255.0)},
    }
    for reason, content in contents.items():
        text = content if isinstance(content, str) else json.dumps({"user_data": content})
        (leaf / "femnist" / "train" / "all_data_1.json").write_text(text)
        with pytest.raises(
            DataError, match=rf"all_data_1\.json is not a sound LEAF file \(.*{reason}"
        ):
            build("femnist", leaf, source="leaf").load()


def test_absent_leaf_files_are_asked_for_by_folder(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"source=leaf: is missing LEAF's JSON files in .*femnist/train, .*FEDSIM_DATA",
    ):
        build("femnist", tmp_path, source="leaf").load()
    assert build("femnist", tmp_path, source="hub").absent() == []  # which is fetched
    for split in ("train", "test"):
        write_leaf(tmp_path / "femnist", split, {"ann": user()})
    with pytest.raises(DataError, match=r"no writer has an image in .*all_data_0\.json"):
        build("femnist", tmp_path, source="leaf").load()


# --- the Hub's -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What the Hub answers, by address: a list of two files, of which only the first is there."""
    rows = table(20, grey=True, side=28, writer_id=[f"f{i % 4:04d}_14" for i in range(20)])
    buffer = io.BytesIO()
    pq.write_table(rows.rename_columns(["image", "character", "writer_id"]), buffer)
    listing = json.dumps(["https://first", "https://second"]).encode()
    answers = {femnist.HUB_LISTING_URL: listing, "https://first": buffer.getvalue()}

    def get(address: str) -> bytes:
        if address not in answers:
            raise OSError("cut off")
        return answers[address]

    monkeypatch.setattr(femnist, "_download", get)
    return answers


def test_femnist_of_the_hub_is_fetched_whole_or_not_at_all(
    tmp_path: Path, hub: dict[str, bytes]
) -> None:
    with pytest.raises(
        DataError,
        match=r"flwrlabs/femnist \(or dataset\.source=leaf\) in .*\(cut off\).*FEDSIM_DATA",
    ):
        build("femnist", tmp_path / "new", tmp_path / "cache").load()
    assert not (tmp_path / "new" / "femnist").exists()
    hub["https://second"] = hub["https://first"]
    data = build("femnist", tmp_path / "new", tmp_path / "cache", test_fraction=0.1).load()
    check_sound(data)
    assert (len(data.train), len(data.test), data.input_shape) == (36, 4, (1, 28, 28))
    assert data.owners is not None
    assert len(np.unique(data.owners)) == 4
    assert [p.name for p in (tmp_path / "new").glob("*") if p.name[0] != "."] == ["femnist"]
    hub.clear()
    assert (
        build("femnist", tmp_path / "new", tmp_path / "cache").load().fingerprint
        == data.fingerprint
    )


# --- made-up handwriting -------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"num_writers": 12, "samples_per_writer": 20.0, "test_samples": 100}


def load(folder: Path, **values: Any) -> LoadedData:
    return build("femnist_generated", folder, **{**SMALL, **values}).load()


def test_it_has_the_form_of_femnist_and_is_a_function_of_the_parameters(tmp_path: Path) -> None:
    data = load(tmp_path, num_classes=62)
    check_sound(data)
    assert (data.num_classes, data.input_shape) == (62, (1, 28, 28))
    assert data.owners is not None
    assert np.unique(data.owners).tolist() == list(range(12))
    assert len(data.train) == pytest.approx(12 * 20, rel=0.4)
    assert data.train.x.float().mean() > 200  # dark on light
    assert data.train.x.min() < 30
    data = load(tmp_path, classes_per_writer=3, samples_per_writer=60.0)
    assert data.owners is not None
    known = [set(data.train.y[data.owners == writer].tolist()) for writer in range(12)]
    assert max(map(len, known)) == 3
    assert set().union(*known) > known[0]
    assert np.bincount(data.test.y).tolist() == [10] * 10
    one, again = (load(tmp_path / name) for name in ("a", "b"))
    assert one.fingerprint == again.fingerprint
    assert one.train.x.equal(again.train.x)
    others = [
        load(tmp_path / "a", **more).fingerprint
        for more in ({"seed": 1}, {"style": 0.1}, {"noise": 0.1})
    ]
    assert len({one.fingerprint, *others}) == 4


def nearest(data: LoadedData, among: NDArray[np.bool_]) -> float:
    """Accuracy on the test set of the nearest of some training images."""
    known, labels = data.train.x[among].flatten(1).float(), data.train.y[among]
    distances = np.linalg.norm(
        data.test.x.flatten(1).float().numpy()[:, None] - known.numpy()[None], axis=2
    )
    return float((labels[distances.argmin(1)] == data.test.y).float().mean())


def test_there_is_something_to_learn_and_writers_differ(tmp_path: Path) -> None:
    values: dict[str, Any] = {"samples_per_writer": 40.0, "test_samples": 60}
    data = load(tmp_path, classes_per_writer=10, size_deviation=0.0, **values)
    assert data.owners is not None
    everybody, one = data.owners >= 0, data.owners == 0
    assert nearest(data, everybody) > 0.8
    assert nearest(data, one) < nearest(data, everybody) - 0.1
