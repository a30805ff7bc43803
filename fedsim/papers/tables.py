"""Tables that set the numbers and claims of a paper beside what our runs give."""

from collections import Counter
from collections.abc import Sequence

from fedsim.papers.examine import Evidence
from fedsim.papers.judge import Judged, omnibus, standardised_errors
from fedsim.papers.published import RULES, VERDICTS, Claim, Number, Publication
from fedsim.results.statistics import Estimate
from fedsim.results.table import Cell, Table, number, show_both, show_estimate, show_p, show_result

AFTER = " (written after runs had been seen)"
OVER_PAPER = "over the paper"
"""The column of the stricter reading."""
REVISED = " (form revised after runs had been seen)"


def totals(compared: Sequence[tuple[Publication, Sequence[Judged]]]) -> Table:
    """How many numbers and claims of each paper have which verdict."""
    by_paper: dict[str, list[Judged]] = {}
    for publication, judged in compared:
        by_paper.setdefault(publication.paper, []).extend(judged)
    rows = []
    for paper, some in by_paper.items():
        for kind, of_kind in (("numbers", Number), ("claims", Claim)):
            for after in (False, True):
                chosen = [
                    j
                    for j in some
                    if isinstance(j.printed, of_kind) and j.printed.added_after_runs == after
                ]
                counts = Counter(judgement.verdict for judgement in chosen)
                name = kind + (AFTER if after else "")
                rows += (
                    [[paper, name, number(len(chosen)), *(number(counts[v]) for v in VERDICTS)]]
                    if chosen
                    else []
                )
    return Table(
        "totals", "Verdicts by paper", ["paper", "", "all", *VERDICTS], rows, RULES["holm"]
    )


def numbers(judged: Sequence[Judged]) -> Table:
    """The numbers printed in a paper beside ours, with verdicts."""
    rows = []
    for place, judgement in zip(_places(judged), judged, strict=True):
        printed, found = judgement.printed, judgement.evidence or Evidence(None)
        if not isinstance(printed, Number):
            continue
        ours = found.ours if isinstance(found.ours, Estimate) else None
        plus_minus = "" if printed.plus_minus is None else f" ± {printed.plus_minus:.2f}"
        name = printed.id.partition("/")[2].replace("/", " ") + (
            AFTER if printed.added_after_runs else ""
        )
        next_one = ours if ours is not None and ours.num > 1 else None
        cells = [
            Cell(f"{printed.value:.4f}{plus_minus}", printed.value),
            show_estimate(ours),
            number(None if ours is None else ours.num),
            Cell("{:.3f} to {:.3f}".format(*next_one.next_interval), next_one.next_interval[0])
            if next_one
            else "-",
            number(next_one.next_half_width if next_one else None, ".3f"),
            number(None if ours is None else ours.mean - printed.value, "+.4f"),
            number(printed.margin, "g"),
        ]
        rows.append([place, name, *cells, *_judged_cells(judgement)])
    header = ["where", "what", "paper", "ours", "seeds", "one more run of ours", "half its width"]
    header += [
        "difference",
        "margin",
        "p close / no draw",
        "the same (Holm)",
        "verdict",
        OVER_PAPER,
        "",
    ]
    note = f"{RULES['judged']} {RULES['number']} {RULES['holm']}"
    return Table("numbers", "The paper's numbers and ours", header, rows, note)


def all_numbers(judged: Sequence[Judged]) -> Table:
    """The omnibus check of each printed table and of each of its rows."""
    rows = []
    for (table, row), errors in sorted(standardised_errors(judged).items()):
        if (found := omnibus(errors)) is not None:
            num, mean, sd, p_value = found
            cells = [number(num), number(mean, "+.2f"), number(sd, ".2f"), show_p(p_value)]
            rows.append([table, row or "all rows", *cells])
    note = (
        "Standardised error: the distance of a printed number from our mean, in units in which that of one more run of"
        " ours is standard normal (mean 0, standard deviation 1). p: of the sum of squares, as if the numbers were"
        " independent; those of one run at several rounds are not, so that it describes rather than tests."
    )
    header = ["table", "row", "numbers", "mean error", "standard deviation", "p"]
    return Table("omnibus", "All printed numbers at once", header, rows, note)


def _places(judged: Sequence[Judged]) -> list[str]:
    """The place of each in the paper; in a report of several presets also the preset whose runs are
    judged."""
    several = len({one.preset for one in judged}) > 1
    return [
        f"{one.printed.where} ({one.preset})" if several else one.printed.where for one in judged
    ]


def _judged_cells(one: Judged) -> list[str]:
    """The p-values, the verdict of either reading, and what is to be said of it."""
    found = one.evidence or Evidence(None)
    p_values = (
        show_both(found.p_for, found.p_against),
        show_both(found.holm_for, found.holm_against),
    )
    return [*p_values, one.verdict, one.over_paper, one.detail]


def claims(judged: Sequence[Judged]) -> Table:
    """The claims of a paper beside our results, with verdicts."""
    rows = []
    for place, judgement in zip(_places(judged), judged, strict=True):
        if isinstance(judgement.printed, Claim):
            claim, found = judgement.printed, judgement.evidence or Evidence(None)
            text = claim.text + (
                AFTER if claim.added_after_runs else REVISED if claim.revised_after_runs else ""
            )
            rows.append([place, text, show_result(found.ours), *_judged_cells(judgement)])
    note = " ".join(
        RULES[name] for name in ("judged", "value", "bound", "gain", "level", "trend", "holm")
    )
    header = [
        "where",
        "claim",
        "ours [95 %]",
        "p for / against",
        "the same (Holm)",
        "verdict",
        OVER_PAPER,
        "",
    ]
    return Table("claims", "The paper's claims", header, rows, note)
