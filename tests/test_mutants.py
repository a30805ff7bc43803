"""Every entry of docs/mutants.yaml still applies to the code. No mutant is run here: scripts/mutants.py does that."""

import shlex
from pathlib import Path

import pytest

import scripts.mutants
from scripts.mutants import ROOT, SURVIVED, Checked, Mutant, complaint, key, line, mutants, written


def test_every_mutant_applies() -> None:
    stale = [told for mutant in mutants() if (told := complaint(mutant, ROOT))]
    assert not stale, "\n".join([f"{len(stale)} stale entries in docs/mutants.yaml:", *stale])


def test_the_table_has_every_mutant_and_no_other() -> None:
    """`scripts/mutants.py <part of the file's path> --write` runs those of a file and writes their rows."""
    listed = [key(line(mutant, "")) for mutant in mutants()]
    assert list(written()) == listed
    assert not [row for row in written().values() if "`survived`" in row]


def test_every_mutant_has_tests_that_exist() -> None:
    files = {(m.file, word.partition("::")[0]) for m in mutants() for word in shlex.split(m.tests)}
    gone = sorted(
        f"{file}: no {test}" for file, test in files if test.startswith("tests/") and not (ROOT / test).exists()
    )
    assert not gone, "\n".join([f"{len(gone)} files of tests are gone:", *gone])


def test_what_is_stale_is_told(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("a = 1\nb = 1\n", encoding="utf-8")

    def told(old: str, new: str = "c", file: str = "one.py") -> str:
        return complaint(Mutant(file, old, new, "tests"), tmp_path)

    assert told("a = 1") == ""
    assert told("gone") == "one.py: 'gone' occurs 0 times"
    assert told("= 1") == "one.py: '= 1' occurs 2 times"
    assert told("a = 1", "a = 1") == "one.py: 'a = 1' is replaced by itself"
    assert told("a = 1", 2) == "one.py: 2 is no text in YAML: put it in quotes"  # type: ignore[arg-type]
    assert told("a = 1", file="two.py") == "two.py: there is no such file"


@pytest.mark.parametrize(
    ("sound", "told"),
    [("right", "tests/a.py::b"), ("a = broken", "nothing known: without it, tests/a.py::b fails")],
)
def test_a_test_that_fails_without_the_mutant_kills_none(
    sound: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.py").write_text(f"{sound}\nb = 1\n", encoding="utf-8")
    asked = []

    def failing_test(words: list[str], checkout: Path) -> str:
        asked.append(words)
        text = (checkout / "one.py").read_text(encoding="utf-8")
        return "tests/a.py::b" if "broken" in text or "b = 2" in text else SURVIVED

    monkeypatch.setattr(scripts.mutants, "failing_test", failing_test)
    checkout, mutant = Checked(tmp_path), Mutant("one.py", "b = 1", "b = 2", "tests/a.py")
    assert [checkout.fate(mutant) for _ in range(2)] == [told, told]
    assert len(asked) == (3 if sound == "right" else 1)  # once for the sound checkout, not for each mutant
