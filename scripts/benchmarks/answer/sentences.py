"""Generated texts of the benchmark's pages, from an `Answer`.

`sentences` and `not_run` are on docs/benchmark.md, the others on docs/benchmark_details.md.
"""

from collections.abc import Sequence

import pandas as pd

from fedsim.benchmark.rules import CONTROLS, HORIZONS, SEEDS, VARIATIONS, Draw
from fedsim.results.labels import REFERENCE
from fedsim.results.ranking import AT_SERVER
from fedsim.results.statistics import ALPHA
from scripts.benchmarks.answer import inference
from scripts.benchmarks.answer.answer import Answer, best_of_classes
from scripts.benchmarks.answer.scores import FIRST_BLOCK, REGIME
from scripts.benchmarks.answer.tuning import COLLAPSE
from scripts.benchmarks.answer.wording import (
    DATA,
    DRAWS,
    MODELS,
    SKEWS,
    ahead_and_behind,
    controls_of,
    count_of,
    listed,
    mean_gain,
    points,
)

EARLY_SHARE = 0.2
"""`early` reports gains after this share of the rounds."""


def sentences(answer: Answer) -> str:
    """Return the five paragraphs of the answer, as bullets."""
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
    verdict = "In some cases" if _is_any_ahead(answer) else "We do not see it"
    title = f"**Does selection pay? {verdict}**"
    if num < num_all:
        title += f" (preliminary, {num} of {num_all} settings)"
    better, worse = (answer.beyond_chance(sign, gains=answer.overall) for sign in (1, -1))
    in_regimes = ahead_and_behind(answer, "p_holm")
    if _is_any_beyond(answer):
        of_means = f"{count_of(better, len(answer.rivals))} ahead, and {len(worse)} behind"
        tests = f"{in_regimes} in a regime. In the mean over regimes, {of_means}"
    else:
        tests = f"{in_regimes}, neither in a regime nor in the mean over regimes"
    largest = answer.intervals.loc[answer.rivals, "gain"].max()
    mean = answer.needed(answer.overall).median()
    in_regime = answer.needed(answer.intervals).median()
    return (
        f"{title}. Learning rate and parameters are tuned for each method. At equal rounds, "
        f"{tests}. But these tests are weak, with {len(SEEDS)} seeds and a correction for all "
        f"methods: to be beyond chance, a mean gain had to exceed {mean:.1f} points (median over "
        f"methods), and a gain in one regime {in_regime:.1f}. The largest gain in a regime is "
        f"{points(largest)}.{_baseline(answer)}{_differences(answer)}"
    )


def _is_any_beyond(answer: Answer) -> bool:
    """Return whether a method gains or loses beyond chance, in a regime or in the mean."""
    signs = (1, -1)
    in_means = any(answer.beyond_chance(sign, gains=answer.overall) for sign in signs)
    return in_means or any(answer.beyond_chance(sign) for sign in signs)


def _differences(answer: Answer) -> str:
    """Say that methods differ from each other, if they do in most regimes by Friedman's test."""
    _, tests = answer.ranks
    is_different = tests.loc["friedman"] < ALPHA
    if is_different.mean() <= 0.5:
        return ""
    return (
        f" Methods do differ from each other, in {is_different.sum()} of {len(is_different)} "
        "regimes ([ranks](benchmark_details.md#ranks))."
    )


def _is_any_ahead(answer: Answer) -> bool:
    """Return whether a method gains beyond chance, in a regime or in the mean."""
    return bool(answer.beyond_chance(1) or answer.beyond_chance(1, gains=answer.overall))


def _median_and_range(values: pd.Series) -> str:
    return (
        f"{values.median():.1f} points (median over methods, {values.min():.1f} to "
        f"{values.max():.1f})"
    )


def _baseline(answer: Answer) -> str:
    """Say what becomes of the tests with the common baseline, if the controls have run."""
    if len(controls_of(answer)) < len(CONTROLS):
        return ""
    overall, in_regimes = answer.common_baseline_overall, answer.common_baseline_intervals
    tests = answer.common_baseline_tests
    verdict = ahead_and_behind(answer, "p_holm", tests)
    beyond = [*answer.beyond_chance(1, gains=tests), *answer.beyond_chance(-1, gains=tests)]
    if not beyond and not _is_any_beyond(answer):
        verdict = "still none is"
    mean, in_regime = answer.needed(overall).median(), answer.needed(in_regimes).median()
    return (
        f" With [a less noisy baseline](benchmark_details.md#baseline) {mean:.1f} and "
        f"{in_regime:.1f} points would do, and {verdict}."
    )


def how_much(answer: Answer) -> str:
    """Say what the best method gains, how much any may gain, and what a wrong rate costs."""
    best = answer.rivals[0]
    parts = [f"{mean_gain(answer.overall_after(num), best)} with {num} rounds" for num in HORIZONS]
    highest = _highest(answer)
    median = answer.changes.loc[best, "median"]
    return (
        f"**By how much, and when?** `{best}` has the highest mean gain over regimes: "
        f"{mean_gain(answer.overall, best)} points ({', '.join(parts)}). This is probably too "
        f"high, because it is the best of {len(answer.rivals)} estimates. The median over settings "
        f"is {points(median)}.{_above_zero(answer, best)} Taken one by one, no interval of a mean "
        f"gain ends above {points(highest)}.{_of_controls(answer)}{_rate(answer)}"
    )


def _of_controls(answer: Answer) -> str:
    """Say what the controls gain, if they have run."""
    gains = [points(answer.overall.loc[name, "gain"]) for name in controls_of(answer)]
    if not gains:
        return ""
    return f" For comparison, random selection again has {' and '.join(gains)} (controls)."


def _above_zero(answer: Answer, best: str) -> str:
    """Say with which horizons the interval of the best method is above zero, if that is not beyond
    chance."""
    if best in answer.beyond_chance(1, gains=answer.overall):
        return ""
    above = []
    for num_rounds in HORIZONS:
        row = answer.overall_after(num_rounds).loc[best]
        if row["gain"] - row["half"] > 0:
            above.append(num_rounds)
    if not above:
        return ""
    text = (
        f" With {' and '.join(map(str, above))} rounds its interval is above zero. But this "
        f"interval is that of one method by itself, and not of the best of {len(answer.rivals)}."
    )
    names = controls_of(answer)
    in_regime = answer.intervals.xs(("constant", HORIZONS[0]), level=REGIME)["gain"]
    if HORIZONS[0] in above and names and (in_regime.reindex(names) > 0).all():
        text += (
            f" And part of it may be bad luck of random selection: under `constant, {HORIZONS[0]}` "
            "the controls gain, too."
        )
    return text


def _highest(answer: Answer) -> float:
    """Return the highest end of an interval of a mean gain."""
    rows = answer.overall.loc[answer.rivals]
    return float((rows["gain"] + rows["half"]).max())


def _rate(answer: Answer) -> str:
    """Say what a wrong learning rate costs random selection, if trials are there."""
    if not len(answer.trials):
        return ""
    row = answer.tuning.loc[REFERENCE]
    return (
        f" In trials of {HORIZONS[0]} rounds a learning rate three times too high "
        f"costs random selection {row['too_high']:.0f} points on average (more than {COLLAPSE} in "
        f"{row['collapses']:.0f} of {row['with_higher']:.0f} cases), and one three times too low "
        f"{row['too_low']:.0f}."
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
    beyond = answer.beyond_chance(-1, gains=answer.overall_at["equal bytes"])
    verdict = f"beyond chance: {listed(beyond) or 'none'}"
    return (
        " Methods that ask many clients lose at equal bytes, with intervals below zero: "
        f"{', '.join(parts)} (after correction, {verdict}). Their rates and schedules were tuned "
        "for the whole number of rounds. They may lose less if tuned for the rounds that they can "
        "afford."
    )


def for_whom(answer: Answer) -> str:
    """Name the best method of each class of requests, if it has a positive mean gain."""
    parts = []
    for kind, method in best_of_classes(answer).items():
        if answer.overall.loc[method, "gain"] <= 0:
            continue
        asked, _, at_server = kind.partition(AT_SERVER)
        server = f", and the server has {at_server}" if at_server else ""
        parts.append(f"`{method}` {mean_gain(answer.overall, method)} (asks for {asked}{server})")
    advice = "" if _is_any_ahead(answer) else "We can recommend none over random selection. "
    return (
        f"**Which method, for whom?** {advice}Where to look further depends on what clients may be "
        "asked for. The highest mean gains among methods that ask for the same (if above zero) "
        f"are {'; '.join(parts)}."
    )


def not_shown(answer: Answer) -> str:
    """Name the population that has run, and what the benchmark does not show."""
    data = []
    for kind in dict.fromkeys(FIRST_BLOCK[name] for name in answer.settings):
        data.append(f"{DATA[kind]} ({MODELS[kind]})" if kind in MODELS else DATA[kind])
    draws = [DRAWS[name] for name in answer.settings]
    clients = _range([draw.num_clients for draw in draws])
    cohorts = _range([draw.cohort_size for draw in draws])
    missing = _missing(draws)
    without = f" These have not run yet: {', '.join(missing)}." if missing else ""
    needed = answer.needed(answer.overall)
    return (
        "**What is not shown?** That methods do not gain. To be beyond chance, an estimated mean "
        f"gain had to exceed {needed.min():.1f} to {needed.max():.1f} points, depending on the "
        "method. If the true gain is as large as that, half of such studies miss it. The settings "
        "that have run are of "
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
    """Say whether seeds have a common effect in all settings."""
    effect = answer.effect_of_seeds
    common = answer.effect_of_seeds_with_common_baseline
    is_seen = effect["p"] < ALPHA
    verdict = "So intervals allow for an effect of seeds that all settings share"
    if not is_seen:
        verdict = "So no such effect is seen. Intervals allow for one all the same"
    text = (
        "A permutation test asks whether seeds have a common effect on mean gains. It exchanges "
        "the seeds within each setting at random, for all methods alike. The variance between "
        f"seeds, divided by that of the rest, is {effect['f']:.1f} (F, mean over "
        f"{len(answer.rivals)} methods). In permutations it is {effect['f_without']:.1f} on "
        f"average, and as high in {100 * effect['p']:.1f} % of {inference.NUM_PERMUTATIONS:,}. "
        f"{verdict}."
    )
    if is_seen and common["p"] >= ALPHA:
        text += (
            " The effect seems to lie in the runs of random selection, which are part of every "
            f"gain: with the [less noisy baseline](#baseline), F is {common['f']:.1f} (p = "
            f"{common['p']:.2f})."
        )
    return text


def baseline(answer: Answer) -> str:
    """Say what changes if gains are measured from random selection and its controls."""
    halves = answer.overall.loc[answer.rivals, "half"].median()
    overall, in_regimes = answer.common_baseline_overall, answer.common_baseline_intervals
    rivals = overall[overall.index.isin(answer.rivals)]
    best = rivals.index[0]
    verdict = ahead_and_behind(answer, "p_holm", answer.common_baseline_tests)
    return (
        f"Half the interval of a mean gain is then {rivals['half'].median():.2f} in place of "
        f"{halves:.2f} points (medians over methods). To be beyond chance, a mean gain has to be "
        f"about {_median_and_range(answer.needed(overall))}, and a gain in one regime "
        f"{answer.needed(in_regimes).median():.1f}. In regimes and in the mean, {verdict}. The "
        f"highest mean gain is {mean_gain(overall, best)} (`{best}`)."
    )
