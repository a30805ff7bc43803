"""All texts of all figures can be read at any width: they lie inside of the figure, and tick labels
do not overlap."""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from fedsim.report.drawing import style
from fedsim.report.end_labels import label_ends, make_room, spread_out
from fedsim.report.layout import line_axes
from fedsim.report.looks import make_looks
from fedsim.report.presentation import Presentation
from fedsim.report.sections import Material, make_sections
from fedsim.results.files import CLIENTS
from fedsim.results.frames import runs_frame
from fedsim.results.runs import read_runs
from tests.report_toys import write_partition, write_run

NUM_CLIENTS = 12
METHODS = (
    ("random", None),
    ("power_of_choice_d10", None),
    ("gpfl", 0.1),
    ("gpfl", 0.2),
    ("gpfl", 0.4),
    ("clairvoyant", None),
)
"""Selectors, and a value by which some differ."""
NAMES = [f"{name} exploration_bonus={value}" if value else name for name, value in METHODS]
SIMULATED = ("simulated_seconds", "simulated_seconds_ask", "simulated_seconds_train")
EXPECTED = {
    "ablation_selector_exploration_bonus",
    "accuracy_bytes",
    "accuracy_rounds",
    "accuracy_samples",
    "accuracy_seconds",
    "accuracy_simulated",
    "clients",
    "coverage",
    "imperfect",
    "participation",
    "partitions",
    "phases",
    "selections",
    "selections_rounds_1",
    "selections_rounds_2",
    "settings_costs",
    "settings_gains",
    "settings_profiles",
    "settings_ranks",
    "simulated_phases",
}


def write_method(folder: Path, number: int, shards: int, seed: int) -> None:
    """Write a run of one of `METHODS`, of which later ones are better and dearer."""
    name, value = METHODS[number]
    selector = {"_target_": name, "exploration_bonus": value}
    selected = [[(round + client) % NUM_CLIENTS for client in range(3)] for round in range(6)]
    columns = {key: [10.0 + 5 * number] * 6 for key in SIMULATED}
    columns["bytes_up"] = [30 * 3**number] * 6
    partition = {"shards_per_client": shards}
    accuracies = [0.1 * round + 0.02 * number + 0.01 * seed for round in range(6)]
    path = write_run(
        folder / f"{shards}-{value}",
        accuracies,
        selected,
        seed=seed,
        num_clients=NUM_CLIENTS,
        columns=columns,
        client_accuracy="labels",
        choices={"selector": name},
        selector=selector if value else {"_target_": name},
        partition=partition,
    )
    np.savez(path / CLIENTS, accuracy=np.linspace(0.1, 0.9, NUM_CLIENTS))
    write_partition(path, np.eye(NUM_CLIENTS, 10, dtype=int).tolist())
    (path / "imperfect.json").write_text('{"clients": [3, 5]}')


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two settings of six methods at two seeds."""
    folder = tmp_path_factory.mktemp("study")
    for number in range(len(METHODS)):
        for shards in (1, 2):
            for seed in (0, 1):
                write_method(folder, number, shards, seed)
    return folder


def drawn(folder: Path, choices: Presentation) -> Iterator[tuple[str, Figure]]:
    """Return the figures of a report by their names, after they were laid out."""
    runs = read_runs(folder)
    frame, looks = choices.arrange(runs_frame(runs))
    material = Material(runs, frame, presentation=choices, looks=looks)
    with style(choices.style, choices.inches, choices.labels):
        for section in make_sections(material):
            for plot in section.plots():
                FigureCanvasAgg(plot.figure)
                plot.figure.draw_without_rendering()
                yield plot.name, plot.figure


def tick_labels(axes: Axes) -> list[list[Text]]:
    """Return the labels of the ticks that are drawn, of each axis."""
    labels = []
    for ticks, limits in (
        (axes.xaxis.get_major_ticks(), axes.get_xlim()),
        (axes.yaxis.get_major_ticks(), axes.get_ylim()),
    ):
        shown = []
        for tick in ticks:
            if min(limits) <= tick.get_loc() <= max(limits):
                shown += [label for label in (tick.label1, tick.label2) if is_shown(label)]
        labels.append(shown)
    return labels


def is_shown(text: Text) -> bool:
    return text.get_visible() and bool(text.get_text().strip())


def problems(figure: Figure) -> list[str]:
    """Return sentences on texts that are not inside of the figure, and tick labels that overlap."""
    shown = []
    sentences = []
    ticks = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                ticks |= {tick.label1, tick.label2}
        for labels in tick_labels(axes):
            shown += labels
            for one, other in combinations(labels, 2):
                if one.get_window_extent().overlaps(other.get_window_extent()):
                    sentences.append(f"{one.get_text()} is on {other.get_text()}")
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if is_shown(text) and text not in ticks:
            shown.append(text)
    for artist in (*shown, *figure.legends):
        box = artist.get_window_extent()
        left, bottom, right, top = box.extents
        if (
            left < -1
            or bottom < -1
            or right > figure.bbox.width + 1
            or top > figure.bbox.height + 1
        ):
            sentences.append(f"{artist} is outside")
    return sentences


@pytest.mark.parametrize("width", [None, "3.3in"])
def test_texts_are_inside_of_each_figure_and_ticks_apart(width: str | None, study: Path) -> None:
    sentences = {}
    for name, figure in drawn(study, Presentation(width=width)):
        sentences[name] = problems(figure)
    assert sentences.keys() == EXPECTED
    assert {name: texts for name, texts in sentences.items() if texts} == {}


def test_names_at_the_ends_of_lines_do_not_overlap(study: Path) -> None:
    """The methods' last accuracies are 0.02 apart, which is less than the height of a name."""
    choices = Presentation(width="3.3in", labels="ends")
    figure = next(figure for name, figure in drawn(study, choices) if name == "accuracy_bytes")
    assert problems(figure) == []
    assert not figure.legends
    for axes in figure.axes:
        shown = [text for text in axes.texts if is_shown(text)]
        texts = sorted(shown, key=lambda text: text.get_window_extent().y0)
        names = [text.get_text().replace("\n", " ") for text in texts]
        assert names == NAMES  # the worst is the lowest
        boxes = [text.get_window_extent() for text in texts]
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_numbers_of_a_linear_axis_have_room_next_to_names(study: Path) -> None:
    """Text for slides leaves less than an inch for axes next to names of three inches."""
    choices = Presentation(width="5in", style="slides", labels="ends", log_x=False)
    figure = next(figure for name, figure in drawn(study, choices) if name == "accuracy_bytes")
    assert problems(figure) == []
    assert all(len(tick_labels(axes)[0]) > 1 for axes in figure.axes)


def test_heights_are_spread_as_little_as_possible() -> None:
    """0.5 and 0.52 must be 0.1 apart, so each moves by 0.04. 0.99 can only move down."""
    assert spread_out(np.array([0.5, 0.1, 0.52]), 0.1, [1] * 3) == pytest.approx([0.46, 0.1, 0.56])
    assert spread_out(np.array([0.99, 1.0]), 0.1, [1] * 2) == pytest.approx([0.9, 1.0])
    assert spread_out(np.array([0.0, 0.0]), 0.1, [1] * 2).tolist() == [0.1, 0.0]
    no_room = spread_out(np.zeros(3), 0.8, [1] * 3)
    assert no_room == pytest.approx([1.0, 0.2, -0.6])


def test_a_name_of_several_lines_has_room_for_all_of_them() -> None:
    """Three lines around 0.5 are at 0.4, 0.5 and 0.6; the next name moves with them by 0.05.

    The lines of a name at the upper or lower edge lie inside of the axes.
    """
    assert spread_out(np.array([0.5, 0.4]), 0.1, [3, 1]) == pytest.approx([0.55, 0.35])
    assert spread_out(np.array([1.0, 0.0]), 0.1, [3, 2]) == pytest.approx([0.9, 0.05])


@pytest.mark.parametrize("num_lines", [10, 40])
def test_a_panel_is_so_high_that_all_names_at_the_ends_of_lines_are_next_to_it(
    num_lines: int,
) -> None:
    names = [f"method {number}" for number in range(num_lines)]
    with style(labels="ends"):
        looks = make_looks({name: name for name in names})
        figure, (axes,) = line_axes(["title"], looks, "round", has_legend=False)
        make_room(figure, [axes], [names], "round")
        for number, name in enumerate(names):
            axes.plot([0, 1], [0, number], **looks[name])
        label_ends(axes, {name: (1, number) for number, name in enumerate(names)}, looks)
        FigureCanvasAgg(figure).draw()
    panel = axes.get_window_extent()
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
    assert len(boxes) == num_lines
    assert min(box.y0 for box in boxes) >= panel.y0
    assert max(box.y1 for box in boxes) <= panel.y1


LONG_NAME = "a very long name of a method that goes on and on for many words and even more words"


@pytest.mark.parametrize("name", [LONG_NAME, LONG_NAME.replace(" ", "_")])
@pytest.mark.parametrize("width", ["2.5in", "3.5in"])
@pytest.mark.parametrize("labels", ["legend", "ends"])
def test_long_names_of_methods_are_inside_of_figures(
    labels: str, width: str, name: str, study: Path
) -> None:
    choices = Presentation(names={"random": name}, width=width, labels=labels)
    sentences = {}
    for plot, figure in drawn(study, choices):
        if plot.startswith("accuracy"):
            sentences[plot] = problems(figure)
    assert {plot: texts for plot, texts in sentences.items() if texts} == {}
