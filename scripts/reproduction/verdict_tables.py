"""The generated tables of the docs that set papers' numbers and claims next to ours."""

from collections.abc import Callable, Hashable, Mapping, Sequence

from fedsim.papers.judge import Judgement
from fedsim.papers.published import VERDICTS, Claim, Number
from fedsim.report.table import show, show_p
from fedsim.results.statistics import ROUNDING, Difference, Estimate, Mean
from scripts.reproduction.cells import markdown, short, signed, three
from scripts.reproduction.open_items import OPEN
from scripts.reproduction.shipped import RESULTS, Shipped

BY_SETTING = "by setting"
"""The verdict on a statement whose rows have different verdicts."""
ARITHMETIC = "arithmetic"
"""The verdict on a statement that all runs give alike, such as a number of samples."""
NOT_JUDGED = "not judged"


def headlines(shipped: Shipped, *names: str) -> str:
    """Show a row for each of some claims or numbers (folder:id, with underscores for spaces)."""
    rows: dict[str, list[str]] = {}
    for folder, compared in shipped.judged.items():
        for publication, some in compared:
            for judged in some:
                name = f"{folder.name}:{judged.printed.id}".replace(" ", "_")
                if name in names:
                    rows[name] = [
                        f"{publication.paper}, {judged.printed.where}: {_text(judged)}",
                        f"`{folder.name}`",
                        _printed_value(judged.printed),
                        _result(judged),
                        _seeds(judged),
                        _verdict(judged),
                        _confidence(judged),
                    ]
    header = ["claim", "runs", "paper", "ours [95 %]", "seeds", "verdict", "confidence"]
    return markdown(header, [rows[name] for name in names])


def totals(shipped: Shipped) -> str:
    """Show how many statements of each paper have which verdict, also by the stricter reading.

    A statement is a printed number or a claim. Readings of a method and presets that answer the
    same are one statement.
    """
    by_paper: dict[str, dict[Hashable, list[Judgement]]] = {}
    for publication, some in shipped.all_judged:
        for judged in some:
            statements = by_paper.setdefault(publication.paper, {})
            key = type(judged.printed), judged.printed.statement
            statements.setdefault(key, []).append(judged)
    verdicts: dict[str, list[str]] = {paper: [] for paper in [*by_paper, "all"]}
    strict_verdicts = verdicts["all, over the paper"] = []
    for paper, statements in by_paper.items():
        for some in statements.values():
            verdict = _together(some, [judged.verdict for judged in some])
            verdicts[paper].append(verdict)
            verdicts["all"].append(verdict)
            strict_verdicts.append(_together(some, [judged.over_paper for judged in some]))
    columns = [v for v in VERDICTS if v != NOT_JUDGED] + [BY_SETTING, ARITHMETIC, NOT_JUDGED]
    rows = []
    for name, counted in verdicts.items():
        counts = [str(counted.count(column)) for column in columns]
        rows.append([name, str(len(counted)), *counts])
    return markdown(["paper", "statements", *columns], rows)


def _together(rows: Sequence[Judgement], verdicts: Sequence[str]) -> str:
    """Return the verdict on a statement from the verdicts of all rows that are about it."""
    tested = [judged for judged in rows if judged.evidence is not None]
    if not tested:
        return NOT_JUDGED
    if all(_is_arithmetic(judged) for judged in tested):
        return ARITHMETIC
    different = set()
    for judged, verdict in zip(rows, verdicts, strict=True):
        if judged.evidence is not None:
            different.add(verdict)
    return different.pop() if len(different) == 1 else BY_SETTING


def _is_arithmetic(judged: Judgement) -> bool:
    """Return whether all runs give the same, so that there is nothing to test."""
    ours = None if judged.evidence is None else judged.evidence.ours
    return isinstance(ours, Mean) and ours.error < ROUNDING


def logs(shipped: Shipped, *folders: str) -> str:
    """Show the authors' logged sweep over alpha and rho next to ours."""
    by_value: dict[str, dict[str, Judgement]] = {}
    for folder in folders:
        for judged in shipped.judgements(RESULTS / folder):
            _, value, measure = judged.printed.id.split("/")
            key = "rho" if "rho" in judged.printed.id else "alpha"
            by_value.setdefault(f"{key} {value}", {})[measure] = judged
    rows = []
    for name, by_measure in by_value.items():
        final, most = by_measure["final"], by_measure["most selections"]
        rows.append(
            [
                name.replace("fixed_", ""),
                f"{final.printed.value:.3f}",
                _result(final),
                _half_width(final),
                _seeds(final),
                _verdict(final),
                f"{most.printed.value:.0f}",
                _result(most),
                _half_width(most),
                _verdict(most),
            ]
        )
    header = ["exploration", "their log", "ours [95 %]", "one more run, +-", "seeds", "verdict"]
    return markdown([*header, "most selected, log", "ours", "one more run, +-", "verdict"], rows)


# --- cells ---


def _text(judged: Judgement) -> str:
    """Return the claim, or what a number is of, with a mark if it was written or revised late."""
    printed = judged.printed
    mark = " †" if printed.added_after_runs else ""
    if isinstance(printed, Number):
        return printed.id.partition("/")[2].replace("/", ", ") + mark
    if not mark and printed.revised_after_runs:
        mark = " ‡"
    return printed.text + mark


def _printed_value(printed: Number | Claim) -> str:
    if isinstance(printed, Number):
        return f"{printed.value:g}"
    if printed.gain:
        return f"+{printed.gain:g}"
    if printed.at_most:
        return f"≤ {printed.at_most:g}"
    if printed.at_least:
        return f"≥ {printed.at_least:g}"
    if printed.value:
        return f"{printed.value:g}"
    if printed.level_with is not None:
        return f"within {printed.level_with:g}"
    return "greater" if printed.gain == 0 else ""


def _result(judged: Judgement) -> str:
    ours = None if judged.evidence is None else judged.evidence.ours
    if isinstance(ours, Estimate):
        return short(ours).rpartition(" (")[0]
    return signed(ours) if isinstance(ours, Difference) else show(ours)


def _half_width(judged: Judgement) -> str:
    """Return how far one more run of ours reaches to each side of a number."""
    ours = None if judged.evidence is None else judged.evidence.ours
    return three(ours.next_half_width) if isinstance(ours, Estimate) and ours.num > 1 else ""


def _verdict(judged: Judgement) -> str:
    """Return the verdict, and that of the stricter reading if it differs."""
    if judged.over_paper == judged.verdict:
        return judged.verdict
    return f"{judged.verdict} (over the paper: {judged.over_paper})"


def _seeds(judged: Judgement) -> str:
    return "" if judged.evidence is None else str(judged.evidence.num)


def _confidence(judged: Judgement) -> str:
    """Return the corrected p-value of the verdict, with a word for readers without statistics."""
    evidence = judged.evidence
    if evidence is None or judged.verdict in OPEN:
        return "none"
    p = evidence.holm_against if judged.verdict == "not reproduced" else evidence.holm_for
    return f"{'high' if p < 0.01 else 'moderate'} (p {show_p(p)} by Holm)"


MAKERS: Mapping[str, Callable[..., str]] = {
    maker.__name__: maker for maker in (headlines, totals, logs)
}
