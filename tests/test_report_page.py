"""What the report's page says of the runs, its links, and the data of its curves; and the page in a
browser."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedsim.report import contrasts, page
from fedsim.report.curves import accuracy_curve
from fedsim.report.headline import header_facts
from fedsim.report.looks import colour_on_page
from fedsim.report.page import (
    MAX_POINTS,
    config_differences,
    curves_data,
    html_page,
    runs_table,
)
from fedsim.report.sections import Material, Section
from fedsim.report.tables import by_group
from fedsim.results import runs
from fedsim.results.reading import read_metrics
from fedsim.results.runs import read_runs
from tests.report_toys import (
    drawn_runs,
    frame_of,
    looks_of,
    make_report,
    rows_of,
    two_methods,
    write_run,
)


def page_of(folder: Path, title: str, **pictures: Any) -> str:
    """Return a page with the table `overview` and the curves of the runs below a folder."""
    frame = frame_of(folder)
    overview = by_group("overview", frame)
    section = Section([overview], brief=[by_group("results", frame)])
    return html_page(title, Material([], frame, looks=looks_of(frame)), [section], pictures, folder)


def test_texts_of_runs_cannot_end_the_scripts_or_become_elements(tmp_path: Path) -> None:
    name = "</script><b>&"
    for note in (name, "other"):
        write_run(tmp_path / note[-1], [0.1], [[0]], note=note)
    text = page_of(tmp_path, name)
    assert "<b>" not in text.partition("<script>")[0]
    script = r'<script type="application/json" id="curves-data">(.*?)</script>'
    data = re.search(script, text, re.DOTALL)
    assert data is not None
    assert f"note={name}" in json.loads(data[1])["looks"]


def test_a_page_names_the_pictures_of_its_curves_for_browsers_without_scripts(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, [0.1, 0.2], [[0], [1]])
    shown_without_scripts = re.findall("<noscript>(.*?)</noscript>", page_of(tmp_path, "t"))
    assert len(shown_without_scripts) == 1
    assert "figures next to this page: accuracy_rounds.png" in shown_without_scripts[0]


def test_the_head_says_what_was_run(tmp_path: Path) -> None:
    for seed in (0, 1, 2, 5):
        status = "done" if seed else "diverged"
        write_run(tmp_path, [0.1, 0.2], [[0], [1]], seed=seed, cohort_size=3, status=status)
    assert header_facts(read_runs(tmp_path)) == {
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


def test_consecutive_seeds_are_a_range_and_different_lengths_are_listed(tmp_path: Path) -> None:
    for seed in range(4):
        rounds = 1 if seed < 2 else 2
        write_run(tmp_path, [0.1] * rounds, [[0]] * rounds, seed=seed)
    facts = header_facts(read_runs(tmp_path))
    assert (facts["seeds"], facts["rounds"]) == ("0 to 3", "1, 2")


def test_the_table_of_runs_has_accuracies_of_those_that_are_done(tmp_path: Path) -> None:
    for seed, status in enumerate(("diverged", "done")):
        write_run(tmp_path, [0.1, 0.2], [[0], [1]], seed=seed, status=status)
    table = runs_table(frame_of(tmp_path)).texts.drop(columns=["run", "folder"])
    assert table.to_numpy().tolist() == [
        ["0", "diverged", "-", "-"],
        ["1", "done", "0.1500", "0.2000"],
    ]


def test_how_configs_differ(tmp_path: Path) -> None:
    for seed, device in enumerate(("cpu", "cuda")):
        config = {"device": device, "mode": "u", "data_dir": "/home/a", "seed": seed}
        write_run(tmp_path, [0.1], [[0]], choices={"engine": device}, **config)
    config = {"lr": 0.5, "extra": {"rho": 2}, "data_dir": "/home/other"}
    write_run(tmp_path, [0.1], [[0]], choices={"selector": "gpfl"}, **config)
    table, shared = config_differences(frame_of(tmp_path))
    own = "engine=cpu and cuda, device=cpu and cuda, mode=u"
    assert rows_of(table) == [
        {"run": "random", "selector": "random", "lr": "0.1", "keys of its own": own},
        {"run": "gpfl", "selector": "gpfl", "lr": "0.5", "keys of its own": "extra.rho=2"},
    ]
    assert {"num_clients: 4", "dataset: digits"} <= set(shared.splitlines())
    assert not re.search("^(lr|data_dir|selector|seed)", shared, re.MULTILINE)


def test_the_data_of_curves_by_hand(tmp_path: Path) -> None:
    """Uploads cost 10 bytes each way and 5 samples; four phases take a second each."""
    write_run(tmp_path, [0.1, None, 0.25], [[0, 1], [1], [2]])
    write_run(tmp_path, [0.3, None, 0.35], [[0, 1], [1], [2]], seed=1)
    runs = drawn_runs(tmp_path)
    data = curves_data(runs, looks_of(runs))
    ((line,),) = [panel["lines"] for panel in data["panels"]]
    assert line == {
        "name": "random",
        "seeds": 2,
        "rounds": [1, 3],
        "bytes": [40, 80],
        "samples": [10, 20],
        "seconds": [4, 12],
        "raw": [0.2, 0.3],
        "smoothed": [0.2, 0.3],
        "low": [0.1, 0.25],
        "high": [0.3, 0.35],
        "coverage": [0.5, 0.75],
        "participation": [0.5, 0.25],
    }
    assert data["looks"] == {"random": {"color": "#000000", "dash": "solid", "symbol": "circle"}}
    assert data["units"] == {"bytes": "B", "samples": ""}
    assert data["range_of"] == "raw"
    assert "smoothed" not in data["values"]  # too short for it


def test_curves_of_runs_that_ended_early_are_not_called_smoothed(tmp_path: Path) -> None:
    """The runs could have had 100 rounds. They ended after two, and no window fits into these."""
    early = {"status": "reached", "stop_at": 0.25, "num_rounds": 100}
    write_run(tmp_path, [0.2, 0.4], [[0], [1]], **early)
    frame = frame_of(tmp_path)
    data = curves_data(frame, looks_of(frame))
    assert "smoothed" not in data["values"]
    assert data["range_of"] == "raw"


def test_a_curve_is_smoothed_if_it_is_as_long_as_five_windows(tmp_path: Path) -> None:
    """Four rounds are two windows of two, and ten rounds are five."""
    for length, window in ((4, 1), (10, 2), (60, 1)):
        folder = tmp_path / str(length)
        final_window = 50 if length == 60 else 2
        write_run(folder, [0.1] * length, [[0]] * length, final_window=final_window)
        assert accuracy_curve(read_runs(folder)).window == window


def test_long_curves_are_thinned_and_keep_their_ends(tmp_path: Path) -> None:
    write_run(tmp_path, [t / 1000 for t in range(600)], [[0]] * 600)
    runs = drawn_runs(tmp_path)
    data = curves_data(runs, looks_of(runs))
    line = data["panels"][0]["lines"][0]
    for key in ("rounds", "bytes", "smoothed", "raw", "coverage"):
        assert len(line[key]) == MAX_POINTS
    assert (line["rounds"][0], line["rounds"][-1]) == (1, 600)
    places = [int(number) - 1 for number in line["rounds"]]
    smoothed = accuracy_curve(read_runs(tmp_path)).smoothed[places]
    assert line["smoothed"] == pytest.approx(smoothed.tolist(), rel=1e-4)
    assert data["range_of"] == "smoothed"


def write_eight_lines(folder: Path) -> None:
    """Write random, m1, m2 and m3, the best, in two settings; 40 rounds each."""
    for shards in (2, 10):
        for number, selector in enumerate(("random", "m1", "m2", "m3")):
            setting = {"choices": {"selector": selector}, "partition": {"shards": shards}}
            write_run(folder / str(shards), [0.1 * number] * 40, [[0]] * 40, **setting)


def test_a_page_that_has_everything_says_of_nothing_that_it_is_left_out(tmp_path: Path) -> None:
    write_eight_lines(tmp_path)
    assert not re.search(r"thinned to|Drawn are|The first \d", page_of(tmp_path, "t"))


def test_what_would_make_the_page_too_large_is_left_out_and_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_eight_lines(tmp_path)
    monkeypatch.setattr(page, "ALL_POINTS", 40)
    monkeypatch.setattr(page, "MAX_ROWS", 3)
    monkeypatch.setattr(page, "PICTURE_BYTES", 7)
    monkeypatch.setattr(contrasts, "MAX_LINES", 5)
    drawn = drawn_runs(tmp_path)
    assert drawn["method"].tolist() == ["random", "m3"] * 2
    pictures = [("one", b"1234"), ("two", b"5678")]
    text = page_of(tmp_path, "t", others=pictures, ablations=pictures)
    assert "Each line is thinned to 10 rounds. Drawn are 4 of 8 lines:" in text
    assert "The first 3 of 8 rows." in text  # of the runs
    assert "The first 3 of 8 rows: overview.csv has all of them." in text
    assert (text.count("one</figcaption>"), text.count("two</figcaption>")) == (2, 0)
    for panel in curves_data(drawn, looks_of(drawn))["panels"]:
        assert [len(line["rounds"]) for line in panel["lines"]] == [10, 10]


def test_a_reference_that_is_the_most_accurate_is_drawn_with_the_best_other_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for selector, accuracy in {"random": 0.9, "m1": 0.1, "m2": 0.3, "m3": 0.2}.items():
        write_run(tmp_path, [accuracy] * 3, [[0]] * 3, choices={"selector": selector})
    monkeypatch.setattr(contrasts, "MAX_LINES", 2)
    assert sorted(drawn_runs(tmp_path)["method"]) == ["m2", "random"]


def test_each_file_of_records_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_methods(tmp_path)
    folders: list[Path] = []

    def counted(folder: Path, **options: Any) -> list[dict[str, Any]]:
        folders.append(folder)
        return read_metrics(folder, **options)

    monkeypatch.setattr(runs, "read_metrics", counted)
    assert make_report([str(tmp_path), "--no-figures"]) == 0
    assert len(folders) == len(set(folders)) == 6


# --- in a browser, where there is one (Chromium or Chrome; GitHub's machines have it) ---

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for name in NAMES if (path := shutil.which(name)) is not None), None)
METHODS = 30

USER = """
const found = { errors: [] };
window.addEventListener("error", (event) => found.errors.push(String(event.message)));
window.addEventListener("load", () => {
  const traces = () => document.querySelector(".panel").data.map((trace) => trace.name).filter((name) => name);
  const rows = () => [...document.querySelectorAll("#table-overview tbody tr")];
  const column = (at) => rows().map((row) => row.cells[at].textContent);
  const panels = [...document.querySelectorAll(".panel")];
  const choose = (id, value) =>
    Object.assign(document.getElementById(id), { value }).dispatchEvent(new Event("change"));
  found.panels = panels.map((panel) => panel.layout.title.text);
  found.drawn = panels.map((p) => p.querySelectorAll(".scatterlayer path.js-line").length);
  found.buttons = [...panels[0].querySelectorAll(".modebar-btn")].map((button) => button.dataset.title);
  found.colours = Object.fromEntries(panels.flatMap((panel) =>
    panel.data.filter((trace) => trace.name).map((trace) => [`${panel.layout.title.text} ${trace.name}`,
      [trace.line.color, trace.y.at(-1)]])));
  document.querySelector("#methods input[value=method_3]").click();
  found.without = traces();
  document.getElementById("none").click();
  found.none = traces();
  document.querySelector("#methods input[value=method_3]").click();
  found.one = traces();
  choose("axis", "bytes");
  choose("value", "coverage");
  const { layout, data } = panels[0];
  found.chosen = [layout.xaxis.title.text, layout.yaxis.title.text, data.length];
  const heads = document.querySelectorAll("#table-overview th button");
  heads[2].click();
  found.upwards = column(2);
  heads[2].click();
  found.downwards = column(2);
  found.sorted = heads[2].parentElement.getAttribute("aria-sort");
  const textContent = JSON.stringify(found);
  document.body.append(Object.assign(document.createElement("pre"), { id: "found", textContent }));
});
"""
"""What a user does, as a script in the page; what is then to be seen is left in it as JSON."""

FRAME = """<iframe src="page.html" style="width: {width}px; height: 800px"></iframe>
<script>
window.addEventListener("load", () => {{
  const page = document.querySelector("iframe").contentDocument.documentElement;
  const cut = [...page.querySelectorAll("table")].filter((table) => table.clientWidth < table.scrollWidth);
  const found = {{ width: page.clientWidth, needed: page.scrollWidth, cut: cut.map((table) => table.id) }};
  const textContent = JSON.stringify(found);
  document.body.append(Object.assign(document.createElement("pre"), {{ id: "found", textContent }}));
}});
</script>"""
"""A page that shows page.html `width` pixels wide, and tells how wide page.html would have to be and
which of its tables are cut off."""


def found_in_browser(page: Path) -> dict[str, Any]:
    """Return what a script of a page has left in it as JSON, after the browser has shown it."""
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=30000"]
    words += ["--dump-dom", "--allow-file-access-from-files"]
    words += [f"--user-data-dir={page.parent / 'profile'}", page.resolve().as_uri()]
    done = subprocess.run(
        [str(BROWSER), *words], capture_output=True, text=True, timeout=300, check=True
    )
    left = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert left is not None, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(left[1]))
    return found


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome")
def test_curves_and_tables_of_thirty_methods_can_be_worked_with(tmp_path: Path) -> None:
    levels = {}
    for number in range(METHODS):
        for shards in (2, 10):
            if (number, shards) == (1, 2):  # methods of the panels differ
                continue
            level = levels[f"shards={shards} method_{number}"] = round(
                0.2 + 0.02 * number + 0.001 * shards, 5
            )
            setting = {"choices": {"selector": f"method_{number}"}, "partition": {"shards": shards}}
            write_run(tmp_path / str(shards), [*[0.1] * 5, *[level] * 60], [[0]] * 65, **setting)
    looks, text = looks_of(drawn_runs(tmp_path)), page_of(tmp_path, "t")
    (tmp_path / "page.html").write_text(text.replace("<body>", f"<body><script>{USER}</script>"))
    found = found_in_browser(tmp_path / "page.html")
    assert found["errors"] == []
    assert found["panels"] == ["shards=2", "shards=10"]
    assert "Download plot" in found["buttons"]
    assert not [
        title for title in found["buttons"] if "share" in title.lower()
    ]  # uploads to plotly
    assert found["drawn"] == [METHODS - 1, METHODS]
    assert found["colours"] == {
        name: [colour_on_page(looks[name.split()[1]]), level] for name, level in levels.items()
    }
    assert len(found["without"]) == METHODS - 2
    assert "method_3" not in found["without"]
    assert (found["none"], found["one"]) == ([], ["method_3"])
    assert found["chosen"] == ["bytes sent, both ways", "share of clients selected so far", 1]
    assert found["upwards"] == sorted(found["upwards"], key=float)
    assert found["downwards"] == sorted(found["upwards"], key=float, reverse=True)
    assert found["sorted"] == "descending"


LONG_NAME = "a very long name of a method that goes on and on for many words and even more words"


def write_long_names(folder: Path) -> None:
    """Write runs of two methods with long names, one of them without spaces."""
    for selector in (LONG_NAME, LONG_NAME.replace(" ", "_")):
        for seed in (0, 1, 2):
            method = {"seed": seed, "choices": {"selector": selector}}
            write_run(folder, [0.1, 0.2 + 0.1 * seed], [[0], [1]], **method)


def shown_in_frame(text: str, width: int, folder: Path) -> dict[str, Any]:
    """Return what `FRAME` finds on a page of this text."""
    (folder / "page.html").write_text(text)
    (folder / "frame.html").write_text(FRAME.format(width=width))
    return found_in_browser(folder / "frame.html")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome")
def test_a_page_with_long_names_is_as_wide_as_a_phone(tmp_path: Path) -> None:
    write_long_names(tmp_path / "runs")
    found = shown_in_frame(page_of(tmp_path / "runs", "t"), 390, tmp_path)
    assert found["needed"] == found["width"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome")
def test_tables_are_printed_with_all_columns(tmp_path: Path) -> None:
    """A4 paper with the browser's margins is 718 pixels wide."""
    write_long_names(tmp_path / "runs")
    text = page_of(tmp_path / "runs", "t").replace("@media print", "@media all")
    found = shown_in_frame(text, 718, tmp_path)
    assert found["cut"] == []
    assert found["needed"] == found["width"]
