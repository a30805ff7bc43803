"""The five short answers that open docs/benchmark.md, from an `Answer`."""

import pandas as pd

from fedsim.benchmark.rules import HORIZONS
from fedsim.results.statistics import ALPHA
from scripts.benchmarks.answer.answer import Answer, best_of_classes
from scripts.benchmarks.answer.scores import FIRST_BLOCK
from scripts.benchmarks.answer.wording import (
    DATA,
    DRAWS,
    MODELS,
    SKEWS,
    ahead_and_behind,
    asked_for,
    bullets,
    count_of,
    mean_gain,
    points,
    split_by_shards,
)


def sentences(answer: Answer) -> str:
    """Return the five short answers that open the page, as bullets. `evidence` has what stands
    behind each."""
    return bullets(
        [
            _whether(answer),
            _how_much(answer),
            _at_what_price(answer),
            _for_whom(answer),
            _not_shown(answer),
        ]
    )


def _whether(answer: Answer) -> str:
    """Say how many methods gain or lose beyond chance at equal rounds."""
    num, num_all = len(answer.settings), len(FIRST_BLOCK)
    verdict = "In some cases" if _is_any_ahead(answer) else "We do not see it"
    title = f"**Does selection pay? {verdict}**"
    if num < num_all:
        title += f" (preliminary, {num} of {num_all} settings)"
    better, worse = (answer.beyond_chance(sign, gains=answer.overall) for sign in (1, -1))
    tests = ahead_and_behind(answer, "p_holm")
    if is_any_beyond(answer):
        of_means = f"{count_of(better, len(answer.rivals))} ahead, and {len(worse)} behind"
        tests = f"{tests} in a regime. In the mean over regimes, {of_means}"
    _, friedman = answer.ranks
    is_different = friedman.loc["friedman"] < ALPHA
    others = " [Methods do differ from each other](benchmark_details.md#ranks)."
    return (
        f"{title}. At equal rounds, with a learning rate tuned for each method, {tests}."
        f"{others if is_different.mean() > 0.5 else ''}"
    )


def _is_any_ahead(answer: Answer) -> bool:
    """Return whether a method gains beyond chance, in a regime or in the mean."""
    return bool(answer.beyond_chance(1) or answer.beyond_chance(1, gains=answer.overall))


def is_any_beyond(answer: Answer) -> bool:
    """Return whether a method gains or loses beyond chance, in a regime or in the mean."""
    signs = (1, -1)
    in_means = any(answer.beyond_chance(sign, gains=answer.overall) for sign in signs)
    return in_means or any(answer.beyond_chance(sign) for sign in signs)


def _how_much(answer: Answer) -> str:
    """Say what the best method gains, and what a schedule brings random selection."""
    best = answer.rivals[0]
    parts = [f"{mean_gain(answer.overall_after(num), best)} with {num} rounds" for num in HORIZONS]
    schedule = mean_gain(answer.overall_references, "schedule")
    return (
        f"**By how much, and when?** `{best}` has the highest mean gain: "
        f"{mean_gain(answer.overall, best)} points ({', '.join(parts)}).{_with_one_shard(answer)} "
        "For comparison, a step or cosine schedule in place of a constant learning rate brings "
        f"random selection itself {schedule}."
    )


def _with_one_shard(answer: Answer) -> str:
    """Say what the best method gains where each client has one shard, and elsewhere."""
    groups = split_by_shards(answer)
    if not all(groups):
        return ""
    best = answer.rivals[0]
    with_one, others = (mean_gain(answer.overall_in(settings), best) for settings in groups)
    return (
        f" In the {len(groups[0])} settings where each client has one shard (mostly a single "
        f"class) it is {with_one}, and in the {len(groups[1])} others {others} ([a comparison post "
        "hoc](benchmark_details.md#one-shard-per-client))."
    )


def _at_what_price(answer: Answer) -> str:
    """Say who gains at equal time and at equal bytes, and who loses most at equal bytes."""
    budgets = ("equal time", "equal bytes")
    ahead = {name: answer.beyond_chance(1, gains=answer.overall_at[name]) for name in budgets}
    if any(ahead.values()):
        parts = [f"{count_of(ahead[name], len(answer.rivals))} ahead at {name}" for name in budgets]
        verdict = f"Beyond chance, {' and '.join(parts)}."
    else:
        verdict = "At equal simulated time and at equal bytes no method is ahead beyond chance."
    losing = losing_at(answer, "equal bytes")
    if not len(losing):
        return f"**At what price?** {verdict}"
    worst = losing.index[0]
    loss = mean_gain(answer.overall_at["equal bytes"], worst)
    return (
        f"**At what price?** {verdict} Methods that ask many clients seem to lose at equal bytes, "
        f"`{worst}` most ({loss} points), but their learning rates were tuned for more rounds than "
        "they can then afford."
    )


def losing_at(answer: Answer, budget: str) -> pd.DataFrame:
    """Return the mean gains at a budget whose interval is below zero, the lowest first."""
    rows = answer.overall_at[budget].loc[answer.rivals].sort_values("gain")
    return rows[rows["gain"] + rows["half"] < 0]


def _for_whom(answer: Answer) -> str:
    """Name the best method, and the best one of those that ask clients for nothing."""
    advice = "" if _is_any_ahead(answer) else "We can recommend none over random selection. "
    best = answer.rivals[0]
    if answer.overall.loc[best, "gain"] <= 0:
        return f"**Which method, for whom?** {advice}No mean gain is above zero."
    text = (
        f"The highest mean gain is that of `{best}`, which asks clients for "
        f"{asked_for(answer.class_of(best))}"
    )
    frugal = best_of_classes(answer).get("nothing")
    if frugal and frugal != best and answer.overall.loc[frugal, "gain"] > 0:
        gain = points(answer.overall.loc[frugal, "gain"])
        text += f"; among methods that ask for nothing, it is that of `{frugal}` ({gain})"
    return f"**Which method, for whom?** {advice}{text}."


def _not_shown(answer: Answer) -> str:
    """Say how large a gain had to be, and what has not run."""
    needed = answer.needed(answer.overall).median()
    missing = _missing_populations(answer)
    without = f" These have not run yet: {', '.join(missing)}." if missing else ""
    return (
        "**What is not shown?** That no method gains. The tests are weak: to be beyond chance, a "
        f"mean gain had to exceed {needed:.1f} points (median over methods).{without}"
    )


def _missing_populations(answer: Answer) -> list[str]:
    """Return the data, models, divisions and numbers of clients that no setting has had that has
    run."""
    draws = [DRAWS[name] for name in answer.settings]
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
