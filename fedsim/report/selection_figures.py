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

STRIP_ROW, HISTOGRAM_ROW, SHARE_ROW = 0.17, 0.3, 0.2
"""Heights in inches of the row of a method that has a strip, a histogram, or a mean share."""
AROUND_STRIPS, AROUND_HISTOGRAMS, AROUND_SHARES = 0.8, 0.7, 0.8
"""Heights in inches of the space around the rows of a panel."""
HALF_STRIP = 0.4
"""Distance in rows from the middle of a strip to its edges."""
BASELINE, HIGHEST_BAR = 0.45, 0.85
"""Distance in rows from the middle of a row down to its histogram's baseline, and the height of the
highest bar."""
BINS = 30
"""Maximum number of bars of a histogram."""
MAP_HEIGHT, BELOW_MAPS = 1.5, 0.4
"""Heights in inches of a map of selections, and of the bar of colours below all maps."""
BESIDE_MAP = 0.3
"""Width in inches of the ticks of a map's y axis, and on average of its label."""
MAPS_IN_A_ROW = 4
"""Maximum number of maps next to each other."""
MAX_COLUMNS = 125
"""Maximum number of columns of a map of selections, so that each can be seen in print. A column of
a longer run stands for several rounds."""


def coverage_plot(runs: pd.DataFrame) -> Plot:
    """Return a figure of the share of clients that have been selected so far, round by round."""

    def median(rows: pd.DataFrame) -> str:
        return show_reached(median_reached(measured(rows, "rounds_to_cover")))

    return _strips("coverage", runs, "coverage", median, is_log=True)


def participation_plot(runs: pd.DataFrame) -> Plot:
    """Return a figure of the share of clients that upload, round by round."""

    def percent(rows: pd.DataFrame) -> str:
        mean = measured(rows, "participation").mean()
        return "-" if math.isnan(mean) else f"{100 * mean:.3g} %"

    return _strips("participation", runs, "participation_ratio", percent, is_log=False)


def _strips(
    name: str,
    runs: pd.DataFrame,
    key: str,
    describe: Callable[[pd.DataFrame], str],
    *,
    is_log: bool,
) -> Plot:
    """Return a figure with a strip for each method, whose colour shows a value for each round.

    The value is the mean over seeds of the recorded quantity `key`. `describe` returns the text to
    the right of a method's strip. `is_log` says whether the axis of rounds is logarithmic.
    """
    panels = {title: by(rows, "method") for title, rows in by_setting(runs).items()}
    methods = {title: list(lines) for title, lines in panels.items()}
    label = "round (log scale)" if is_log else "round"
    figure, all_axes = row_axes(methods, STRIP_ROW, AROUND_STRIPS, label)
    data = []
    for (title, lines), axes in zip(panels.items(), all_axes, strict=True):
        for row, (method, method_runs) in enumerate(lines.items()):
            values = stack_series(list(method_runs["run"]), key).mean(0)
            x = np.arange(len(values) + 1) + 0.5  # edges of cells: a round is in the middle
            y = [row - HALF_STRIP, row + HALF_STRIP]
            mesh = axes.pcolormesh(x, y, values[None], vmin=0, vmax=1, rasterized=True)
            rounds = np.arange(1, len(values) + 1)
            data.append({"setting": title, "method": method, "round": rounds, name: values})
        write_beside_rows(axes, [describe(method_runs) for method_runs in lines.values()])
        if is_log:
            set_log_scale(axes, is_whole=True)
    add_color_bar(figure, mesh, all_axes, name)  # all strips have the same scale of colours
    return Plot(name, CAPTIONS[name], figure, data)


def histogram_plot(panels: Mapping[str, Lines], looks: Mapping[str, Look]) -> Plot:
    """Return a figure with a histogram for each method: how often clients were selected."""
    methods = {title: list(lines) for title, lines in panels.items()}
    label = "selections of a client"
    figure, all_axes = row_axes(methods, HISTOGRAM_ROW, AROUND_HISTOGRAMS, label)
    data = []
    for (title, lines), axes in zip(panels.items(), all_axes, strict=True):
        selections = {}  # of each client in each run, [runs, clients]
        for method, runs in lines.items():
            selections[method] = np.stack([run.selections for run in runs])
        edges = histogram_edges(max(int(numbers.max()) for numbers in selections.values()))
        never = []
        for row, (method, numbers) in enumerate(selections.items()):
            clients_in_bars, _ = np.histogram(numbers, edges)
            # The axis counts rows downwards, so that the top of a bar is a smaller number.
            bottom = row + BASELINE
            tops = bottom - HIGHEST_BAR * clients_in_bars / clients_in_bars.max()
            axes.stairs(tops, edges, baseline=bottom, fill=True, color=looks[method]["color"])
            never.append(f"{(numbers == 0).sum(1).mean():.3g} never")
            data.append(
                {
                    "setting": title,
                    "method": method,
                    "selections_from": edges[:-1] + 0.5,
                    "selections_to": edges[1:] - 0.5,
                    "clients_of_all_seeds": clients_in_bars,
                }
            )
        write_beside_rows(axes, never)
    return Plot("selections", CAPTIONS["selections"], figure, data)


def histogram_edges(highest: int) -> Floats:
    """Return the edges of at most `BINS` bars for the whole numbers from 0 to `highest`.

    All bars cover as many numbers. The edges lie halfway between two numbers.
    """
    width = math.ceil((highest + 1) / BINS)
    bars = math.ceil((highest + 1) / width)
    return np.arange(bars + 1, dtype=np.float64) * width - 0.5


def imperfect_plot(runs: pd.DataFrame, looks: Mapping[str, Look]) -> Plot | None:
    """Return a figure of how often methods chose imperfect clients, with a row for each method;
    None if all clients are honest."""
    by_title: dict[str, dict[str, Preference]] = {}
    for preference in preferences(runs):
        by_title.setdefault(preference.setting, {})[preference.method] = preference
    if not by_title:
        return None
    methods = {title: list(by_method) for title, by_method in by_title.items()}
    label = "share of its choices that are imperfect clients"
    figure, all_axes = row_axes(methods, SHARE_ROW, AROUND_SHARES, label)
    data = []
    for by_method, axes in zip(by_title.values(), all_axes, strict=True):
        for row, preference in enumerate(by_method.values()):
            look = looks[preference.method]
            share = preference.chosen_share
            low, high = share.interval
            row_edges = [row - 0.5, row + 0.5]
            by_chance = [preference.client_share] * 2
            axes.plot(by_chance, row_edges, color="grey", linestyle="--", linewidth=0.8)
            axes.plot(share.values, [row] * share.num, ".", **dots_of(look))
            lengths = [[abs(low - share.mean)], [abs(high - share.mean)]]
            axes.errorbar(share.mean, row, xerr=lengths, elinewidth=0.8, capsize=2, **look)
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
        axes.set_xlim(0, None)
    return Plot("imperfect", CAPTIONS["imperfect"], figure, data)


def round_plots(panels: Mapping[str, Lines]) -> list[Plot]:
    """Return a figure for each setting, with a map for each method: in which rounds each client was
    selected, at the first seed."""
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
    # In short runs each column is a round, so that all shares are 1. Then colours say nothing.
    has_scale = len(set(shares)) > 1
    lowest = shares.min() if has_scale else 0
    figure, all_axes = make_axes(
        len(maps), MAP_HEIGHT, BELOW_MAPS, max_columns=MAPS_IN_A_ROW, sharey=True
    )
    num_columns = num_columns_of(all_axes[0])
    for number, (axes, (method, values)) in enumerate(zip(all_axes, maps.items(), strict=True)):
        image = axes.imshow(
            np.where(values > 0, values, np.nan),
            vmin=lowest,
            vmax=shares.max(initial=0),  # 0 if nobody was selected
            aspect="auto",
            interpolation="nearest",
            extent=(0.5, lines[method][0].rounds.num + 0.5, len(values) - 0.5, -0.5),
            rasterized=True,
        )
        is_in_last_row = number >= len(maps) - num_columns
        label = "round" if is_in_last_row else ""
        write_around(figure, axes, method, label, text_scale() * BESIDE_MAP)
        if number % num_columns == 0:
            axes.set_ylabel("client")
    if title:
        figure.suptitle(fit_text(title, figure.get_figwidth()))
    if has_scale:
        add_color_bar(figure, image, all_axes, "share of rounds")
    return figure


def _selected_by_round(run: Run) -> Floats:
    """Return the map of a run, [N, columns].

    A column stands for one round or several. Each value is the share of the column's rounds in
    which the client was selected.
    """
    num_rounds = run.rounds.num
    num_columns = min(num_rounds, MAX_COLUMNS)
    column_of_round = np.arange(num_rounds) * num_columns // num_rounds
    rounds, clients = run.rounds.chosen
    counts = np.zeros((run.num_clients, num_columns))
    np.add.at(counts, (clients, column_of_round[rounds]), 1)
    return counts / np.bincount(column_of_round, minlength=num_columns)
