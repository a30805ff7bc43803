"""Tables that show the numbers and claims of a paper next to the results of our runs.

Each row ends with two pairs of p-values (for and against, raw and corrected by Holm's method), the
verdict, the verdict of the stricter reading (over the paper), and remarks.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fedsim.papers.evidence import Evidence
from fedsim.papers.judge import ByPublication, Judgement, omnibus, standardised_errors
from fedsim.papers.published import RULES, VERDICTS, Claim, Number
from fedsim.report.table import Format, Table, make_frame, show_both, show_p
from fedsim.results.statistics import Estimate

AFTER = " (written after runs had been seen)"
REVISED = " (form revised after runs had been seen)"
OVER_PAPER = "over the paper"
"""The column of the stricter reading."""
STYLES: dict[str, str] = {
    **dict.fromkeys(VERDICTS, "undecided"),
    "reproduced": "reproduced",
    "not reproduced": "not",
}
"""The CSS classes of cells with verdicts on the page."""
JUDGED_HEADER = ["the same (Holm)", "verdict", OVER_PAPER, ""]


def totals_table(compared: ByPublication) -> Table:
    """Return the number of numbers and claims with each verdict, by paper."""
    by_paper: dict[str, list[Judgement]] = {}
    for publication, judged in compared:
        by_paper.setdefault(publication.paper, []).extend(judged)
    rows = []
    for paper, judgements in by_paper.items():
        for name, kind in (("numbers", Number), ("claims", Claim)):
            for is_after in (False, True):
                verdicts = [
                    judgement.verdict
                    for judgement in judgements
                    if isinstance(judgement.printed, kind)
                    and judgement.printed.added_after_runs == is_after
                ]
                counts = Counter(verdicts)
                if verdicts:
                    label = f"{name}{AFTER}" if is_after else name
                    rows.append([paper, label, len(verdicts), *(counts[v] for v in VERDICTS)])
    frame = make_frame(["paper", "", "all", *VERDICTS], rows)
    return Table("totals", "Verdicts by paper", frame, rules=RULES["holm"])


def comparison_table(judged: Sequence[Judgement]) -> Table:
    """Return the printed numbers next to ours at any size: final accuracies, if there are any.

    If all of them have one verdict, it is in the title instead of a column.
    """
    rows: dict[bool, list[Any]] = {True: [], False: []}
    for judgement in judged:
        printed, ours = judgement.printed, judgement.ours
        if isinstance(printed, Number) and ours is not None:
            reason = judgement.rounds or judgement.detail
            verdict = ": ".join(filter(None, [reason, judgement.verdict]))
            row = [_short_name(printed), printed.value, ours, ours.num, verdict]
            rows[printed.measure == "final_accuracy"].append(row)
    frame = make_frame(["", "paper", "ours", "seeds", "verdict"], rows[True] or rows[False])
    title = "The paper's numbers and ours, mean [95 % interval] over seeds"
    if frame["verdict"].nunique() == 1:
        title += f" ({frame.pop('verdict')[0]})"
    return Table("paper", title, frame, {"paper": ".4f"}, styles=STYLES)


def _short_name(printed: Number) -> str:
    """Return the id of a printed number without the table."""
    return printed.id.partition("/")[2].replace("/", " ")


def numbers_table(judged: Sequence[Judgement]) -> Table:
    """Return the numbers printed in a paper next to ours, with verdicts."""
    rows = []
    for place, judgement in zip(_places(judged), judged, strict=True):
        printed = judgement.printed
        if not isinstance(printed, Number):
            continue
        ours = judgement.evidence.ours if judgement.evidence else None
        ours = ours if isinstance(ours, Estimate) else None
        name = _short_name(printed)
        if printed.added_after_runs:
            name += AFTER
        row: list[Any] = [place, name]
        row += [(printed.value, printed.plus_minus), ours]
        row.append(None if ours is None else ours.num)
        row += [ours.next_interval, ours.next_half_width] if ours and ours.num > 1 else [None, None]
        row.append(None if ours is None else ours.mean - printed.value)
        rows.append([*row, printed.margin, *_judged_cells(judgement)])
    header = ["where", "what", "paper", "ours", "seeds", "one more run of ours", "half its width"]
    header += ["difference", "margin", "p close / no draw", *JUDGED_HEADER]
    formats = {
        "paper": _show_printed,
        "one more run of ours": _show_range,
        "half its width": ".3f",
        "difference": "+.4f",
        "margin": "g",
    }
    rules = f"{RULES['judged']} {RULES['number']} {RULES['holm']}"
    return _verdict_table("numbers", "The paper's numbers and ours", header, rows, formats, rules)


def _show_printed(printed: tuple[float, float | None]) -> str:
    value, plus_minus = printed
    return f"{value:.4f}" if plus_minus is None else f"{value:.4f} ± {plus_minus:.2f}"


def _show_range(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else "{:.3f} to {:.3f}".format(*interval)


def omnibus_table(judged: Sequence[Judgement]) -> Table:
    """Return the omnibus check of each printed table and of each of its rows."""
    rows = []
    for (table, row), errors in sorted(standardised_errors(judged).items()):
        check = omnibus(errors)
        if check is not None:
            rows.append([table, row or "all rows", *check])
    note = (
        "Standardised error: the distance of a printed number from our mean, in units in which "
        "that of one more run of ours is standard normal (mean 0, standard deviation 1). p: of the "
        "sum of squares, as if the numbers were independent; those of one run at several rounds "
        "are not, so that it describes rather than tests."
    )
    header = ["table", "row", "numbers", "mean error", "standard deviation", "p"]
    formats = {"mean error": "+.2f", "standard deviation": ".2f", "p": show_p}
    frame = make_frame(header, rows)
    return Table("omnibus", "All printed numbers at once", frame, formats, note)


def claims_table(judged: Sequence[Judgement]) -> Table:
    """Return the claims of a paper next to our results, with verdicts."""
    rows = []
    for place, judgement in zip(_places(judged), judged, strict=True):
        claim = judgement.printed
        if not isinstance(claim, Claim):
            continue
        text = claim.text
        if claim.added_after_runs:
            text += AFTER
        elif claim.revised_after_runs:
            text += REVISED
        ours = judgement.evidence.ours if judgement.evidence else None
        rows.append([place, text, ours, *_judged_cells(judgement)])
    header = ["where", "claim", "ours [95 %]", "p for / against", *JUDGED_HEADER]
    names = ("judged", "value", "bound", "gain", "level", "trend", "holm")
    rules = " ".join(RULES[name] for name in names)
    return _verdict_table("claims", "The paper's claims", header, rows, {}, rules)


def _verdict_table(
    name: str,
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    formats: dict[str, Format],
    rules: str,
) -> Table:
    """Return a table whose rows end with `_judged_cells`."""
    p_columns = dict.fromkeys((header[-5], header[-4]), show_both)  # raw and corrected
    frame = make_frame(header, rows)
    return Table(name, title, frame, {**formats, **p_columns}, rules=rules, styles=STYLES)


def _judged_cells(judgement: Judgement) -> list[Any]:
    """Return the last cells of a row, whose columns are the raw p-values and `JUDGED_HEADER`."""
    evidence = judgement.evidence or Evidence(None)
    return [
        (evidence.p_for, evidence.p_against),
        (evidence.holm_for, evidence.holm_against),
        judgement.verdict,
        judgement.over_paper,
        judgement.detail,
    ]


def _places(judged: Sequence[Judgement]) -> list[str]:
    """Return the place of each number or claim in the paper.

    If the judged runs are of several presets, the preset is added.
    """
    if len({judgement.preset for judgement in judged}) < 2:
        return [judgement.printed.where for judgement in judged]
    return [f"{judgement.printed.where} ({judgement.preset})" for judgement in judged]
