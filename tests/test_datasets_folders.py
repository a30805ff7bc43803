"""Folders of images, one folder a class."""

import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from fedsim.core.errors import DataError
from fedsim.data import images as image_folder
from tests.dataset_toys import build, check_sound


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Ants of red 0 and bees of red 200, three each in each split, of several sizes."""
    root = tmp_path / "insects"
    for split in ("train", "test"):
        for number, name in enumerate(("ant", "bee")):
            (root / split / name).mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (10 + i, 12), (200 * number, 0, 0)).save(root / split / name / f"{i}.png")
    return root


def test_images_are_scaled_and_classes_numbered_alphabetically(tmp_path: Path, folders: Path) -> None:
    data = build("image_folder", tmp_path, path="insects", size=8).load()
    check_sound(data)
    assert (data.num_classes, data.input_shape, len(data.train), len(data.test)) == (2, (3, 8, 8), 6, 6)
    for y, red in ((0, 0), (1, 200)):
        assert data.train.x[data.train.y == y][:, 0].unique().tolist() == [red]
    grey = build("image_folder", tmp_path, path=str(folders), size=8, grey=True).load()
    assert (grey.input_shape, grey.mean) == ((1, 8, 8), (0.5,))
    assert grey.fingerprint != data.fingerprint


def test_a_folder_is_decoded_once_and_its_fingerprint_is_its_content(
    tmp_path: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, original = [], image_folder.decode
    monkeypatch.setattr(image_folder, "decode", lambda *a, **k: decoded.append(1) or original(*a, **k))
    first = build("image_folder", tmp_path, path="insects").load().fingerprint
    assert build("image_folder", tmp_path, path="insects").load().fingerprint == first
    assert len(decoded) == 2
    folders.rename(tmp_path / "moved")
    assert build("image_folder", tmp_path, path="moved").load().fingerprint == first
    Image.new("RGB", (9, 9)).save(tmp_path / "moved" / "train" / "bee" / "0.png")
    changed = build("image_folder", tmp_path, path="moved").load()
    assert changed.fingerprint != first
    assert 0 in changed.train.x[changed.train.y == 1][:, 0]


def test_links_to_the_same_images_with_other_labels_share_no_cache(tmp_path: Path, folders: Path) -> None:
    for name in ("fine", "coarse"):
        for image in sorted((folders / "train").rglob("*.png")):
            for split in ("train", "test"):
                label = image.parent.name if name == "fine" else "insect"
                (tmp_path / name / split / label).mkdir(parents=True, exist_ok=True)
                (tmp_path / name / split / label / f"{image.parent.name}{image.name}").symlink_to(image)
    for name in ("fine", "coarse"):
        data = build("image_folder", tmp_path, path=name).load()
        alone = build("image_folder", tmp_path, tmp_path / f"cache of {name}", path=name).load()
        assert data.num_classes == alone.num_classes == len(set(data.train.y.tolist()))
        assert torch.equal(data.train.y, alone.train.y)
        assert (data.sha256, data.fingerprint) == (alone.sha256, alone.fingerprint)


def test_folders_that_are_absent_or_differ_in_their_classes_are_named(tmp_path: Path, folders: Path) -> None:
    with pytest.raises(DataError, match=r"dataset\.path=nowhere: is missing train/ in .*nowhere or .*nowhere"):
        build("image_folder", tmp_path, path="nowhere").load()
    assert build("image_folder", tmp_path, path="insects").absent() == []
    (folders / "test" / "cow").mkdir()
    with pytest.raises(DataError, match=r"dataset\.path: Found no valid file for the classes cow"):
        build("image_folder", tmp_path, path="insects").load()
    Image.new("L", (4, 4)).save(folders / "test" / "cow" / "0.png")
    with pytest.raises(DataError, match="train/ and test/ differ in their classes: cow"):
        build("image_folder", tmp_path, path="insects").load()
    shutil.rmtree(folders / "test")
    assert build("image_folder", tmp_path, path="insects").absent() == [f"test/ in {folders}"]
