"""Figures of selected clients: coverage and participation, how often and in which rounds clients
were selected, and choices of imperfect ones."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedsim.core.arrays import Floats
from fedsim.report.contrasts import Preference, preferences
from fedsim.report.curves import stack_series
from fedsim.report.drawing import CAPTIONS, Plot
from fedsim.report.layout import (
    Lines,
    add_color_bar,
    dots_of,
    fit_text,
    make_axes,
    num_columns_of,
    row_axes,
    text_scale,
    write_around,
    write_beside_rows,
)
from fedsim.report.looks import Look
from fedsim.report.table import median_reached, show_reached
from fedsim.report.ticks import set_log_scale
from fedsim.results.frames import by, by_setting, measured
from fedsim.results.runs import Run

BINS = 30
"""Largest number of bars of a histogram."""
BESIDE_MAP = 0.3
"""Width in inches of what is next to a map: the ticks of its y axis, and on average its label."""
MAX_COLUMNS = 125
"""Largest number of columns of a map of selections, so that each can be seen in print. A column of
a longer run stands for several rounds."""


def coverage_plot(runs: pd.DataFrame) -> Plot:
    """Return a figure of the share of clients that have been selected so far, round by round."""

    def median(rows: pd.DataFrame) -> str:
        return show_reached(median_reached(measured(rows, "rounds_to_cover")))

    return _strips("coverage", runs, "coverage", True, median)


def participation_plot(runs: pd.DataFrame) -> Plot:
    """Return a figure of the share of clients that upload, round by round."""

    def percent(rows: pd.DataFrame) -> str:
        mean = measured(rows, "participation").mean()
        return "-" if math.isnan(mean) else f"{100 * mean:.3g} %"

    return _strips("participation", runs, "participation_ratio", False, percent)


def _strips(
    name: str, runs: pd.DataFrame, key: str, is_log: bool, describe: Callable[[pd.DataFrame], str]
) -> Plot:
    """Return a figure with a strip for each method, whose colour shows a value for each round.

    The value is the mean over seeds of the recorded quantity `key`. `describe` returns the text to
    the right of a method's strip. `is_log` says whether the axis of rounds is logarithmic.
    """
    panels = {title: by(rows, "method") for title, rows in by_setting(runs).items()}
    means = {}
    for group, rows in by(runs, "group").items():
        means[group] = stack_series(list(rows["run"]), key).mean(0)
    titles = {title: list(lines) for title, lines in panels.items()}
    label = "round (log scale)" if is_log else "round"
    figure, all_axes = row_axes(titles, 0.17, 0.8, label)
    data = []
    for (title, lines), axes in zip(panels.items(), all_axes, strict=True):
        for number, (method, rows) in enumerate(lines.items()):
            values = means[rows["group"].iloc[0]]
            rounds = np.arange(1, len(values) + 1)
            data.append({"setting": title, "method": method, "round": rounds, name: values})
            x = np.arange(len(values) + 1) + 0.5  # edges of cells: a round is in the middle
            y = [number - 0.4, number + 0.4]
            mesh = axes.pcolormesh(x, y, values[None], vmin=0, vmax=1, rasterized=True)
        write_beside_rows(axes, [describe(rows) for rows in lines.values()])
        if is_log:
            set_log_scale(axes, is_whole=True)
    add_color_bar(figure, mesh, all_axes, name)
    return Plot(name, CAPTIONS[name], figure, data)


def histogram_plot(panels: Mapping[str, Lines], looks: Mapping[str, Look]) -> Plot:
    """Return a figure with a histogram for each method: how often clients were selected."""
    titles = {title: list(lines) for title, lines in panels.items()}
    figure, all_axes = row_axes(titles, 0.3, 0.7, "selections of a client")
    data = []
    for (title, lines), axes in zip(panels.items(), all_axes, strict=True):
        counts = {
            method: np.stack([run.selections for run in runs]) for method, runs in lines.items()
        }
        edges = histogram_edges(max(int(values.max()) for values in counts.values()))
        never = []
        for row, (method, values) in enumerate(counts.items()):
            heights, _ = np.histogram(values, edges)
            bottom = row + 0.45  # rows are 1 high and counted downwards, so that tops are smaller
            tops = bottom - 0.85 * heights / heights.max()
            axes.stairs(tops, edges, baseline=bottom, fill=True, color=looks[method]["color"])
            never.append(f"{(values == 0).sum(1).mean():.3g} never")
            data.append(
                {
                    "setting": title,
                    "method": method,
                    "selections_from": edges[:-1] + 0.5,
                    "selections_to": edges[1:] - 0.5,
                    "clients_of_all_seeds": heights,
                }
            )
        write_beside_rows(axes, never)
    return Plot("selections", CAPTIONS["selections"], figure, data)


def histogram_edges(highest: int) -> Floats:
    """Return the edges of at most `BINS` bars of equal width for whole numbers from 0 to
    `highest`."""
    width = math.ceil((highest + 1) / BINS)
    bars = math.ceil((highest + 1) / width)
    return np.arange(bars + 1, dtype=np.float64) * width - 0.5


def imperfect_plot(runs: pd.DataFrame, looks: Mapping[str, Look]) -> Plot | None:
    """Return a figure of how often methods chose imperfect clients, a row for each method; None if
    all clients are honest."""
    by_title: dict[str, dict[str, Preference]] = {}
    for preference in preferences(runs):
        by_title.setdefault(preference.setting, {})[preference.method] = preference
    if not by_title:
        return None
    titles = {title: list(rows) for title, rows in by_title.items()}
    label = "share of its choices that are imperfect clients"
    figure, all_axes = row_axes(titles, 0.2, 0.8, label)
    data = []
    for rows, axes in zip(by_title.values(), all_axes, strict=True):
        for row, preference in enumerate(rows.values()):
            look = looks[preference.method]
            share = preference.chosen_share
            low, high = share.interval
            data.append(
                {
                    "setting": preference.setting,
                    "method": preference.method,
                    "seeds": [share.num],
                    "share_of_choices": share.mean,
                    "low": low,
                    "high": high,
                    "share_of_clients": preference.client_share,
                }
            )
            reach = [[abs(end - share.mean)] for end in share.interval]
            expected = [preference.client_share] * 2
            ends = [row - 0.5, row + 0.5]
            axes.plot(expected, ends, color="grey", linestyle="--", linewidth=0.8)
            axes.plot(share.values, [row] * share.num, ".", **dots_of(look))
            axes.errorbar(share.mean, row, xerr=reach, elinewidth=0.8, capsize=2, **look)
        axes.set_xlim(0, None)
    return Plot("imperfect", CAPTIONS["imperfect"], figure, data)


def round_plots(panels: Mapping[str, Lines]) -> list[Plot]:
    """Return a figure for each setting, with a map for each method: which client was selected in
    which round, at the first seed."""
    plots = []
    for number, (title, lines) in enumerate(panels.items(), 1):
        name = "selections_rounds" if len(panels) == 1 else f"selections_rounds_{number}"
        caption = CAPTIONS["selections_rounds"].format(title=f" ({title})" if title else "")
        data = []
        for method, runs in lines.items():
            rounds, clients = runs[0].rounds.chosen
            data.append(
                {"setting": title, "method": method, "round": rounds + 1, "client": clients}
            )
        plots.append(Plot(name, caption, _maps(title, lines), data))
    return plots


def _maps(title: str, lines: Lines) -> Figure:
    """Return the figure of one setting for `round_plots`."""
    maps = {method: _selected_by_round(runs[0]) for method, runs in lines.items()}
    shares = np.concatenate([values[values > 0] for values in maps.values()])
    # In short runs each column is a round, so that all shares are 1.
    lowest = 0 if len(set(shares)) == 1 else shares.min()
    figure, all_axes = make_axes(len(maps), 1.5, 0.4, max_columns=4)
    num_columns = num_columns_of(all_axes[0])
    for number, (axes, (method, values)) in enumerate(zip(all_axes, maps.items(), strict=True)):
        extent = (0.5, lines[method][0].rounds.num + 0.5, len(values) - 0.5, -0.5)
        image = axes.imshow(
            np.where(values > 0, values, np.nan),
            vmin=lowest,
            vmax=shares.max(),
            aspect="auto",
            interpolation="nearest",
            extent=extent,
            rasterized=True,
        )
        is_lowest = number >= len(maps) - num_columns
        write_around(figure, axes, method, "round" if is_lowest else "", text_scale() * BESIDE_MAP)
        if number % num_columns == 0:
            axes.set_ylabel("client")
    if title:
        figure.suptitle(fit_text(title, figure.get_figwidth()))
    if lowest:
        add_color_bar(figure, image, all_axes, "share of rounds")
    return figure


def _selected_by_round(run: Run) -> Floats:
    """Return the map of a run, [N, columns].

    A column stands for one round or several. Each value is the share of its rounds in which the
    client was selected.
    """
    num_rounds = run.rounds.num
    columns = min(num_rounds, MAX_COLUMNS)
    rounds, clients = run.rounds.chosen
    counts = np.zeros((run.num_clients, columns))
    np.add.at(counts, (clients, rounds * columns // num_rounds), 1)
    column_of_round = np.arange(num_rounds) * columns // num_rounds
    return counts / np.bincount(column_of_round, minlength=columns)
