"""What the verdicts leave open, which runs would decide it, and how often the rules err."""

import csv
import io
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fedsim.papers.evidence import Evidence, holm_corrected, number_evidence
from fedsim.papers.judge import Judgement
from fedsim.papers.published import VERDICTS, Claim, Number
from fedsim.results.frames import finished_rows
from fedsim.results.measures import bounds_of
from fedsim.results.statistics import UNIT, Estimate, estimate
from scripts.reproduction.cells import markdown
from scripts.reproduction.seeds import seeds_needed
from scripts.reproduction.shipped import RESULTS, Shipped

OPEN = ("undecided", "too wide to tell", "consistent with")
"""Verdicts that decide nothing."""
OPEN_FILE = RESULTS / "open.csv"
TRIALS = 100
OFFSETS = (0.0, 0.05, 0.10)
NOT_SIMULATED = ("direction only", "not judged")
FEW_SEEDS = 40
"""Number of seeds up to which runs are worth making."""


# --- error rates ---


def rates(shipped: Shipped) -> str:
    """Show how often each verdict falls on printed accuracies whose truth is known.

    They are simulated with the spreads, seeds and families of the shipped runs.
    """
    known = []
    for _, some in shipped.all_judged:
        known += [judged for judged in some if _is_accuracy(judged)]
    verdicts = [verdict for verdict in VERDICTS if verdict not in NOT_SIMULATED]
    rows = []
    for offset in OFFSETS:
        for name, key in (("its family", _family), ("the paper", _paper_family)):
            rng = np.random.default_rng(0)
            counts: Counter[str] = Counter()
            for _ in range(TRIALS):
                counts.update(_simulated(known, offset, key, rng))
            shares = [f"{100 * counts[v] / TRIALS / len(known):.1f} %" for v in verdicts]
            rows.append([f"off by {offset:.2f}" if offset else "exact", name, *shares])
    header = [f"truth of {len(known)} printed accuracies", "corrected within", *verdicts]
    return markdown(header, rows)


def _is_accuracy(judged: Judgement) -> bool:
    if not isinstance(judged.printed, Number) or judged.evidence is None:
        return False
    is_estimate = isinstance(judged.evidence.ours, Estimate)
    return is_estimate and bounds_of(judged.printed.measure) == UNIT


def _family(judged: Judgement) -> Hashable:
    return judged.family


def _paper_family(judged: Judgement) -> Hashable:
    return judged.paper_family


def _simulated(
    known: Iterable[Judgement],
    offset: float,
    key: Callable[[Judgement], Hashable],
    rng: np.random.Generator,
) -> list[str]:
    """Return the verdicts on numbers of one run each.

    The true mean of a number's method lies `offset` above or below ours. Tests of
    equal `key` are corrected together.
    """
    families: dict[Hashable, list[Evidence]] = {}
    for judged in known:
        assert isinstance(judged.printed, Number)
        assert judged.evidence is not None
        ours = judged.evidence.ours
        assert isinstance(ours, Estimate)
        printed = offset * rng.choice((-1, 1)) + rng.normal(0, ours.sd)
        runs = estimate(rng.normal(0, ours.sd, judged.evidence.num).tolist())
        evidence = number_evidence(printed, runs, judged.printed.margin)
        families.setdefault(key(judged), []).append(evidence)
    verdicts: list[str] = []
    for family in families.values():
        verdicts += [evidence.verdict for evidence in holm_corrected(family)]
    return verdicts


# --- what stays open ---

Choices = tuple[tuple[str, str], ...]
"""The choices of a group of runs, sorted."""


@dataclass(frozen=True)
class OpenItem:
    """A number or claim that is not decided, and the runs that would decide it.

    `seeds` is the number of seeds that would do, or None if no number would. `groups` are the runs
    that it is about, and `hours_per_run` are hours of a core.
    """

    folder: Path
    judged: Judgement
    seeds: int | None
    groups: frozenset[Choices]
    hours_per_run: float

    @property
    def missing_seeds(self) -> int:
        if self.seeds is None or self.judged.evidence is None:
            return 0
        return self.seeds - self.judged.evidence.num

    @property
    def hours(self) -> float:
        return self.missing_seeds * len(self.groups) * self.hours_per_run

    @property
    def needs_few_seeds(self) -> bool:
        return self.seeds is not None and self.seeds <= FEW_SEEDS


def open_items(shipped: Shipped) -> list[OpenItem]:
    """Return all that is judged and not decided."""
    items = []
    for folder in shipped.judged:
        hours = _hours_per_run(shipped.frames[folder])
        for judged in shipped.judgements(folder):
            if judged.verdict in OPEN:
                assert judged.evidence is not None
                seeds = seeds_needed(judged.printed, judged.evidence, judged.tests)
                groups = frozenset(_groups(judged.printed))
                items.append(OpenItem(folder, judged, seeds, groups, hours))
    return items


def open_csv(items: Sequence[OpenItem]) -> str:
    """Return a CSV file with a line for each item."""
    rows = []
    for item in items:
        judged = item.judged
        assert judged.evidence is not None
        rows.append(
            {
                "runs": item.folder.name,
                "where": judged.printed.where,
                "id": judged.printed.id,
                "verdict": judged.verdict,
                "over the paper": judged.over_paper,
                "seeds": judged.evidence.num,
                "tests in its family": judged.tests,
                "seeds needed": "none" if item.seeds is None else item.seeds,
                "more runs": item.missing_seeds * len(item.groups),
                "hours of a core": f"{item.hours:.2g}",
            }
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def what_is_open(shipped: Shipped, word: str = "") -> str:
    """Show by folder how many items are open, how many few seeds would decide, and at what cost.

    `row=<folder>` or `row=all` shows one row.
    """
    by_folder: dict[str, list[OpenItem]] = {}
    for item in open_items(shipped):
        by_folder.setdefault(item.folder.name, []).append(item)
    counts = []
    rows = []
    for name, items in by_folder.items():
        few = [item for item in items if item.needs_few_seeds]
        impossible = sum(item.seeds is None for item in items)
        hours = _hours_together(few)
        numbers = [len(items), len(few), len(items) - len(few) - impossible, impossible]
        counts.append([*numbers, hours])
        most = max(item.seeds or 0 for item in few) if few else "-"
        cells = [str(number) for number in numbers]
        rows.append([f"`{name}`", *cells, str(most), f"{hours:.2g}" if few else "-"])
    *totals, hours = np.sum(counts, 0)
    rows.append(["all", *(f"{total:.0f}" for total in totals), "", f"{hours:.2g}"])
    row_name = word.removeprefix("row=")
    header = ["runs", "open", f"by {FEW_SEEDS} seeds at most", "by more", "by none"]
    shown = [row for row in rows if row_name in ("", row[0].strip("`"))]
    return markdown([*header, "seeds for the second", "hours of a core"], shown)


def _hours_together(items: Iterable[OpenItem]) -> float:
    """Return hours of a core. The runs of a group serve all items that are about it."""
    of_group: dict[Choices, float] = {}
    for item in items:
        hours = item.missing_seeds * item.hours_per_run
        for group in item.groups:
            of_group[group] = max(of_group.get(group, 0.0), hours)
    return sum(of_group.values())


def _hours_per_run(runs: pd.DataFrame) -> float:
    return (
        float(np.mean([run.summary["wall_seconds"] for run in finished_rows(runs)["run"]])) / 3600
    )


def _groups(printed: Number | Claim) -> list[Choices]:
    """Return the choices of each group of runs that a number or claim is about."""
    if isinstance(printed, Number):
        return [_sorted(printed.about)]
    varied = printed.grows_with or printed.pooled_over
    places = [{varied: str(value)} for value in printed.values] if varied else [{}]
    groups = []
    for place in places:
        about = dict(printed.about) | place
        groups.append(_sorted(about))
        groups += [_sorted(about | {printed.among: other}) for other in printed.others]
        if printed.minus:
            groups.append(_sorted(about | dict(printed.minus)))
    return groups


def _sorted(choices: Mapping[str, str]) -> Choices:
    return tuple(sorted(choices.items()))


MAKERS: Mapping[str, Callable[..., str]] = {
    maker.__name__: maker for maker in (rates, what_is_open)
}
