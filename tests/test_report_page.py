"""The report's HTML page: what it says of the runs, what rows are sorted by, links, and the data of its curves."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedsim.report.__main__ import main
from fedsim.report.page import (
    MAX_POINTS,
    config_differences,
    curves_data,
    folder_links,
    header_facts,
    html_page,
    runs_table,
    shared_config,
)
from fedsim.report.plot import make_looks
from fedsim.results.curves import accuracy_curve
from fedsim.results.groups import drawn_panels, group_runs, make_panels
from fedsim.results.runs import read_archive, read_runs, write_archive
from fedsim.results.table import Table
from tests.report_toys import two_methods, write_run


class Page(HTMLParser):
    """The parts of a page that tests look at: elements by name, with attributes, texts by the open element, ids."""

    VOID = ("meta", "img", "input", "br", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open:
            self.texts.append((self.open[-1], data.strip()))

    def values(self, tag: str, attribute: str) -> list[str]:
        return [value for name, attrs in self.elements if name == tag and (value := attrs.get(attribute)) is not None]

    def of(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def page_of(path: Path) -> Page:
    page = Page(path.read_text(encoding="utf-8"))
    assert not page.open, "elements that are not closed"
    return page


def test_the_page_of_a_folder_of_runs(tmp_path: Path) -> None:
    two_methods(tmp_path / "runs")
    assert main([str(tmp_path / "runs")]) == 0
    report = tmp_path / "runs" / "report"
    page = page_of(report / "report.html")
    ids = page.values("table", "id")
    assert {"table-overview", "table-pairs", "table-configs", "table-runs"} <= set(ids)
    targets = {element.get("id") for _, element in page.elements}
    assert all(link[1:] in targets for link in page.values("a", "href") if link.startswith("#"))
    for link in page.values("a", "href"):
        assert link.startswith("#") or (report / link / "config.yaml").is_file(), link
    assert sum(not link.startswith("#") for link in page.values("a", "href")) == 6
    for address in (*page.values("script", "src"), *page.values("img", "src"), *page.values("link", "href")):
        assert address.startswith("data:"), "the page needs no network"
    assert len(page.values("img", "src")) == len(list((report / "figures").glob("*.pdf"))) == 9
    assert any("plotly.js v" in text for text in page.of("script"))
    size = (report / "report.html").stat().st_size
    assert 4e6 < size < 7e6


def test_a_page_without_figures_is_small(tmp_path: Path) -> None:
    two_methods(tmp_path)
    assert main([str(tmp_path), "--no-figures"]) == 0
    path = tmp_path / "report" / "report.html"
    page_of(path)
    assert path.stat().st_size < 100_000
    assert "plotly" not in path.read_text()


def test_the_page_of_an_archive_has_no_links_to_folders(tmp_path: Path) -> None:
    two_methods(tmp_path / "runs", seeds=1)
    write_archive(read_runs(tmp_path / "runs"), tmp_path / "runs", tmp_path / "runs.parquet")
    groups = group_runs(read_archive(tmp_path / "runs.parquet"))
    assert folder_links(groups, tmp_path) == [None, None]
    assert main([str(tmp_path / "runs.parquet"), "--to", str(tmp_path / "report"), "--no-figures"]) == 0
    page = page_of(tmp_path / "report" / "report.html")
    assert all(link.startswith("#") for link in page.values("a", "href"))
    assert any("digits-iid-mlp-gpfl" in text or "gpfl" in text for text in page.of("td"))


def test_texts_of_runs_cannot_end_the_scripts_or_become_elements(tmp_path: Path) -> None:
    name = "</script><b>&"
    write_run(tmp_path / "a", [0.1], [[0]], choices={"selector": "x"}, note=name)
    write_run(tmp_path / "b", [0.1], [[0]], choices={"selector": "x"}, note="other")
    groups = group_runs(read_runs(tmp_path))
    panels = drawn_panels(make_panels(groups))
    text = html_page(name, groups, [], tmp_path, panels=panels, looks=make_looks(panels))
    page = Page(text)
    assert "b" not in {tag for tag, _ in page.elements}
    data = re.search(r'<script type="application/json" id="curves-data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert f"note={name}" in json.loads(data[1])["looks"]


def test_the_head_says_what_was_run(tmp_path: Path) -> None:
    for seed in (0, 1, 2, 5):
        write_run(tmp_path, [0.1, 0.2], [[0], [1]], seed=seed, cohort_size=3, status="done" if seed else "diverged")
    facts = header_facts(read_runs(tmp_path))
    assert facts == {
        "data set": "digits",
        "partition": "iid",
        "model": "mlp",
        "clients (N)": "4",
        "clients a round (K)": "3",
        "rounds": "2",
        "seeds": "0, 1, 2, 5",
        "runs": "4 (1 diverged, 3 done)",
        "environment": "torch 1",
    }
    for seed in (3, 4):
        write_run(tmp_path, [0.1], [[0]], seed=seed)
    assert header_facts(read_runs(tmp_path))["seeds"] == "0 to 5"
    assert header_facts(read_runs(tmp_path))["rounds"] == "1, 2"


def test_how_configs_differ(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1], [[0]], choices={"selector": "random"}, mode="u", data_dir="/home/somebody")
    write_run(tmp_path, [0.1], [[0]], choices={"selector": "gpfl"}, lr=0.5, extra={"rho": 2}, data_dir="/home/other")
    groups = group_runs(read_runs(tmp_path))
    table = config_differences(groups)
    assert table.header == ["run", "selector", "lr", "keys of its own"]
    assert table.rows == [["random", "random", "0.1", "mode=u"], ["gpfl", "gpfl", "0.5", "extra.rho=2"]]
    shared = shared_config(groups).splitlines()
    assert "num_clients: 4" in shared
    assert "dataset: digits" in shared
    assert not any(line.startswith(("lr", "data_dir", "selector", "seed")) for line in shared)


def test_every_run_is_listed_with_its_status(tmp_path: Path) -> None:
    write_run(tmp_path, [0.5, 0.7], [[0], [0]])
    write_run(tmp_path, [0.5, 0.7], [[0], [0]], seed=1, status="diverged")
    rows = runs_table(group_runs(read_runs(tmp_path))).rows
    assert [row[1:5] for row in rows] == [["0", "done", "0.6000", "0.7000"], ["1", "diverged", "-", "-"]]


def test_rows_are_sorted_by_the_numbers_that_cells_show(tmp_path: Path) -> None:
    two_methods(tmp_path)
    write_run(tmp_path, [0.1], [[0]], choices={"selector": "afl"}, seed=1)
    assert main([str(tmp_path), "--no-figures"]) == 0
    found = re.findall(r'data-sort="([^"]*)"[^>]*>([^<]*)<', (tmp_path / "report" / "report.html").read_text())
    by_text = {text: float(value) for value, text in found}
    assert by_text["10.0 s"] == 10
    assert by_text["never (0/3)"] == math.inf
    assert by_text["&lt; .001"] < 0.001
    assert by_text["0.4100 [0.3852, 0.4348]"] == pytest.approx(0.41)
    assert not {"random", "-", "", "[+0.1000, +0.1000]"} & by_text.keys()


def test_empty_columns_are_left_out_but_not_of_files_for_programs() -> None:
    table = Table("t", "T", ["", "run", "a", "b"], [["", "x", "-", "1"], ["", "y", "", "2"]])
    assert table.without_empty_columns().header == ["run", "b"]
    assert "| run | b |" in table.markdown()
    assert r"run & b \\" in table.latex()
    assert len(table.rich().columns) == 2
    assert table.csv().splitlines()[0] == ",run,a,b"


def curves_of(folder: Path) -> dict[str, Any]:
    panels = drawn_panels(make_panels(group_runs(read_runs(folder))))
    return curves_data(panels, make_looks(panels))


def test_the_data_of_curves_by_hand(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1, None, 0.25], [[0, 1], [1], [2]])
    write_run(tmp_path, [0.3, None, 0.35], [[0, 1], [1], [2]], seed=1)
    data = curves_of(tmp_path)
    ((line,),) = [panel["lines"] for panel in data["panels"]]
    assert line == {
        **{"name": "random", "seeds": 2, "rounds": [1, 3], "bytes": [40, 80], "samples": [10, 20]},
        **{"seconds": [4, 12], "raw": [0.2, 0.3], "smoothed": [0.2, 0.3], "low": [0.1, 0.25], "high": [0.3, 0.35]},
        **{"coverage": [0.5, 0.75], "participation": [0.5, 0.25]},
    }
    assert data["looks"] == {"random": {"color": "#000000", "dash": "solid", "symbol": "circle"}}
    assert data["units"] == {"bytes": "B", "samples": ""}
    assert data["range_of"] == "raw"
    assert "smoothed" not in data["values"]  # too short for it


def test_long_curves_are_thinned_and_keep_their_ends(tmp_path: Path) -> None:
    write_run(tmp_path, [t / 1000 for t in range(600)], [[0]] * 600)
    data = curves_of(tmp_path)
    line = data["panels"][0]["lines"][0]
    assert all(len(line[key]) == MAX_POINTS for key in ("rounds", "bytes", "smoothed", "raw", "coverage"))
    assert (line["rounds"][0], line["rounds"][-1]) == (1, 600)
    curve = accuracy_curve(read_runs(tmp_path))
    at = [int(round) - 1 for round in line["rounds"]]
    assert line["smoothed"] == pytest.approx(curve.smoothed[at].tolist(), rel=1e-4)
    assert data["range_of"] == "smoothed"
