"""Mutants of the code: small mistakes made on purpose, each of which some test must notice.

    uv run python scripts/mutants.py                  # all of docs/mutants.yaml: half an hour of a
    core uv run python scripts/mutants.py ledger gpfl      # those of files whose path has one of
    these words uv run python scripts/mutants.py --random 1 100 clients   # a hundred more, drawn
    with seed 1

The list names a file, a text that occurs in it once, what replaces it, and the tests that are run,
in a copy of the checkout. A mutant is killed by the first test that fails; one that no test can
kill says why in `equivalent`. The tests must pass without the mutant: otherwise nothing is known of
it. Random ones (scripts/random_mutants.py) that survive have a reason in
docs/mutants_survivors.yaml.
"""

import argparse
import importlib
import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import yaml

from scripts import random_mutants

ROOT = Path(__file__).parents[1]
LIST, SURVIVORS = ROOT / "docs" / "mutants.yaml", ROOT / "docs" / "mutants_survivors.yaml"
LIBRARIES = (
    "torch",
    "torchvision",
    "scipy.optimize",
    "scipy.cluster.hierarchy",
    "hypothesis",
    "hydra",
    "cvxpy",
    "rich",
)
"""Imported once, and not for every mutant."""
SURVIVED = "survived"
LIMIT = 900
"""Seconds for the tests of a mutant, which may be a loop without an end."""


@dataclass(frozen=True)
class Mutant:
    """In `file`, `old` (which occurs once) becomes `new`; `tests` (words for pytest) are to
    notice."""

    file: str
    old: str
    new: str
    tests: str
    equivalent: str = ""


def mutants() -> list[Mutant]:
    """The list. Tests are given once a file."""
    groups = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    return [
        Mutant(**{"file": g["file"], "tests": g["tests"], **m})
        for g in groups
        for m in g["mutants"]
    ]


@contextmanager
def copy_of_checkout() -> Iterator[Path]:
    """A folder that may be changed."""
    with tempfile.TemporaryDirectory(prefix="fedsim-mutants-") as folder:
        for name in ("conf", "docs", "fedsim", "scripts", "tests"):
            left_out = ["results"] if name == "docs" else []
            shutil.copytree(
                ROOT / name,
                Path(folder) / name,
                ignore=shutil.ignore_patterns("__pycache__", *left_out),
            )
        for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
            shutil.copy(ROOT / name, folder)
        yield Path(folder)


def complaint(mutant: Mutant, checkout: Path) -> str:
    """Why `mutant` cannot be applied to `checkout`, or an empty text."""
    path = checkout / mutant.file
    if not path.is_file():
        return f"{mutant.file}: there is no such file"
    for text in (mutant.old, mutant.new):
        if not isinstance(text, str):
            return f"{mutant.file}: {text!r} is no text in YAML: put it in quotes"
    times = path.read_text(encoding="utf-8").count(mutant.old)
    if times != 1:
        return f"{mutant.file}: {mutant.old!r} occurs {times} times"
    return (
        f"{mutant.file}: {mutant.old!r} is replaced by itself" if mutant.new == mutant.old else ""
    )


def fate(mutant: Mutant, checkout: Path) -> str:
    """The test that fails, or `survived`, or why the mutant cannot be applied."""
    if told := complaint(mutant, checkout):
        return told
    path = checkout / mutant.file
    sound = path.read_text(encoding="utf-8")
    path.write_text(sound.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return failing_test(shlex.split(mutant.tests), checkout)
    finally:
        path.write_text(sound, encoding="utf-8")


class Checked:
    """What the tests say of a checkout without any mutant, asked once for each list of tests."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        self.known: dict[str, str] = {}

    def fate(self, mutant: Mutant) -> str:
        """As `fate`, if its tests pass without it."""
        if mutant.tests not in self.known:
            self.known[mutant.tests] = failing_test(shlex.split(mutant.tests), self.checkout)
        before = self.known[mutant.tests]
        return (
            fate(mutant, self.checkout)
            if before == SURVIVED
            else f"nothing known: without it, {before} fails"
        )


def failing_test(words: list[str], checkout: Path) -> str:
    """The first failure of those tests, in a child that has the large libraries from its parent,
    and fedsim from the checkout."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_run_tests, args=(words, checkout, theirs))
    child.start()
    theirs.close()
    try:
        return str(ours.recv()) if ours.poll(LIMIT) else "no end"
    except EOFError:
        return f"pytest ended with {child.exitcode}"
    finally:
        child.kill()
        child.join()


def _run_tests(words: list[str], checkout: Path, answer: Connection) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.chdir(checkout)
    os.environ["PYTHONPATH"] = str(checkout)
    sys.path.insert(0, str(checkout))
    sys.dont_write_bytecode = True
    first = _FirstFailure()
    code = pytest.main(
        ["-x", "-q", "-n0", "-p", "no:cacheprovider", "--tb=no", *words], plugins=[first]
    )
    answer.send(first.name or (SURVIVED if code == 0 else f"pytest ended with {code}"))


class _FirstFailure:
    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid


def line(mutant: Mutant, killer: str) -> str:
    """What is printed of a mutant."""
    change = (
        f"`{_one_line(mutant.old)}` to `{_one_line(mutant.new)}`"
        if mutant.new
        else f"no `{_one_line(mutant.old)}`"
    )
    return f"{mutant.file}: {change} | {mutant.equivalent or killer}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def run_random(seed: int, count: int, words: list[str]) -> int:
    """Draw mutants from the modules that `words` name; the tests are those that the list names for
    these modules."""
    ours = [m for m in mutants() if not words or any(word in m.file for word in words)]
    tests = {
        w.partition("::")[0] for m in ours for w in shlex.split(m.tests) if w.startswith("tests/")
    }
    fates = random_mutants.run(random_mutants.draw(seed, count, words), sorted(tests))
    known = yaml.safe_load(SURVIVORS.read_text(encoding="utf-8"))
    survivors = [mutant for mutant, fate in fates.items() if fate in random_mutants.BAD]
    left = [mutant for mutant in survivors if mutant.told not in known]
    print(f"{len(fates)} mutants, {len(left)} neither killed nor in {SURVIVORS.name}")
    return int(bool(left))


def main() -> int:
    parser = argparse.ArgumentParser(description="Run mistakes made on purpose.")
    parser.add_argument("words", nargs="*", help="parts of paths; none: all files")
    parser.add_argument(
        "--random", nargs=2, type=int, metavar=("SEED", "COUNT"), help="drawn by chance instead"
    )
    options = parser.parse_args()
    if options.random:
        return run_random(*options.random, options.words)
    chosen = [m for m in mutants() if not options.words or any(w in m.file for w in options.words)]
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in LIBRARIES:
        importlib.import_module(name)
    survivors = 0
    with copy_of_checkout() as folder:
        checkout = Checked(folder)
        for mutant in chosen:
            killer = "" if mutant.equivalent else checkout.fate(mutant)
            bad = bool(killer) and not killer.startswith("tests/")
            survivors += bad
            print(("!! " if bad else "   ") + line(mutant, killer), flush=True)
    print(f"{len(chosen)} mutants, {survivors} not killed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
