"""Names and numbers of docs/benchmark.md in words, for its tables, sentences and figures."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from fedsim.benchmark.rules import CONTROLS, HORIZONS, SCHEDULES, draw_settings
from fedsim.results.ranking import AT_SERVER
from fedsim.results.statistics import ALPHA
from scripts.benchmarks.answer.answer import Answer
from scripts.benchmarks.answer.scores import NO_METHODS

REGIMES = [(schedule, num_rounds) for num_rounds in HORIZONS for schedule in SCHEDULES]
"""The regimes in the order of all tables and figures."""
HEADER = [f"{schedule}, {num_rounds}" for schedule, num_rounds in REGIMES]
DATA = {
    "watch": "smartwatch",
    "cifar": "CIFAR-10",
    "writers": "synthetic handwriting",
    "fmnist": "Fashion-MNIST",
    "plays": "Shakespeare",
}
"""The names of data sets on the page."""
SKEWS = {
    "natural": "natural clients",
    "quantity_skew": "log-normal sizes",
    "shards_1": "one shard per client",
    "shards_2": "two shards per client",
    "dirichlet_01": "Dirichlet by class, 0.1",
    "dirichlet_05": "Dirichlet by class, 0.5",
    "dirichlet_client": "Dirichlet by client",
}
"""The names of divisions of the data on the page."""
MODELS = {"cifar": "linear layer on frozen features", "lenet": "LeNet"}
"""The model of each kind of data; the others have an MLP."""
DRAWS = {draw.name: draw for draw in draw_settings()}


def points(value: float) -> str:
    return "" if np.isnan(value) else f"{round(value, 2) + 0.0:+.2f}"  # +0.00 and not -0.00


def share(value: float) -> str:
    """Return a share of random selection's total; "never" for inf."""
    return "never" if np.isinf(value) else f"{value:.2f}"


def gain(row: pd.Series) -> str:
    """Return a gain with half its interval, bold if it is significant."""
    text = points(row["gain"])
    if not np.isnan(row["half"]):
        text += f" ± {row['half']:.2f}"
    return f"**{text}**" if row.get("p_holm", 1) < ALPHA else text


def mean_gain(rows: pd.DataFrame, method: str) -> str:
    """Return a method's mean gain over regimes with half its interval, for a sentence."""
    return gain(rows.loc[method].drop("p_holm", errors="ignore"))


def name_of(method: str) -> str:
    """Return a method's cell: italic for controls and references."""
    return f"*{method}*" if method in (*CONTROLS, *NO_METHODS) else method


def ahead_and_behind(answer: Answer, p: str, gains: pd.DataFrame | None = None) -> str:
    """Say how many methods are significantly ahead of random selection, and how many behind it, by
    the p-values in the column `p` of `gains` (`Answer.significant`)."""
    better, worse = (answer.significant(sign, p, gains) for sign in (1, -1))
    num_all = len(answer.rivals)
    if not better and not worse:
        return none_beyond(answer)
    return (
        f"{count_of(better, num_all)} significantly ahead of random selection, and "
        f"{count_of(worse, num_all)} behind it"
    )


def none_beyond(answer: Answer) -> str:
    none = count_of([], len(answer.rivals))
    return f"{none} significantly ahead of random selection or behind it"


def count_of(names: Sequence[str], num_all: int) -> str:
    """Return "none of 17 methods is", or how many with their names and their verb."""
    if not names:
        return f"none of {num_all} methods is"
    verb = "is" if len(names) == 1 else "are"
    return f"{len(names)} of {num_all} methods ({listed(names)}) {verb}"


def listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def asked_for(kind: str) -> str:
    """Return a class of methods in words, such as "losses, and the server has the test set"."""
    asked, _, at_server = kind.partition(AT_SERVER)
    return f"{asked}, and the server has {at_server}" if at_server else asked


def split_by_shards(answer: Answer) -> tuple[list[str], list[str]]:
    """Return the settings that have run in which each client has one shard, mostly a single class,
    and the others."""
    with_one = [name for name in answer.settings if DRAWS[name].skew == "shards_1"]
    return with_one, [name for name in answer.settings if name not in with_one]


def controls_of(answer: Answer) -> list[str]:
    return [name for name in CONTROLS if name in answer.methods]


def median_and_range(values: pd.Series) -> str:
    return (
        f"{values.median():.1f} points (median over methods, {values.min():.1f} to "
        f"{values.max():.1f})"
    )


def bullets(texts: Sequence[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)
