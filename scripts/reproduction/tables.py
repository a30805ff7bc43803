"""The generated tables of docs/reproduction that are about our runs alone, as Markdown."""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedsim.commands.replay import verdict
from fedsim.results.frames import (
    CONTROL,
    REFERENCE,
    by,
    by_setting,
    done,
    first_run,
    has_made,
    measured,
    reference_of,
    runs_frame,
)
from fedsim.results.runs import Run
from fedsim.results.statistics import MIN_SEEDS, UNIT, Difference, estimate, holm, paired, pooled
from scripts.reproduction.cells import markdown, short, signed, tested
from scripts.reproduction.shipped import RESULTS, Shipped

DOCS = RESULTS.parent
Panels = Mapping[str, Mapping[str, pd.DataFrame]]
"""The runs by setting and method."""
NO_RUNS = pd.Series(dtype="float64")

MARGIN = 0.02
PLANNED = 10
"""Equivalence of final accuracies, and the number of seeds, as preset gpfl_settings states them."""
READINGS = ("gpfl", "gpfl_official")
BY_SIZE = "gpfl_dir_by_size"
TITLES = {
    "gpfl_1spc": "1SPC",
    "gpfl_2spc": "2SPC",
    "gpfl_dir": "Dir(0.2)",
    BY_SIZE: "Dir(0.2), by size",
}


def accuracy(shipped: Shipped, folder: str, *wanted: str) -> str:
    """Final accuracy with t intervals: a row a method, a column a setting. `wanted`: key=value that
    runs have made."""
    panels = _panels(shipped, folder, wanted)
    return _pivot(panels, lambda title, line: _estimated(panels[title][line]["final_accuracy"]))


def differences(shipped: Shipped, folder: str, *wanted: str) -> str:
    """Differences of final accuracy to random selection in the same setting, with p by Holm over
    the table.

    Or to `against=<choice>`, and of another `measure=<name>` (`fedsim.results.measures`).
    """
    wanted, against = _taken(wanted, "against", REFERENCE)
    wanted, measure = _taken(wanted, "measure", "final_accuracy")
    panels = _panels(shipped, folder, wanted)
    found = {}
    for title, lines in panels.items():
        for line in lines:
            one = _difference(lines, line, reference_of(lines, line, against), measure)
            if one is not None and max(map(abs, one.values)) > 0:
                found[title, line] = one
    corrected = dict(zip(found, holm([one.p_value for one in found.values()]), strict=True))

    def cell(title: str, line: str) -> str:
        one = found.get((title, line))
        return "" if one is None else tested(one, corrected[title, line])

    return _pivot(panels, cell, f"minus {against}", without_empty_rows=True)


def settings(shipped: Shipped, *folders: str) -> str:
    """The decision of preset gpfl_settings: by local training and network, GPFL minus random, and
    what follows.

    Or GPFL minus `against=<choice>`. Runs of presets that differ in name alone count together.
    """
    folders, against = _taken(folders, "against", REFERENCE)
    found = _settings(shipped, folders, against)
    corrected = holm([mean.p_value for *_, mean in found])
    rows = []
    for (labels, cells, mean), p in zip(found, corrected, strict=True):
        each = [f"{signed(one)} ({one.num})" for one in cells]
        rows.append([*labels, *each, f"{tested(mean, p)} ({mean.num})", _decision(mean)])
    header = [
        "local training",
        "network",
        "",
        "1SPC",
        "2SPC",
        "Dir(0.2)",
        "mean of the three",
        f"GPFL and {against}",
    ]
    return markdown(header, rows)


def settings_means(shipped: Shipped, *folders: str) -> str:
    """The means of the three partitions alone: GPFL minus random and minus round robin, p by Holm
    over each column."""
    columns = [_settings(shipped, folders, against) for against in (REFERENCE, "round_robin")]
    corrected = [holm([mean.p_value for *_, mean in found]) for found in columns]
    rows = [[*labels] for labels, *_ in columns[0]]
    for found, p_values in zip(columns, corrected, strict=True):
        for row, (*_, mean), p in zip(rows, found, p_values, strict=True):
            row += [tested(mean, p), _decision(mean).replace("equivalent within 0.02", "level")]
    header = [
        "local training",
        "network",
        "",
        "minus random",
        "GPFL and random",
        "minus round robin",
    ]
    return markdown([*header, "GPFL and round robin"], rows)


def _settings(
    shipped: Shipped, folders: Sequence[str], against: str
) -> list[tuple[tuple[str, str, str], list[Difference], Difference]]:
    """Of each training, network and reading of GPFL: the differences at the three partitions, and
    their mean."""
    rows = []
    for texts, network, by_method in _by_network(shipped, folders):
        for method in READINGS:
            strata = [
                _by_seed(by_method, cell, method, against)
                for cell in ("gpfl_1spc", "gpfl_2spc", "gpfl_dir")
            ]
            mean, cells = (
                pooled(strata),
                [one for stratum in strata if (one := pooled([stratum])) is not None],
            )
            if mean is not None:
                rows.append(((texts, network, method), cells, mean))
    return rows


def by_size(shipped: Shipped, *folders: str) -> str:
    """As `settings`, of Dir(0.2) with all methods' models averaged by size: GPFL minus random and
    minus round robin."""
    rows, found = [], []
    for texts, network, by_method in _by_network(shipped, folders):
        for method in READINGS:
            both = [
                _paired(by_method, BY_SIZE, method, against)
                for against in (REFERENCE, "round_robin")
            ]
            if all(both):
                rows.append([texts, network, method])
                found.append([one for one in both if one])
    corrected = [holm([both[column].p_value for both in found]) for column in (0, 1)]
    for i, (row, both) in enumerate(zip(rows, found, strict=True)):
        for one, p in zip(both, corrected, strict=True):
            row += [f"{tested(one, p[i])} ({one.num})", _decision(one)]
    header = [
        "local training",
        "network",
        "",
        "minus random",
        "GPFL and random",
        "minus round_robin",
    ]
    return markdown([*header, "GPFL and round_robin"], rows)


def rivals_by_size(shipped: Shipped, *folders: str) -> str:
    """The same of FedCor and power-of-choice, minus random, and of both readings of GPFL minus
    FedCor."""
    rows, found = [], []
    for texts, network, by_method in _by_network(shipped, folders):
        names = [method for cell, method in by_method if cell == BY_SIZE]
        fedcor, choice = (
            next((n for n in names if n.startswith(kind)), "")
            for kind in ("fedcor", "power_of_choice")
        )
        asked = [
            (fedcor, REFERENCE),
            (choice, REFERENCE),
            *((reading, fedcor) for reading in READINGS),
        ]
        pairs = [one for pair in asked if (one := _paired(by_method, BY_SIZE, *pair))]
        if len(pairs) == len(asked):
            rows.append([texts, network])
            found.append(pairs)
    corrected = iter(holm([one.p_value for pairs in found for one in pairs]))
    for row, pairs in zip(rows, found, strict=True):
        row += [f"{tested(one, next(corrected))} ({one.num})" for one in pairs]
    header = ["local training", "network", "FedCor minus random", "power-of-choice minus random"]
    return markdown([*header, *(f"{reading} minus FedCor" for reading in READINGS)], rows)


def cost(shipped: Shipped) -> str:
    """What the shipped runs took: seconds where whole runs are kept."""
    rows = []
    for folder, frame in shipped.frames.items():
        runs = list(done(frame)["run"])
        seconds = [
            float(run.summary["wall_seconds"]) for run in runs if "wall_seconds" in run.summary
        ]
        rounds = sorted({run.num_rounds for run in runs})
        hours = f"{sum(seconds) / 3600:.2g}" if len(seconds) == len(runs) else "not recorded"
        rows.append(
            [f"`{folder.name}`", str(len(runs)), ", ".join(map(str, rounds)), hours, _made_by(runs)]
        )
    return markdown(
        ["runs in docs/results", "runs", "rounds", "hours of a core", "engine, commit"], rows
    )


def early(shipped: Shipped, folder: str, *wanted: str) -> str:
    """Mean accuracy of rounds 31 to 50, which the authors' logs of one code have, from the kept
    rounds of ours."""
    panels = _panels(shipped, folder, wanted)

    def cell(title: str, line: str) -> str:
        runs = done(panels[title][line])["run"]
        return _estimated(
            runs.map(lambda run: np.mean([r["test_accuracy"] for r in _between(run, 31, 50)]))
        )

    return _pivot(panels, cell)


def from_report(shipped: Shipped, folder: str, name: str, *wanted: str) -> str:
    """A table of the folder's report, from its CSV file, and of that the columns `wanted` (all) and
    the first `rows=`.

    Spaces in names of columns are underscores here.
    """
    found = _read(RESULTS / folder / f"{name}.csv")
    limits = [int(word.removeprefix("rows=")) for word in wanted if word.startswith("rows=")]
    names = [word.replace("_", " ") for word in wanted if not word.startswith("rows=")] or list(
        found[0]
    )
    shown = found[: limits[0]] if limits else found
    return markdown(names, [[row[name] for name in names] for row in shown])


def over_settings(shipped: Shipped, file: str) -> str:
    """Of a report's table over settings, `file=<path below docs>`: gains over random selection in
    points, the largest first, verdicts with the number of seeds where they are preliminary, and
    bytes."""
    rows = []
    for row in sorted(
        _read(DOCS / file.removeprefix("file=")), key=lambda row: -float(row["to random"] or 0)
    ):
        gain = [
            f"{100 * float(one):+.2f}"
            for one in re.findall(r"[+-][.\d]+", row["to random"] + row["95 % interval"])
        ]
        verdict = (
            row["verdict"]
            .replace("preliminary", f"({row['seeds']})")
            .replace(",", "")
            .replace("reference", "")
        )
        name = f"*{row['method']}*" if row["method"] == CONTROL else row["method"]
        told = f"{gain[0]} [{gain[1]}, {gain[2]}]" if gain else ""
        rows.append([name, row["asks for"], told, verdict, row["bytes"].partition(" (")[0]])
    return markdown(["method", "asks for", "gain", "verdict", "bytes"], rows)


def regret_and_accuracy(shipped: Shipped, folder: str, wanted: str) -> str:
    """What `fedsim replay` says of regret and real accuracy, of docs/measured/replay_regret.csv and
    of the runs of `cell=<name>` in the folder, which are not the same jobs
    (`fedsim.commands.replay.verdict`)."""
    cell = wanted.removeprefix("cell=")
    regrets = {
        row["method"]: _leading(row["regret"]) for row in _read(DOCS / "measured/replay_regret.csv")
    }
    runs = {
        row["run"]: _leading(row["final accuracy (last 11)"])
        for row in _read(RESULTS / folder / "overview.csv")
    }
    pairs = [
        (regret, runs[name])
        for method, regret in regrets.items()
        if (name := f"{cell} {method}") in runs
    ]
    return verdict(*np.array(pairs).T)


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _leading(cell: str) -> float:
    return float(cell.split()[0])


def _between(run: Run, first: int, last: int) -> list[Mapping[str, float]]:
    return [record for record in run.records if first <= record["round"] <= last]


def _runs(shipped: Shipped, folder: str, wanted: Sequence[str] = ()) -> pd.DataFrame:
    made = dict(word.split("=", 1) for word in wanted)
    made = {
        key: value.replace("_", " ") if value.startswith("[") else value
        for key, value in made.items()
    }
    groups = by(shipped.frames[RESULTS / folder], "group").values()
    return runs_frame(run for rows in groups if has_made(rows, made) for run in rows["run"])


def _panels(shipped: Shipped, folder: str, wanted: Sequence[str]) -> Panels:
    settings = by_setting(_runs(shipped, folder, wanted))
    return {title: by(rows, "method") for title, rows in settings.items()}


def _network(rows: pd.DataFrame) -> tuple[str, str]:
    """Its hidden layers and its dropout, as text."""
    model = first_run(rows).config["model"]
    return " and ".join(map(str, model["hidden"])), f"{model['dropout']:g}"


def _by_network(
    shipped: Shipped, folders: Sequence[str]
) -> list[tuple[str, str, Mapping[tuple[str, str], pd.Series]]]:
    """Local training, network, and by cell and selector the final accuracies, of presets named like
    gpfl_settings."""
    found: dict[tuple[str, str, str], dict[tuple[str, str], pd.Series]] = {}
    for folder in folders:
        texts = "authors' code" if folder.endswith("_code") else "paper"
        for rows in by(_runs(shipped, folder), "group").values():
            by_method = found.setdefault((texts, *_network(rows)), {})
            choices = first_run(rows).choices
            key = choices["cell"], choices["selector"]
            accuracies = rows["final_accuracy"].dropna()
            by_method[key] = accuracies.combine_first(by_method.get(key, accuracies))
    return [
        (texts, f"{hidden}, {'dropout ' + dropout if float(dropout) else 'no dropout'}", by_method)
        for (texts, hidden, dropout), by_method in sorted(
            found.items(), key=lambda one: one[0], reverse=True
        )
    ]


def _taken(words: Sequence[str], key: str, default: str) -> tuple[tuple[str, ...], str]:
    """The words without `<key>=<value>`, and that value; `default` where there is none."""
    named = [word.partition("=")[2] for word in words if word.startswith(f"{key}=")]
    return tuple(word for word in words if not word.startswith(f"{key}=")), (named or [default])[0]


def _paired(
    by: Mapping[tuple[str, str], pd.Series], cell: str, method: str, against: str
) -> Difference | None:
    return pooled([_by_seed(by, cell, method, against)])


def _by_seed(
    by: Mapping[tuple[str, str], pd.Series], cell: str, method: str, against: str
) -> pd.Series:
    return paired(by.get((cell, method), NO_RUNS), by.get((cell, against), NO_RUNS))


def _difference(
    lines: Mapping[str, pd.DataFrame], line: str, reference: str | None, measure: str
) -> Difference | None:
    if reference is None or line == reference:
        return None
    return pooled([paired(measured(lines[line], measure), measured(lines[reference], measure))])


def _decision(found: Difference) -> str:
    """What the rule of preset gpfl_settings says; at fewer seeds than it plans, it is what it says
    so far."""
    if found.num < MIN_SEEDS:
        return "-"
    return _by_rule(found) + (
        f" (so far: {found.num} of {PLANNED} seeds)" if found.num < PLANNED else ""
    )


def _by_rule(found: Difference) -> str:
    """An interval can exclude 0 and yet show that the difference is small: then both are said."""
    level = f"equivalent within {MARGIN:g}" if found.p_equivalent(MARGIN) < 0.05 else ""
    low, high = found.interval
    side = "GPFL exceeds" if low > 0 else "GPFL falls short" if high < 0 else ""
    return ", ".join(word for word in (side, level) if word) or "undecided"


def _pivot(
    panels: Panels,
    cell: Callable[[str, str], str],
    corner: str = "",
    *,
    without_empty_rows: bool = False,
) -> str:
    lines = list(dict.fromkeys(line for panel in panels.values() for line in panel))
    rows = [
        [line, *(cell(title, line) if line in panels[title] else "" for title in panels)]
        for line in lines
    ]
    rows = [row for row in rows if any(row[1:]) or not without_empty_rows]
    titles = [" ".join(TITLES.get(word, word) for word in title.split()) for title in panels]
    return markdown([corner, *titles], rows)


def _estimated(values: pd.Series) -> str:
    found = estimate(values.dropna(), UNIT)
    return "" if found is None else short(found)


def _made_by(runs: Sequence[Run]) -> str:
    engines = {str(run.summary.get("engine")) for run in runs if "engine" in run.summary}
    commits = {
        str((run.summary.get("revision") or {}).get("commit"))[:10]
        for run in runs
        if run.summary.get("revision")
    }
    return (
        f"{', '.join(sorted(engines))}, {', '.join(sorted(commits))}"
        if engines
        else "an earlier version"
    )


MAKERS: Mapping[str, Callable[..., str]] = {
    maker.__name__: maker
    for maker in (
        *(
            accuracy,
            differences,
            settings,
            settings_means,
            by_size,
            rivals_by_size,
            cost,
            early,
            from_report,
        ),
        *(over_settings, regret_and_accuracy),
    )
}
