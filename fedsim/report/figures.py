"""Figures with one panel per setting and one line per method: means over seeds, with the range of the seeds."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedsim.communication.ledger import PHASES
from fedsim.report import measures
from fedsim.report.groups import Group
from fedsim.report.panels import Panel
from fedsim.report.runs import Floats, Run
from fedsim.tracking.files import write_atomically

STYLE: dict[str, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "font.size": 9,
    "lines.linewidth": 0.9,
    "figure.constrained_layout.use": True,
}
NUM_COLOURS = 10
"""Number of colours in a cycle; further lines repeat them with other line styles."""
BINS = 30


@dataclass(frozen=True)
class Plot:
    """A figure, the name of its files, and its caption."""

    name: str
    caption: str
    figure: Figure

    def save(self, folder: Path) -> Path:
        """Write it as PNG and PDF to `folder` and close it; returns the path of the PNG."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.png"
        png, pdf = io.BytesIO(), io.BytesIO()
        self.figure.savefig(png, format="png", dpi=130)
        self.figure.savefig(pdf, format="pdf", metadata={"CreationDate": None})
        write_atomically(path, png.getvalue())
        write_atomically(path.with_suffix(".pdf"), pdf.getvalue())
        plt.close(self.figure)
        return path


def all_plots(panels: Sequence[Panel]) -> list[Plot]:
    """All figures for which the runs have data."""
    panels = [p for p in panels if any(group.complete for group in p.lines.values())]
    if not panels:
        return []
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        plots = [
            _curves("accuracy_rounds", panels, "Test accuracy against rounds", _draw_against_rounds),
            _curves(
                "accuracy_bytes", panels, "Test accuracy against bytes, both ways", _draw_against("GB", _gigabytes)
            ),
            _curves(
                "accuracy_samples", panels, "Test accuracy against samples passed by clients", _draw_against_samples
            ),
            _curves("coverage", panels, "Share of clients that have been selected", _draw_coverage),
            _curves("participation", panels, "Share of clients that upload", _draw_participation),
            _histograms(panels),
            _phase_bars(panels),
            _partitions(panels),
        ]
    return [plot for plot in plots if plot is not None]


Draw = Callable[[Axes, Sequence[Run], dict[str, Any]], None]


def _curves(name: str, panels: Sequence[Panel], caption: str, draw: Draw) -> Plot:
    figure, axes = _make_axes(panels)
    for panel, ax in zip(panels, axes, strict=True):
        for number, (line, group) in enumerate(panel.lines.items()):
            if group.complete:
                draw(ax, group.complete, {"label": line, **_line_style(number)})
        ax.set_title(panel.title)
        if ax.get_xlabel() == "round" and ax.get_xscale() == "linear":
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes)
    return Plot(name, f"{caption}: mean over seeds, and their range.", figure)


def _draw_against_rounds(ax: Axes, runs: Sequence[Run], style: dict[str, Any]) -> None:
    values = _stack_series(runs, lambda run: run.series("test_accuracy"))
    measured = np.isfinite(values).any(0)
    _plot_mean_and_range(ax, np.flatnonzero(measured) + 1.0, values[:, measured], style)
    ax.set(xlabel="round", ylabel="test accuracy")


def _draw_against(unit: str, amount: Callable[[Run], Floats]) -> Draw:
    def draw(ax: Axes, runs: Sequence[Run], style: dict[str, Any]) -> None:
        values = _stack_series(runs, lambda run: run.series("test_accuracy"))
        spent = _stack_series(runs, lambda run: np.cumsum(amount(run))).mean(0)
        measured = np.isfinite(values).any(0)
        _plot_mean_and_range(ax, spent[measured], values[:, measured], style)
        ax.set(xlabel=unit, ylabel="test accuracy")

    return draw


def _gigabytes(run: Run) -> Floats:
    return (run.series("bytes_down") + run.series("bytes_up")) / 1e9


def _draw_against_samples(ax: Axes, runs: Sequence[Run], style: dict[str, Any]) -> None:
    _draw_against("million samples", lambda run: (run.series("train_samples") + run.series("forward_samples")) / 1e6)(
        ax, runs, style
    )


def _draw_coverage(ax: Axes, runs: Sequence[Run], style: dict[str, Any]) -> None:
    values = _stack_series(runs, lambda run: run.series("coverage"))
    _plot_mean_and_range(ax, np.arange(values.shape[1]) + 1.0, values, style)
    ax.set(xlabel="round", ylabel="covered", ylim=(0, 1.03), xscale="log")


def _draw_participation(ax: Axes, runs: Sequence[Run], style: dict[str, Any]) -> None:
    values = _stack_series(runs, lambda run: run.series("participation_ratio"))
    _plot_mean_and_range(ax, np.arange(values.shape[1]) + 1.0, values, style)
    ax.set(xlabel="round", ylabel="participation ratio", ylim=(0, 1.03))


def _histograms(panels: Sequence[Panel]) -> Plot:
    """Histograms of how often clients were selected, over all seeds."""
    figure, axes = _make_axes(panels)
    for panel, ax in zip(panels, axes, strict=True):
        counts = {
            line: np.concatenate([r.selections for r in g.complete]) for line, g in panel.lines.items() if g.complete
        }
        highest = max(int(c.max()) for c in counts.values())
        edges = np.linspace(-0.5, highest + 0.5, min(highest + 2, BINS + 1))
        for number, (line, values) in enumerate(counts.items()):
            seeds = len(panel.lines[line].complete)
            heights, _ = np.histogram(values, edges)
            ax.stairs(heights / seeds, edges, label=line, **_line_style(number))
        ax.set(xlabel="selections of a client", ylabel="clients", title=panel.title)
    _legend(axes)
    return Plot("selections", "How often clients were selected: clients per bar, mean over seeds.", figure)


def _phase_bars(panels: Sequence[Panel]) -> Plot:
    figure, axes = _make_axes(panels)
    for panel, ax in zip(panels, axes, strict=True):
        done = {line: group for line, group in panel.lines.items() if group.complete}
        left = np.zeros(len(done))
        for phase in PHASES:
            spent = np.array([_seconds_of_200_rounds(group, phase) for group in done.values()])
            ax.barh(list(done), spent, left=left, label=phase, height=0.6)
            left += spent
        ax.invert_yaxis()
        ax.set(xlabel="seconds in 200 rounds", title=panel.title)
    _legend(axes)
    return Plot("phases", "Seconds of 200 rounds by phase, mean over seeds.", figure)


def _seconds_of_200_rounds(group: Group, phase: str) -> float:
    cost = measures.cost_of_rounds(f"seconds_{phase}")
    values = [value for run in group.complete if (value := cost(run)) is not None]
    return float(np.mean(values)) if values else 0.0


def _partitions(panels: Sequence[Panel]) -> Plot | None:
    """The clients' label counts at the first seed."""
    shown = [(p.title, h) for p in panels if (h := _first_run(p).histograms) is not None]
    if not shown:
        return None
    figure, axes = _make_axes(shown)
    for (title, histogram), ax in zip(shown, axes, strict=True):
        left = np.zeros(len(histogram))
        for label in range(histogram.shape[1]):
            ax.barh(np.arange(len(histogram)), histogram[:, label], left=left, height=1.0, label=str(label))
            left += histogram[:, label]
        ax.grid(visible=False)
        ax.set(xlabel="training samples, by label", ylabel="client", title=title)
    _legend(axes)
    return Plot("partitions", "Training samples of every client by label, at the first seed.", figure)


# --- shared helpers ----------------------------------------------------------------------------------------------


def _make_axes(panels: Sequence[Any]) -> tuple[Figure, list[Axes]]:
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns + 1.3, 3.1 * rows), squeeze=False)
    used = list(axes.flat)
    for ax in used[len(panels) :]:
        ax.set_visible(False)
    return figure, used[: len(panels)]


def _legend(axes: Sequence[Axes]) -> None:
    handles, labels = axes[-1].get_legend_handles_labels()
    if len(labels) > 1:
        axes[-1].legend(handles, labels, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)


def _line_style(number: int) -> dict[str, Any]:
    return {"color": f"C{number % NUM_COLOURS}", "linestyle": ["-", "--", ":"][number // NUM_COLOURS % 3]}


def _plot_mean_and_range(ax: Axes, x: NDArray[Any], values: Floats, style: dict[str, Any]) -> None:
    """Plot the mean [T] of `values` [S, T] over S seeds, and their range."""
    ax.plot(x, np.nanmean(values, 0), **style)
    if len(values) > 1:
        ax.fill_between(x, np.nanmin(values, 0), np.nanmax(values, 0), color=style["color"], alpha=0.12, linewidth=0)


def _stack_series(runs: Sequence[Run], series: Callable[[Run], Floats]) -> Floats:
    """The series of all runs, [S, T], cut to the length T of the shortest."""
    rows = [series(run) for run in runs]
    length = min(map(len, rows))
    return np.stack([row[:length] for row in rows])


def _first_run(panel: Panel) -> Run:
    return next(group.complete[0] for group in panel.lines.values() if group.complete)
