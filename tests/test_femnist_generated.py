"""Made-up handwriting: seeded, of the form that was asked for, different from writer to writer, and learnable."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedsim.core.errors import ConfigError
from fedsim.data.base import LoadedData
from tests.dataset_toys import build, check_sound

SMALL: dict[str, Any] = {"num_writers": 12, "samples_per_writer": 20.0, "test_samples": 100}


def load(folder: Path, **values: Any) -> LoadedData:
    return build("femnist_generated", folder, **{**SMALL, **values}).load()


def test_it_has_the_form_of_femnist(tmp_path: Path) -> None:
    data = load(tmp_path, num_classes=62)
    check_sound(data)
    assert (data.num_classes, data.input_shape) == (62, (1, 28, 28))
    assert data.owners is not None
    assert np.unique(data.owners).tolist() == list(range(12))
    assert len(data.train) == pytest.approx(12 * 20, rel=0.4)
    assert data.train.x.float().mean() > 200  # dark on light
    assert data.train.x.min() < 30


def test_writers_write_some_classes_and_the_test_set_has_all_alike(tmp_path: Path) -> None:
    data = load(tmp_path, classes_per_writer=3, samples_per_writer=60.0)
    assert data.owners is not None
    known = [set(data.train.y[data.owners == writer].tolist()) for writer in range(12)]
    assert max(map(len, known)) == 3
    assert set().union(*known) > known[0]
    assert np.bincount(data.test.y).tolist() == [10] * 10


def test_the_same_parameters_give_the_same_set_and_others_another(tmp_path: Path) -> None:
    one, again = (load(tmp_path / name) for name in ("a", "b"))
    assert one.fingerprint == again.fingerprint
    assert one.train.x.equal(again.train.x)
    others = [load(tmp_path / "a", **more).fingerprint for more in ({"seed": 1}, {"style": 0.1}, {"noise": 0.1})]
    assert len({one.fingerprint, *others}) == 4


def nearest(data: LoadedData, among: NDArray[np.bool_]) -> float:
    """Accuracy on the test set of the nearest of some training images."""
    known, labels = data.train.x[among].flatten(1).float(), data.train.y[among]
    distances = np.linalg.norm(data.test.x.flatten(1).float().numpy()[:, None] - known.numpy()[None], axis=2)
    return float((labels[distances.argmin(1)] == data.test.y).float().mean())


def test_there_is_something_to_learn_and_writers_differ(tmp_path: Path) -> None:
    data = load(tmp_path, classes_per_writer=10, size_deviation=0.0, samples_per_writer=60.0)
    assert data.owners is not None
    everybody, one = data.owners >= 0, data.owners == 0
    assert nearest(data, everybody) > 0.8
    assert nearest(data, one) < nearest(data, everybody) - 0.1


def test_the_small_preset_has_its_198_writers(tmp_path: Path) -> None:
    owners = build("femnist_generated", tmp_path, test_samples=10).load().owners
    assert owners is not None
    assert (np.bincount(owners) >= 10).sum() >= 198


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"classes_per_writer": 11}, r"classes_per_writer=11: must be at most 10"),
        ({"size_deviation": 1e200}, r"size_deviation=1e\+200: must lie in \[0, 3\]"),
        ({"style": 100.0}, r"style=100\.0: must lie in \[0, 10\]"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(tmp_path, **values)


@pytest.mark.filterwarnings("error")
def test_the_largest_style_and_deviation_draw_numbers(tmp_path: Path) -> None:
    data = load(tmp_path, style=10.0, size_deviation=3.0, num_writers=300)
    assert 0 < data.train.x.float().mean() < 255
