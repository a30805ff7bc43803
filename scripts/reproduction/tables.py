"""The generated tables of docs/reproduction that show our runs alone, as Markdown.

Each public function makes a table from the shipped runs and the words of a marker (pages.py).
"""

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedsim.commands.replay_analysis import verdict
from fedsim.results.frames import (
    by,
    by_setting,
    finished_rows,
    first_run,
    has_values,
    measured,
    reference_of,
    runs_frame,
    selector_of,
)
from fedsim.results.labels import CONTROL, REFERENCE
from fedsim.results.statistics import MIN_SEEDS, UNIT, Difference, estimate, holm, paired, pooled
from scripts.reproduction.cells import markdown, short, signed, tested
from scripts.reproduction.shipped import RESULTS, Shipped

DOCS = RESULTS.parent
Panels = Mapping[str, Mapping[str, pd.DataFrame]]
"""Runs by setting and method."""
NO_RUNS = pd.Series(dtype="float64")
MARGIN = 0.02
"""Differences of final accuracy within this margin are equivalent, by preset gpfl_settings."""
PLANNED = 10
"""Number of seeds that preset gpfl_settings plans."""
READINGS = ("gpfl", "gpfl_official")
"""The two readings of GPFL: by the paper, and by its authors' code."""
PARTITIONS = ("gpfl_1spc", "gpfl_2spc", "gpfl_dir")
BY_SIZE = "gpfl_dir_by_size"
TITLES = {
    "gpfl_1spc": "1SPC",
    "gpfl_2spc": "2SPC",
    "gpfl_dir": "Dir(0.2)",
    BY_SIZE: "Dir(0.2), by size",
}


# --- methods by settings ---


def accuracy(shipped: Shipped, folder: str, *values: str) -> str:
    """Show final accuracies with t intervals: a row for each method, a column for each setting.

    `values` are key=value. Only runs that have them count.
    """
    panels = _panels(shipped, folder, values)
    return _pivot(panels, lambda title, line: _estimated(panels[title][line]["final_accuracy"]))


def early(shipped: Shipped, folder: str, *values: str) -> str:
    """Show the mean accuracy of rounds 31 to 50, which the authors' logs of one code have."""
    panels = _panels(shipped, folder, values)

    def cell(title: str, line: str) -> str:
        runs = finished_rows(panels[title][line])["run"]
        return _estimated(runs.map(lambda run: run.columns["test_accuracy"][30:50].mean()))

    return _pivot(panels, cell)


def differences(shipped: Shipped, folder: str, *words: str) -> str:
    """Show differences of final accuracy to random selection in the same setting.

    p-values are corrected by Holm over the table. `against=<choice>` compares with another choice,
    and `measure=<name>` compares another measure (`fedsim.results.measures`).
    """
    words, against = _option(words, "against", REFERENCE)
    words, measure = _option(words, "measure", "final_accuracy")
    panels = _panels(shipped, folder, words)
    found: dict[tuple[str, str], Difference] = {}
    for title, lines in panels.items():
        for line, rows in lines.items():
            candidates = [name for name in lines if against in (name, selector_of(lines[name]))]
            reference = reference_of(lines, line, candidates)
            if reference is None or reference == line:
                continue
            values = paired(measured(rows, measure), measured(lines[reference], measure))
            difference = pooled([values])
            if difference is not None and any(difference.values):
                found[title, line] = difference
    p_values = dict(zip(found, holm([one.p_value for one in found.values()]), strict=True))

    def cell(title: str, line: str) -> str:
        key = title, line
        return tested(found[key], p_values[key]) if key in found else ""

    return _pivot(panels, cell, f"minus {against}", with_empty_rows=False)


def _panels(shipped: Shipped, folder: str, values: Sequence[str]) -> Panels:
    settings = by_setting(_runs(shipped, folder, values))
    return {title: by(rows, "method") for title, rows in settings.items()}


def _runs(shipped: Shipped, folder: str, values: Sequence[str] = ()) -> pd.DataFrame:
    """Return the runs of a folder that have some values, such as model.hidden=[64,_30]."""
    required = {}
    for word in values:
        key, _, value = word.partition("=")
        required[key] = value.replace("_", " ") if value.startswith("[") else value
    runs = []
    for rows in by(shipped.frames[RESULTS / folder], "group").values():
        if has_values(rows, required):
            runs += list(rows["run"])
    return runs_frame(runs)


def _option(words: Sequence[str], key: str, default: str) -> tuple[tuple[str, ...], str]:
    """Return the words without key=value, and the value, or `default` if there is none."""
    values = [word.partition("=")[2] for word in words if word.startswith(f"{key}=")]
    others = tuple(word for word in words if not word.startswith(f"{key}="))
    return others, values[0] if values else default


def _pivot(
    panels: Panels,
    cell: Callable[[str, str], str],
    corner: str = "",
    *,
    with_empty_rows: bool = True,
) -> str:
    lines = dict.fromkeys(line for panel in panels.values() for line in panel)
    rows = []
    for line in lines:
        cells = [cell(title, line) if line in panel else "" for title, panel in panels.items()]
        if with_empty_rows or any(cells):
            rows.append([line, *cells])
    titles = [" ".join(TITLES.get(word, word) for word in title.split()) for title in panels]
    return markdown([corner, *titles], rows)


def _estimated(values: pd.Series) -> str:
    result = estimate(values.dropna(), UNIT)
    return "" if result is None else short(result)


# --- GPFL and its rivals by local training and network ---


class Network:
    """Final accuracies of a local training and a network, from presets named like gpfl_settings.

    `accuracies` has them by cell and selector, each by seed.
    """

    def __init__(self, training: str, hidden: str, dropout: str) -> None:
        without = "no dropout" if float(dropout) == 0 else f"dropout {dropout}"
        self.labels = [training, f"{hidden}, {without}"]
        self.accuracies: dict[tuple[str, str], pd.Series] = {}

    def add(self, cell: str, selector: str, accuracies: pd.Series) -> None:
        earlier = self.accuracies.get((cell, selector), accuracies)
        self.accuracies[cell, selector] = accuracies.combine_first(earlier)

    def difference(self, cells: Iterable[str], method: str, against: str) -> Difference | None:
        """Return the mean difference over some cells, paired by seed."""
        strata = []
        for cell in cells:
            ours = self.accuracies.get((cell, method), NO_RUNS)
            strata.append(paired(ours, self.accuracies.get((cell, against), NO_RUNS)))
        return pooled(strata)

    def rival(self, kind: str) -> str:
        """Return the selector by data size whose name begins with `kind`, or an empty text."""
        names = [name for cell, name in self.accuracies if cell == BY_SIZE]
        matching = [name for name in names if name.startswith(kind)]
        return matching[0] if matching else ""


def _networks(shipped: Shipped, folders: Sequence[str]) -> list[Network]:
    """Return the networks of some folders, those of the paper's local training first."""
    networks: dict[tuple[str, str, str], Network] = {}
    for folder in folders:
        training = "authors' code" if folder.endswith("_code") else "paper"
        for rows in by(_runs(shipped, folder), "group").values():
            run = first_run(rows)
            model = run.config["model"]
            hidden = " and ".join(map(str, model["hidden"]))
            key = training, hidden, f"{model['dropout']:g}"
            network = networks.setdefault(key, Network(*key))
            accuracies = rows["final_accuracy"].dropna()
            network.add(run.choices["cell"], run.choices["selector"], accuracies)
    return [networks[key] for key in sorted(networks, reverse=True)]


def settings(shipped: Shipped, *words: str) -> str:
    """Show the decision of preset gpfl_settings: GPFL minus random selection, and what follows.

    There is a row for each local training, network and reading. `against=<choice>` compares with
    another choice. Runs of presets that differ in name alone count together.
    """
    folders, against = _option(words, "against", REFERENCE)
    rows = []
    means = []
    for network in _networks(shipped, folders):
        for method in READINGS:
            mean = network.difference(PARTITIONS, method, against)
            if mean is None:
                continue
            means.append(mean)
            row = [*network.labels, method]
            for cell in PARTITIONS:
                difference = network.difference([cell], method, against)
                if difference is not None:
                    row.append(f"{signed(difference)} ({difference.num})")
            rows.append(row)
    p_values = holm([mean.p_value for mean in means])
    for row, mean, p in zip(rows, means, p_values, strict=True):
        row += [f"{tested(mean, p)} ({mean.num})", _decision(mean)]
    header = ["local training", "network", "", "1SPC", "2SPC", "Dir(0.2)", "mean of the three"]
    return markdown([*header, f"GPFL and {against}"], rows)


def settings_means(shipped: Shipped, *folders: str) -> str:
    """Show the means of the three partitions alone, with p-values by Holm over each column."""
    table = _readings(shipped, folders, PARTITIONS, "round robin", with_seeds=False)
    return table.replace(f"equivalent within {MARGIN:g}", "level")


def by_size(shipped: Shipped, *folders: str) -> str:
    """Show Dir(0.2) with the models of all methods averaged by data size, as `settings` does."""
    return _readings(shipped, folders, [BY_SIZE], "round_robin", with_seeds=True)


def _readings(
    shipped: Shipped, folders: Sequence[str], cells: Sequence[str], title: str, *, with_seeds: bool
) -> str:
    """Show both readings of GPFL minus random selection, and minus round robin."""
    rows = []
    columns: list[list[Difference]] = [[], []]
    for network in _networks(shipped, folders):
        for method in READINGS:
            to_random = network.difference(cells, method, REFERENCE)
            to_round_robin = network.difference(cells, method, "round_robin")
            if to_random is not None and to_round_robin is not None:
                rows.append([*network.labels, method])
                columns[0].append(to_random)
                columns[1].append(to_round_robin)
    for column in columns:
        p_values = holm([difference.p_value for difference in column])
        for row, difference, p in zip(rows, column, p_values, strict=True):
            seeds = f" ({difference.num})" if with_seeds else ""
            row += [tested(difference, p) + seeds, _decision(difference)]
    header = ["local training", "network", "", "minus random", "GPFL and random"]
    return markdown([*header, f"minus {title}", f"GPFL and {title}"], rows)


def rivals_by_size(shipped: Shipped, *folders: str) -> str:
    """Show FedCor and power-of-choice minus random selection, and GPFL minus FedCor, by data size.

    p-values are corrected by Holm over the table.
    """
    rows = []
    found = []
    for network in _networks(shipped, folders):
        fedcor, power_of_choice = network.rival("fedcor"), network.rival("power_of_choice")
        pairs = [(fedcor, REFERENCE), (power_of_choice, REFERENCE)]
        pairs += [(reading, fedcor) for reading in READINGS]
        contrasts = [network.difference([BY_SIZE], *pair) for pair in pairs]
        differences = [one for one in contrasts if one is not None]
        if len(differences) == len(pairs):
            rows.append(list(network.labels))
            found.append(differences)
    p_values = iter(holm([one.p_value for differences in found for one in differences]))
    for row, differences in zip(rows, found, strict=True):
        row += [f"{tested(one, next(p_values))} ({one.num})" for one in differences]
    header = ["local training", "network", "FedCor minus random", "power-of-choice minus random"]
    return markdown([*header, *(f"{reading} minus FedCor" for reading in READINGS)], rows)


def _decision(difference: Difference) -> str:
    """Return what the rule of preset gpfl_settings says, if there are enough seeds.

    An interval can exclude 0 and yet show that the difference is small. Then both are said.
    """
    if difference.num < MIN_SEEDS:
        return "-"
    words = []
    low, high = difference.interval
    if low > 0:
        words.append("GPFL exceeds")
    elif high < 0:
        words.append("GPFL falls short")
    if difference.p_equivalent(MARGIN) < 0.05:
        words.append(f"equivalent within {MARGIN:g}")
    decision = ", ".join(words) or "undecided"
    if difference.num < PLANNED:
        decision += f" (so far: {difference.num} of {PLANNED} seeds)"
    return decision


# --- other tables ---


def cost(shipped: Shipped) -> str:
    """Show what the shipped runs took, and which engines and commits made them."""
    rows = []
    for folder, frame in shipped.frames.items():
        runs = list(finished_rows(frame)["run"])
        seconds = [run.summary.get("wall_seconds") for run in runs]
        hours = "not recorded" if None in seconds else f"{sum(seconds) / 3600:.2g}"
        rounds = ", ".join(str(number) for number in sorted({run.num_rounds for run in runs}))
        engines = {str(run.summary["engine"]) for run in runs if "engine" in run.summary}
        commits = {run.commit[:10] for run in runs if run.commit}
        made_by = ", ".join([*sorted(engines), *sorted(commits)]) or "an earlier version"
        rows.append([f"`{folder.name}`", str(len(runs)), rounds, hours, made_by])
    header = ["runs in docs/results", "runs", "rounds", "hours of a core", "engine, commit"]
    return markdown(header, rows)


def from_report(shipped: Shipped, folder: str, name: str, *words: str) -> str:
    """Show a table of a folder's report, from its CSV file.

    `words` name the columns (all), with underscores for spaces, and `rows=` the first rows.
    """
    columns, number = _option(words, "rows", "")
    table = _read(RESULTS / folder / f"{name}.csv")
    names = [word.replace("_", " ") for word in columns] or list(table[0])
    shown = table[: int(number)] if number else table
    return markdown(names, [[row[name] for name in names] for row in shown])


def over_settings(shipped: Shipped, word: str) -> str:
    """Show a report's table over settings, `file=<path below docs>`, the largest gain first.

    A row has the gain over random selection in points, the verdict (with the number of seeds if it
    is preliminary), and bytes.
    """
    table = _read(DOCS / word.removeprefix("file="))
    table.sort(key=lambda row: -float(row["to random"] or 0))
    rows = []
    for row in table:
        numbers = re.findall(r"[+-][.\d]+", row["to random"] + row["95 % interval"])
        points = [f"{100 * float(number):+.2f}" for number in numbers]
        gain = "{} [{}, {}]".format(*points) if points else ""
        verdict = re.sub(",|reference", "", row["verdict"])
        verdict = verdict.replace("preliminary", f"({row['seeds']})")
        name = f"*{row['method']}*" if row["method"] == CONTROL else row["method"]
        num_bytes = row["bytes"].partition(" (")[0]
        rows.append([name, row["asks for"], gain, verdict, num_bytes])
    return markdown(["method", "asks for", "gain", "verdict", "bytes"], rows)


def regret_and_accuracy(shipped: Shipped, folder: str, word: str) -> str:
    """Say what `fedsim replay` says of regret and real accuracy (`fedsim.commands.replay.verdict`).

    Regrets come from docs/measured/replay_regret.csv, and accuracies from the runs of `cell=<name>`
    in the folder. These are not the same jobs.
    """
    cell = word.removeprefix("cell=")
    accuracies = {}
    for row in _read(RESULTS / folder / "overview.csv"):
        accuracies[row["run"]] = float(row["final accuracy (last 11)"].split()[0])
    pairs = []
    for row in _read(DOCS / "measured" / "replay_regret.csv"):
        name = f"{cell} {row['method']}"
        if name in accuracies:
            pairs.append((float(row["regret"].split()[0]), accuracies[name]))
    return verdict(*np.array(pairs).T)


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


MAKERS: Mapping[str, Callable[..., str]] = {
    maker.__name__: maker
    for maker in (
        accuracy,
        early,
        differences,
        settings,
        settings_means,
        by_size,
        rivals_by_size,
        cost,
        from_report,
        over_settings,
        regret_and_accuracy,
    )
}
