"""One-token mutants drawn at random from fedsim/, run in children of one process that has collected
the tests.

A mutant replaces the code of one function in a forked child; the tests that execute its line run
there, the fastest of each file first. Which tests execute which line is recorded once for each file
of tests (`.cache/mutants`, remade when that file changes). Statements outside of functions are no
candidates, nor are annotations, messages and assertions.
"""

import ast
import copy
import gc
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "mutants"
WITHOUT = ("engine/graph", "engine/native")
"""What needs a GPU, and calls of C."""
SECONDS = 15.0
"""Of recorded time for the tests of a mutant."""
BAD = SURVIVED, NOT_EXECUTED = "survived", "no test executes it"
"""What tests do not notice; they do notice a loop without an end."""

SWAPPED: dict[type, list[type]] = {
    **{
        ast.Lt: [ast.LtE, ast.Gt],
        ast.LtE: [ast.Lt, ast.GtE],
        ast.Gt: [ast.GtE, ast.Lt],
        ast.GtE: [ast.Gt, ast.LtE],
    },
    **{ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq], ast.Is: [ast.IsNot], ast.IsNot: [ast.Is]},
    **{ast.In: [ast.NotIn], ast.NotIn: [ast.In], ast.And: [ast.Or], ast.Or: [ast.And]},
    **{ast.Add: [ast.Sub], ast.Sub: [ast.Add], ast.Mult: [ast.Div], ast.Div: [ast.Mult]},
    **{ast.FloorDiv: [ast.Div], ast.Mod: [ast.Mult], ast.Pow: [ast.Mult]},
}
OPPOSITE = {"min": "max", "minimum": "maximum", "argmin": "argmax"}
OPPOSITE |= {large: small for small, large in OPPOSITE.items()}
NO_CANDIDATES = {"strict", "copy", "dtype", "non_blocking"}
"""Keywords whose value changes no result."""


@dataclass(frozen=True)
class Random:
    """A mutant of the function that begins at `function` (name, line); `lines` are those of the
    changed expression."""

    file: str
    function: tuple[str, int]
    lines: tuple[int, ...]
    told: str
    code: CodeType

    def __str__(self) -> str:
        return f"{self.told}, line {self.lines[0]}"


# --- candidates ------------------------------------------------------------------------------------------------------


def changes(node: ast.AST) -> Iterator[Callable[[Any], None]]:
    """What may become of a node, as functions that change it in place."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            yield from (
                lambda n, i=i, new=new: n.ops.__setitem__(i, new())
                for new in SWAPPED.get(type(op), [])
            )
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        yield from (
            lambda n, new=new: setattr(n, "op", new()) for new in SWAPPED.get(type(node.op), [])
        )
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield lambda n: setattr(
            n, "value", n.value + 1 if isinstance(n.value, int) else 2 * n.value or 1.0
        )
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield lambda n: (
            setattr(n, "op", ast.Not()),
            setattr(n, "operand", ast.UnaryOp(ast.Not(), n.operand)),
        )[0]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield lambda n: setattr(n, "op", ast.UAdd())
    elif isinstance(node, ast.Name) and node.id in OPPOSITE:
        yield lambda n: setattr(n, "id", OPPOSITE[n.id])
    elif isinstance(node, ast.Attribute) and node.attr in OPPOSITE:
        yield lambda n: setattr(n, "attr", OPPOSITE[n.attr])


def inside(node: ast.AST, statement: int = 0) -> Iterator[tuple[ast.AST, int]]:
    """The nodes of a function that count, each with the line of its statement."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "args", "returns", "decorator_list") and not isinstance(
            node, ast.Call
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(
                child, ast.JoinedStr | ast.Raise | ast.Assert
            ):
                continue
            if isinstance(child, ast.keyword) and child.arg in NO_CANDIDATES:
                continue
            line = child.lineno if isinstance(child, ast.stmt) else statement
            yield child, line
            yield from inside(child, line)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Those of a module and of its classes, not those inside of them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef | ast.If):
            yield from functions(node)


def candidates(path: Path) -> list[Callable[[], Random]]:
    """All mutants of a file, each to be made when it is drawn."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        lambda f=f, i=i, c=c: made(path, tree, f, i, c)  # type: ignore[misc]
        for f, function in enumerate(functions(tree))
        for i, (node, _) in enumerate(inside(function))
        for c in range(len(list(changes(node))))
    ]


def made(path: Path, tree: ast.Module, f: int, i: int, c: int) -> Random:
    """Change `c` of node `i` of function `f`."""
    mutated = copy.deepcopy(tree)
    function = list(functions(mutated))[f]
    node, statement = list(inside(function))[i]
    before = ast.unparse(node)
    list(changes(node))[c](node)
    first = min([function.lineno, *(one.lineno for one in function.decorator_list)])
    name = function.name
    code = compile(ast.fix_missing_locations(mutated), str(path), "exec", dont_inherit=True)
    (own,) = (one for one in _codes(code) if (one.co_name, one.co_firstlineno) == (name, first))
    lines = tuple(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    file = path.relative_to(ROOT).as_posix()
    told = f"{file}: `{before}` to `{ast.unparse(node)}` in {name}"
    return Random(file, (name, first), (*lines, statement), told, own)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from _codes(one)


def files(words: Sequence[str]) -> list[Path]:
    """The modules of fedsim/ whose path has one of `words`, or all."""
    named = [(f, f.relative_to(ROOT).as_posix()) for f in sorted((ROOT / "fedsim").rglob("*.py"))]
    return [
        f
        for f, name in named
        if not any(w in name for w in WITHOUT) and (not words or any(w in name for w in words))
    ]


def draw(seed: int, count: int, words: Sequence[str]) -> list[Random]:
    """So many mutants, different ones, every one as likely as any other."""
    every = [one for path in files(words) for one in candidates(path)]
    print(f"{len(every)} candidates", flush=True)
    return [one() for one in random.Random(seed).sample(every, min(count, len(every)))]


# --- tests -----------------------------------------------------------------------------------------------------------


class Loop:
    """In place of pytest's loop: records what is not recorded, and then runs the mutants."""

    def __init__(self, mutants: Sequence[Random]) -> None:
        self.mutants = mutants
        self.fates: dict[Random, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Each file of tests, and each mutant, in a child."""
        for mutant in self.mutants:
            importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))
        gc.unfreeze()
        own = {
            f
            for f in gc.get_objects()
            if isinstance(f, FunctionType) and "/fedsim/" in f.__code__.co_filename
        }
        self.by_start = {
            (f.__code__.co_filename, f.__code__.co_name, f.__code__.co_firstlineno): f for f in own
        }
        gc.freeze()
        self.items = {item.nodeid: item for item in session.items}
        files = sorted({item.path for item in session.items})
        self.seconds: dict[str, float] = {}
        self.tests: dict[tuple[str, int], list[str]] = {}
        for path in files:
            for test, (seconds, lines) in recorded(
                path, [i for i in session.items if i.path == path]
            ).items():
                if test in self.items:
                    self.seconds[test] = seconds
                    for file, numbers in lines.items():
                        for number in numbers:
                            self.tests.setdefault((file, number), []).append(test)
        for mutant in self.mutants:
            self.fates[mutant] = self.fate(mutant)
            print(f"{'!!' if self.fates[mutant] in BAD else '  '} {mutant} | {self.fates[mutant]}")
            sys.stdout.flush()
        return True

    def fate(self, mutant: Random) -> str:
        """The test that fails, or `survived`, `no end` or `no test executes it`."""
        function = self.by_start.get((str(ROOT / mutant.file), *mutant.function))
        tests = next(
            (found for line in mutant.lines if (found := self.tests.get((mutant.file, line)))), []
        )
        if function is None or not tests:
            return NOT_EXECUTED
        chosen = self.chosen(tests)
        seconds = 10 + 4 * sum(self.seconds[t] for t in chosen)

        def work() -> str:
            function.__code__ = mutant.code
            return first_failure([self.items[t] for t in chosen])

        return in_a_child(work, seconds)

    def chosen(self, tests: Sequence[str]) -> list[str]:
        """The fastest of each file, then the second of each, and so on."""
        ranks: dict[str, int] = {}
        order = []
        for test in sorted(tests, key=lambda t: self.seconds[t]):
            file = test.partition("::")[0]
            ranks[file] = ranks.get(file, -1) + 1
            order.append((ranks[file], self.seconds[test], test))
        chosen, total = [], 0.0
        for _, seconds, test in sorted(order):
            if total + seconds <= SECONDS or not chosen:
                chosen.append(test)
                total += seconds
        return chosen


def in_a_child(work: Callable[[], str], limit: float) -> str:
    """What `work` returns in a forked process without output, or `no end` after `limit` seconds of
    its time."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        os.setsid()
        signal.setitimer(signal.ITIMER_PROF, limit)  # which ends the process
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        try:
            os.write(theirs, work().encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        answer = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return answer or (
        "no end" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF else "died"
    )


def first_failure(
    items: Sequence[pytest.Item], passed: Callable[[pytest.Item, float], None] | None = None
) -> str:
    """The first of `items` that fails (without `passed`), or `survived`."""
    failures: list[str] = []

    class Watch:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failures.append(report.nodeid)

    items[0].config.pluginmanager.register(Watch())
    for item, following in zip(items, [*items[1:], None], strict=True):
        begin, before = time.process_time(), len(failures)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if passed and len(failures) == before:
            passed(item, time.process_time() - begin)
        if failures and not passed:
            return failures[0]
    return SURVIVED


def recorded(
    path: Path, items: Sequence[pytest.Item]
) -> dict[str, tuple[float, dict[str, list[int]]]]:
    """For each test of a file that passes: its seconds, and the lines of fedsim that it
    executes."""
    key = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    place = CACHE / f"{path.stem}-{key}.json"
    if not place.exists():
        print(f"recording {path.name}", flush=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        in_a_child(lambda: record(items, place), 900)
    found: dict[str, tuple[float, dict[str, list[int]]]] = (
        json.loads(place.read_text()) if place.exists() else {}
    )
    return found


def record(items: Sequence[pytest.Item], place: Path) -> str:
    """Run all `items` with a trace of the lines of fedsim, and write what they execute."""
    seen: dict[str, set[int]] = {}
    own: dict[CodeType, set[int] | None] = {}
    found = {}
    prefix = str(ROOT / "fedsim") + os.sep

    def trace(frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        lines = own.get(code, 0)
        if lines == 0:
            file = code.co_filename
            lines = None
            if file.startswith(prefix):
                lines = seen.setdefault(file.removeprefix(str(ROOT) + os.sep), set())
            own[code] = lines
        if lines is None:
            return None

        def line(frame: FrameType, event: str, _: object) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line

    def passed(item: pytest.Item, seconds: float) -> None:
        found[item.nodeid] = (
            seconds,
            {file: sorted(lines) for file, lines in seen.items() if lines},
        )

    class Clear:
        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_setup(self) -> None:
            for lines in seen.values():
                lines.clear()

    items[0].config.pluginmanager.register(Clear())
    sys.settrace(trace)
    first_failure(items, passed)
    sys.settrace(None)
    place.write_text(json.dumps(found))
    return SURVIVED


def run(mutants: Sequence[Random], tests: Sequence[str]) -> dict[Random, str]:
    """The fate of each mutant by those files of tests."""
    loop = Loop(mutants)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(ROOT)
    pytest.main(["-q", "-n0", "-s", "-p", "no:cacheprovider", *tests], plugins=[loop])
    return loop.fates
