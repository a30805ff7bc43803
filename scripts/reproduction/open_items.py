"""How often the rules err in the families as they are shipped, and what stays open: which runs
would decide it."""

import csv
import io
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fedsim.papers.examine import Evidence, holm_corrected, is_number
from fedsim.papers.judge import Judged, family_of
from fedsim.papers.published import VERDICTS, Claim, Number, Publication
from fedsim.results.frames import done
from fedsim.results.measures import bounds_of
from fedsim.results.statistics import UNIT, Estimate, estimate
from scripts.reproduction.cells import markdown
from scripts.reproduction.seeds import seeds_needed
from scripts.reproduction.shipped import RESULTS, Shipped

OPEN = ("undecided", "too wide to tell", "consistent with")
OPEN_FILE = RESULTS / "open.csv"
TRIALS = 100
OFF = (0.0, 0.05, 0.10)
FEW = 40
"""Seeds up to which runs are counted as worth making."""

# --- error rates ---


def rates(shipped: Shipped) -> str:
    """The verdicts on printed accuracies of a known truth, simulated with the shipped spreads,
    seeds and families."""
    known = [(p, one) for p, some in shipped.all_judged for one in some if _is_accuracy(one)]
    rows = []
    for off in OFF:
        for name, key in (("its family", family_of), ("the paper", _paper)):
            rng, counts = np.random.default_rng(0), Counter[str]()
            for _ in range(TRIALS):
                counts.update(_simulated(known, off, key, rng))
            shares = [f"{100 * counts[verdict] / TRIALS / len(known):.1f} %" for verdict in _SINGLE]
            rows.append(["exact" if not off else f"off by {off:.2f}", name, *shares])
    return markdown(
        [f"truth of {len(known)} printed accuracies", "corrected within", *_SINGLE], rows
    )


_SINGLE = [verdict for verdict in VERDICTS if verdict not in ("direction only", "not judged")]


def _is_accuracy(one: Judged) -> bool:
    ours = None if one.evidence is None else one.evidence.ours
    return (
        isinstance(one.printed, Number)
        and isinstance(ours, Estimate)
        and bounds_of(one.printed.measure) == UNIT
    )


def _paper(publication: Publication, printed: Number | Claim) -> Hashable:
    return publication.paper, printed.added_after_runs


def _simulated(
    known: Sequence[tuple[Publication, Judged]],
    off: float,
    key: Callable[[Publication, Number | Claim], Hashable],
    rng: np.random.Generator,
) -> Iterator[str]:
    """The verdicts on numbers of one run each, whose method's true mean lies `off` above or below
    ours."""
    families: dict[Hashable, list[Evidence]] = {}
    for publication, one in known:
        assert one.evidence is not None
        assert isinstance(one.evidence.ours, Estimate)
        assert isinstance(one.printed, Number)
        sd, num = one.evidence.ours.sd, one.evidence.num
        printed = off * rng.choice((-1, 1)) + rng.normal(0, sd)
        found = is_number(printed, estimate(rng.normal(0, sd, num).tolist()), one.printed.margin)
        families.setdefault(key(publication, one.printed), []).append(found)
    return (one.verdict for family in families.values() for one in holm_corrected(family))


# --- what stays open ---


@dataclass(frozen=True)
class OpenItem:
    """A number or a claim that is not decided, and what would decide it; `seeds`: None if no number
    of them would.

    `groups`: the settings whose runs it is about. `hours`: of a core, for the seeds that are
    missing.
    """

    folder: Path
    judged: Judged
    seeds: int | None
    groups: frozenset[tuple[tuple[str, str], ...]]
    hours_a_run: float

    @property
    def more(self) -> int:
        """The seeds that are missing."""
        return (
            0
            if self.seeds is None or self.judged.evidence is None
            else self.seeds - self.judged.evidence.num
        )

    @property
    def hours(self) -> float:
        return self.more * len(self.groups) * self.hours_a_run


def open_items(shipped: Shipped) -> list[OpenItem]:
    """All that is judged and not decided."""
    found = []
    for folder, judged in shipped.judged.items():
        hours = _hours_a_run(shipped.frames[folder])
        for one in (one for _, some in judged for one in some if one.verdict in OPEN):
            assert one.evidence is not None
            needed = seeds_needed(one.printed, one.evidence, one.tests)
            found.append(OpenItem(folder, one, needed, frozenset(_settings(one.printed)), hours))
    return found


def open_csv(items: Sequence[OpenItem]) -> str:
    """One line an item."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [
        "runs",
        "where",
        "id",
        "verdict",
        "over the paper",
        "seeds",
        "tests in its family",
        "seeds needed",
    ]
    writer.writerow([*names, "more runs", "hours of a core"])
    for item in items:
        one = item.judged
        assert one.evidence is not None
        cells = [item.folder.name, one.printed.where, one.printed.id, one.verdict, one.over_paper]
        numbers = [one.evidence.num, one.tests, "none" if item.seeds is None else item.seeds]
        writer.writerow([*cells, *numbers, item.more * len(item.groups), f"{item.hours:.2g}"])
    return text.getvalue()


def what_is_open(shipped: Shipped, *wanted: str) -> str:
    """By folder: how many items are open, how many of them few seeds would decide, and what these
    runs would take.

    With `row=<folder>` or `row=all` of that alone.
    """
    by_folder: dict[str, list[OpenItem]] = {}
    for item in open_items(shipped):
        by_folder.setdefault(item.folder.name, []).append(item)
    rows, all_of_them = [], []
    for name, items in by_folder.items():
        few = [item for item in items if item.seeds is not None and item.seeds <= FEW]
        seeds = max((item.seeds or 0 for item in few), default=0)
        none = sum(item.seeds is None for item in items)
        hours = _hours_together(few)
        all_of_them.append((len(items), len(few), len(items) - len(few) - none, none, hours))
        rows.append(
            [
                f"`{name}`",
                *map(str, all_of_them[-1][:4]),
                str(seeds or "-"),
                f"{hours:.2g}" if few else "-",
            ]
        )
    sums = [sum(column) for column in zip(*all_of_them, strict=True)]
    rows.append(["all", *(f"{value:.0f}" for value in sums[:4]), "", f"{sums[4]:.2g}"])
    header = [
        "runs",
        "open",
        f"by {FEW} seeds at most",
        "by more",
        "by none",
        "seeds for the second",
        "hours of a core",
    ]
    return markdown(
        header, [row for row in rows if not wanted or f"row={row[0].strip('`')}" in wanted]
    )


def _hours_together(items: Sequence[OpenItem]) -> float:
    """Of a core, where the runs of a setting serve all items that are about it."""
    most: dict[Hashable, float] = {}
    for item in items:
        for group in item.groups:
            most[group] = max(most.get(group, 0.0), item.more * item.hours_a_run)
    return sum(most.values())


def _hours_a_run(runs: pd.DataFrame) -> float:
    return float(np.mean([run.summary["wall_seconds"] for run in done(runs)["run"]])) / 3600


def _settings(printed: Number | Claim) -> Iterator[tuple[tuple[str, str], ...]]:
    """The choices of the runs that a number or a claim is about."""
    if isinstance(printed, Number):
        yield _key(printed.about)
        return
    over = printed.grows_with or printed.pooled_over
    for place in [{over: str(value)} for value in printed.values] if over else [{}]:
        about = {**printed.about, **place}
        yield _key(about)
        for other in printed.others:
            yield _key({**about, printed.among: other})
        if printed.minus:
            yield _key({**about, **printed.minus})


def _key(about: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(about.items()))


MAKERS: Mapping[str, Callable[..., str]] = {
    maker.__name__: maker for maker in (rates, what_is_open)
}
