"""The tables and sentences of docs/benchmark.md, as Markdown from an `Answer`."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from fedsim.benchmark.rules import CONTROLS, HORIZONS, SCHEDULES, VARIATIONS, Draw, draw_settings
from fedsim.results.frames import REFERENCE
from fedsim.results.ranking import AT_SERVER
from fedsim.results.statistics import ALPHA
from scripts.benchmarks.answer import scores
from scripts.benchmarks.answer.answer import Answer, best_of_classes
from scripts.benchmarks.answer.scores import FIRST_BLOCK, NO_METHODS
from scripts.benchmarks.answer.tuning import COLLAPSE
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
    """Return a method's mean gain over regimes with half its interval, for a sentence."""
    return gain(rows.loc[method].drop("p_holm", errors="ignore"))


def name_of(method: str) -> str:
    """Return a method's cell: italic for controls and references."""
    return f"*{method}*" if method in (*CONTROLS, *NO_METHODS) else method


# --- tables ---


def means_table(answer: Answer) -> str:
    """Show each method's mean gain over regimes at equal rounds, time and bytes, the highest gain
    first, then the references."""
    rows = []
    for method in answer.methods:
        cells = [gain(means.loc[method]) for means in answer.overall_at.values()]
        rows.append([name_of(method), answer.classes[method], *cells])
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
        rows.append([name_of(method), answer.classes[method], *cells, names])
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
        return _none_beyond(answer)
    return (
        f"{_methods(better, num_all)} ahead of random selection beyond chance, and "
        f"{_methods(worse, num_all)} behind it"
    )


def _none_beyond(answer: Answer) -> str:
    none = _methods([], len(answer.rivals))
    return f"{none} ahead of random selection or behind it beyond chance"


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
    return markdown(["setting", "division", *map(name_of, methods)], rows)


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
    better, worse = (_beyond_in_the_mean(answer, "equal rounds", sign) for sign in (1, -1))
    verdict = "In some cases" if answer.beyond_chance(1) or better else "We do not see it"
    title = f"**Does selection pay? {verdict}**"
    if num < num_all:
        title += f" (preliminary, {num} of {num_all} settings)"
    in_regimes = _ahead_and_behind(answer, "p_holm")
    if in_regimes == _none_beyond(answer) and not better and not worse:
        tests = f"{in_regimes}, neither in a regime nor in the mean over regimes"
    else:
        of_means = f"{_methods(better, len(answer.rivals))} ahead, and {len(worse)} behind"
        tests = f"{in_regimes} in a regime. In the mean over regimes, {of_means}"
    largest = answer.intervals.loc[answer.rivals, "gain"].max()
    return (
        f"{title}. With a learning rate of its own for each method, {tests}. But these tests are "
        f"weak: a gain in a regime had to be about {answer.needed(answer.intervals):.1f} points, "
        f"and a mean gain {answer.needed(answer.overall):.1f}. The largest gain in a regime is "
        f"{points(largest)}. [If seeds are independent between settings](#seeds), a gain had to be "
        f"{answer.needed_if_nested(answer.intervals, num):.1f} points, and a mean gain "
        f"{answer.needed_if_nested(answer.overall, num):.1f}."
    )


def _beyond_in_the_mean(answer: Answer, budget: str, sign: int) -> list[str]:
    """Return the methods whose mean gain (1) or loss (-1) over regimes is beyond chance, after
    Holm's correction over all methods."""
    rows = answer.overall_at[budget].loc[answer.rivals]
    is_beyond = (rows["p_holm"] < ALPHA) & (np.sign(rows["gain"]) == sign)
    return list(rows.index[is_beyond])


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
    parts = [f"{mean_gain(answer.overall_after(num), best)} with {num} rounds" for num in HORIZONS]
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
    row = answer.tuning.loc[REFERENCE]
    return (
        " For comparison, a learning rate three times too high costs random selection more than "
        f"{COLLAPSE} points in {row['collapses']:.0f} of {row['with_higher']:.0f} cases (settings "
        f"with schedules). One three times too low costs {row['too_low']:.1f} points on average."
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
    if others:
        text += f"The highest mean gain is another: {' and '.join(others)}."
    else:
        text += "No method has more."
    return f"{text}{_losses_at_equal_bytes(answer)}"


def _losses_at_equal_bytes(answer: Answer) -> str:
    """Name the methods whose interval at equal bytes is below zero, and those of them that lose
    beyond chance."""
    rows = answer.overall_at["equal bytes"].loc[answer.rivals].sort_values("gain")
    losing = rows[rows["gain"] + rows["half"] < 0]
    if not len(losing):
        return ""
    parts = [f"`{name}` {points(row['gain'])}" for name, row in losing.iterrows()]
    beyond = _beyond_in_the_mean(answer, "equal bytes", -1)
    verdict = f" ({_listed(beyond)} beyond chance)" if beyond else ""
    return f" Methods that ask many clients lose at equal bytes: {', '.join(parts)}{verdict}."


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
        f"**Which method, for whom?** {advice}It depends on what clients may be asked for. Among "
        "the methods that ask for the same, the highest mean gains (if above zero) are "
        f"{'; '.join(parts)}."
    )


def not_shown(answer: Answer) -> str:
    """Name the population that has run, and what the benchmark does not show."""
    data = list(dict.fromkeys(DATA[FIRST_BLOCK[name]] for name in answer.settings))
    draws = [DRAWS[name] for name in answer.settings]
    clients = _range([draw.num_clients for draw in draws])
    cohorts = _range([draw.cohort_size for draw in draws])
    missing = _missing(draws)
    without = f" These have not run yet: {', '.join(missing)}." if missing else ""
    return (
        "**What is not shown?** Small gains are not excluded. The settings that have run are of "
        f"{', '.join(data[:-1])} and {data[-1]}, with small models and {clients} clients, of which "
        f"{cohorts} are selected in a round.{without} The answer says nothing about larger models, "
        "real devices, fairness between clients or privacy."
    )


def _missing(draws: Sequence[Draw]) -> list[str]:
    """Return the data, models, divisions and numbers of clients that no setting has had that has
    run."""
    names = {**DATA, "lenet": MODELS["lenet"]}
    missing: list[str] = []
    for draw in DRAWS.values():
        if draw.stratum not in {other.stratum for other in draws}:
            missing.append(names[draw.stratum])
        if draw.skew not in {other.skew for other in draws}:
            missing.append(SKEWS[draw.skew])
        if draw.num_clients not in {other.num_clients for other in draws}:
            missing.append(f"{draw.num_clients:,} clients")
    return list(dict.fromkeys(missing))


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
    p_values = answer.p_of_seeds
    needed = answer.needed_if_nested(answer.intervals, num)
    text = (
        f"For each method and regime, an F test asks whether seeds have such an effect on the gain."
        f" Of {len(p_values)} tests, {100 * (p_values < ALPHA).mean():.0f} % have p < {ALPHA:g}. "
        f"Without any effect it would be {100 * ALPHA:.0f} % of independent tests.\n\n"
        "If there is none, half the interval of a mean gain is "
        f"{halves['half_nested']:.2f} in place of {halves['half']:.2f} points (medians over "
        f"methods). A gain in one regime is beyond chance from about {needed:.1f} points on, in "
        f"place of {answer.needed(answer.intervals):.1f} (medians over methods and regimes). Then "
        f"{_ahead_and_behind(answer, 'p_nested')}."
    )
    if num < num_all:
        needed_in_all = answer.needed_if_nested(answer.intervals, num_all)
        text += (
            f" With all {num_all} settings, {needed_in_all:.1f} points would do, if gains vary "
            "between settings as they do so far."
        )
    return text


MAKERS: Mapping[str, Callable[[Answer], str]] = {
    "sentences": sentences,
    "settings": settings_table,
    "not_run": not_run,
    "means": means_table,
    "partial": partial_table,
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
