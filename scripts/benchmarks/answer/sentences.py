"""The five short answers that open docs/benchmark.md, from an `Answer`."""

from fedsim.benchmark.rules import HORIZONS
from fedsim.results.ranking import AT_SERVER
from fedsim.results.statistics import ALPHA
from scripts.benchmarks.answer.answer import Answer
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
    listed,
    mean_gain,
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
    """Say how many methods gain or lose significantly at equal rounds."""
    num, num_all = len(answer.settings), len(FIRST_BLOCK)
    verdict = "In some cases." if _is_any_ahead(answer) else "We have found no benefit."
    if num < num_all:
        verdict = f"{verdict[:-1]} so far ({num} of {num_all} settings)."
    tests = ahead_and_behind(answer, "p_holm")
    if is_any_significant(answer):
        better, worse = (answer.significant(sign, gains=answer.overall) for sign in (1, -1))
        of_means = f"{count_of(better, len(answer.rivals))} ahead, and {len(worse)} behind"
        tests = f"{tests} in a regime. In the mean over regimes, {of_means}"
    _, friedman = answer.ranks
    is_different = friedman.loc["friedman"] < ALPHA
    others = " [Methods do differ from each other](benchmark_details.md#ranks)."
    return (
        f"**Does selection pay?** {verdict} At equal rounds, with a learning rate tuned for each "
        f"method, {tests}.{others if is_different.mean() > 0.5 else ''}"
    )


def _is_any_ahead(answer: Answer) -> bool:
    """Return whether a method gains significantly, in a regime or in the mean."""
    return bool(answer.significant(1) or answer.significant(1, gains=answer.overall))


def is_any_significant(answer: Answer) -> bool:
    """Return whether a method gains or loses significantly, in a regime or in the mean."""
    signs = (1, -1)
    in_means = any(answer.significant(sign, gains=answer.overall) for sign in signs)
    return in_means or any(answer.significant(sign) for sign in signs)


def _how_much(answer: Answer) -> str:
    """Say what the best method gains, and what a schedule brings random selection."""
    best = answer.rivals[0]
    parts = [f"{mean_gain(answer.overall_after(num), best)} with {num} rounds" for num in HORIZONS]
    schedule = mean_gain(answer.overall_references, "schedule")
    return (
        f"**By how much, and when?** `{best}` has the highest mean gain: "
        f"{mean_gain(answer.overall, best)} points ({', '.join(parts)}). As the best of "
        f"{len(answer.rivals)} estimates, it is probably too high.{_with_one_shard(answer)} For "
        "comparison, random selection itself gains "
        f"{schedule} if its learning rate falls in steps or as a cosine, and is not constant."
    )


def _with_one_shard(answer: Answer) -> str:
    """Say what the best method gains where each client has one shard, and elsewhere."""
    groups = split_by_shards(answer)
    if not all(groups):
        return ""
    best = answer.rivals[0]
    with_one, others = (mean_gain(answer.overall_in(settings), best) for settings in groups)
    num_with_one, num_others = map(len, groups)
    those_with_one = "setting" if num_with_one == 1 else f"{num_with_one} settings"
    the_others = "other one" if num_others == 1 else f"{num_others} others"
    return (
        f" It is {with_one} in the {those_with_one} where most clients have a single class, and "
        f"{others} in the {the_others}. (We chose [this "
        "comparison](benchmark_details.md#one-shard-per-client) after seeing results: it is a "
        "hypothesis.)"
    )


def _at_what_price(answer: Answer) -> str:
    """Say who gains and who loses significantly at equal time and at equal bytes."""
    budgets = ("equal time", "equal bytes")
    ahead = {name: answer.significant(1, gains=answer.overall_at[name]) for name in budgets}
    if any(ahead.values()):
        parts = [f"{count_of(ahead[name], len(answer.rivals))} ahead at {name}" for name in budgets]
        verdict = f"Significantly, {' and '.join(parts)}."
    else:
        verdict = "At equal simulated time and at equal bytes no method is significantly ahead."
    losses = []
    for budget in budgets:
        behind = answer.significant(-1, gains=answer.overall_at[budget])
        if behind:
            verb = "is" if len(behind) == 1 else "are"
            losses.append(f"{listed(behind)} {verb} behind at {budget}")
    if losses:
        verdict = (
            f"{verdict[:-1]}, but {' and '.join(losses)}. A method that spends more in each round "
            "has fewer rounds there, for which its learning rate was not tuned."
        )
    return f"**At what price?** {verdict}"


def _for_whom(answer: Answer) -> str:
    """Say what to do, and name the best method and the best one that asks clients for nothing."""
    advice = "" if _is_any_ahead(answer) else " We can recommend none over random selection."
    text = f"Tune the learning rate and its schedule first.{advice}"
    best = answer.rivals[0]
    if answer.overall.loc[best, "gain"] > 0:
        text += (
            f" If you want to try one, `{best}` has the highest mean gain, and asks clients for "
            f"{asked_for(answer.class_of(best))}"
        )
        frugal = [name for name in answer.rivals if _parts_of_class(answer, name)[0] == "nothing"]
        if frugal and frugal[0] != best and answer.overall.loc[frugal[0], "gain"] > 0:
            gain = mean_gain(answer.overall, frugal[0])
            _, at_server = _parts_of_class(answer, frugal[0])
            needs = f"; the server has {at_server}" if at_server else ""
            text += (
                f". Among methods that ask clients for nothing, it is `{frugal[0]}` ({gain}{needs})"
            )
        text += "."
    return f"**Which method, for whom?** {text}"


def _parts_of_class(answer: Answer, method: str) -> tuple[str, str]:
    """Return what a method asks clients for, and the samples that it needs at the server ("" for
    none)."""
    asked, _, at_server = answer.class_of(method).partition(AT_SERVER)
    return asked, at_server


def _not_shown(answer: Answer) -> str:
    """Say how large a gain would be found, and what has not run."""
    found = answer.detectable(answer.overall).median()
    missing = _missing_populations(answer)
    without = f" Not in it yet: {', '.join(missing)}." if missing else ""
    return (
        "**What does this not show?** It does not prove that selection never helps. The tests are "
        f"weak: only a mean gain of {found:.1f} points or more would be found in 80 of 100 such "
        f"studies (median over methods). Smaller ones are easily missed.{without}"
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
