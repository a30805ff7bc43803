"""scripts/mutants.py: which mutants a file has. No mutant is run here."""

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from scripts import mutants as script
from scripts.mutants import ROOT, SURVIVED, SURVIVORS, Mutant, mutants_of

SOURCE = '''\
LIMIT: int = 3


class Box:
    def size(self, x: int = 1) -> bool:
        """Up to 4."""
        assert x > 5
        if not x:
            raise ValueError(f"{x + 6}")
        return min(x, 0.0) < -x * 7 or self.size(strict=True)
'''
RETURN = "min(x, 0.0) < -x * 7 or self.size(strict=True)"


def changed_text(mutant: Mutant) -> str:
    """Return the condition, or the returned expression, whichever a mutant changes."""
    function = ast.parse(mutant.source).body[-1].body[0]  # type: ignore[attr-defined]
    condition = ast.unparse(function.body[2].test)
    return condition if condition != "not x" else ast.unparse(function.body[3].value)


def test_mutants_change_what_a_function_computes_and_nothing_else() -> None:
    changes = [(m.line, m.kind, changed_text(m)) for m in mutants_of("box.py", SOURCE)]
    assert changes == [
        (8, "boolean: without not", "x"),
        (10, "boolean: or to and", RETURN.replace(" or ", " and ")),
        (10, "compare: < to <=", RETURN.replace("<", "<=")),
        (10, "compare: < to >", RETURN.replace("<", ">")),
        (10, "name: min to max", RETURN.replace("min", "max")),
        (10, "constant: 0.0 to 1.0", RETURN.replace("0.0", "1.0")),
        (10, "arithmetic: * to /", RETURN.replace("*", "/")),
        (10, "arithmetic: without minus", RETURN.replace("-x", "x")),
        (10, "constant: 7 to 8", RETURN.replace("7", "8")),
    ]


def test_methods_are_named_with_their_class() -> None:
    assert {mutant.function for mutant in mutants_of("box.py", SOURCE)} == {"Box.size"}


def test_a_test_that_fails_without_the_mutant_does_not_kill_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer, flaky = "tests/test_box.py::test_size", "tests/test_box.py::test_time"
    path = tmp_path / "box.py"
    path.write_text(SOURCE)

    def first_failure(tests: Sequence[str], checkout: Path, left_out: Sequence[str]) -> str:
        if flaky not in left_out:
            return flaky
        return killer if path.read_text() != SOURCE else SURVIVED

    monkeypatch.setattr(script, "first_failure", first_failure)
    left_out: list[str] = []
    mutant = mutants_of("box.py", SOURCE)[0]
    assert script.fate(mutant, ["tests/test_box.py"], tmp_path, left_out) == killer
    assert left_out == [flaky]
    assert path.read_text() == SOURCE


def test_each_accepted_survivor_is_a_mutant_and_has_a_reason() -> None:
    for entry in yaml.safe_load(SURVIVORS.read_text(encoding="utf-8")):
        source = (ROOT / entry["file"]).read_text(encoding="utf-8")
        mutants = {(m.function, m.kind) for m in mutants_of(entry["file"], source)}
        assert (entry["function"], entry["kind"]) in mutants, entry
        assert entry["reason"]
