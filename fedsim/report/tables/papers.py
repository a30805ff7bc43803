"""Tables that set the numbers and claims of a paper beside what our runs give."""

from collections.abc import Sequence

from fedsim.report.statistics import Difference
from fedsim.report.tables.formatting import show_estimate, show_interval, show_one_sided, show_p
from fedsim.report.tables.table import Table
from fedsim.report.verdicts.judge import Judged
from fedsim.report.verdicts.published import Claim
from fedsim.report.verdicts.rules import RULES


def numbers(judged: Sequence[Judged]) -> Table:
    """The numbers printed in a paper beside ours, with verdicts."""
    rows = []
    for judgement in judged:
        printed, ours = judgement.printed, judgement.ours
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
                "-" if judgement.difference is None else f"{judgement.difference:+.4f}",
                show_p(judgement.p_against),
                show_p(judgement.holm_against),
                judgement.verdict,
                judgement.detail,
            ]
        )
    header = ["where", "what", "paper", "ours", "one more run of ours", "difference", "p", "p (Holm)", "verdict", ""]
    note = f"{RULES['judged']} {RULES['number']}"
    return Table("numbers", "The paper's numbers and ours", header, rows, note)


def claims(judged: Sequence[Judged]) -> Table:
    """The claims of a paper beside our results, with verdicts."""
    rows = []
    for judgement in judged:
        if isinstance(judgement.printed, Claim):
            claim, ours = judgement.printed, judgement.ours
            shown = " ".join(show_interval(ours)) if isinstance(ours, Difference) else show_estimate(ours)
            p_values = show_one_sided(judgement.p_for, judgement.p_against)
            corrected = show_one_sided(judgement.holm_for, judgement.holm_against)
            text = claim.text + (" (written after runs had been seen)" if claim.added_after_runs else "")
            rows.append([claim.where, text, shown, p_values, corrected, judgement.verdict, judgement.detail])
    note = f"{RULES['judged']} {RULES['bound']} {RULES['gain']}"
    header = ["where", "claim", "ours", "p for / against", "the same (Holm)", "verdict", ""]
    return Table("claims", "The paper's claims", header, rows, note)
