"""The names of lines at their ends, instead of a legend."""

from collections.abc import Mapping

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from scipy.optimize import isotonic_regression

from fedsim.core.arrays import Floats
from fedsim.report.looks import Look

LINE_HEIGHT = 1.35
"""Distance of two names as a multiple of the text size."""


def label_ends(
    axes: Axes, ends: Mapping[str, tuple[float, float]], looks: Mapping[str, Look]
) -> None:
    """Write the names of lines to the right of the axes, each as high as its line ends, or next to
    it if another name is there. A thin line leads from the end to the line's marker at its name.

    `ends` are points in data coordinates. The limits of the axes stay as they are from here on.
    """
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = to_axes.transform(list(ends.values()))[:, 1]
    # The layout makes axes at most a tenth lower than they are now.
    inches = 0.9 * axes.bbox.height / axes.figure.dpi
    size = matplotlib.rcParams["font.size"]
    distance = LINE_HEIGHT * size / 72 / inches
    names = list(ends)
    for name, place in zip(names, spread_out(heights, distance), strict=True):
        line = {
            "arrowstyle": "-",
            "color": looks[name]["color"],
            "linewidth": 0.6,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        marker_place = (1.05, place)
        axes.annotate(
            "",
            ends[name],
            marker_place,
            textcoords="axes fraction",
            annotation_clip=False,
            arrowprops=line,
        )
        axes.plot(*marker_place, transform=axes.transAxes, clip_on=False, **looks[name])
        axes.annotate(
            name,
            marker_place,
            (0.6 * size, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
        )


def spread_out(heights: Floats, distance: float) -> Floats:
    """Return places that are at least `distance` apart, as near to the heights as possible, and in
    the same order.

    They lie in [0, 1] if there is room for all; otherwise they begin at 1.
    """
    order = np.argsort(-heights, kind="stable")
    steps = distance * np.arange(len(heights))
    # With the steps added, places must only not increase.
    raised = isotonic_regression(heights[order] + steps, increasing=False).x
    places = np.empty(len(heights))
    places[order] = np.clip(raised, min(steps[-1], 1), 1) - steps
    return places
