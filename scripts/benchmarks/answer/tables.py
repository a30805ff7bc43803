"""The tables and sentences of docs/benchmark.md, as Markdown from an `Answer`."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from fedsim.benchmark.rules import CONTROLS, HORIZONS, SCHEDULES, VARIATIONS, draw_settings
from fedsim.results.frames import REFERENCE
from fedsim.results.ranking import AT_SERVER
from fedsim.results.statistics import ALPHA
from scripts.benchmarks.answer import scores
from scripts.benchmarks.answer.answer import Answer, best_of_classes
from scripts.benchmarks.answer.scores import FIRST_BLOCK, NO_METHODS
from scripts.reproduction.cells import markdown

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
EARLY_SHARE = 0.2
"""A share of the rounds."""
REFERENCES = {"schedule": "*the schedule*", "server": "*the server alone*"}
"""The cells of references that are no selectors."""


def points(value: float) -> str:
    return "" if np.isnan(value) else f"{round(value, 2) + 0.0:+.2f}"  # +0.00 and not -0.00


def share(value: float) -> str:
    """Return a share of random selection's total; "never" for inf."""
    return "never" if np.isinf(value) else f"{value:.2f}"


def gain(row: pd.Series) -> str:
    """Return a gain with half its interval, bold if it is beyond chance."""
    text = points(row["gain"])
    if not np.isnan(row["half"]):
        text += f" ± {row['half']:.2f}"
    return f"**{text}**" if row.get("p_holm", 1) < ALPHA else text


def mean_gain(rows: pd.DataFrame, method: str) -> str:
    """Return a method's mean gain over regimes with half its interval, "" without one. Mean gains
    are not tested."""
    return gain(rows.loc[method].drop("p_holm")) if method in rows.index else ""


def name_of(answer: Answer, method: str) -> str:
    """Return a method's cell: italic for controls and references, with the number of settings if it
    has not run in all of them."""
    text = f"*{method}*" if method in (*CONTROLS, *NO_METHODS) else method
    num = int(answer.intervals.loc[method, "settings"].min())
    return text if num == len(answer.settings) else f"{text} ({num})"


# --- tables ---


def means_table(answer: Answer) -> str:
    """Show each method's mean gain over regimes at equal rounds, time and bytes, the highest gain
    first, then the references."""
    rows = []
    for method in answer.methods:
        cells = [mean_gain(means, method) for means in answer.overall_at.values()]
        rows.append([name_of(answer, method), answer.classes[method], *cells])
    for method, name in REFERENCES.items():
        if method in answer.overall_references.index:
            rows.append([name, "", mean_gain(answer.overall_references, method), "", ""])
    return markdown(["method", "asks for", *answer.overall_at], rows)


def gains_table(answer: Answer) -> str:
    """Show each method's gain in each regime, the highest mean gain first, then the references."""
    rows = []
    for method in answer.methods:
        rows.append([name_of(answer, method), *_by_regime(answer.intervals, method)])
    for method, name in REFERENCES.items():
        if method in answer.references.index.unique("method"):
            rows.append([name, *_by_regime(answer.references, method)])
    return f"{markdown(['method', *HEADER], rows)}\n\n{_classes_in_words(answer)}"


def _classes_in_words(answer: Answer) -> str:
    """Say which methods are beyond chance if those that ask for the same are compared alone."""
    return (
        f"After correction over all methods and regimes, {_ahead_and_behind(answer, 'p_holm')}. If "
        "the correction is only over methods that ask for the same, "
        f"{_ahead_and_behind(answer, 'p_class')}."
    )


def _ahead_and_behind(answer: Answer, p: str) -> str:
    """Say how many methods are ahead of random selection beyond chance, and how many behind it, by
    the p-values in the column `p`."""
    better, worse = answer.beyond_chance(1, p), answer.beyond_chance(-1, p)
    num_all = len(answer.rivals)
    if not better and not worse:
        return f"{_methods([], num_all)} ahead of random selection or behind it beyond chance"
    return (
        f"{_methods(better, num_all)} ahead of random selection beyond chance, and "
        f"{_methods(worse, num_all)} behind it"
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
    labels = {"critical": "*critical difference*", "friedman": "*Friedman's p*"}
    for key, label in labels.items():
        rows.append([label, *(f"{tests.loc[key, regime]:.2g}" for regime in REGIMES)])
    return f"{_ranks_in_words(answer)}\n\n{markdown(['method', *HEADER], rows)}"


def _ranks_in_words(answer: Answer) -> str:
    """Say in how many regimes methods differ, and which differ from random selection and from the
    best method."""
    mean_ranks, tests = answer.ranks
    num = int((tests.loc["friedman"] < ALPHA).sum())
    from_random = (mean_ranks - mean_ranks.loc[REFERENCE]).abs() > tests.loc["critical"]
    from_best = mean_ranks - mean_ranks.min() > tests.loc["critical"]
    names = _listed(_true_rows(from_random)) or "No method"
    verb = "have" if len(_true_rows(from_random)) > 1 else "has"
    text = (
        f"By Friedman's test, methods differ from each other in {num} of {len(REGIMES)} regimes "
        f"(p < {ALPHA:g} in each by itself). {names} {verb} a rank that differs from random "
        "selection's by more than the critical difference."
    )
    if worst := _true_rows(from_best):
        text += f" Worse than the best method by more than that, in some regime: {_listed(worst)}."
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
        name = method if method == REFERENCE else name_of(answer, method)
        rows.append([name, *cells, f"{100 * reached:.0f} %"])
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
        rows.append([name_of(answer, str(method)), points(row["gain"]), without_one, *others])
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
        costs = [f"{row[name]:.2f}" for name in ("too_low", "too_high")]
        rows.append([method, *costs, *shares])
    costs = ["rate one step too low", "rate one step too high"]
    shares = ["same as random", "at the edge", f"lower at {HORIZONS[1]}", "other values"]
    return markdown(["method", *costs, *shares], rows)


def settings_table(answer: Answer) -> str:
    """Show each setting that has run, and random selection's final accuracy there."""
    means = answer.finals.xs(REFERENCE, level="method").groupby(["setting", *scores.REGIME]).mean()
    rows = []
    for setting in answer.settings:
        draw = DRAWS[setting]
        model = MODELS.get(draw.stratum, "MLP")
        clients = [SKEWS[draw.skew], str(draw.num_clients), str(draw.cohort_size)]
        accuracies = [f"{means[setting, *regime]:.1f}" for regime in REGIMES]
        rows.append([setting, model, *clients, *accuracies])
    return markdown(["setting", "model", "division", "N", "K", *HEADER], rows)


def by_setting_table(answer: Answer) -> str:
    """Show the mean gain over regimes in each setting, for the best method of each class and for a
    control."""
    means = scores.over_regimes(answer.gains).mean(axis="columns").unstack("method")
    methods = [*best_of_classes(answer).values(), *_controls(answer)[:1]]
    rows = []
    for setting in answer.settings:
        draw = DRAWS[setting]
        cells = [points(means.loc[setting, method]) for method in methods]
        rows.append([setting, SKEWS[draw.skew], *cells])
    return markdown(["setting", "division", *(name_of(answer, name) for name in methods)], rows)


def variations_table(answer: Answer) -> str:
    """Show mean gains over regimes in the settings of the second block that have run."""
    rounds = answer.all_rounds[answer.all_rounds["setting"].isin(VARIATIONS)]
    settings = [name for name in VARIATIONS if name in set(rounds["setting"])]
    if not settings:
        return "No setting of the second block has run."
    gains = scores.over_regimes(scores.gains(scores.finals(rounds))).mean(axis="columns")
    by_setting = gains.unstack("setting")[settings]
    by_setting = by_setting.sort_values(settings[0], ascending=False)
    rows = []
    for method, row in by_setting.iterrows():
        rows.append([str(method), *map(points, row)])
    return markdown(["method", *settings], rows)


def not_run(answer: Answer) -> str:
    """Name the settings that have not run, as bullets."""
    have_run = set(answer.all_rounds["setting"])
    lines = []
    for title, settings in (("first", FIRST_BLOCK), ("second", VARIATIONS)):
        missing = [name for name in settings if name not in have_run]
        if missing:
            names = ", ".join(f"`{name}`" for name in missing)
            lines.append(f"- {len(missing)} of {len(settings)} of the {title} block: {names}")
    return "\n".join(lines) or "All settings have run."


# --- sentences ---


def sentences(answer: Answer) -> str:
    """Return the five sentences of the answer."""
    return "\n".join(
        f"- {sentence}"
        for sentence in (
            whether(answer),
            how_much(answer),
            at_what_price(answer),
            for_whom(answer),
            not_shown(answer),
        )
    )


def whether(answer: Answer) -> str:
    """Say how many methods gain or lose beyond chance, and how large a gain had to be."""
    num, num_all = len(answer.settings), len(FIRST_BLOCK)
    verdict = "In some regimes" if answer.beyond_chance(1) else "We do not see it"
    title = f"**Does selection pay? {verdict}**"
    if num < num_all:
        title += f" (preliminary, {num} of {num_all} settings)"
    largest = answer.intervals.loc[answer.rivals, "gain"].max()
    return (
        f"{title}. With a learning rate of its own for each method, "
        f"{_ahead_and_behind(answer, 'p_holm')} in a regime. The largest of these gains is "
        f"{points(largest)} points. To be told from chance, it had to be about "
        f"{answer.needed():.0f}, or {answer.needed_if_nested(num):.0f} [if seeds are independent "
        "between settings](#seeds)."
    )


def _methods(names: Sequence[str], num_all: int) -> str:
    """Return "none of 17 methods is", or how many with their names and their verb."""
    if not names:
        return f"none of {num_all} methods is"
    verb = "is" if len(names) == 1 else "are"
    return f"{len(names)} of {num_all} methods ({_listed(names)}) {verb}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def how_much(answer: Answer) -> str:
    """Say what the best method gains, how much any may gain, and what a wrong rate costs."""
    best = answer.rivals[0]
    by_horizon = answer.intervals.loc[best, "gain"].groupby("num_rounds").mean()
    parts = [f"{points(by_horizon[num])} with {num} rounds" for num in HORIZONS]
    of_rivals = answer.overall.loc[answer.rivals]
    highest = float((of_rivals["gain"] + of_rivals["half"]).max())
    median = answer.changes.loc[best, "median"]
    controls = [points(answer.overall.loc[name, "gain"]) for name in _controls(answer)]
    return (
        f"**By how much, and when?** `{best}` has the highest mean gain over regimes: "
        f"{mean_gain(answer.overall, best)} points ({', '.join(parts)}). The median over settings "
        f"is {points(median)}. As the best of {len(answer.rivals)} estimates, it is probably too "
        f"high. No method's interval ends above {points(highest)}. Two controls, which are random "
        f"selection again, have {' and '.join(controls)}.{_rate(answer)}"
    )


def _controls(answer: Answer) -> list[str]:
    return [name for name in CONTROLS if name in answer.methods]


def _rate(answer: Answer) -> str:
    """Say what a wrong learning rate costs random selection, if trials are there."""
    if not len(answer.trials):
        return ""
    costs = answer.tuning.loc[REFERENCE]
    return (
        f" For comparison, a learning rate three times too high costs random selection "
        f"{costs['too_high']:.1f} points, and one three times too low {costs['too_low']:.1f}."
    )


def at_what_price(answer: Answer) -> str:
    """Say what the best method gains at equal cost, and what it spends."""
    best = answer.rivals[0]
    means = answer.overall_at
    text = (
        f"**At what price?** If `{best}` stops at random selection's simulated time, its mean gain "
        f"is {mean_gain(means['equal time'], best)} points, and at random selection's bytes "
        f"{mean_gain(means['equal bytes'], best)}. "
    )
    others = []
    for budget in ("equal time", "equal bytes"):
        name = means[budget].loc[answer.rivals, "gain"].idxmax()
        if name != best:
            others.append(f"at {budget} it is {mean_gain(means[budget], name)} (`{name}`)")
    if not others:
        return f"{text}No method has more."
    return f"{text}The highest mean gain is another: {' and '.join(others)}."


def for_whom(answer: Answer) -> str:
    """Name the best method of each class of requests, if it has a positive mean gain."""
    parts = []
    for kind, method in best_of_classes(answer).items():
        if answer.overall.loc[method, "gain"] <= 0:
            continue
        asked, _, at_server = kind.partition(AT_SERVER)
        server = f", and the server has {at_server}" if at_server else ""
        parts.append(f"`{method}` {mean_gain(answer.overall, method)} (asks for {asked}{server})")
    advice = "" if answer.beyond_chance(1) else "We can recommend none over random selection. "
    return (
        f"**Which method, for whom?** {advice}It depends on what clients may be asked for. The "
        f"highest mean gains are {'; '.join(parts)}."
    )


def not_shown(answer: Answer) -> str:
    """Name the population that has run, and what the benchmark does not show."""
    data = list(dict.fromkeys(DATA[FIRST_BLOCK[name]] for name in answer.settings))
    draws = [DRAWS[name] for name in answer.settings]
    clients = _range([draw.num_clients for draw in draws])
    cohorts = _range([draw.cohort_size for draw in draws])
    return (
        "**What is not shown?** Small gains are not excluded. The settings that have run are of "
        f"{', '.join(data[:-1])} and {data[-1]}, with small models and {clients} clients, of which "
        f"{cohorts} are selected in a round. The answer says nothing about larger models, real "
        "devices, fairness between clients or privacy."
    )


def _range(numbers: Sequence[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}"


def early(answer: Answer) -> str:
    """Compare the gains of the drawn methods early and at the end of the rounds."""
    curves = answer.curves[answer.curves["budget"] == "round"]
    by_share = curves.groupby(["method", "share"])["gain"].mean()
    parts = []
    for method in answer.drawn:
        first, last = by_share[method, EARLY_SHARE], by_share[method, 1.0]
        parts.append(f"`{method}` {points(first)} and {points(last)}")
    return (
        f"After {100 * EARLY_SHARE:.0f} % of the rounds and in the last round, the mean gains over "
        f"regimes are: {'; '.join(parts)}. These are gains in single rounds and not in the mean of "
        "the last four measurements."
    )


def seeds(answer: Answer) -> str:
    """Say how much depends on seeds being crossed with settings."""
    num, num_all = len(answer.settings), len(FIRST_BLOCK)
    halves = answer.overall.loc[answer.rivals, ["half", "half_nested"]].median()
    text = (
        "If seeds have an effect on random selection's accuracy that is common to all settings, it "
        f"is hard to see: the p-values of an F test are {answer.p_of_seeds.min():.2f} to "
        f"{answer.p_of_seeds.max():.2f} in the six regimes, each by itself. Without such an "
        f"effect, half the interval of a mean gain is {halves['half_nested']:.2f} in place of "
        f"{halves['half']:.2f} points (medians over methods), and a gain in one regime is beyond "
        f"chance from about {answer.needed_if_nested(num):.1f} points on, in place of "
        f"{answer.needed():.1f} (medians over methods and regimes). Then "
        f"{_ahead_and_behind(answer, 'p_nested')}."
    )
    if num < num_all:
        text += f" With all {num_all} settings, {answer.needed_if_nested(num_all):.1f} points would"
        text += " do, if gains vary between settings as they do so far."
    return text


MAKERS: Mapping[str, Callable[[Answer], str]] = {
    "sentences": sentences,
    "settings": settings_table,
    "not_run": not_run,
    "means": means_table,
    "gains": gains_table,
    "by_setting": by_setting_table,
    "ranks": ranks_table,
    "prices": prices_table,
    "early": early,
    "changes": changes_table,
    "seeds": seeds,
    "variations": variations_table,
    "tuning": tuning_table,
}
"""Makers of the parts of the page, by the name in their marker, in the order of the page."""
