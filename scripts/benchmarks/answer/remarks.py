"""Single generated texts of the benchmark's pages, from an `Answer`.

`not_run` is on docs/benchmark.md, the others on docs/benchmark_details.md.
"""

from fedsim.benchmark.rules import VARIATIONS
from fedsim.results.statistics import ALPHA
from scripts.benchmarks.answer import inference
from scripts.benchmarks.answer.answer import Answer
from scripts.benchmarks.answer.scores import FIRST_BLOCK
from scripts.benchmarks.answer.wording import (
    ahead_and_behind,
    mean_gain,
    median_and_range,
    points,
)

EARLY_SHARE = 0.2
"""`early` reports gains after this share of the rounds."""


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
        f"{halves:.2f} points (medians over methods). To be significant, a mean gain has to be "
        f"about {median_and_range(answer.needed(overall))}, and a gain in one regime "
        f"{answer.needed(in_regimes).median():.1f}. In regimes and in the mean, {verdict}. The "
        f"highest mean gain is {mean_gain(overall, best)} (`{best}`)."
    )
