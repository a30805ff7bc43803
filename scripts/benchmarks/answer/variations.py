"""The second block of the selection benchmark, version 1: how gains change if one thing differs
from a base.

Its settings were not sampled. So its intervals are those of means over seeds, and nothing is
tested. A gain is the difference to the mean of random selection and its controls, which depends
less on the luck of one run. `by_seed` is a table of mean gains over regimes: a row for each method
and setting, a column for each seed.
"""

import pandas as pd

from fedsim.benchmark.rules import CONTROLS, VARIATIONS
from fedsim.results.labels import REFERENCE
from fedsim.results.statistics import Mean
from scripts.benchmarks.answer import scores
from scripts.benchmarks.answer.answer import Answer
from scripts.benchmarks.answer.wording import bullets, gain, name_of
from scripts.reproduction.cells import markdown

BASE = VARIATIONS[0]
BASELINE = (REFERENCE, *CONTROLS)
DIFFERENCE = {
    "v1_base": "the base",
    "v1_base_noisy": "wrong labels",
    "v1_base_labels_away": "availability by label",
    "v1_base_deadline": "a deadline",
    "v1_base_scaffold": "SCAFFOLD",
}
"""The thing that differs from the base, by setting."""
DEADLINE = "v1_base_deadline"
NUM_NAMED = 2
"""Number of methods that are named for the most updates that arrive, and for the fewest."""


def variations(answer: Answer) -> str:
    """Show mean gains over regimes in the settings that have run, and what differs from the
    base."""
    rounds = answer.all_rounds[answer.all_rounds["setting"].isin(VARIATIONS)]
    settings = [name for name in VARIATIONS if name in set(rounds["setting"])]
    if not settings:
        return "No setting of the second block has run."
    finals = scores.finals(rounds)
    baseline = [name for name in BASELINE if name in set(rounds["method"])]
    by_seed = scores.over_regimes(scores.gains(finals, baseline))
    of_baseline = finals[finals.index.get_level_values("method").isin(baseline)]
    parts = [_table(of_baseline, by_seed, settings)]
    if BASE in settings and len(settings) > 1:
        parts.append(_changes_in_words(by_seed, settings[1:]))
    if DEADLINE in settings:
        parts.append(_arrivals_in_words(rounds[rounds["setting"] == DEADLINE]))
    return "\n\n".join(parts)


def _table(of_baseline: pd.Series, by_seed: pd.DataFrame, settings: list[str]) -> str:
    """Show the accuracy of the baseline, and each method's mean gain, in each setting."""
    accuracies = of_baseline.groupby("setting").mean()
    rows = [["*random selection*", *(f"{accuracies[name]:.1f} %" for name in settings)]]
    for method in _highest_first(by_seed, settings[0]):
        cells = []
        for setting in settings:
            has_run = (method, setting) in by_seed.index
            cells.append(gain(_over_seeds(by_seed.loc[method, setting])) if has_run else "")
        rows.append([name_of(method), *cells])
    return markdown(["method", *(DIFFERENCE[name] for name in settings)], rows)


def _changes_in_words(by_seed: pd.DataFrame, settings: list[str]) -> str:
    """Say which gains differ from those in the base, and how many would do so by chance."""
    texts = []
    num_compared = num_named = 0
    for setting in settings:
        differing = []
        for method in _highest_first(by_seed, BASE):
            if method in scores.NO_METHODS or (method, setting) not in by_seed.index:
                continue
            num_compared += 1
            row = _over_seeds(by_seed.loc[method, setting] - by_seed.loc[method, BASE])
            if abs(row["gain"]) > row["half"]:
                num_named += 1
                differing.append(f"`{method}` ({gain(row)})")
        texts.append(f"With {DIFFERENCE[setting]}: {', '.join(differing) or 'none'}.")
    return (
        "Methods whose gain has changed from the base (the 95 % interval of the change excludes "
        f"zero):\n\n{bullets(texts)}\n\nThese intervals are not corrected: of {num_compared} "
        f"changes, {num_compared / 20:.1f} would be named by chance, and {num_named} are."
    )


def _arrivals_in_words(rounds: pd.DataFrame) -> str:
    """Say how many updates arrive in a round before the deadline: means over runs, and the worst
    run of the methods with the fewest."""
    last_rounds = rounds.sort_values("round").groupby(scores.KEYS)["uploads"].last()
    by_method = last_rounds.groupby("method").agg(["mean", "min"])
    of_random = by_method.loc[REFERENCE, "mean"]
    rivals = by_method.drop(index=[*BASELINE, *scores.NO_METHODS], errors="ignore")
    rivals = rivals.sort_values("mean", ascending=False)
    most = []
    for row in rivals[:NUM_NAMED].itertuples():
        most.append(f"`{row.Index}` ({row.mean:.1f})")
    fewest = []
    for row in rivals[: -NUM_NAMED - 1 : -1].itertuples():
        fewest.append(f"`{row.Index}` ({row.mean:.1f}, in its worst run {row.min:.1f})")
    return (
        f"Before the deadline, {of_random:.1f} updates arrive in a round with random selection. "
        f"Most arrive with {' and '.join(most)}, and fewest with {' and '.join(fewest)}."
    )


def _highest_first(by_seed: pd.DataFrame, setting: str) -> list[str]:
    """Return the methods that have run in a setting, the highest mean gain first."""
    means = by_seed.xs(setting, level="setting").mean(axis="columns")
    return list(means.sort_values(ascending=False).index)


def _over_seeds(values: pd.Series) -> pd.Series:
    """Return the mean of a value for each seed, with half its interval by Student's t."""
    mean = Mean(tuple(values))
    return pd.Series({"gain": mean.mean, "half": mean.half_width})
