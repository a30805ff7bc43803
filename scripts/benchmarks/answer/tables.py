"""The tables of docs/benchmark.md, as Markdown from an `Answer`."""

import numpy as np
import pandas as pd

from fedsim.benchmark.rules import CONTROLS, HORIZONS
from fedsim.commands.catalogue import Catalogue
from fedsim.results.labels import REFERENCE
from fedsim.results.statistics import ALPHA
from scripts.benchmarks.answer import scores
from scripts.benchmarks.answer.answer import Answer, best_of_classes
from scripts.benchmarks.answer.wording import (
    DATA,
    DRAWS,
    HEADER,
    MODELS,
    REGIMES,
    SKEWS,
    ahead_and_behind,
    controls_of,
    gain,
    listed,
    name_of,
    points,
    share,
    split_by_shards,
)
from scripts.reproduction.cells import markdown

REFERENCES = {"schedule": "*the schedule*", "server": "*the server alone*"}
"""The cells of references that are no selectors."""


def methods_table(answer: Answer) -> str:
    """Show each method's idea and source, as the head of its file has them, in the order of
    `means_table`. A method that is not part of fedsim has the source of its card."""
    shipped = Catalogue().group("selector").choices
    rows = []
    for method in answer.rivals:
        choice = shipped.get(method)
        if choice is None:
            rows.append([method, "", answer.sources.get(method, "")])
        else:
            rows.append([method, choice.idea.rstrip("."), choice.fields["source"]])
    return markdown(["method", "idea", "source"], rows)


def means_table(answer: Answer) -> str:
    """Show each method's mean gain over regimes at equal rounds, time and bytes, the highest gain
    first, then the references."""
    rows = []
    for method in answer.methods:
        cells = [gain(means.loc[method]) for means in answer.overall_at.values()]
        rows.append([name_of(method), answer.class_of(method), *cells])
    for method, name in REFERENCES.items():
        if method in answer.overall_references.index:
            rows.append([name, "", gain(answer.overall_references.loc[method]), "", ""])
    return markdown(["method", "asks for", *answer.overall_at], rows)


def partial_table(answer: Answer) -> str:
    """Show the mean gains of methods that have run in some settings only."""
    settings_of = answer.gains.dropna().reset_index("setting").groupby("method")["setting"]
    rows = []
    for method in answer.partial_methods:
        cells = [gain(means.loc[method]) for means in answer.overall_at.values()]
        names = ", ".join(settings_of.get_group(method).unique())
        rows.append([name_of(method), answer.class_of(method), *cells, names])
    if not rows:
        return "All methods have run in all settings."
    return markdown(["method", "asks for", *answer.overall_at, "settings"], rows)


def gains_table(answer: Answer) -> str:
    """Show each method's gain in each regime, the highest mean gain first, then the references."""
    rows = []
    for method in answer.methods:
        rows.append([name_of(method), *_by_regime(answer.intervals, method)])
    for method, name in REFERENCES.items():
        if method in answer.references.index.unique("method"):
            rows.append([name, *_by_regime(answer.references, method)])
    return f"{markdown(['method', *HEADER], rows)}\n\n{_classes_in_words(answer)}"


def _classes_in_words(answer: Answer) -> str:
    """Say which methods gain or lose significantly if only methods that ask for the same are
    compared."""
    return (
        f"After correction over all methods and regimes, {ahead_and_behind(answer, 'p_holm')}. If "
        "the correction is only over methods that ask for the same, "
        f"{ahead_and_behind(answer, 'p_class')}."
    )


def _by_regime(rows: pd.DataFrame, method: str) -> list[str]:
    keys = [(method, *regime) for regime in REGIMES]
    return [gain(rows.loc[key]) if key in rows.index else "" for key in keys]


def ranks_table(answer: Answer) -> str:
    """Show mean ranks over settings, the best first, and the tests of each regime."""
    mean_ranks, tests = answer.ranks
    mean_ranks = mean_ranks.loc[mean_ranks.mean(axis="columns").sort_values().index]
    rows = []
    for method, of_method in mean_ranks.iterrows():
        name = f"*{method}*" if method in CONTROLS else str(method)
        rows.append([name, *(f"{of_method[regime]:.1f}" for regime in REGIMES)])
    criticals = [f"{tests.loc['critical', regime]:.1f}" for regime in REGIMES]
    p_values = [f"{tests.loc['friedman', regime]:.2g}" for regime in REGIMES]
    rows += [["*critical difference*", *criticals], ["*Friedman's p*", *p_values]]
    return f"{_ranks_in_words(answer)}\n\n{markdown(['method', *HEADER], rows)}"


def _ranks_in_words(answer: Answer) -> str:
    """Say in how many regimes methods differ, and which differ from random selection and from the
    best method."""
    mean_ranks, tests = answer.ranks
    num = int((tests.loc["friedman"] < ALPHA).sum())
    from_random = (mean_ranks - mean_ranks.loc[REFERENCE]).abs() > tests.loc["critical"]
    from_best = mean_ranks - mean_ranks.min() > tests.loc["critical"]
    names = listed(_true_rows(from_random)) or "No method"
    verb = "have" if len(_true_rows(from_random)) > 1 else "has"
    text = (
        f"By Friedman's test, methods differ from each other in {num} of {len(REGIMES)} regimes "
        f"(p < {ALPHA:g} in each by itself). {names} {verb} a rank that differs from random "
        "selection's by more than the critical difference"
    )
    if from_random.any(axis=None):
        regimes = [
            f"`{schedule}, {rounds}`"
            for schedule, rounds in REGIMES
            if from_random[schedule, rounds].any()
        ]
        text += (
            f", in {' and '.join(regimes)}. This is not corrected over regimes, and speaks only of "
            "these seeds"
        )
    text += "."
    if worst := _true_rows(from_best):
        text += f" Worse than the best method by more than that, in some regime: {listed(worst)}."
    return text


def _true_rows(table: pd.DataFrame) -> list[str]:
    """Return the names of the rows that have a True."""
    return [str(name) for name in table.index[table.any(axis="columns")]]


def prices_table(answer: Answer) -> str:
    """Show what methods spend until random selection's final accuracy, and count failures."""
    rows = []
    for method in [REFERENCE, *answer.methods]:
        cells = []
        for prices in answer.prices.values():
            of_method = prices.xs(method, level="method")
            for num_rounds in HORIZONS:
                of_horizon = of_method.xs(num_rounds, level="num_rounds")
                cells.append(share(float(of_horizon.median())))
        reached = np.isfinite(answer.prices["bytes"].xs(method, level="method")).mean()
        rows.append([name_of(method), *cells, f"{100 * reached:.0f} %"])
    header = [f"{cost}, {num}" for cost in ("bytes", "time") for num in HORIZONS]
    table = markdown(["method", *header, "reached"], rows)
    failures = answer.failures[answer.failures > 0]
    counts = ", ".join(f"{num} of `{method}`" for method, num in failures.items())
    return f"{table}\n\nRuns that diverged: {counts or 'none'}."


def changes_table(answer: Answer) -> str:
    """Show what changes the mean gain over all regimes, besides equal cost (`means_table`)."""
    changes = answer.changes.loc[[name for name in answer.methods if name in answer.changes.index]]
    changes = changes.drop(columns=["equal bytes", "equal time"])
    rows = []
    for method, row in changes.iterrows():
        without_one = ""
        if row["settings"] > 1:
            without_one = f"{points(row['lowest'])} to {points(row['highest'])}"
        others = [points(value) for value in row.drop(["settings", "gain", "lowest", "highest"])]
        rows.append([name_of(str(method)), points(row["gain"]), without_one, *others])
    columns = list(changes.columns)
    others = [DATA.get(name, name) for name in columns[columns.index("median") :]]
    return markdown(["method", "gain", "without one setting", *others], rows)


def tuning_table(answer: Answer) -> str:
    """Show what the trials chose for each method, and what the next rates cost."""
    if not len(answer.trials):
        return "No trials are there."
    rows = []
    for method in [REFERENCE, *(name for name in answer.rivals if name in answer.tuning.index)]:
        row = answer.tuning.loc[method]
        shares = [f"{100 * row[name]:.0f} %" for name in ("same", "edge", "lower", "own")]
        costs = [f"{row[name]:.1f}" for name in ("too_low", "too_high")]
        collapses = f"{row['collapses']:.0f} of {row['with_higher']:.0f}"
        rows.append([method, *costs, collapses, *shares])
    costs = ["lower rate costs", "higher rate costs", "collapses"]
    shares = ["same as random", "at the edge", f"lower at {HORIZONS[1]}", "other values"]
    return markdown(["method", *costs, *shares], rows)


def settings_table(answer: Answer) -> str:
    """Show each setting that has run, and random selection's final accuracy there: the lowest and
    the highest of all regimes."""
    finals = answer.finals.xs(REFERENCE, level="method")
    by_regime = finals.groupby(["setting", *scores.REGIME]).mean()
    rows = []
    for setting in answer.settings:
        draw = DRAWS[setting]
        model = MODELS.get(draw.stratum, "MLP")
        clients = [SKEWS[draw.skew], str(draw.num_clients), str(draw.cohort_size)]
        accuracies = by_regime[setting]
        rows.append([setting, model, *clients, f"{accuracies.min():.1f} to {accuracies.max():.1f}"])
    return markdown(["setting", "model", "partition", "N", "K", "random selection, %"], rows)


def by_setting_table(answer: Answer) -> str:
    """Show the mean gain over regimes in each setting, for the best method of each class and for a
    control."""
    means = scores.over_regimes(answer.gains).mean(axis="columns").unstack("method")
    methods = [*best_of_classes(answer).values(), *controls_of(answer)[:1]]
    rows = []
    for setting in answer.settings:
        draw = DRAWS[setting]
        cells = [points(means.loc[setting, method]) for method in methods]
        rows.append([setting, SKEWS[draw.skew], *cells])
    return markdown(["setting", "partition", *map(name_of, methods)], rows)


def one_shard_table(answer: Answer) -> str:
    """Show mean gains over regimes where each client has one shard, and in the other settings."""
    groups = split_by_shards(answer)
    if not all(groups):
        return "All settings that have run divide the data in the same way."
    means = [answer.overall_in(settings) for settings in groups]
    rows = []
    for method in answer.methods:
        rows.append([name_of(method), *(gain(table.loc[method]) for table in means)])
    header = [f"one shard per client ({len(groups[0])})", f"other divisions ({len(groups[1])})"]
    return markdown(["method", *header], rows)
