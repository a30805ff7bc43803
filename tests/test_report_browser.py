"""The report's page in a browser, where there is one (Chromium or Chrome; GitHub's machines have it)."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedsim.report.page import html_page
from fedsim.report.plot import make_looks
from fedsim.report.tables import overview
from fedsim.results.groups import drawn_panels, group_runs, make_panels
from fedsim.results.runs import read_runs
from tests.report_toys import write_run

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
  const choose = (id, value) => {
    document.getElementById(id).value = value;
    document.getElementById(id).dispatchEvent(new Event("change"));
  };
  found.panels = panels.map((panel) => panel.layout.title.text);
  found.drawn = panels.map((p) => p.querySelectorAll(".scatterlayer path.js-line").length);
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
  const result = document.createElement("pre");
  result.id = "found";
  result.textContent = JSON.stringify(found);
  document.body.append(result);
});
"""
"""What a user does, as a script in the page; what is then to be seen is left in it as JSON."""


def in_browser(page: Path) -> dict[str, Any]:
    assert BROWSER is not None
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=30000", "--dump-dom"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    done = subprocess.run(
        [BROWSER, *words, profile, page.resolve().as_uri()], capture_output=True, text=True, timeout=300, check=True
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    return result


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome")
def test_curves_and_tables_of_thirty_methods_can_be_worked_with(tmp_path: Path) -> None:
    levels = {}
    for number in range(METHODS):
        for shards in (2, 10):
            if (number, shards) == (1, 2):  # methods of the panels differ
                continue
            level = levels[f"shards={shards} method_{number}"] = round(0.2 + 0.02 * number + 0.001 * shards, 5)
            accuracies: list[float | None] = [*[0.1] * 5, *[level] * 60]
            setting = {"choices": {"selector": f"method_{number}"}, "partition": {"shards": shards}}
            write_run(tmp_path / str(shards), accuracies, [[0]] * 65, **setting)
    groups = group_runs(read_runs(tmp_path))
    panels = drawn_panels(make_panels(groups))
    looks = make_looks(panels)
    text = html_page("t", groups, [overview(groups)], tmp_path, panels=panels, looks=looks)
    (tmp_path / "page.html").write_text(text.replace("<body>", f"<body><script>{USER}</script>"))
    found = in_browser(tmp_path / "page.html")
    assert found["errors"] == []
    assert found["panels"] == ["shards=2", "shards=10"]
    assert found["drawn"] == [METHODS - 1, METHODS]
    assert found["colours"] == {name: [looks[name.split()[1]].colour, level] for name, level in levels.items()}
    assert len(found["without"]) == METHODS - 2
    assert "method_3" not in found["without"]
    assert (found["none"], found["one"]) == ([], ["method_3"])
    assert found["chosen"] == ["bytes sent, both ways", "share of clients selected so far", 1]
    assert found["upwards"] == sorted(found["upwards"], key=float)
    assert found["downwards"] == sorted(found["upwards"], key=float, reverse=True)
    assert found["sorted"] == "descending"
