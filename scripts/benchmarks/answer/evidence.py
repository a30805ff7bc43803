"""The text behind the five short answers (`sentences`): how strong the tests are, and caveats."""

from collections.abc import Sequence

import pandas as pd

from fedsim.benchmark.rules import CONTROLS, HORIZONS, SEEDS
from fedsim.results.labels import REFERENCE
from scripts.benchmarks.answer.answer import Answer, best_of_classes
from scripts.benchmarks.answer.scores import FIRST_BLOCK, REGIME
from scripts.benchmarks.answer.sentences import is_any_beyond, losing_at
from scripts.benchmarks.answer.tuning import COLLAPSE
from scripts.benchmarks.answer.wording import (
    DATA,
    DRAWS,
    MODELS,
    ahead_and_behind,
    asked_for,
    bullets,
    controls_of,
    listed,
    mean_gain,
    median_and_range,
    points,
)


def evidence(answer: Answer) -> str:
    """Return what stands behind the five sentences: bullets under a bold title for each."""
    titles = {
        "Does it pay?": _strength_of_tests(answer),
        "By how much?": _caveats_of_best(answer),
        "At what price?": _at_equal_cost(answer),
        "For whom?": _best_of_classes(answer),
        "For which population?": _population(answer),
    }
    return "\n\n".join(f"**{title}**\n\n{bullets(texts)}" for title, texts in titles.items())


def _strength_of_tests(answer: Answer) -> list[str]:
    """Say how large a gain had to be to be beyond chance, in the mean and in one regime."""
    of_means, of_regimes = answer.needed(answer.overall), answer.needed(answer.intervals)
    largest = answer.intervals.loc[answer.rivals, "gain"].max()
    texts = [
        f"The tests have {len(SEEDS)} seeds and are corrected for all methods. To be beyond "
        f"chance, an estimated mean gain had to exceed {median_and_range(of_means)}. A true gain "
        f"of {answer.detectable(answer.overall).median():.1f} points would be found in 80 of "
        "100 such studies.",
        f"In one regime, a gain had to exceed {of_regimes.median():.1f} points. The largest is "
        f"{points(largest)}.",
    ]
    # The common baseline is the mean of random selection and all of its controls.
    if len(controls_of(answer)) == len(CONTROLS):
        texts.append(_with_common_baseline(answer))
    return texts


def _with_common_baseline(answer: Answer) -> str:
    """Say how large a gain has to be if it is measured from the common baseline, and whether any
    is."""
    tests = answer.common_baseline_tests
    is_beyond = [answer.beyond_chance(sign, gains=tests) for sign in (1, -1)]
    if any(is_beyond) or is_any_beyond(answer):
        verdict = f"Then {ahead_and_behind(answer, 'p_holm', tests)}"
    else:
        verdict = "Still no method is beyond chance"
    of_means = answer.needed(answer.common_baseline_overall).median()
    of_regimes = answer.needed(answer.common_baseline_intervals).median()
    return (
        f"With [a less noisy baseline](benchmark_details.md#baseline), a mean gain has to exceed "
        f"{of_means:.1f} points, and a gain in one regime {of_regimes:.1f}. {verdict}."
    )


def _caveats_of_best(answer: Answer) -> list[str]:
    """Say why the highest mean gain is less than it seems, how much the controls gain, and what a
    wrong learning rate costs."""
    best = answer.rivals[0]
    gain, median = answer.overall.loc[best, "gain"], answer.changes.loc[best, "median"]
    texts = [
        f"The {points(gain)} points of `{best}` are probably an overestimate, because they are the "
        f"best of {len(answer.rivals)} estimates. The median over settings is {points(median)}.",
        *_above_zero(answer, best),
        "The upper end of the highest interval of a mean gain at equal rounds is "
        f"{points(_highest_end(answer))}.",
    ]
    controls = [points(answer.overall.loc[name, "gain"]) for name in controls_of(answer)]
    if controls:
        texts.append(
            f"The controls, which are random selection with other draws, gain "
            f"{' and '.join(controls)}."
        )
    if len(answer.trials):
        texts.append(_wrong_rates(answer))
    return texts


def _above_zero(answer: Answer, best: str) -> list[str]:
    """Say where the interval of the best method is above zero, although its mean gain is not beyond
    chance."""
    if best in answer.beyond_chance(1, gains=answer.overall):
        return []
    above = []
    if _is_above_zero(answer.overall.loc[best]):
        above.append("in the mean over all regimes")
    for num_rounds in HORIZONS:
        if _is_above_zero(answer.overall_after(num_rounds).loc[best]):
            above.append(f"with {num_rounds} rounds")
    if not above:
        return []
    text = (
        f"Its interval is above zero {' and '.join(above)}. But that is the interval "
        "of a single method, and does not allow for the choice of the best of "
        f"{len(answer.rivals)}."
    )
    names = controls_of(answer)
    in_regime = answer.intervals.xs(("constant", HORIZONS[0]), level=REGIME)["gain"]
    is_above_early = f"with {HORIZONS[0]} rounds" in above
    if is_above_early and names and (in_regime.reindex(names) > 0).all():
        text += (
            f" And part of it may be bad luck of random selection: under `constant, {HORIZONS[0]}` "
            f"the controls have {' and '.join(points(value) for value in in_regime[names])}."
        )
    return [text]


def _is_above_zero(row: pd.Series) -> bool:
    return bool(row["gain"] - row["half"] > 0)


def _highest_end(answer: Answer) -> float:
    """Return the highest end of an interval of a mean gain."""
    rows = answer.overall.loc[answer.rivals]
    return float((rows["gain"] + rows["half"]).max())


def _wrong_rates(answer: Answer) -> str:
    """Say what a wrong learning rate costs random selection."""
    row = answer.tuning.loc[REFERENCE]
    return (
        f"Costs of a wrong learning rate are means over the trials of random selection with "
        f"{HORIZONS[0]} rounds: {row['too_high']:.0f} points if it is three times too high (more "
        f"than {COLLAPSE} in {row['collapses']:.0f} of {row['with_higher']:.0f} cases), and "
        f"{row['too_low']:.0f} if it is three times too low."
    )


def _at_equal_cost(answer: Answer) -> list[str]:
    """Say what the best method gains at equal cost, and who loses."""
    best = answer.rivals[0]
    means = answer.overall_at
    text = (
        f"If `{best}` stops at random selection's simulated time, its mean gain is "
        f"{mean_gain(means['equal time'], best)} points, and at random selection's bytes "
        f"{mean_gain(means['equal bytes'], best)}. "
    )
    others = []
    for budget in ("equal time", "equal bytes"):
        name = means[budget].loc[answer.rivals, "gain"].idxmax()
        if name != best:
            others.append(f"at {budget} `{name}` ({mean_gain(means[budget], name)})")
    if others:
        text += f"Another method has the highest mean gain {' and '.join(others)}."
    else:
        text += "No method has a higher mean gain there."
    texts = [text]
    for budget in ("equal time", "equal bytes"):
        losing = losing_at(answer, budget)
        if not len(losing):
            continue
        parts = [f"`{name}` {points(row['gain'])}" for name, row in losing.iterrows()]
        beyond = answer.beyond_chance(-1, gains=means[budget])
        texts.append(
            f"These methods have intervals below zero at {budget}: {', '.join(parts)}. After "
            f"correction, beyond chance: {listed(beyond) or 'none'}."
        )
    texts.append(
        "Rates and schedules were tuned for the whole number of rounds. A method that stops early "
        "never reaches the end of its schedule, and may lose less if it is tuned for the rounds "
        "that it can afford."
    )
    return texts


def _best_of_classes(answer: Answer) -> list[str]:
    """Name the best method of each class of requests, if it has a positive mean gain."""
    parts = []
    for kind, method in best_of_classes(answer).items():
        if answer.overall.loc[method, "gain"] <= 0:
            continue
        gain = mean_gain(answer.overall, method)
        parts.append(f"`{method}` {gain} (asks for {asked_for(kind)})")
    return [
        "The highest mean gains among methods that ask clients for the same, if above zero: "
        f"{'; '.join(parts) or 'none'}."
    ]


def _population(answer: Answer) -> list[str]:
    """Name the population that has run."""
    data = []
    for kind in dict.fromkeys(FIRST_BLOCK[name] for name in answer.settings):
        data.append(f"{DATA[kind]} ({MODELS[kind]})" if kind in MODELS else DATA[kind])
    draws = [DRAWS[name] for name in answer.settings]
    clients = _range([draw.num_clients for draw in draws])
    cohorts = _range([draw.cohort_size for draw in draws])
    return [
        f"The settings that have run are of {', '.join(data[:-1])} and {data[-1]}, with small "
        f"models and {clients} clients, of which {cohorts} are selected in a round.",
        "The benchmark says nothing about larger models, real devices, fairness between clients "
        "or privacy.",
    ]


def _range(numbers: Sequence[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}"
