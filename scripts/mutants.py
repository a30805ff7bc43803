"""Make small mistakes in fedsim on purpose, and run the tests to see whether they notice.

    uv run python scripts/mutants.py 1 30                  # 30 of fedsim/, drawn with seed 1
    uv run python scripts/mutants.py 1 30 rounds gpfl      # only of paths with one of these words
    uv run python scripts/mutants.py 1 30 rounds --tests tests/test_experiment.py

A mutant changes one operator, number or name in one function. The script copies the checkout,
writes the mutant into the copy, and runs the tests there: the test files that import the mutant's
module, or the files after --tests. A mutant is killed if a test fails that passes without it. A
survivor shows that a test is missing, unless tests/mutants_survivors.yaml gives the reason why no
test can kill it.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
SURVIVORS = ROOT / "tests" / "mutants_survivors.yaml"
NOT_MUTATED = ("engine/graph", "engine/native")
"""Modules that need a GPU, and calls of C code."""
TIME_LIMIT = 900
"""Seconds for the tests of one mutant, which may be an endless loop."""
SURVIVED = "survived"
NO_END = "no end"

OPERATORS = {
    "<": ast.Lt,
    "<=": ast.LtE,
    ">": ast.Gt,
    ">=": ast.GtE,
    "==": ast.Eq,
    "!=": ast.NotEq,
    "is": ast.Is,
    "is not": ast.IsNot,
    "in": ast.In,
    "not in": ast.NotIn,
    "and": ast.And,
    "or": ast.Or,
    "+": ast.Add,
    "-": ast.Sub,
    "*": ast.Mult,
    "/": ast.Div,
    "//": ast.FloorDiv,
    "%": ast.Mod,
    "**": ast.Pow,
}
SYMBOLS = {operator: symbol for symbol, operator in OPERATORS.items()}
NEW_OPERATORS = {
    "<": ["<=", ">"],
    "<=": ["<", ">="],
    ">": [">=", "<"],
    ">=": [">", "<="],
    "==": ["!="],
    "!=": ["=="],
    "is": ["is not"],
    "is not": ["is"],
    "in": ["not in"],
    "not in": ["in"],
    "and": ["or"],
    "or": ["and"],
    "+": ["-"],
    "-": ["+"],
    "*": ["/"],
    "/": ["*"],
    "//": ["/"],
    "%": ["*"],
    "**": ["*"],
}
NEW_NAMES = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "argmin": "argmax",
    "argmax": "argmin",
}
KEYWORDS_WITHOUT_EFFECT = {"strict", "copy", "dtype", "non_blocking"}
"""Keyword arguments whose value changes no result."""


@dataclass(frozen=True)
class Mutant:
    """One change of one function.

    `file` is a path relative to the checkout, `function` a qualified name such as `Clients.ask`,
    and `kind` describes the change, for example `compare: > to >=`. `source` is the whole text of
    the changed file.
    """

    file: str
    function: str
    kind: str
    line: int
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}, {self.kind}"


# --- drawing mutants ---


def draw(seed: int, count: int, words: Sequence[str]) -> list[Mutant]:
    """Draw `count` different mutants of the files whose path contains one of `words`.

    All files of fedsim/ take part if there are no words. Every mutant is equally likely.
    """
    mutants: list[Mutant] = []
    for path in sorted((ROOT / "fedsim").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        chosen = not words or any(word in file for word in words)
        if chosen and not any(part in file for part in NOT_MUTATED):
            mutants += mutants_of(file, path.read_text(encoding="utf-8"))
    print(f"{len(mutants)} candidates", flush=True)
    return random.Random(seed).sample(mutants, min(count, len(mutants)))


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Return every mutant of a file with the text `source`."""
    mutants = []
    for function, definition in functions(ast.parse(source)):
        for node in computing_nodes(definition.body):
            for kind, new_text in changes(node):
                mutated = replaced(source, node, new_text)
                mutants.append(Mutant(file, function, kind, node.lineno, mutated))
    return mutants


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a module and of its classes, with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def computing_nodes(nodes: Sequence[ast.AST]) -> Iterator[ast.stmt | ast.expr]:
    """Yield the nodes whose change may change a result, at any depth.

    Annotations, parameters, messages and assertions are left out.
    """
    for node in nodes:
        if isinstance(node, ast.arguments | ast.JoinedStr | ast.Raise | ast.Assert):
            continue
        if isinstance(node, ast.keyword) and node.arg in KEYWORDS_WITHOUT_EFFECT:
            continue
        if isinstance(node, ast.stmt | ast.expr):
            yield node
        if isinstance(node, ast.AnnAssign):
            children: list[ast.AST] = [node.value] if node.value else []
        else:
            children = list(ast.iter_child_nodes(node))
        yield from computing_nodes(children)


def changes(node: ast.stmt | ast.expr) -> Iterator[tuple[str, str]]:
    """Yield the kind and the new text of each change of a node."""
    match node:
        case ast.Compare(left, operators, comparators):
            for i, operator in enumerate(operators):
                for kind, new in new_operators("compare", operator):
                    changed = [*operators[:i], new, *operators[i + 1 :]]
                    yield kind, in_brackets(ast.Compare(left, changed, comparators))
        case ast.BinOp(left, operator, right):
            for kind, new in new_operators("arithmetic", operator):
                yield kind, in_brackets(ast.BinOp(left, new, right))
        case ast.BoolOp(operator, values):
            for kind, new in new_operators("boolean", operator):
                yield kind, in_brackets(ast.BoolOp(new, values))
        case ast.AugAssign(target, operator, value):
            for kind, new in new_operators("arithmetic", operator):
                yield kind, ast.unparse(ast.AugAssign(target, new, value))
        case ast.Constant(bool() as value):
            yield f"constant: {value} to {not value}", repr(not value)
        case ast.Constant(int() as value):
            yield f"constant: {value} to {value + 1}", repr(value + 1)
        case ast.Constant(float() as value):
            new_value = 2 * value if value else 1.0
            yield f"constant: {value} to {new_value}", repr(new_value)
        case ast.UnaryOp(ast.Not(), operand):
            yield "boolean: without not", in_brackets(operand)
        case ast.UnaryOp(ast.USub(), operand):
            yield "arithmetic: without minus", in_brackets(operand)
        case ast.Name(name) if name in NEW_NAMES:
            yield f"name: {name} to {NEW_NAMES[name]}", NEW_NAMES[name]
        case ast.Attribute(value, name) if name in NEW_NAMES:
            changed_name = ast.Attribute(value, NEW_NAMES[name])
            yield f"name: {name} to {NEW_NAMES[name]}", ast.unparse(changed_name)


def new_operators(group: str, operator: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield operators to put in place of one, each with its kind, such as `compare: > to >=`."""
    symbol = SYMBOLS.get(type(operator), "")
    for new_symbol in NEW_OPERATORS.get(symbol, []):
        yield f"{group}: {symbol} to {new_symbol}", OPERATORS[new_symbol]()


def in_brackets(expression: ast.expr) -> str:
    return f"({ast.unparse(expression)})"


def replaced(source: str, node: ast.stmt | ast.expr, new_text: str) -> str:
    """Return `source` with the text of `node` replaced. Positions in a tree count UTF-8 bytes."""
    lines = source.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    whole = b"".join(lines)
    return (whole[:start] + new_text.encode() + whole[end:]).decode()


# --- running the tests ---


def copy_checkout(folder: Path) -> None:
    """Copy what the tests need, without the large files of docs/results, into `folder`."""
    for name in ("conf", "docs", "examples", "fedsim", "scripts", "tests"):
        left_out = shutil.ignore_patterns("__pycache__", "*.parquet", "summary.json")
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"):
        shutil.copy(ROOT / name, folder)


def tests_that_import(file: str) -> list[str]:
    """Return the test files that import the module `file`."""
    module = file.removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    pattern = (
        rf"^(from|import) {re.escape(module)}\b|^from {re.escape(package)} import .*\b{name}\b"
    )
    importing = re.compile(pattern, re.MULTILINE)
    test_files = sorted((ROOT / "tests").glob("test_*.py"))
    return [
        path.relative_to(ROOT).as_posix()
        for path in test_files
        if importing.search(path.read_text(encoding="utf-8"))
    ]


def fate(mutant: Mutant, tests: Sequence[str], checkout: Path, left_out: list[str]) -> str:
    """Return the first test that fails with a mutant and passes without it, or `survived`.

    A test that fails without the mutant proves nothing. It is printed and added to `left_out`.
    """
    path = checkout / mutant.file
    original = path.read_text(encoding="utf-8")
    while True:
        path.write_text(mutant.source, encoding="utf-8")
        result = first_failure(tests, checkout, left_out)
        path.write_text(original, encoding="utf-8")
        if result == SURVIVED:
            return result
        is_test = result.startswith("tests/")
        without = first_failure([result] if is_test else tests, checkout, left_out)
        if without == SURVIVED:
            return result
        if "::" not in result:
            sys.exit(f"without a mutant, {' '.join(tests)}: {without}. Mend this first.")
        print(f"   left out: {result}. Without a mutant, too: {without}", flush=True)
        left_out.append(result)


def first_failure(tests: Sequence[str], checkout: Path, left_out: Sequence[str]) -> str:
    """Run `tests` in a checkout, except those in `left_out`.

    Return the first test that fails, `survived`, `no end`, or pytest's exit status.
    """
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-n0", "-rfE", "--tb=no"]
    deselected = [f"--deselect={test}" for test in left_out]
    try:
        finished = subprocess.run(
            [*command, "-p", "no:cacheprovider", *deselected, *tests],
            cwd=checkout,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
        )
    except subprocess.TimeoutExpired:
        return NO_END
    if finished.returncode == 0:
        return SURVIVED
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", finished.stdout, re.MULTILINE)
    return failed[1] if failed else f"pytest exits with {finished.returncode}"


def run(mutants: Sequence[Mutant], tests: Sequence[str]) -> list[Mutant]:
    """Run and print each mutant. Return those that no test kills and no entry explains."""
    explained = yaml.safe_load(SURVIVORS.read_text(encoding="utf-8"))
    accepted = {(entry["file"], entry["function"], entry["kind"]) for entry in explained}
    left_out: list[str] = []
    survivors = []
    with tempfile.TemporaryDirectory(prefix="fedsim-mutants-") as folder:
        checkout = Path(folder)
        copy_checkout(checkout)
        for mutant in mutants:
            chosen = tests or tests_that_import(mutant.file)
            if not chosen:
                print(f"!! {mutant} | no test imports this module: name tests with --tests")
                survivors.append(mutant)
                continue
            result = fate(mutant, chosen, checkout, left_out)
            known = (mutant.file, mutant.function, mutant.kind) in accepted
            unexplained = result == SURVIVED and not known
            if unexplained:
                survivors.append(mutant)
            print(f"{'!!' if unexplained else '  '} {mutant} | {result}", flush=True)
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests on mistakes made on purpose.")
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("words", nargs="*", help="parts of paths; without any, all of fedsim/")
    parser.add_argument("--tests", nargs="+", default=[], help="test files to run")
    options = parser.parse_args()
    mutants = draw(options.seed, options.count, options.words)
    survivors = run(mutants, options.tests)
    print(f"{len(mutants)} mutants, {len(survivors)} neither killed nor in {SURVIVORS.name}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
