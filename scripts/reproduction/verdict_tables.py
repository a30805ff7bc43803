"""The generated tables of docs/reproduction and docs/verdicts.md that set papers' numbers and
claims beside ours."""

from collections.abc import Callable, Hashable, Mapping, Sequence

from fedsim.papers.judge import Judged
from fedsim.papers.published import VERDICTS, Claim, Number
from fedsim.report.table import show, show_p
from fedsim.results.statistics import ROUNDING, Difference, Estimate, Mean
from scripts.reproduction.cells import markdown, short, signed, three
from scripts.reproduction.shipped import RESULTS, Shipped


def headlines(shipped: Shipped, *ids: str) -> str:
    """One row a chosen claim or number (folder:id): what the paper prints, ours, the verdict, and
    how sure it is.

    Spaces in ids are underscores here.
    """
    by_id = {
        f"{folder.name}:{one.printed.id}".replace(" ", "_"): (publication, one)
        for folder, judged in shipped.judged.items()
        for publication, some in judged
        for one in some
    }
    rows = []
    for name in ids:
        publication, one = by_id[name]
        preset = name.partition(":")[0]
        printed = one.printed
        rows.append(
            [
                f"{publication.paper}, {printed.where}: {_text(one)}",
                f"`{preset}`",
                _printed_value(printed),
                _result(one),
                _seeds(one),
                _verdict(one),
                _confidence(one),
            ]
        )
    return markdown(
        ["claim", "runs", "paper", "ours [95 %]", "seeds", "verdict", "confidence"], rows
    )


def totals(shipped: Shipped) -> str:
    """How many statements of the papers have which verdict, by paper and altogether, and by the
    stricter reading.

    A statement is a printed number or a claim; readings of a method and presets that answer the
    same are one. Where their verdicts differ it counts as "by setting". What all runs give alike is
    arithmetic; what is not judged counts only if nothing of the statement is.
    """
    by_paper: dict[str, dict[Hashable, list[Judged]]] = {}
    for publication, some in shipped.all_judged:
        for one in some:
            statements = by_paper.setdefault(publication.paper, {})
            statements.setdefault((type(one.printed), one.printed.statement), []).append(one)
    own = {
        paper: [_together(found, _own) for found in some.values()]
        for paper, some in by_paper.items()
    }
    strict = [_together(found, _strict) for some in by_paper.values() for found in some.values()]
    counted = {
        **own,
        "all": [verdict for some in own.values() for verdict in some],
        "all, over the paper": strict,
    }
    columns = [*VERDICTS[:-1], BY_SETTING, ARITHMETIC, VERDICTS[-1]]
    rows = [
        [name, str(len(some)), *(str(some.count(column)) for column in columns)]
        for name, some in counted.items()
    ]
    return markdown(["paper", "statements", *columns], rows)


def _own(one: Judged) -> str:
    return one.verdict


def _strict(one: Judged) -> str:
    return one.over_paper


BY_SETTING, ARITHMETIC = "by setting", "arithmetic"


def _is_arithmetic(one: Judged) -> bool:
    """Whether all runs give the same, as numbers of clients and samples do, so that there is
    nothing to test."""
    ours = None if one.evidence is None else one.evidence.ours
    return isinstance(ours, Mean) and ours.error < ROUNDING


def _together(judged: Sequence[Judged], verdict: Callable[[Judged], str]) -> str:
    """The verdict on a statement from those of all rows that are about it."""
    tested = [one for one in judged if one.evidence is not None]
    if tested and all(_is_arithmetic(one) for one in tested):
        return ARITHMETIC
    found = {verdict(one) for one in tested}
    return BY_SETTING if len(found) > 1 else next(iter(found), "not judged")


def logs(shipped: Shipped, *folders: str) -> str:
    """The authors' logged sweep over alpha and rho beside ours."""
    by_about: dict[str, dict[str, Judged]] = {}
    for folder in folders:
        for _, some in shipped.judged.get(RESULTS / folder, []):
            for one in some:
                row, column = one.printed.id.split("/")[1:]
                by_about.setdefault(f"{'rho' if 'rho' in one.printed.id else 'alpha'} {row}", {})[
                    column
                ] = one
    rows = []
    for name, found in by_about.items():
        final, most = found["final"], found["most selections"]
        assert isinstance(final.printed, Number)
        assert isinstance(most.printed, Number)
        row = [
            name.replace("fixed_", ""),
            f"{final.printed.value:.3f}",
            _result(final),
            _half(final),
            _seeds(final),
        ]
        rows.append(
            [
                *row,
                _verdict(final),
                f"{most.printed.value:.0f}",
                _result(most),
                _half(most),
                _verdict(most),
            ]
        )
    header = ["exploration", "their log", "ours [95 %]", "one more run, +-", "seeds", "verdict"]
    return markdown([*header, "most selected, log", "ours", "one more run, +-", "verdict"], rows)


def _text(one: Judged) -> str:
    after = " †" if one.printed.added_after_runs else ""
    if isinstance(one.printed, Claim):
        return one.printed.text + (after or (" ‡" if one.printed.revised_after_runs else ""))
    return one.printed.id.partition("/")[2].replace("/", ", ") + after


def _printed_value(printed: Number | Claim) -> str:
    if isinstance(printed, Number):
        return f"{printed.value:g}"
    for sign, value in (
        ("+", printed.gain),
        ("≤ ", printed.at_most),
        ("≥ ", printed.at_least),
        ("", printed.value),
    ):
        if value:
            return f"{sign}{value:g}"
    if printed.level_with is not None:
        return f"within {printed.level_with:g}"
    return "greater" if printed.gain == 0 else ""


def _result(one: Judged) -> str:
    found = None if one.evidence is None else one.evidence.ours
    if isinstance(found, Estimate):
        return short(found).rpartition(" (")[0]
    return signed(found) if isinstance(found, Difference) else show(found)


def _half(one: Judged) -> str:
    """How far one more run of ours reaches to each side, of a number."""
    found = None if one.evidence is None else one.evidence.ours
    return three(found.next_half_width) if isinstance(found, Estimate) and found.num > 1 else ""


def _verdict(one: Judged) -> str:
    """The verdict, and that of the stricter reading if it is another."""
    return (
        one.verdict
        if one.over_paper == one.verdict
        else f"{one.verdict} (over the paper: {one.over_paper})"
    )


def _seeds(one: Judged) -> str:
    return "" if one.evidence is None else str(one.evidence.num)


def _confidence(one: Judged) -> str:
    """The corrected p-value of the verdict, in words for those who want no p-values."""
    if one.evidence is None or one.verdict in ("undecided", "too wide to tell", "consistent with"):
        return "none"
    p = one.evidence.holm_against if one.verdict == "not reproduced" else one.evidence.holm_for
    words = "high" if p < 0.01 else "moderate"
    return f"{words} (p {show_p(p)} by Holm)"


MAKERS: Mapping[str, Callable[..., str]] = {
    maker.__name__: maker for maker in (headlines, totals, logs)
}
