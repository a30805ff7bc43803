"""requirements/pyproject.toml pins what uv resolved, all of it and nothing else."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCK, PINS = ROOT / "uv.lock", ROOT / "requirements" / "pyproject.toml"
OURS = {"fedsim-selection", "fedsim-pins"}


@pytest.mark.skipif(not LOCK.is_file(), reason="uv.lock is written by uv")
def test_every_package_of_the_lock_is_pinned_to_its_version() -> None:
    packages = tomllib.loads(LOCK.read_text(encoding="utf-8"))["package"]
    locked = {
        f"{package['name']}=={package['version']}"
        for package in packages
        if package["name"] not in OURS
    }
    requirements = tomllib.loads(PINS.read_text(encoding="utf-8"))["project"]["dependencies"]
    pinned = {requirement.partition(";")[0].strip() for requirement in requirements}
    assert sorted(locked - pinned) == [], "not pinned"
    assert sorted(pinned - locked) == [], "pinned, but not in the lock"
