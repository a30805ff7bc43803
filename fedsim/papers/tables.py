"""Tables that show the numbers and claims of a paper next to the results of our runs.

Each row ends with two pairs of p-values (for and against, raw and corrected by Holm's method), the
verdict, the verdict of the stricter reading (over the paper), and remarks.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from fedsim.papers.evidence import Evidence
from fedsim.papers.judge import ByPublication, Judgement, omnibus, standardised_errors
from fedsim.papers.published import RULES, VERDICTS, Claim, Number
from fedsim.report.table import Format, Table, make_frame, show_both, show_p

AFTER = " (written after runs had been seen)"
REVISED = " (form revised after runs had been seen)"
CORRECTED = "the same (Holm)"
"""The column after that of the raw p-values: the same p-values, corrected."""
OVER_PAPER = "over the paper"
"""The column of the stricter reading."""
REMARKS = ""
"""The column of remarks, which has no heading."""
STYLES: dict[str, str] = {
    **dict.fromkeys(VERDICTS, "undecided"),
    "reproduced": "reproduced",
    "not reproduced": "not",
}
"""The CSS classes of cells with verdicts on the page."""


def totals_table(judged: ByPublication) -> Table:
    """Return the number of numbers and claims with each verdict, by paper."""
    counts: dict[tuple[str, type, bool], Counter[str]] = defaultdict(Counter)
    for _, judgements in judged:
        for judgement in judgements:
            paper, is_after = judgement.paper_family
            counts[paper, type(judgement.printed), is_after][judgement.verdict] += 1
    papers = dict.fromkeys(paper for paper, _, _ in counts)  # each once, in this order
    rows = []
    for paper, kind, is_after in product(papers, (Number, Claim), (False, True)):
        verdicts = counts[paper, kind, is_after]
        if verdicts:
            label = "numbers" if kind is Number else "claims"
            if is_after:
                label += AFTER
            rows.append([paper, label, verdicts.total(), *(verdicts[name] for name in VERDICTS)])
    frame = make_frame(["paper", "", "all", *VERDICTS], rows)
    return Table("totals", "Verdicts by paper", frame, rules=RULES["holm"])


def comparison_table(judgements: Sequence[Judgement]) -> Table:
    """Return the printed numbers next to ours at any size: final accuracies, if there are any.

    If all of them have one verdict, it is in the title instead of a column.
    """
    final_rows: list[list[Any]] = []
    other_rows: list[list[Any]] = []
    for judgement in judgements:
        printed, ours = judgement.printed, judgement.ours
        if not isinstance(printed, Number) or ours is None:
            continue
        reason = judgement.rounds or judgement.detail
        verdict = f"{reason}: {judgement.verdict}" if reason else judgement.verdict
        rows = final_rows if printed.measure == "final_accuracy" else other_rows
        rows.append([_short_name(printed), printed.value, ours, ours.num, verdict])
    frame = make_frame(["", "paper", "ours", "seeds", "verdict"], final_rows or other_rows)
    title = "The paper's numbers and ours, mean [95 % interval] over seeds"
    if frame["verdict"].nunique() == 1:
        title += f" ({frame['verdict'][0]})"
        frame = frame.drop(columns="verdict")
    return Table("paper", title, frame, {"paper": ".4f"}, styles=STYLES)


def _short_name(printed: Number) -> str:
    """Return the id of a printed number without the table."""
    return printed.id.partition("/")[2].replace("/", " ")


def numbers_table(judgements: Sequence[Judgement]) -> Table:
    """Return the numbers printed in a paper next to ours, with verdicts."""
    rows = []
    for place, judgement in _with_places(judgements):
        printed = judgement.printed
        if not isinstance(printed, Number):
            continue
        name = _short_name(printed)
        row: dict[str, Any] = {
            "where": place,
            "what": name + AFTER if printed.added_after_runs else name,
            "paper": (printed.value, printed.plus_minus),
            "margin": printed.margin,
        }
        ours = judgement.ours if judgement.evidence else None
        if ours is not None:
            row["ours"] = ours
            row["seeds"] = ours.num
            row["difference"] = ours.mean - printed.value
            if ours.num > 1:
                row["one more run of ours"] = ours.next_interval
                row["half its width"] = ours.next_half_width
        rows.append((row, judgement))
    columns = {
        "where": "",
        "what": "",
        "paper": _show_printed,
        "ours": "",
        "seeds": "",
        "one more run of ours": _show_range,
        "half its width": ".3f",
        "difference": "+.4f",
        "margin": "g",
    }
    title = "The paper's numbers and ours"
    rules = f"{RULES['judged']} {RULES['number']} {RULES['holm']}"
    return _verdict_table("numbers", title, columns, "p close / no draw", rows, rules)


def _show_printed(printed: tuple[float, float | None]) -> str:
    value, plus_minus = printed
    return f"{value:.4f}" if plus_minus is None else f"{value:.4f} ± {plus_minus:.2f}"


def _show_range(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else "{:.3f} to {:.3f}".format(*interval)


def omnibus_table(judgements: Sequence[Judgement]) -> Table:
    """Return the omnibus check of each printed table and of each of its rows."""
    rows = []
    for (table, row), errors in sorted(standardised_errors(judgements).items()):
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


def claims_table(judgements: Sequence[Judgement]) -> Table:
    """Return the claims of a paper next to our results, with verdicts."""
    rows = []
    for place, judgement in _with_places(judgements):
        claim = judgement.printed
        if not isinstance(claim, Claim):
            continue
        text = claim.text
        if claim.added_after_runs:
            text += AFTER
        elif claim.revised_after_runs:
            text += REVISED
        ours = judgement.evidence.ours if judgement.evidence else None
        rows.append(({"where": place, "claim": text, "ours [95 %]": ours}, judgement))
    columns = dict.fromkeys(("where", "claim", "ours [95 %]"), "")
    names = ("judged", "value", "bound", "gain", "level", "trend", "holm")
    rules = " ".join(RULES[name] for name in names)
    return _verdict_table("claims", "The paper's claims", columns, "p for / against", rows, rules)


def _verdict_table(
    name: str,
    title: str,
    columns: Mapping[str, Format],
    p_column: str,
    rows: Sequence[tuple[dict[str, Any], Judgement]],
    rules: str,
) -> Table:
    """Return a table of numbers or claims with verdicts.

    `columns` has the formats of the first columns, and `p_column` is the name of that of the raw
    p-values. A row has its first cells by column, and the judgement that the last cells show.
    """
    formats = {
        **columns,
        p_column: show_both,
        CORRECTED: show_both,
        "verdict": "",
        OVER_PAPER: "",
        REMARKS: "",
    }
    cells = []
    for first_cells, judgement in rows:
        evidence = judgement.evidence or Evidence(None)
        row = first_cells | {
            p_column: (evidence.p_for, evidence.p_against),
            CORRECTED: (evidence.holm_for, evidence.holm_against),
            "verdict": judgement.verdict,
            OVER_PAPER: judgement.over_paper,
            REMARKS: judgement.detail,
        }
        cells.append([row.get(column) for column in formats])
    frame = make_frame(list(formats), cells)
    return Table(name, title, frame, formats, rules=rules, styles=STYLES)


def _with_places(judgements: Sequence[Judgement]) -> list[tuple[str, Judgement]]:
    """Return the judgements with the place of each number or claim in the paper.

    If the judged runs are of several presets, the preset is added to the place.
    """
    presets = {judgement.preset for judgement in judgements}
    result = []
    for judgement in judgements:
        place = judgement.printed.where
        if len(presets) > 1:
            place += f" ({judgement.preset})"
        result.append((place, judgement))
    return result
