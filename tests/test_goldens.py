"""Results to the last bit, where they were recorded on a machine like this one."""

import json

import pytest

from tests import goldens

SHARES = {"mlp": 6, "convolutions": 18, "norms": 3}
"""By setting: the short form compares every so many-th selector. Backends compare different ones.
Convolutions take longest."""
RECORDED = json.loads(goldens.FILE.read_text(encoding="utf-8"))


@pytest.mark.skipif(
    RECORDED["environment"] != goldens.environment(),
    reason="recorded with another processor or other versions (python -m tests.goldens record)",
)
@pytest.mark.parametrize("setting", goldens.SETTINGS)
@pytest.mark.parametrize("backend", goldens.BACKENDS)
@pytest.mark.parametrize("form", ["short", pytest.param("long", marks=pytest.mark.slow)])
def test_runs_are_what_they_were_to_the_last_bit(form: str, backend: str, setting: str) -> None:
    """The long form compares all selectors by each backend in each setting."""
    share = SHARES[setting] if form == "short" else 1
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
