"""The command `fedsim report`, what its page holds, and its comparison with an earlier report."""

import csv
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedsim.core.errors import FedsimError
from fedsim.report.command import filtered
from fedsim.results.runs import read_runs
from tests.report_toys import make_report, two_methods, write_run


class Page(HTMLParser):
    """The elements of a page by name, with their attributes; all of them are closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert not self.open, "elements that are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "input", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def values(self, tag: str, attribute: str) -> list[str]:
        return [
            value
            for name, attrs in self.elements
            if name == tag and (value := attrs.get(attribute)) is not None
        ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a preset with runs of two methods, and their report."""
    folder = tmp_path_factory.mktemp("report") / "outputs" / "gpfl_table2_fmnist"
    two_methods(folder)
    assert make_report(["gpfl_table2_fmnist", "--output-dir", str(folder.parent)]) == 0
    return folder


def test_the_command_writes_everything(runs: Path) -> None:
    target = runs / "report"
    names = {p.relative_to(target).as_posix() for p in target.rglob("*")}
    assert {"report.html", "tables.md", "summary.json", "overview.tex", "overview.csv"} <= names
    assert {
        "figures/accuracy_rounds.png",
        "figures/accuracy_rounds.pdf",
        "figures/coverage.png",
    } <= names
    rows = list(csv.reader((target / "pairs.csv").open()))
    assert rows[1][1:3] == [
        "gpfl - random",
        "+0.0500",
    ]  # the mean over both rounds, as the window is longer
    assert (
        json.loads((target / "summary.json").read_text())["groups"][1]["seeds"]["0"][
            "final_accuracy"
        ]
        == 0.45
    )


def test_the_page(runs: Path) -> None:
    report = runs / "report"
    page, path = Page(report / "report.html"), report / "report.html"
    assert {"table-overview", "table-pairs", "table-configs", "table-runs"} <= set(
        page.values("table", "id")
    )
    targets = {element.get("id") for _, element in page.elements}
    links = page.values("a", "href")
    for link in links:
        assert (
            link[1:] in targets
            if link.startswith("#")
            else (report / link / "config.yaml").is_file()
        ), link
    assert sum(not link.startswith("#") for link in links) == 6
    for address in (
        *page.values("script", "src"),
        *page.values("img", "src"),
        *page.values("link", "href"),
    ):
        assert address.startswith("data:"), "the page needs no network"
    assert len(page.values("img", "src")) == len(list((report / "figures").glob("*.pdf"))) == 9
    assert "plotly.js v" in path.read_text()
    assert 4e6 < path.stat().st_size < 7e6
    assert str(runs.parent) not in path.read_text()


def test_a_page_without_figures_is_small_and_sorts_rows_by_the_numbers_of_their_cells(
    tmp_path: Path,
) -> None:
    two_methods(tmp_path)
    write_run(tmp_path, [0.1], [[0]], choices={"selector": "afl"}, seed=1)
    assert make_report([str(tmp_path), "--no-figures"]) == 0
    path = tmp_path / "report" / "report.html"
    Page(path)
    assert path.stat().st_size < 100_000
    assert "plotly" not in path.read_text()
    found = re.findall(r'data-sort="([^"]*)"[^>]*>([^<]*)<', path.read_text())
    by_text = {text: float(value) for value, text in found}
    assert by_text["10.0 s"] == 10
    assert by_text["never (0/3)"] == math.inf
    assert by_text["&lt; .001"] < 0.001
    assert by_text["0.4100 [0.3852, 0.4348]"] == pytest.approx(0.41)
    assert not {"random", "-", "", "[+0.1000, +0.1000]"} & by_text.keys()


def against(folder: Path, earlier: Any, to: Path) -> tuple[int, list[list[str]]]:
    """The exit code and the rows of the comparison of the runs in `folder` with an earlier
    summary."""
    (to / "earlier.json").write_text(json.dumps(earlier))
    code = make_report(
        [str(folder), "--no-figures", "--to", str(to), "--against", str(to / "earlier.json")]
    )
    table = to / "against.csv"
    return code, list(csv.reader(table.open()))[1:] if table.is_file() else []


def test_a_report_compares_itself_with_an_earlier_one(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads((runs / "report" / "summary.json").read_text())
    values["groups"][1]["seeds"]["1"]["final_accuracy"] -= 0.03
    values["groups"][1]["made_by"]["1"] = {
        "engine": "batched, 1 thread",
        "commit": "0123456789abcdef",
    }
    values["verdicts"]["gone"] = "reproduced"
    code, rows = against(runs, values, tmp_path)
    unknown = "not recorded"
    engines = f"batched, 1 thread, {unknown}"
    assert code == 0
    assert rows[0] == ["random", "3", "+0.0000", "0.0000", *[unknown] * 4]
    assert rows[1] == [
        "gpfl",
        "3",
        "+0.0100",
        "0.0300",
        unknown,
        unknown,
        engines,
        f"0123456789, {unknown}",
    ]
    assert "Verdicts that are gone: gone." in " ".join(capsys.readouterr().out.split())


def test_a_comparison_of_nothing_is_an_error(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads((runs / "report" / "summary.json").read_text())
    for change in ({"seeds": {"10": {"final_accuracy": 0.5}}}, {"config": "0"}):
        earlier = {**values, "groups": [{**group, **change} for group in values["groups"]]}
        assert against(runs, earlier, tmp_path) == (3, [])
        told = capsys.readouterr()
        assert "--against: nothing to compare" in told.err
        assert "Verdicts that differ" not in told.out


def test_against_tells_groups_apart_whose_configs_compare_as_equal(tmp_path: Path) -> None:
    folder = tmp_path / "now"
    for accuracy, path in ((0.9, "/d/a"), (0.3, "/d/b")):
        write_run(folder / path[1:], [accuracy] * 2, [[0], [1]], dataset={"path": path})
    assert make_report([str(folder), "--no-figures"]) == 0
    code, rows = against(
        folder, json.loads((folder / "report" / "summary.json").read_text()), tmp_path
    )
    assert (code, [row[2:4] for row in rows]) == (0, [["+0.0000", "0.0000"]] * 2)


@pytest.mark.parametrize("word", ["stop_at=null", "secure=true", "lr=0.10", "seed=0.0"])
def test_values_of_where_are_those_of_a_command_line(word: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    write_run(folder, [0.5], [[0]], stop_at=None, secure=True, lr=0.1, seed=0)
    assert make_report([str(folder), "--no-figures", "--where", word]) == 0


def test_files_of_an_earlier_report_are_named(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(runs), "--no-figures", "--to", str(tmp_path / "to")]
    assert make_report(words) == 0
    assert make_report(words) == 0
    assert "earlier report" not in capsys.readouterr().err
    assert make_report([*words, "--where", "selector=random"]) == 0
    note = capsys.readouterr().err
    assert "also has files of an earlier report, perhaps of other runs: pairs.csv" in note


def test_a_value_of_where_that_no_run_has_is_told(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--where", "selector=random,orot"]
    assert make_report([str(runs), "--no-figures", "--to", str(tmp_path), *where]) == 0
    note = "fedsim report: --where selector=random,orot: no run has orot; there are gpfl, random\n"
    assert note in capsys.readouterr().err


def test_a_report_of_some_of_the_runs(runs: Path, tmp_path: Path) -> None:
    some = {
        "selector=*": 2,
        "selector=x,g*": 1,
        "selector=random --where num_rounds=2": 1,
        "seed=0,3": 2,
    }
    for words, rows in some.items():
        where = ["--where", *words.split()]
        assert make_report([str(runs), "--no-figures", "--to", str(tmp_path), *where]) == 0
        assert len(json.loads((tmp_path / "summary.json").read_text())["groups"]) == rows


@pytest.mark.parametrize(
    ("word", "rho"),
    [
        ("selector.rho=0.5", 0.5),
        ("selector.exploration.rho=0.9,2", 0.9),
        ("optimizer.schedule.milestones=[2,3]", 0.5),
        ("optimizer.schedule.milestones=[1],[2, *]", 0.5),
        ("optimizer.schedule.milestones=[1,3],7", 0.9),
    ],
)
def test_a_report_of_runs_by_a_list_or_a_shorthand(tmp_path: Path, word: str, rho: float) -> None:
    for value, milestones in ((0.5, [2, 3]), (0.9, [1, 3])):
        selector = {"exploration": {"rho": value}}
        optimizer = {"schedule": {"milestones": milestones}}
        folder = tmp_path / str(value)
        write_run(folder, [0.1], [[0]], selector=selector, optimizer=optimizer)
    (run,) = filtered(read_runs(tmp_path), word)
    assert run.config["selector"]["exploration"]["rho"] == rho


@pytest.mark.parametrize("name", ["chest_xray", "parquet"])
def test_data_at_a_path_are_found_by_their_name_and_by_their_choice(
    tmp_path: Path, name: str
) -> None:
    choices = {"selector": "random", "dataset": "parquet"}
    write_run(tmp_path, [0.1], [[0]], choices=choices, dataset={"path": "/data/chest_xray"})
    write_run(tmp_path, [0.1], [[0]])
    (run,) = filtered(read_runs(tmp_path), f"dataset={name}")
    assert run.dataset == "chest_xray"


@pytest.mark.parametrize("other", ["a", "b", None])
def test_runs_of_a_setting_that_read_different_files_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str | None
) -> None:
    """`other` is the first digit of the other run's checksum. Generated data have none."""
    for selector, digit in (("random", "a"), ("gpfl", other)):
        data = {"fingerprint": "x", "sha256": digit and digit * 64}
        write_run(tmp_path, [0.1], [[0]], choices={"selector": selector}, summary={"data": data})
    assert make_report([str(tmp_path), "--no-figures"]) == 0
    warns = (
        "runs have read different files (data.sha256 aaaaaaaaaaaa, bbbbbbbbbbbb in summary.json)"
    )
    assert (warns in capsys.readouterr().err) == (other == "b")


def test_a_folder_without_runs_is_told(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = str(tmp_path / "absent.json")
    for words, told in (
        ([str(tmp_path)], "no finished run"),
        ([str(runs), "--no-figures", "--to", str(tmp_path), "--against", absent], "--against"),
        (
            ["nonsense", "--output-dir", str(tmp_path)],
            "neither a folder with runs, nor the name of results",
        ),
        (
            [str(runs), "--where", "selector=oort,"],
            "selector=oort,: holds of no run; there are gpfl, random",
        ),
        ([str(runs), "--where", "nonsense"], "nonsense: holds of no run; none has a nonsense"),
    ):
        assert make_report(words) == 3
        assert told in capsys.readouterr().err
    with pytest.raises(FedsimError):
        read_runs(tmp_path / "empty")
