"""The text behind the five short answers (`sentences`): how strong the tests are, and caveats."""

from collections.abc import Sequence

from fedsim.benchmark.rules import CONTROLS, HORIZONS, SEEDS
from fedsim.results.labels import REFERENCE
from scripts.benchmarks.answer.answer import Answer
from scripts.benchmarks.answer.scores import FIRST_BLOCK, REGIME
from scripts.benchmarks.answer.sentences import is_any_significant
from scripts.benchmarks.answer.tuning import COLLAPSE
from scripts.benchmarks.answer.wording import (
    DATA,
    DRAWS,
    MODELS,
    ahead_and_behind,
    bullets,
    controls_of,
    listed,
    points,
)


def evidence(answer: Answer) -> str:
    """Return what stands behind the five sentences: bullets under a bold title for each."""
    sections = {
        "How strong are the tests?": _strength_of_tests(answer),
        "How much of the highest gain is chance?": _caveats_of_best(answer),
        "Where do the results apply?": _population(answer),
    }
    return "\n\n".join(f"**{title}**\n\n{bullets(texts)}" for title, texts in sections.items())


def _strength_of_tests(answer: Answer) -> list[str]:
    """Say how large a gain had to be to be significant: in the mean over regimes, in one regime,
    and from the common baseline."""
    in_mean, in_regimes = answer.needed(answer.overall), answer.needed(answer.intervals)
    largest = answer.intervals.loc[answer.rivals, "gain"].max()
    tested = answer.overall.index[answer.overall["p_holm"].notna()]
    partly = [name for name in tested if name not in answer.rivals]
    verb = "has" if len(partly) == 1 else "have"
    in_part = f" ({len(partly)} of them {verb} run in some settings only)" if partly else ""
    found = answer.detectable(answer.overall).median()
    texts = [
        f"Each method has {len(SEEDS)} seeds in a setting, and p-values are corrected for "
        f"{len(tested)} methods{in_part}. To be significant, a mean gain had to exceed "
        f"{in_mean.median():.1f} points for the median method ({in_mean.min():.1f} for the method "
        f"with the steadiest gains, {in_mean.max():.1f} for that with the least steady). If the "
        f"median method truly gained {found:.1f} points, 80 of 100 studies like this one would "
        "find it.",
        f"In a single regime, a gain had to exceed {in_regimes.median():.1f} points. The largest "
        f"is {points(largest)}.",
    ]
    # The common baseline is the mean of random selection and all of its controls.
    if len(controls_of(answer)) == len(CONTROLS):
        texts.append(_with_common_baseline(answer))
    return texts


def _with_common_baseline(answer: Answer) -> str:
    """Say how large a gain has to be if it is measured from the common baseline, and whether any
    is."""
    tests = answer.common_baseline_tests
    names = [*answer.significant(1, gains=tests), *answer.significant(-1, gains=tests)]
    if names or is_any_significant(answer):
        verdict = f"Then {ahead_and_behind(answer, 'p_holm', tests)}"
    else:
        verdict = "Still no method is significant"
    in_mean = answer.needed(answer.common_baseline_overall).median()
    in_regimes = answer.needed(answer.common_baseline_intervals).median()
    return (
        "If gains are measured from [a less noisy baseline](benchmark_details.md#baseline), the "
        f"mean of three runs of random selection, {in_mean:.1f} points are enough in the mean, and "
        f"{in_regimes:.1f} in a single regime. {verdict}."
    )


def _caveats_of_best(answer: Answer) -> list[str]:
    """Say why the highest mean gain is less than it seems, how much the controls gain, and what a
    wrong learning rate costs."""
    best = answer.rivals[0]
    texts = []
    if answer.overall.loc[best, "gain"] > 0:
        texts.append(
            f"`{best}` is the best of {len(answer.rivals)} estimates, so its "
            f"{points(answer.overall.loc[best, 'gain'])} points are probably too high."
        )
    texts += _above_zero(answer)
    highest = (answer.overall["gain"] + answer.overall["half"])[answer.rivals].max()
    texts.append(f"No interval of a mean over all regimes goes beyond {points(highest)} points.")
    controls = controls_of(answer)
    if controls:
        gains = [points(answer.overall.loc[name, "gain"]) for name in controls]
        texts.append(
            "Controls, which are random selection with other random numbers, have mean gains of "
            f"{' and '.join(gains)}.{_luck_of_baseline(answer, controls)}"
        )
    if len(answer.trials):
        texts.append(_wrong_rates(answer))
    return texts


def _above_zero(answer: Answer) -> list[str]:
    """Say which intervals are above zero although no mean gain is significant."""
    if answer.significant(1, gains=answer.overall):
        return []
    tables = {"in the mean over all regimes": answer.overall}
    for num_rounds in HORIZONS:
        tables[f"with {num_rounds} rounds"] = answer.overall_after(num_rounds)
    parts = []
    for where, table in tables.items():
        rows = table.loc[answer.rivals]
        above = list(rows.index[rows["gain"] - rows["half"] > 0])
        if above:
            parts.append(f"{listed(above)} ({where})")
    if not parts:
        return []
    return [
        f"Intervals of mean gains that are above zero: {'; '.join(parts)}. They are not corrected "
        f"for the number of {len(answer.rivals)} methods."
    ]


def _luck_of_baseline(answer: Answer, controls: Sequence[str]) -> str:
    """Say if all controls gain in the regime in which gains are highest: random selection may have
    been unlucky there."""
    mean_by_regime = answer.intervals.loc[answer.rivals, "gain"].groupby(REGIME).mean()
    schedule, num_rounds = mean_by_regime.idxmax()
    gains = answer.intervals.xs((schedule, num_rounds), level=REGIME)["gain"][controls]
    if not (gains > 0).all():
        return ""
    return (
        f" Under `{schedule}, {num_rounds}`, where methods gain most, controls gain, too "
        f"({' and '.join(map(points, gains))}): random selection may have been unlucky there."
    )


def _wrong_rates(answer: Answer) -> str:
    """Say what a wrong learning rate costs random selection."""
    row = answer.tuning.loc[REFERENCE]
    return (
        f"A wrong learning rate costs random selection {row['too_high']:.0f} points on average if "
        f"it is three times too high, and {row['too_low']:.0f} if it is three times too low. The "
        f"former costs more than {COLLAPSE} points in {row['collapses']:.0f} of the "
        f"{row['with_higher']:.0f} pairs of a setting and a schedule in which a higher rate was "
        f"tried. These are trials with {HORIZONS[0]} rounds. One that diverged counts as 0 %."
    )


def _population(answer: Answer) -> list[str]:
    """Say which data, models and clients the settings have that have run."""
    data = []
    for kind in dict.fromkeys(FIRST_BLOCK[name] for name in answer.settings):
        data.append(f"{DATA[kind]} ({MODELS[kind]})" if kind in MODELS else DATA[kind])
    draws = [DRAWS[name] for name in answer.settings]
    clients = _range([draw.num_clients for draw in draws])
    cohorts = _range([draw.cohort_size for draw in draws])
    text = (
        f"The settings that have run are of {_in_words(data)}, with small models and {clients} "
        f"clients, of which {cohorts} are selected in a round."
    )
    return [
        text,
        "The benchmark says nothing about larger models, real devices, fairness between clients "
        "or privacy.",
    ]


def _in_words(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low} to {high}" if low < high else str(low)
