"""Tables as plain data, and as text for a terminal, Markdown, LaTeX and CSV."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import rich.table
from rich.box import SIMPLE_HEAD

from fedsim.ledger import PHASES
from fedsim.report import measures
from fedsim.report.groups import Group
from fedsim.report.measures import Measure
from fedsim.report.panels import Panel
from fedsim.report.published import Claim
from fedsim.report.statistics import Difference, Estimate, estimate, paired
from fedsim.report.verdicts import RULES, Judged, values_of
from fedsim.tracking.console import show_bytes, show_seconds

REFERENCE = "random"
"""The selector that others are compared with in pairs, where a panel has it; else its first line."""


@dataclass(frozen=True)
class Table:
    """Cells are text. `name` is that of its files."""

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def rich(self) -> rich.table.Table:
        table = rich.table.Table(title=self.title, title_justify="left", box=SIMPLE_HEAD, caption=self.note or None)
        for number, name in enumerate(self.header):
            table.add_column(name, justify="left" if number < 2 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", _bars(self.header), _bars(["---"] * len(self.header))]
        lines += [_bars(row) for row in self.rows]
        return "\n".join([*lines, "", *([self.note, ""] if self.note else [])])

    def latex(self) -> str:
        """A `tabular` with booktabs' rules."""
        body = [" & ".join(map(_tex, row)) + r" \\" for row in self.rows]
        columns = "l" * min(2, len(self.header)) + "r" * max(len(self.header) - 2, 0)
        head = " & ".join(map(_tex, self.header)) + r" \\"
        rules = [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
        return "\n".join([f"% {self.title}", *rules, r"\end{tabular}", ""])

    def csv(self) -> str:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([self.header, *self.rows])
        return out.getvalue()


def overview(groups: Sequence[Group]) -> Table:
    """What every group came to and what it cost, means over seeds."""
    header = ["run", "seeds", "final accuracy", "last 10", "fluct.", "covered after", "Gini", "part.", "down", "up"]
    rows = [
        [
            group.name,
            _seeds(group),
            show_estimate(_estimate(group, measures.final_accuracy())),
            show_mean(_estimate(group, measures.final_accuracy(10))),
            show_mean(_estimate(group, measures.fluctuation())),
            show_reached(group, measures.rounds_to_cover(), lambda value: f"{value:.0f}"),
            show_mean(_estimate(group, measures.selection_gini)),
            show_mean(_estimate(group, measures.mean_participation)),
            *(show_bytes(_total(group, name)) for name in ("bytes_down", "bytes_up")),
        ]
        for group in groups
    ]
    note = (
        "Final accuracy: mean of the last 11 evaluations, with its 95 % bootstrap interval over seeds. fluct.: largest"
        " distance of one of them from their mean. covered after: median round by which every client was selected."
    )
    return Table("overview", "Overview", header, rows, note)


def checkpoints(groups: Sequence[Group]) -> Table:
    """Accuracy after 15 % and 50 % of the rounds, single and around, and at the end."""
    columns: dict[str, Measure] = {
        "15 %": measures.accuracy_after(0.15),
        "around 15 %": measures.accuracy_around(0.15),
        "50 %": measures.accuracy_after(0.5),
        "around 50 %": measures.accuracy_around(0.5),
        "last 11": measures.final_accuracy(),
    }
    rows = [
        [group.name, _seeds(group), *(show_estimate(_estimate(group, m)) for m in columns.values())] for group in groups
    ]
    note = "Single rounds are noisy; 'around' is the mean of eleven rounds centred on the checkpoint."
    return Table("checkpoints", "Accuracy at checkpoints", ["run", "seeds", *columns], rows, note)


def pairs(panels: Sequence[Panel]) -> Table:
    """Every line of a panel against its reference, at equal seeds."""
    rows = []
    for panel in panels:
        reference = panel.reference(REFERENCE)
        for line, group in panel.lines.items():
            difference = paired(values_of(group, "final_accuracy"), values_of(reference, "final_accuracy"))
            if group is not reference:
                rows.append([panel.title, f"{line} - {panel.name_of(reference)}", *show_difference(difference)])
    header = ["", "difference of final accuracy", "mean", "95 % interval", "p (sign flips)", "pairs"]
    note = "n pairs cannot give a p-value below 2 / 2^n."
    return Table("pairs", "Paired differences at equal seeds", header, rows, note)


def targets(panels: Sequence[Panel]) -> Table:
    """Rounds and bytes until the reference's mean final accuracy is first reached."""
    rows = []
    for panel in panels:
        level = _estimate(panel.reference(REFERENCE), measures.final_accuracy())
        if level is None:
            continue
        for line, group in panel.lines.items():
            rounds = show_reached(group, measures.rounds_to(level.mean), lambda value: f"{value:.0f}")
            volume = show_reached(group, measures.bytes_to(level.mean), show_bytes)
            rows.append([panel.title, line, f"{level.mean:.4f}", rounds, volume])
    header = ["", "run", "target", "rounds", "bytes both ways"]
    note = (
        "Target: the mean final accuracy of the panel's reference. Medians over all finished runs; those that never get"
        " there count as beyond."
    )
    return Table("targets", "To a target accuracy", header, rows, note)


def phases(groups: Sequence[Group]) -> Table:
    """Seconds by phase and what crossed the network, scaled to 200 rounds as in GPFL's Fig. 6."""
    rows = []
    for group in groups:
        runs = [run for run in group.complete if run.records]
        if not runs:
            continue
        scale = [200 / len(run.records) for run in runs]
        spent = [
            np.mean([r.series(f"seconds_{p}").sum() * s for r, s in zip(runs, scale, strict=True)]) for p in PHASES
        ]
        moved = [
            np.mean([run.series(name).sum() * s for run, s in zip(runs, scale, strict=True)])
            for name in ("bytes_down", "bytes_up")
        ]
        cells = [show_seconds(float(v)) for v in [sum(spent), *spent]] + [show_bytes(float(v)) for v in moved]
        rows.append([group.name, *cells])
    return Table("phases", "Cost of 200 rounds", ["run", "total", *PHASES, "down", "up"], rows)


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
                one.verdict,
            ]
        )
    header = ["where", "what", "paper", "ours", "one more run of ours", "difference", "verdict"]
    return Table("numbers", "The paper's numbers and ours", header, rows, RULES["number"])


def claims(judged: Sequence[Judged]) -> Table:
    """Claims, and what our runs say."""
    rows = []
    for one in judged:
        if isinstance(one.printed, Claim):
            shown = (
                " ".join(show_difference(one.ours)[:2]) if isinstance(one.ours, Difference) else show_estimate(one.ours)
            )
            rows.append([one.printed.where, one.printed.text, shown, one.verdict, one.detail])
    note = f"{RULES['bound']} {RULES['gain']}"
    return Table("claims", "The paper's claims", ["where", "claim", "ours", "verdict", ""], rows, note)


# --- cells -------------------------------------------------------------------------------------------------------


def show_estimate(value: Estimate | Difference | None) -> str:
    if value is None:
        return "-"
    digits = 4 if abs(value.mean) < 10 else 1  # shares, or rounds and selections
    interval = f" [{value.low:.{digits}f}, {value.high:.{digits}f}]" if value.num > 1 else ""
    return f"{value.mean:.{digits}f}{interval}"


def show_mean(value: Estimate | None) -> str:
    return "-" if value is None else f"{value.mean:.3f}"


def show_difference(value: Difference | None) -> list[str]:
    if value is None:
        return ["-", "", "", ""]
    interval = f"[{value.low:+.4f}, {value.high:+.4f}]"
    return [f"{value.mean:+.4f}", interval, f"{value.p_value:.3f}", str(value.num)]


def show_reached(group: Group, measure: Measure, show: Callable[[float], str]) -> str:
    """The median over finished runs, counting those that never get there as beyond; how many did if not all."""
    runs = group.complete
    values = sorted(value for run in runs if (value := measure(run)) is not None)
    if not runs:
        return "-"
    middle = (len(runs) - 1) // 2
    median = show(values[middle]) if middle < len(values) else "never"
    return median if len(values) == len(runs) else f"{median} ({len(values)}/{len(runs)})"


def _estimate(group: Group, measure: Measure) -> Estimate | None:
    return estimate([value for run in group.complete if (value := measure(run)) is not None])


def _total(group: Group, name: str) -> float:
    totals = [float(run.summary["totals"][name]) for run in group.complete]
    return float(np.mean(totals)) if totals else 0.0


def _seeds(group: Group) -> str:
    diverged = f", {group.num_diverged} diverged" if group.num_diverged else ""
    return f"{len(group.complete)}{diverged}"


def _bars(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _tex(text: str) -> str:
    text = re.sub(r"([&%$#_{}])", r"\\\1", text)
    return text.replace("±", r"$\pm$").replace("^", r"\^{}")
