"""Tables that set the numbers and claims of a paper beside what our runs give."""

from collections.abc import Sequence

from fedsim.report.statistics import Difference
from fedsim.report.tables.formatting import show_estimate, show_interval, show_p, show_sides
from fedsim.report.tables.table import Table
from fedsim.report.verdicts.judge import Judged
from fedsim.report.verdicts.published import Claim
from fedsim.report.verdicts.rules import RULES


def numbers(judged: Sequence[Judged]) -> Table:
    """Printed numbers beside ours."""
    rows = []
    for one in judged:
        printed, ours = one.printed, one.ours
        if isinstance(printed, Claim) or isinstance(ours, Difference):
            continue
        single = ours is None or ours.num < 2
        rows.append(
            [
                printed.where,
                printed.id.partition("/")[2].replace("/", " "),
                f"{printed.value:.4f}" + ("" if printed.plus_minus is None else f" ± {printed.plus_minus:.2f}"),
                show_estimate(ours),
                "-" if single or ours is None else f"{ours.next_low:.3f} to {ours.next_high:.3f}",
                "-" if one.difference is None else f"{one.difference:+.4f}",
                show_p(one.p_against),
                show_p(one.holm_against),
                one.verdict,
                one.detail,
            ]
        )
    header = ["where", "what", "paper", "ours", "one more run of ours", "difference", "p", "p (Holm)", "verdict", ""]
    note = f"{RULES['judged']} {RULES['number']}"
    return Table("numbers", "The paper's numbers and ours", header, rows, note)


def claims(judged: Sequence[Judged]) -> Table:
    """Claims, and what our runs say."""
    rows = []
    for one in judged:
        if isinstance(one.printed, Claim):
            ours = " ".join(show_interval(one.ours)) if isinstance(one.ours, Difference) else show_estimate(one.ours)
            p_values = show_sides(one.p_for, one.p_against), show_sides(one.holm_for, one.holm_against)
            text = one.printed.text + (" (written after runs had been seen)" if one.printed.added_after_runs else "")
            rows.append([one.printed.where, text, ours, *p_values, one.verdict, one.detail])
    note = f"{RULES['judged']} {RULES['bound']} {RULES['gain']}"
    header = ["where", "claim", "ours", "p for / against", "the same (Holm)", "verdict", ""]
    return Table("claims", "The paper's claims", header, rows, note)
