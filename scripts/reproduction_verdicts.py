"""The generated tables of docs/reproduction and docs/verdicts.md that set papers' numbers and claims beside ours."""

from collections import Counter
from collections.abc import Callable, Mapping

from fedsim.report.statistics import Difference, Estimate
from fedsim.report.tables import papers
from fedsim.report.tables.formatting import show_p, show_result
from fedsim.report.verdicts.judge import Judged
from fedsim.report.verdicts.published import Claim, Number
from fedsim.report.verdicts.rules import VERDICTS
from scripts.reproduction_cells import markdown, short, signed
from scripts.shipped import RESULTS, Shipped


def claims(shipped: Shipped, folder: str) -> str:
    """All judged claims and numbers of a folder, by verdict."""
    judged = [one for _, some in shipped.judged[RESULTS / folder] for one in some if one.evidence is not None]
    rows = [[_text(one), _result(one), _seeds(one), one.verdict] for one in judged if isinstance(one.printed, Claim)]
    return markdown(["claim", "ours [95 %]", "seeds", "verdict"], rows)


def numbers(shipped: Shipped, folder: str) -> str:
    """The printed numbers of a folder: the paper's, ours, and how many of them have which verdict."""
    judged = [one for _, some in shipped.judged[RESULTS / folder] for one in some if isinstance(one.printed, Number)]
    rows = []
    for one in judged:
        assert isinstance(one.printed, Number)
        rows.append([_text(one), f"{one.printed.value:g}", _result(one), _seeds(one), one.verdict])
    return markdown(["number", "paper", "ours [95 %]", "seeds", "verdict"], rows)


def all_numbers(shipped: Shipped, folder: str) -> str:
    """The printed numbers of a folder all at once, as standardised errors."""
    judged = [one for _, some in shipped.judged[RESULTS / folder] for one in some]
    table = papers.all_numbers(judged)
    return markdown(table.header, table.rows)


def headlines(shipped: Shipped, *ids: str) -> str:
    """One row a chosen claim or number (folder:id): what the paper prints, ours, the verdict, and how sure it is.

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
                f"**{one.verdict}**",
                _confidence(one),
            ]
        )
    return markdown(["claim", "runs", "paper", "ours [95 %]", "seeds", "verdict", "confidence"], rows)


def totals(shipped: Shipped) -> str:
    """How many printed numbers and claims have which verdict, by paper and altogether."""
    by_paper: dict[str, Counter[str]] = {}
    for publication, judged in shipped.all_judged:
        by_paper.setdefault(publication.paper, Counter()).update(one.verdict for one in judged)
    by_paper["all"] = sum(by_paper.values(), Counter())
    rows = [
        [paper, str(sum(counts.values())), *(str(counts[v]) for v in VERDICTS)] for paper, counts in by_paper.items()
    ]
    return markdown(["paper", "numbers and claims", *VERDICTS], rows)


def logs(shipped: Shipped, *folders: str) -> str:
    """The authors' logged sweep over alpha and rho beside ours."""
    by_about: dict[str, dict[str, Judged]] = {}
    for folder in folders:
        for _, some in shipped.judged.get(RESULTS / folder, []):
            for one in some:
                row, column = one.printed.id.split("/")[1:]
                by_about.setdefault(f"{'rho' if 'rho' in one.printed.id else 'alpha'} {row}", {})[column] = one
    rows = []
    for name, found in by_about.items():
        final, most = found["final"], found["most selections"]
        assert isinstance(final.printed, Number)
        assert isinstance(most.printed, Number)
        row = [name.replace("fixed_", ""), f"{final.printed.value:.3f}", _result(final), _seeds(final), final.verdict]
        rows.append([*row, f"{most.printed.value:.0f}", _result(most), most.verdict])
    header = ["exploration", "their log", "ours [95 %]", "seeds", "verdict", "most selected, log", "ours", "verdict"]
    return markdown(header, rows)


def _text(one: Judged) -> str:
    after = " †" if one.printed.added_after_runs else ""
    if isinstance(one.printed, Claim):
        return one.printed.text + (after or (" ‡" if one.printed.revised_after_runs else ""))
    return one.printed.id.partition("/")[2].replace("/", ", ") + after


def _printed_value(printed: Number | Claim) -> str:
    if isinstance(printed, Number):
        return f"{printed.value:g}"
    for sign, value in (("+", printed.gain), ("≤ ", printed.at_most), ("≥ ", printed.at_least), ("", printed.value)):
        if value:
            return f"{sign}{value:g}"
    if printed.level_with is not None:
        return f"within {printed.level_with:g}"
    return "greater" if printed.gain == 0 else ""


def _result(one: Judged) -> str:
    found = None if one.evidence is None else one.evidence.ours
    if isinstance(found, Estimate):
        return short(found).rpartition(" (")[0]
    return signed(found) if isinstance(found, Difference) else show_result(found)


def _seeds(one: Judged) -> str:
    return "" if one.evidence is None else str(one.evidence.num)


def _confidence(one: Judged) -> str:
    """The corrected p-value of the verdict, in words for those who want no p-values."""
    if one.evidence is None or one.verdict in ("undecided", "consistent with"):
        return "none"
    p = one.evidence.holm_against if one.verdict == "not reproduced" else one.evidence.holm_for
    words = "high" if p < 0.01 else "moderate"
    return f"{words} (p {show_p(p)})"


MAKERS: Mapping[str, Callable[..., str]] = {
    maker.__name__: maker for maker in (claims, numbers, all_numbers, headlines, totals, logs)
}
