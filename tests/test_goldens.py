"""Results to the last bit, where they were recorded on a machine like this one."""

import json

import pytest

from tests import goldens

RECORDED = json.loads(goldens.FILE.read_text(encoding="utf-8"))


@pytest.mark.skipif(
    RECORDED["environment"] != goldens.environment(),
    reason="recorded with another processor or other versions (python -m tests.goldens record)",
)
@pytest.mark.parametrize("setting", goldens.SETTINGS)
@pytest.mark.parametrize("backend", goldens.BACKENDS)
def test_runs_are_what_they_were_to_the_last_bit(backend: str, setting: str) -> None:
    recorded = {name: case for name, case in RECORDED["cases"].items() if name.endswith(f"/{setting}/{backend}")}
    assert recorded
    assert goldens.differences(recorded, dict(goldens.outcomes(setting, backend))) == []


def test_a_difference_is_told() -> None:
    before = {"ids": "a", "ledger": "b", "parameters": "c", "train_loss": "0.5"}
    after = {**before, "parameters": "d", "train_loss": "0.50000001"}
    assert goldens.differences({"x": before}, {"x": dict(before)}) == []
    assert goldens.differences({"x": before}, {"x": after}) == [
        "x: parameters differs",
        "x: train_loss 0.5 -> 0.50000001",
    ]
    assert goldens.differences({"x": before}, {}) == ["x: not there any more"]
