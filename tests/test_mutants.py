"""Every entry of docs/mutants.yaml still applies to the code; which random mutants there are. None
is run here: scripts/mutants.py does that."""

import shlex
from pathlib import Path

import pytest
import yaml

from scripts import random_mutants
from scripts.mutants import ROOT, SURVIVORS, Mutant, complaint, mutants


def test_every_mutant_applies() -> None:
    stale = [told for mutant in mutants() if (told := complaint(mutant, ROOT))]
    assert not stale, "\n".join([f"{len(stale)} stale entries in docs/mutants.yaml:", *stale])


def test_survivors_have_a_reason_and_the_files_of_all_are_there() -> None:
    known = yaml.safe_load(SURVIVORS.read_text(encoding="utf-8"))
    assert all(
        reason and (ROOT / told.partition(": ")[0]).is_file() for told, reason in known.items()
    )
    files = {
        word.partition("::")[0]
        for m in mutants()
        for word in shlex.split(m.tests)
        if word.startswith("tests/")
    }
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []


def test_what_is_stale_is_told(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("a = 1\nb = 1\n", encoding="utf-8")
    told = [
        complaint(Mutant("one.py", old, "c", "tests"), tmp_path) for old in ("a = 1", "gone", "= 1")
    ]
    assert told == [
        "",
        "one.py: 'gone' occurs 0 times",
        "one.py: '= 1' occurs 2 times",
    ]
    assert (
        complaint(Mutant("two.py", "a = 1", "c", "tests"), tmp_path)
        == "two.py: there is no such file"
    )


CODE = """
ANNOTATED: int = 3

class A:
    def f(self, x: int = 1) -> bool:
        \"\"\"Up to 4.\"\"\"
        assert x > 5
        if not x:
            raise ValueError(f"{x + 6}")
        return min(x, 0.0) < -x * 7 or self.g(strict=True)
"""


def test_random_mutants_are_of_what_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_mutants, "ROOT", tmp_path)
    (tmp_path / "one.py").write_text(CODE, encoding="utf-8")
    found = [make() for make in random_mutants.candidates(tmp_path / "one.py")]
    changed = [one.told.removeprefix("one.py: ").removesuffix(" in f") for one in found]
    whole, product = "min(x, 0.0) < -x * 7", "-x * 7"
    assert changed == [
        "`not x` to `not not x`",
        f"`{whole} or self.g(strict=True)` to `{whole} and self.g(strict=True)`",
        f"`{whole}` to `min(x, 0.0) <= {product}`",
        f"`{whole}` to `min(x, 0.0) > {product}`",
        "`min` to `max`",
        "`0.0` to `1.0`",
        f"`{product}` to `-x / 7`",
        "`-x` to `+x`",
        "`7` to `8`",
    ]
    assert {one.lines for one in found} == {(8, 8), (10, 10)}
