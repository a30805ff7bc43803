"""What the runs of a report are: data, sizes, seeds, how their configs differ, and where their folders are."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedsim.config.nested import flat
from fedsim.report import measures
from fedsim.report.archive import ArchivedRun
from fedsim.report.groups import NEW_GROUPS, Group, relevant
from fedsim.report.runs import Run
from fedsim.report.tables.results import FINAL, LAST
from fedsim.report.tables.table import Table

MOST = 8
"""Values of a fact that are listed; of more, their number is told."""
UNCOMPARED = ("preset", "tracker", "scale")
"""Config groups that change nothing themselves: the values that they set are compared."""


def header_facts(runs: Sequence[Run]) -> dict[str, str]:
    """The facts at the head of the page, as texts by their names; those that no run has are left out."""
    facts = {
        "data set": _choices(runs, "dataset"),
        "partition": _choices(runs, "partition"),
        "model": _choices(runs, "model"),
        "clients (N)": _values(runs, "num_clients"),
        "clients a round (K)": _values(runs, "cohort_size"),
        "rounds": _values(runs, "num_rounds"),
        "seeds": _seeds(runs),
        "runs": f"{len(runs)} ({', '.join(f'{n} {status}' for status, n in Counter(r.status for r in runs).items())})",
        "commit": _listed(sorted({run.commit[:10] for run in runs if run.commit is not None})),
        "environment": "; ".join(sorted({_environment(run) for run in runs} - {""})),
    }
    return {name: text for name, text in facts.items() if text}


def _seeds(runs: Sequence[Run]) -> str:
    found = sorted({run.seeds for run in runs})
    return _listed(found if any(seeds.own for seeds in found) else [seeds.seed for seeds in found])


def _choices(runs: Sequence[Run], group: str) -> str:
    return _listed(list(dict.fromkeys(run.choices[group] for run in runs if group in run.choices)))


def _values(runs: Sequence[Run], key: str) -> str:
    return _listed(
        sorted({run.config[key] for run in runs if key in run.config}, key=lambda value: (str(type(value)), value))
    )


def _listed(values: Sequence[Any]) -> str:
    """The values; consecutive integers as a range."""
    if len(values) > 2 and values == list(range(values[0], values[-1] + 1) if isinstance(values[0], int) else ()):
        return f"{values[0]} to {values[-1]}"
    shown = ", ".join(map(str, values[:MOST]))
    return shown if len(values) <= MOST else f"{shown} and {len(values) - MOST} more"


def _environment(run: Run) -> str:
    return ", ".join(f"{name} {value}" for name, value in run.summary.get("environment", {}).items())


def config_differences(groups: Sequence[Group]) -> Table:
    """How the configs of groups differ: a column for each key of all of them, and one for keys that only some have."""
    configs = [_compared(group.runs[0]) for group in groups]
    everywhere = [key for key in _keys(configs) if all(key in config for config in configs)]
    columns = [key for key in everywhere if len({config[key] for config in configs}) > 1]
    rows = []
    for group, config in zip(groups, configs, strict=True):
        own = ", ".join(f"{key}={value}" for key, value in config.items() if key not in everywhere)
        rows.append([group.name, *(config[key] for key in columns), own])
    return Table("configs", "How the configs differ", ["run", *columns, "keys of its own"], rows)


def shared_config(groups: Sequence[Group]) -> str:
    """The keys and values that all configs have in common, a line each."""
    configs = [_compared(group.runs[0]) for group in groups]
    shared = {key: value for key, value in configs[0].items() if all(config.get(key) == value for config in configs)}
    return "\n".join(f"{key}: {value}" for key, value in shared.items())


def _keys(configs: Sequence[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(key for config in configs for key in config))


def _compared(run: Run) -> dict[str, str]:
    """The choices and values of a run that can change its results; a class is told by the choice that names it."""
    choices = NEW_GROUPS | {group: choice for group, choice in run.choices.items() if group not in UNCOMPARED}
    values = {key: str(value) for key, value in flat(relevant(run.config))}
    told = {f"{group.replace('/', '.')}._target_" for group in choices}
    return choices | {key: value for key, value in values.items() if key not in told}


def runs_table(groups: Sequence[Group]) -> Table:
    """Every run: its group, seed, status, accuracies if it reached its last round, and the name of its folder."""
    rows = []
    for group in groups:
        for run in group.runs:
            accuracies = [measure(run) for measure in (measures.final_accuracy(), measures.last_accuracy)]
            shown = ["-" if value is None or run.status != "done" else f"{value:.4f}" for value in accuracies]
            rows.append([group.name, str(run.seeds), run.status, *shown, run.folder.name])
    return Table("runs", "Runs", ["run", "seed", "status", FINAL, LAST, "folder"], rows)


def folder_links(groups: Sequence[Group], start: Path) -> list[str | None]:
    """Links from the folder `start` to the runs' folders, in the order of `runs_table`; None for runs of an archive."""
    runs = [run for group in groups for run in group.runs]
    return [
        None if isinstance(run, ArchivedRun) else quote(Path(os.path.relpath(run.folder, start)).as_posix()) + "/"
        for run in runs
    ]
