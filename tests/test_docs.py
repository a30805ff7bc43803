"""Check the pages: each command composes or prints what the page shows, links lead somewhere, and
the pages name everything that exists."""

import importlib.util
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import yaml
from hydra.core.override_parser.types import Override

from fedsim.api import experiments
from fedsim.commands.catalogue import Catalogue
from fedsim.commands.dispatch import COMMANDS, answer, run_experiment
from fedsim.config.command_line import read_command_line
from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.core.errors import FedsimError
from fedsim.report import command as report
from fedsim.results.runs import ReportError
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
from tests.sweep_words import Words, few_choices

TEN_ROUNDS = "num_rounds=10"
"""Added to commands and to experiments in Python that are run. Ten rounds print a line each."""
NOT_INSTALLED = re.compile(r"\S+: needs the package \w+; install fedsim with its extra '\w+'\n.*")
"""The only allowed error of a composed command: it needs an extra that the tests do not install."""
OTHER_PROGRAMS = ("uv", "uvx", "pip", "zensical", "export", "source", "git")
"""Programs whose arguments are not checked."""
MAX_JOBS = 2
"""Maximum number of jobs of a command that are composed."""
SELECTORS = sorted(path.stem for path in (ROOT / "conf/selector").glob("*.yaml"))


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def find(pattern: str, page: Path) -> list[str]:
    """Return all matches of a pattern in a page, whose lines ^ and $ delimit."""
    return re.findall(pattern, read(page), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_does_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(CONSOLE, "width", 140)
    monkeypatch.setenv("SCRATCH", str(tmp_path))  # a shell replaces it in the scripts for clusters
    if page == ROOT / "README.md":
        monkeypatch.setenv("UV", "uv")  # as under `uv run`, with which its commands begin

    def compose_ten_rounds(words, **options):
        return compose_jobs([*words, TEN_ROUNDS], **options)

    monkeypatch.setattr(experiments, "compose_jobs", compose_ten_rounds)
    for block in blocks(page):
        if block.title is not None:
            path = tmp_path / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(block.text)
    names: dict[str, object] = {}
    for block in blocks(page):
        if block.language == "python" and block.title is None:
            exec(compile(block.text, f"{page}:{block.line}", "exec"), names)
        for command in commands(block):
            check_command(page, command, capsys)


def check_command(page: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """Compose or run a command of a page. Fails with its line."""
    place = f"{name(page)}:{command.line}: {' '.join(command.words)}"
    words = program(command.words)
    if command.printed is None:
        try:
            compose(words)
        except (FedsimError, ValueError, SystemExit) as error:
            if not NOT_INSTALLED.fullmatch(str(error)):
                pytest.fail(f"{place}\n{error}")
        return
    capsys.readouterr()
    run(words)
    out, err = capsys.readouterr()
    line = missing_line(command.printed, out + err)
    if line is not None:
        pytest.fail(f"{place} does not print\n{line}\nits shape: {shape(line)}\n{out}{err}")


def compose(words: tuple[str, ...]) -> None:
    """Compose a command, or look for what it names. Raises `ValueError` for what does not exist."""
    first, rest = words[0], words[1:]
    exists = True
    if words[:3] == ("python", "-m", "fedsim.run"):
        compose_some_jobs(words[3:])
    elif first == "fedsim":
        compose_fedsim(rest)
    elif words[:2] == ("python", "-m"):
        exists = importlib.util.find_spec(words[2]) is not None
    elif first == "python":
        exists = script_exists(*(word for word in rest if word != "-P"))
    elif first == "pytest":
        exists = all((ROOT / word).is_file() for word in rest if word.endswith(".py"))
    elif first == "make":
        exists = f"\n{rest[0]}:" in read(ROOT / "Makefile")
    elif first not in OTHER_PROGRAMS:
        exists = not rest and "." in first  # the name of a script
    if not exists:
        raise ValueError(f"{words}: no such thing")


def script_exists(script: str, *arguments: str) -> bool:
    """Return whether a script of the repository exists and has the options in `arguments`."""
    path = ROOT / script
    if script == "scripts/benchmark.py" and arguments:
        module = MODULES.get(arguments[0], "missing").replace(".", "/")
        path = ROOT / f"scripts/benchmarks/{module}.py"
    return path.is_file() and all(
        f'"{argument}"' in read(path) for argument in arguments if argument.startswith("--")
    )


def compose_fedsim(words: tuple[str, ...]) -> None:
    """Compose the jobs of a command line of fedsim, read that of a report, or run a list."""
    first = words[0] if words else ""
    if first == "report":
        with mock.patch.object(report, "find_source", side_effect=ReportError("read")):
            assert answer(words) == 3  # the runs need not exist
    elif first in ("list", "cite", "--help", "--version"):
        assert answer(words) == 0
    elif first in ("show", "doctor"):
        compose_some_jobs(words[1:])
    elif first not in COMMANDS:
        compose_some_jobs(words)


def compose_some_jobs(argv: tuple[str, ...]) -> None:
    """Compose and check `MAX_JOBS` jobs of a command line."""
    args = read_command_line(argv)

    def some_jobs(overrides: Sequence[Override]) -> list[Words]:
        jobs = few_choices(overrides, max_choices=1)
        return jobs[:: math.ceil(len(jobs) / MAX_JOBS)]

    with pytest.MonkeyPatch.context() as patch, search_path(args.config_dir, args.config_path):
        patch.setattr("fedsim.config.compose.expand", some_jobs)
        check_jobs(compose_jobs(args.overrides, multirun=args.multirun))


def run(words: tuple[str, ...]) -> None:
    """Run a command of fedsim for ten rounds, or a report without figures."""
    program_name, *arguments = words
    assert program_name == "fedsim", "only commands of fedsim have their output shown"
    if "report" in arguments:
        arguments.append("--no-figures")
    if answer(arguments) is None:
        run_experiment([*arguments, TEN_ROUNDS, "tracker.wandb.mode=disabled"])


@pytest.mark.parametrize(
    "line",
    [
        "fedsim selector=randon",
        "fedsim report default --no-such",
        "python scripts/no.py",
        "python -m fedsim.no",
        "pytest no.py",
        "make no",
        "rm x",
    ],
)
def test_a_wrong_command_is_found(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = commands(Block(1, "bash", None, (line,)))
    with pytest.raises(pytest.fail.Exception, match=re.escape(line)):
        check_command(ROOT / "README.md", command, capsys)


def test_every_page_is_in_the_navigation() -> None:
    navigation = find(r"([\w/]+\.md)$", ROOT / "mkdocs.yml")
    assert yaml.safe_load(read(ROOT / "mkdocs.yml"))["nav"]
    assert sorted(navigation) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


GROUPS = [p for p in sorted((ROOT / "conf").rglob("*")) if any(p.glob("*.yaml"))]


@pytest.mark.parametrize("group", GROUPS, ids=lambda p: str(p.relative_to(ROOT / "conf")))
def test_every_choice_of_a_group_is_documented(group: Path) -> None:
    text = read(DOCS / "configuration.md")
    if group.name == "selector":
        text += read(DOCS / "selectors.md")
    if group.name == "preset":
        text += read(DOCS / "papers.md")
    documented = set(re.findall(r"(?<![\w.])[\w.]*\w", text))
    choices = {path.stem for path in group.glob("*.yaml")}
    if group.name == "sketch":  # the page names their sizes in a remark
        choices = {choice for choice in choices if not choice.endswith(("_10", "_100"))}
    assert sorted(choices - documented) == []


def test_selectors_that_the_table_of_the_readme_names_exist() -> None:
    last_cells = find(r"^\|.*\|([^|]+)\|$", ROOT / "README.md")
    selectors = re.findall(r"`(\w+)`", " ".join(last_cells))
    assert len(selectors) > 20
    assert set(selectors) <= set(SELECTORS)


def test_the_tables_of_selectors_are_the_heads_of_their_files() -> None:
    page = read(selector_tables.PAGE)
    assert selector_tables.with_tables(page) == page  # scripts/selector_tables.py --write
    edited_by_hand = page.replace("12 K up", "13 K up")
    assert edited_by_hand != page
    assert selector_tables.with_tables(edited_by_hand) == page
    assert "| `random` (fedavg, uniform) |" in page


def test_every_method_is_in_a_table_of_selectors() -> None:
    names = ", ".join(re.findall(r"<!-- selectors: (.*) -->", read(selector_tables.PAGE)))
    choices = Catalogue().group("selector").choices.values()
    methods = [choice.name for choice in choices if choice.base is None]
    assert sorted(names.split(", ")) == methods


def test_the_page_of_what_selectors_were_checked_against_has_a_row_for_each() -> None:
    cells = find(r"^\|([^|]*)", DOCS / "selectors_checked.md")
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == SELECTORS


def test_the_reference_has_every_selector() -> None:
    text = read(DOCS / "api/selectors.md")
    modules = {p.stem for p in (ROOT / "fedsim/selectors").glob("*.py")} - {"__init__"}
    documented = set(re.findall(r"^::: fedsim\.selectors\.(\w+)", text, re.MULTILINE))
    shared = {
        "candidates",
        "gaussian_process",
        "gradient_projection",
        "label_counts",
        "layer_names",
        "optics",
        "predictions",
        "similarity",
        "subset_search",
        "ward",
    }
    assert modules - documented <= shared
    assert documented <= modules


def test_the_concepts_quote_the_readable_twin() -> None:
    excerpts = [block.text for block in blocks(DOCS / "concepts.md") if block.language == "py"]
    assert excerpts
    assert all(excerpt in read(ROOT / "examples/one_round.py") for excerpt in excerpts)


def test_the_map_of_the_design_has_all_rooms() -> None:
    files = {p.name for p in (ROOT / "fedsim").glob("*.py")} - {"__init__.py", "__main__.py"}
    folders = {f"{p.parent.name}/" for p in (ROOT / "fedsim").glob("*/__init__.py")}
    entries = find(r"^  (\w+(?:\.py|/)) ", DOCS / "design.md")
    assert set(entries) == files | folders


def anchors(page: Path) -> Iterator[str]:
    """Yield the anchors of a page's headings, as the site and GitHub make them."""
    for heading in re.findall(r"^#+ (.*)$", read(page), re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", heading)).lower()
        yield re.sub(r"[\s-]+", "-", words.strip())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", prose(page)):
        path, _, anchor = "".join(link).partition("#")
        if "://" in path:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)}: {path}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name(page)}: {path}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_an_empty_line_ends_every_table(page: Path) -> None:
    """The site takes a line directly below a table for a row of it."""
    assert not re.findall(r"^\| .*\n(?!\||\s*$).+", prose(page), re.MULTILINE)


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", read(page), flags=re.MULTILINE | re.DOTALL)
