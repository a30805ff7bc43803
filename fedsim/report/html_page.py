"""The report as one self-contained HTML page."""

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml

from fedsim.report.figures import Plot
from fedsim.report.runs import Run
from fedsim.report.tables.table import Table
from fedsim.report.verdicts.published import Publication
from fedsim.report.verdicts.rules import RULES, VERDICTS

CLASSES = dict.fromkeys(VERDICTS, "undecided") | {"reproduced": "reproduced", "not reproduced": "not"}
"""The style of a cell with a verdict."""


def html_page(
    title: str,
    runs: Sequence[Run],
    tables: Sequence[Table],
    plots: Mapping[Path, Plot],
    publications: Sequence[Publication],
) -> str:
    """The HTML text: tables, figures (from their PNG files), sources, rules of verdicts and the first run's config."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    statuses = Counter(run.status for run in runs)
    return environment.get_template("html_page.html.j2").render(
        title=title,
        num_runs=len(runs),
        statuses=", ".join(f"{count} {status}" for status, count in statuses.items()),
        environment=_describe_environment(runs),
        tables=tables,
        classes=CLASSES,
        sources=[f"{p.title}: {p.source}" for p in publications],
        rules=RULES.values(),
        plots=[{"caption": plot.caption, "data": _base64(path)} for path, plot in plots.items()],
        config=yaml.safe_dump(_without_folders(runs[0].config), sort_keys=False, allow_unicode=True),
    )


def _describe_environment(runs: Sequence[Run]) -> str:
    facts = {tuple(run.summary.get("environment", {}).items()) for run in runs}
    return "; ".join(sorted(", ".join(f"{k} {v}" for k, v in fact) for fact in facts))


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _without_folders(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without folders, which are those of a machine."""
    return {k: v for k, v in config.items() if k not in ("data_dir", "cache_dir", "output_dir")}
