"""Results to the last bit, where they were recorded on a machine like this one."""

import json

import pytest

from tests import goldens

SHARE = len(goldens.SETTINGS) * len(goldens.BACKENDS)
RECORDED = json.loads(goldens.FILE.read_text(encoding="utf-8"))


@pytest.mark.skipif(
    RECORDED["environment"] != goldens.environment(),
    reason="recorded with another processor or other versions (python -m tests.goldens record)",
)
@pytest.mark.parametrize("setting", goldens.SETTINGS)
@pytest.mark.parametrize("backend", goldens.BACKENDS)
@pytest.mark.parametrize("share", [SHARE, pytest.param(1, marks=pytest.mark.slow)])
def test_runs_are_what_they_were_to_the_last_bit(share: int, backend: str, setting: str) -> None:
    """By default a selector occurs in at most one setting, by one backend. In the long form, every
    selector occurs in every setting by every backend."""
    share = min(share, len(goldens.FEW)) if setting == "norms" else share
    found = dict(goldens.outcomes(setting, backend, share))
    ours = {name for name in RECORDED["cases"] if name.endswith(f"/{setting}/{backend}")}
    recorded = {
        name: RECORDED["cases"][name] for name in ours & (ours if share == 1 else found.keys())
    }
    assert recorded
    assert goldens.differences(recorded, found) == []


def test_a_difference_is_told() -> None:
    before = {"ids": "a", "ledger": "b", "parameters": "c", "train_loss": "0.5"}
    after = {**before, "parameters": "d", "train_loss": "0.50000001"}
    assert goldens.differences({"x": before}, {"x": dict(before)}) == []
    told = ["x: parameters differs", "x: train_loss 0.5 -> 0.50000001"]
    assert goldens.differences({"x": before}, {"x": after}) == told
    assert goldens.differences({"x": before}, {}) == ["x: not there any more"]
