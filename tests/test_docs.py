"""Every command on a page is composed or run, and prints what the page shows; the pages name all
that there is."""

import importlib.util
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.types import Override

from fedsim.api import experiments
from fedsim.commands.catalogue import Catalogue
from fedsim.commands.dispatch import COMMANDS, answer
from fedsim.config import words as command_line
from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.core.errors import FedsimError
from fedsim.jobs import cli
from fedsim.report import command as report
from fedsim.results.runs import ReportError
from fedsim.running.process import print_error
from fedsim.tracking.console import CONSOLE
from scripts import selector_tables
from scripts.benchmark import MODULES
from tests.documentation import (
    DOCS,
    PAGES,
    ROOT,
    Block,
    Command,
    blocks,
    commands,
    missing_line,
    program,
    shape,
)
from tests.report_toys import make_report
from tests.sweep_words import axes_of, diagonal

SHORT = ("num_rounds=10", "tracker.wandb.mode=disabled")
"""Added to commands that are run: ten rounds, which print a line each, in place of fifty. To
experiments in Python: the first of these."""
NOT_INSTALLED = re.compile(r"\S+: needs the package \w+; install fedsim with its extra '\w+'\n.*")
"""All that may be wrong with a command, which needs an extra that the tests do without."""
OTHERS = ("uv", "uvx", "pip", "zensical", "export", "source", "git")
"""Programs of others, whose words are not looked at."""
WIDTH = 140
MOST_JOBS = 2
"""Jobs of a command that are composed."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_does_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(CONSOLE, "width", WIDTH)
    monkeypatch.setenv(
        "SCRATCH", str(tmp_path)
    )  # a shell would replace it, in the commands for clusters
    if page == ROOT / "README.md":
        monkeypatch.setenv("UV", "uv")  # as under `uv run`, with which its commands begin
    monkeypatch.setattr(
        experiments, "compose_jobs", lambda words, **more: compose_jobs([*words, SHORT[0]], **more)
    )
    for block in blocks(page):
        if block.title is not None:
            path = tmp_path / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text((path.read_text() if path.exists() else "") + block.text)
    names: dict[str, object] = {}
    for block in blocks(page):
        if block.language == "python" and block.title is None:
            exec(compile(block.text, f"{page}:{block.line}", "exec"), names)
        for command in commands(block):
            do(page, command, capsys)


def do(page: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """Compose or run a command of a page; fails with its line."""
    where = f"{name(page)}:{command.line}: {' '.join(command.words)}"
    words = program(command.words)
    if command.printed is None:
        try:
            check(words)
        except (FedsimError, ValueError, SystemExit) as error:
            if not NOT_INSTALLED.fullmatch(str(error)):
                pytest.fail(f"{where}\n{error}")
        return
    capsys.readouterr()
    run(words)
    out, err = capsys.readouterr()
    line = missing_line(command.printed, out + err)
    assert line is None, (
        f"{where} does not print\n{line}\nits shape: {shape(line)}\nit printed\n{out}{err}"
    )


def check(words: tuple[str, ...]) -> None:
    """Compose a command, or look for what it names. Raises `ValueError` for what is not there, or
    nobody knows."""
    first, rest = words[0], words[1:]
    if words[:3] == ("python", "-m", "fedsim.run"):
        compose(words[3:])
    elif first == "fedsim":
        check_fedsim(words[1:])
    elif words[:2] == ("python", "-m"):
        require(importlib.util.find_spec(words[2]) is not None, words[2])
    elif first == "python":
        script, *flags = [word for word in rest if word != "-P"]
        path = ROOT / script
        if script == "scripts/benchmark.py" and flags:
            path = (
                ROOT
                / "scripts"
                / "benchmarks"
                / f"{MODULES.get(flags[0], 'no').replace('.', '/')}.py"
            )
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        require(
            bool(text) and all(f'"{flag}"' in text for flag in flags if flag.startswith("--")), rest
        )
    elif first == "pytest":
        require(all((ROOT / word).is_file() for word in rest if word.endswith(".py")), rest)
    elif first == "make":
        require(f"\n{rest[0]}:" in (ROOT / "Makefile").read_text(encoding="utf-8"), rest[0])
    elif first not in OTHERS:
        require(not rest and "." in first, first)


def check_fedsim(words: tuple[str, ...]) -> None:
    """`words` follow `fedsim`: those about jobs are composed."""
    first = words[0] if words else ""
    if first == "report":
        read_report_words(words[1:])
    elif first in ("list", "--help", "--version"):
        assert answer(words) == 0
    elif first not in COMMANDS or first in ("show", "doctor"):
        compose(words[1:] if first in COMMANDS else words)


def require(holds: bool, what: object) -> None:
    if not holds:
        raise ValueError(f"{what}: no such thing")


def compose(argv: tuple[str, ...]) -> None:
    """Compose and check `MOST_JOBS` of the jobs of a command line in which each value of each key
    that it sets occurs; what a preset sweeps over, and seeds, have their first value."""
    args = command_line.read(argv)

    def few_jobs(found: Sequence[Override]) -> list[list[str]]:
        jobs = diagonal(
            [words if key in keys else words[:1] for key, words in axes_of(found).items()]
        )
        return jobs[:: math.ceil(len(jobs) / MOST_JOBS)]

    with pytest.MonkeyPatch.context() as patch, search_path(args.config_dir, args.config_path):
        keys = {o.get_key_element() for o in command_line.parse(args.overrides)} - {"seed"}
        patch.setattr("fedsim.config.compose.expand", few_jobs)
        check_jobs(compose_jobs(args.overrides, multirun=args.multirun))


def read_report_words(argv: tuple[str, ...]) -> None:
    """Read a command line of the report, whose runs need not be there."""

    def stop(name: str, output_dir: Path) -> Path:
        raise ReportError("read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "find_source", stop)
        assert make_report(argv) == 3


def run(words: tuple[str, ...]) -> None:
    """Run a command of fedsim for a few rounds, or a report without figures; errors are told as on
    the terminal."""
    assert words[0] == "fedsim", "only commands of fedsim have their output shown"
    if words[1:2] == ("report",):
        assert make_report([*words[2:], "--no-figures"]) == 0
        return
    try:
        cli.run([*words[1:], *SHORT])
    except FedsimError as error:
        print_error(error)


def test_a_wrong_command_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """The negative control of all above."""
    wrong = (
        "fedsim selector=randon",
        "python scripts/no.py",
        "make no",
        "python -m fedsim.no",
        "rm x",
        "pytest no.py",
    )
    for line in (*wrong, "fedsim report default --no-such"):
        (command,) = commands(Block(1, "bash", None, (line,)))
        with pytest.raises(pytest.fail.Exception, match=re.escape(line)):
            do(ROOT / "README.md", command, capsys)


def test_every_page_is_in_the_navigation() -> None:
    def leaves(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        return [
            leaf
            for child in (node.values() if isinstance(node, dict) else node)
            for leaf in leaves(child)
        ]

    listed = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


GROUPS = [p for p in sorted((ROOT / "conf").rglob("*")) if any(p.glob("*.yaml"))]


@pytest.mark.parametrize("group", GROUPS, ids=lambda p: str(p.relative_to(ROOT / "conf")))
def test_every_choice_of_a_group_is_documented(group: Path) -> None:
    pages = {"selector": "selectors.md", "preset": "papers.md"}
    text = (DOCS / pages.get(group.name, "configuration.md")).read_text(encoding="utf-8")
    text += (DOCS / "configuration.md").read_text(encoding="utf-8")
    text = re.sub(r"(\w+) \(each of these four also as `_10` and `_100`\)", r"\1", text)
    stems = {p.stem for p in group.glob("*.yaml")}
    if group.name == "sketch":
        stems = {stem for stem in stems if not stem.endswith(("_10", "_100"))}
    missing = [
        stem
        for stem in sorted(stems)
        if not re.search(rf"(?<![\w.]){re.escape(stem)}(?![\w])", text)
    ]
    assert missing == []


def test_selectors_that_the_table_of_the_readme_names_exist() -> None:
    rows = [
        line
        for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    named = {word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[-2])}
    assert len(named) > 20
    assert named <= {p.stem for p in (ROOT / "conf/selector").glob("*.yaml")}


def test_the_tables_of_selectors_are_the_heads_of_their_files() -> None:
    page = selector_tables.PAGE.read_text(encoding="utf-8")
    assert selector_tables.with_tables(page) == page  # scripts/selector_tables.py --write
    assert (
        selector_tables.with_tables(page.replace("12 K up", "13 K up")) == page
    )  # a cell that was edited by hand
    assert "| `random` (fedavg, uniform) |" in page
    named = [name for found in selector_tables.TABLE.findall(page) for name in found[1].split(", ")]
    methods = [
        choice.name
        for choice in Catalogue().group("selector").choices.values()
        if choice.base is None
    ]
    assert sorted(named) == methods


def test_the_page_of_what_selectors_were_checked_against_has_a_row_for_each() -> None:
    lines = (DOCS / "selectors_checked.md").read_text(encoding="utf-8").splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("|")]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(p.stem for p in (ROOT / "conf/selector").glob("*.yaml"))


def test_the_reference_has_every_selector() -> None:
    text = (DOCS / "api/selectors.md").read_text(encoding="utf-8")
    modules = {p.stem for p in (ROOT / "fedsim/selectors").glob("*.py")} - {"__init__"}
    documented = set(re.findall(r"^::: fedsim\.selectors\.(\w+)", text, re.MULTILINE))
    assert modules - documented <= {"gaussian_process", "similarity", "tools", "ward"}
    assert documented <= modules


def test_the_map_of_the_design_has_all_rooms() -> None:
    text = (DOCS / "design.md").read_text(encoding="utf-8")
    files = {p.name for p in (ROOT / "fedsim").glob("*.py")} - {"__init__.py", "__main__.py"}
    folders = {f"{p.parent.name}/" for p in (ROOT / "fedsim").glob("*/__init__.py")}
    assert set(re.findall(r"^  (\w+(?:\.py|/)) ", text, re.MULTILINE)) == files | folders


def slug(heading: str) -> str:
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", lambda m: m[1] or "", heading).lower()
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain).strip())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_within_the_repository_lead_somewhere_and_an_empty_line_ends_every_table(
    page: Path,
) -> None:
    """The site takes a line directly below a table for a row of it, also a heading."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    assert not re.findall(r"^\| .*\n(?!\||\s*$).+", text, re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text):
        path, _, anchor = "".join(target).partition("#")
        if "://" in path:
            continue
        file = page if not path else (page.parent / path).resolve()
        assert file.exists(), f"{name(page)}: {path}"
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), f"{name(page)}: {path}#{anchor}"
