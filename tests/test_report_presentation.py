"""The choices of `fedsim report`: names, order, selection, style and width; and the looks of
methods."""

import re
import warnings
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import yaml

from fedsim.core.arrays import Floats
from fedsim.core.disk import conf_dir
from fedsim.report.accuracy_figures import accuracy_plots
from fedsim.report.drawing import Plot, save, style
from fedsim.report.looks import CLASS_COLOURS, COLOURS, ON_DARK, make_looks
from fedsim.report.presentation import Presentation, read_presentation
from fedsim.report.sections import ASSETS
from fedsim.report.tables import by_group, pairs
from fedsim.results.reading import DamagedError
from fedsim.results.runs import ReportError
from tests.report_toys import (
    drawn_runs,
    frame_of,
    lines_of,
    looks_of,
    make_report,
    rows_of,
    two_methods,
    write_run,
)

# --- looks ---

BLINDNESS = {
    "none": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
"""What each kind of colour blindness makes of linear RGB: the matrices of Machado, Oliveira and
Fernandes (2009), severity 1.0."""


def cie_lab(colour: str, matrix: list[list[float]]) -> Floats:
    """Return an sRGB colour as CIE L*a*b*, as somebody sees it (`BLINDNESS`)."""
    srgb = np.array(matplotlib.colors.to_rgb(colour))
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(matrix) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ seen / [0.9505, 1.0, 1.089]  # relative to white (D65)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("palette", [COLOURS, ON_DARK, CLASS_COLOURS])
@pytest.mark.parametrize("blindness", BLINDNESS)
def test_colours_are_told_apart_with_any_colour_blindness(
    palette: tuple[str, ...], blindness: str
) -> None:
    """Delta E (CIE 1976) of about 2 can just be seen. The closest pair here has 16.1: green and
    sky blue with tritanopia."""
    seen = [cie_lab(colour, BLINDNESS[blindness]) for colour in palette]
    assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) > 16


def test_classes_of_methods_have_colours_that_no_method_has() -> None:
    plain = BLINDNESS["none"]
    for colour in CLASS_COLOURS:
        for other in (*COLOURS, *ON_DARK):
            assert np.linalg.norm(cie_lab(colour, plain) - cie_lab(other, plain)) > 16


def test_common_selectors_have_different_colours_and_all_have_different_looks() -> None:
    names = yaml.safe_load((ASSETS / "looks.yaml").read_text())
    selectors = [name for line in names for name in line]
    assert set(selectors) <= {path.stem for path in conf_dir().glob("selector/*.yaml")}
    looks = make_looks({name: name for name in selectors})
    common = ("random", "power_of_choice", "gpfl", "fedcor", "full", "oort", "afl", "round_robin")
    assert {looks[name]["color"] for name in common} == {f"C{n}" for n in range(8)}
    assert {looks[name]["linestyle"] for name in common} == {"-"}
    assert len({(look["color"], look["marker"]) for look in looks.values()}) == len(selectors)


def test_a_look_does_not_depend_on_the_other_methods() -> None:
    """`mine` is a user's selector. zlib.crc32(b"mine") % 288 is 211: the colour 211 % 8 and the
    marker 211 % 9."""
    alone = make_looks({"mine": "mine", "gpfl": "gpfl"})
    among_others = make_looks({"afl": "afl", "gpfl": "gpfl", "random": "random", "mine": "mine"})
    for method in ("mine", "gpfl"):
        assert alone[method] == among_others[method]
    assert (alone["mine"]["color"], alone["mine"]["marker"]) == ("C3", "v")


def test_variants_of_a_selector_differ_and_the_first_has_its_look() -> None:
    variants = {f"gpfl rho={rho}": "gpfl" for rho in range(30)}
    looks = make_looks(variants | {"fedcor": "fedcor"})
    assert looks["gpfl rho=0"] == make_looks({"gpfl": "gpfl"})["gpfl"]
    assert looks["fedcor"] == make_looks({"fedcor": "fedcor"})["fedcor"]
    assert len({tuple(look.values()) for look in looks.values()}) == 31


def test_a_users_method_has_a_colour_that_no_other_selector_has() -> None:
    """The colour of `mine` alone is C3, that of fedcor. full has C4, the next one."""
    assert make_looks({"fedcor": "fedcor", "mine": "mine"})["mine"]["color"] == "C4"
    looks = make_looks({"mine": "mine", "full": "full", "fedcor": "fedcor", "random": "random"})
    assert looks["mine"]["color"] == "C5"
    assert looks["fedcor"] == make_looks({"fedcor": "fedcor"})["fedcor"]
    # zlib.crc32 of m26 and of m58 is 169, modulo 288
    looks = make_looks({"m26": "m26", "m58": "m58"})
    assert looks["m26"] == make_looks({"m26": "m26"})["m26"]  # the first one keeps its look
    assert looks["m26"]["color"] != looks["m58"]["color"]


def test_users_methods_keep_their_colours_and_change_markers_if_all_colours_are_taken() -> None:
    common = ("random", "power_of_choice", "gpfl", "fedcor", "full", "oort", "afl", "round_robin")
    looks = make_looks({name: name for name in (*common, "m26", "m58")})
    alone = make_looks({"m26": "m26"})["m26"]
    assert looks["m26"] == alone
    assert looks["m58"]["color"] == alone["color"]
    assert looks["m58"]["marker"] != alone["marker"]


# --- names, order, selection ---


def write_three(folder: Path) -> None:
    """Write runs of random, afl and gpfl with the final accuracies 0.2, 0.3 and 0.4."""
    for accuracy, selector in ((0.2, "random"), (0.3, "afl"), (0.4, "gpfl")):
        write_run(folder, [0.1, accuracy], [[0], [1]], choices={"selector": selector})


def test_methods_are_chosen_ordered_and_renamed_and_keep_their_looks(tmp_path: Path) -> None:
    write_three(tmp_path)
    frame = frame_of(tmp_path)
    choices = Presentation(
        names={"gpfl": "GPFL"}, order=["gpfl", "random"], only=["random", "gpfl"]
    )
    arranged, looks = choices.arrange(frame)
    assert list(arranged["method"]) == ["GPFL", "random"]
    assert list(arranged["group"]) == ["GPFL", "random"]
    assert list(looks) == ["GPFL", "random"]
    assert looks["GPFL"] == looks_of(frame)["gpfl"]


def test_a_selectors_name_stands_for_all_of_its_variants(tmp_path: Path) -> None:
    for rho in (1, 2):
        selector = {"_target_": "gpfl", "rho": rho}
        write_run(
            tmp_path / str(rho), [0.1], [[0]], choices={"selector": "gpfl"}, selector=selector
        )
    choices = Presentation(names={"gpfl": "GPFL"}, only=["gpfl"])
    arranged, _ = choices.arrange(frame_of(tmp_path))  # where it is not even in their names
    assert list(arranged["method"]) == ["rho=1", "rho=2"]
    write_run(tmp_path, [0.2], [[0]])
    choices = Presentation(names={"gpfl": "GPFL", "gpfl rho=2": "best"}, only=["gpfl"])
    arranged, _ = choices.arrange(frame_of(tmp_path))
    assert list(arranged["method"]) == ["GPFL rho=1", "best"]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"only": ["gpf"]}, "only: gpf is no method of this report; did you mean gpfl? there are"),
        (
            {"names": {"x": "y"}},
            "names: x is no method of this report; there are random, afl, gpfl",
        ),
        (
            {"names": {"gpfl": "afl"}},
            "names: several methods would have the name afl",
        ),
        (
            {"reference": ["fedcor"]},
            "reference: fedcor is no method of this report; there are random, afl, gpfl",
        ),
    ],
)
def test_names_of_no_method_and_equal_names_are_refused(
    choices: dict[str, object], message: str, tmp_path: Path
) -> None:
    write_three(tmp_path)
    with pytest.raises(ReportError, match=re.escape(message)) as error:
        Presentation(**choices).arrange(frame_of(tmp_path))  # type: ignore[arg-type]
    assert error.value.exit_code == 2


# --- the reference ---


def write_seeds(folder: Path) -> None:
    """Write two runs of random, afl and gpfl each: final accuracies 0.2, 0.3 and 0.4."""
    for accuracy, selector in ((0.2, "random"), (0.3, "afl"), (0.4, "gpfl")):
        for seed in (0, 1):
            choices = {"selector": selector}
            write_run(folder, [accuracy] * 2, [[0], [1]], seed=seed, choices=choices)


def test_characters_that_the_font_lacks_are_named_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    two_methods(tmp_path)
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        assert make_report([str(tmp_path), "--names", "gpfl=\u9078\u629e \U0001f680"]) == 0
    assert [str(warning.message) for warning in issued if "font" in str(warning.message)] == []
    notes = [line for line in capfd.readouterr().err.splitlines() if "font" in line]
    assert len(notes) == 1
    assert notes[0].startswith("fedsim report: the font of figures lacks \u9078 \u629e \U0001f680 ")
    assert "--names" in notes[0]


def test_methods_are_compared_with_the_reference_that_the_user_names(tmp_path: Path) -> None:
    """A name hides neither the method nor its selector from the choice."""
    write_seeds(tmp_path)
    frame = frame_of(tmp_path)
    assert {row["difference of final accuracy"]: row["mean"] for row in rows_of(pairs(frame))} == {
        "afl - random": "+0.1000",
        "gpfl - random": "+0.2000",
    }
    choices = Presentation(reference=["gpfl"], names={"gpfl": "GPFL"})
    arranged, _ = choices.arrange(frame)
    shown = {row["difference of final accuracy"]: row["mean"] for row in rows_of(pairs(arranged))}
    assert shown == {"random - GPFL": "-0.2000", "afl - GPFL": "-0.1000"}


def test_a_reference_with_variants_is_the_most_similar_one(tmp_path: Path) -> None:
    """gpfl and afl ran with lr 0.1 and 0.5 each."""
    for seed in (0, 1):
        for selector, lr, accuracy in (
            ("gpfl", 0.1, 0.2),
            ("gpfl", 0.5, 0.3),
            ("afl", 0.1, 0.4),
            ("afl", 0.5, 0.6),
        ):
            choices = {"selector": selector}
            write_run(tmp_path, [accuracy] * 2, [[0], [1]], seed=seed, lr=lr, choices=choices)
    arranged, _ = Presentation(reference=["gpfl"]).arrange(frame_of(tmp_path))
    assert {
        row["difference of final accuracy"]: row["mean"] for row in rows_of(pairs(arranged))
    } == {
        "afl lr=0.1 - gpfl lr=0.1": "+0.2000",
        "afl lr=0.5 - gpfl lr=0.5": "+0.3000",
    }


def test_the_option_for_the_reference_is_kept_and_may_not_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_seeds(tmp_path)
    words = [str(tmp_path), "--no-figures"]
    assert make_report([*words, "--reference", "afl"]) == 0
    assert make_report(words) == 0
    out, _ = capsys.readouterr()
    assert out.count("its lead over afl: too few seeds") == 2
    assert make_report([*words, "--only", "random,gpfl"]) == 2
    message = (
        "reference: afl is not in only, which is random, gpfl; add it there, or choose another"
    )
    assert message in capsys.readouterr().err
    assert make_report([*words, "--reference", ""]) == 0
    assert "over random: too few seeds" in capsys.readouterr().out


# --- the file ---


def test_the_same_command_uses_the_choices_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_three(tmp_path)
    words = [str(tmp_path), "--no-figures"]
    assert make_report([*words, "--names", "gpfl=GPFL", "--only", "random,gpfl"]) == 0
    assert make_report(words) == 0
    assert make_report([*words, "--only", ""]) == 0
    out, err = capsys.readouterr()
    narrow, again, wide = re.findall(r"Results\n(.*?)time: means", out, re.DOTALL)
    assert err.count("report.yaml keeps an earlier --only, which hides 1 of 3 methods") == 1
    assert re.findall(r"^(\w+) +1 ", narrow, re.MULTILINE) == ["random", "GPFL"]
    assert again == narrow
    assert re.findall(r"^(\w+) +1 ", wide, re.MULTILINE) == ["random", "afl", "GPFL"]
    for file in ("tables.md", "overview.tex", "report.html"):
        assert "GPFL" in (tmp_path / "report" / file).read_text()
    stored = yaml.safe_load((tmp_path / "report" / "report.yaml").read_text())
    assert (stored["names"], stored["only"]) == ({"gpfl": "GPFL"}, [])


def test_options_name_methods_that_have_lists_in_their_names(tmp_path: Path) -> None:
    for milestones in ([1], [2, 3]):
        optimizer = {"schedule": {"milestones": milestones}}
        write_run(tmp_path / str(len(milestones)), [0.1], [[0]], optimizer=optimizer)
    two, one = "milestones=[2, 3]", "milestones=[1]"
    options = ["--order", f"{two}, {one}", "--only", f"{one},{two}"]
    options += ["--names", f"{two}=late,{one}=early"]
    assert make_report([str(tmp_path), "--no-figures", *options]) == 0
    stored = yaml.safe_load((tmp_path / "report" / "report.yaml").read_text())
    assert stored["order"] == [two, one]
    assert stored["only"] == [one, two]
    assert stored["names"] == {two: "late", one: "early"}


def test_names_in_the_file_of_methods_that_left_are_noted_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file names gpfl, of which the second report has no run."""
    write_three(tmp_path)
    words = [str(tmp_path), "--no-figures"]
    assert make_report([*words, "--names", "gpfl=GPFL,afl=AFL", "--only", "gpfl"]) == 0
    capsys.readouterr()
    path = tmp_path / "report" / "report.yaml"
    before = path.read_text()
    assert make_report([*words, "--where", "selector=random,afl"]) == 0
    out, err = capsys.readouterr()
    assert "AFL" in out
    remedy = "it is ignored; correct {key} in the file, or delete the name there"
    for key in ("names", "only"):
        note = f"{path}: {key}: gpfl is no method of this report; there are random, afl; "
        assert note + remedy.format(key=key) in err
    assert f"{path}: only: none of its names is left, so all methods are shown" in err
    assert path.read_text() == before
    assert make_report([*words, "--where", "selector=random,afl", "--only", "gpfl"]) == 2
    assert f"{path}" not in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("style: papr", "style=papr: must be paper or slides or dark"),
        ("names: {afl: random}", "names: several methods would have the name random"),
        ("{only: [gpfl], reference: [afl]}", "reference: afl is not in only, which is gpfl"),
        ("order: [[gpfl]]", "order: must have names as texts, not ['gpfl']"),
        ("names: {gpfl: null}", "names: must have names as texts, not None"),
    ],
)
def test_errors_in_the_file_name_it(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_three(tmp_path)
    path = tmp_path / "report" / "report.yaml"
    path.parent.mkdir()
    path.write_text(text)
    assert make_report([str(tmp_path), "--no-figures"]) == 3
    assert f"{path}: {message}" in capsys.readouterr().err
    if text.startswith("style"):
        assert make_report([str(tmp_path), "--no-figures", "--style", "paper"]) == 0


def test_a_report_without_choices_has_no_file_of_them(tmp_path: Path) -> None:
    write_three(tmp_path)
    assert make_report([str(tmp_path), "--no-figures"]) == 0
    assert make_report([str(tmp_path), "--no-figures", "--only", "", "--reference", ""]) == 0
    assert not (tmp_path / "report" / "report.yaml").exists()


def test_an_error_of_yaml_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "report.yaml").write_text("only: [")
    with pytest.raises(DamagedError, match=re.escape(f"{tmp_path / 'report.yaml'} is no YAML")):
        read_presentation(tmp_path, {})


def test_an_empty_file_means_no_choices(tmp_path: Path) -> None:
    (tmp_path / "report.yaml").write_text("# nothing\n")
    assert read_presentation(tmp_path, {}) == Presentation()


@pytest.mark.parametrize("text", ["colour: red", "names: [gpfl]", "log_x: 3", "- a"])
def test_a_file_with_other_keys_or_values_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "report.yaml").write_text(text)
    with pytest.raises(ReportError, match=r"report\.yaml: must have values of names, order, only"):
        read_presentation(tmp_path, {})


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("width", "3", "column, page, or from 1.5in to 40in, such as 3.3in, 8.4cm, 84mm or 240pt"),
        ("width", "0.1in", "column, page"),
        ("style", "papr", "paper or slides or dark"),
        ("spread", "se", "interval or sd"),
    ],
)
def test_other_values_are_refused_with_the_rule(key: str, value: str, rule: str) -> None:
    with pytest.raises(ReportError, match=re.escape(f"{key}={value}: must be {rule}")):
        Presentation(**{key: value})  # type: ignore[arg-type]


# --- figures ---


@pytest.mark.parametrize(
    ("width", "inches"),
    [
        (None, None),
        ("column", 3.5),
        ("page", 7.16),
        ("3.3in", 3.3),
        ("84 mm", 3.307),
        ("240pt", 10 / 3),
    ],
)
def test_widths_have_units(width: str | None, inches: float | None) -> None:
    assert Presentation(width=width).inches == pytest.approx(inches, abs=1e-3)


def plots_of(folder: Path, log_x: bool | None = None) -> list[Plot]:
    runs = drawn_runs(folder)
    return accuracy_plots(lines_of(runs), looks_of(runs), log_x)


def test_all_files_of_a_figure_are_as_wide_as_asked_for_and_the_same_each_time(
    tmp_path: Path,
) -> None:
    two_methods(tmp_path / "runs")
    for folder in ("a", "b"):
        with style("slides", width=3.3):
            save(plots_of(tmp_path / "runs")[:1], tmp_path / folder)
    names = [f"accuracy_rounds.{ending}" for ending in ("csv", "pdf", "png", "svg")]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    points = 72 * 3.3
    pdf = (tmp_path / "a" / "accuracy_rounds.pdf").read_bytes()
    assert f"/MediaBox [ 0 0 {points:g} ".encode() in pdf
    svg = (tmp_path / "a" / "accuracy_rounds.svg").read_text()
    assert f'width="{points:g}pt"' in svg
    assert "<text" not in svg  # text as outlines, which need no font
    assert matplotlib.image.imread(tmp_path / "a" / "accuracy_rounds.png").shape[1] == 990


def test_the_data_of_a_figure(tmp_path: Path) -> None:
    """An upload costs 20 bytes both ways. Seeds have 0.5 and 0.51 after two rounds of two uploads."""
    two_methods(tmp_path / "runs", seeds=2)
    with style():
        save([plots_of(tmp_path / "runs")[1]], tmp_path)
    lines = (tmp_path / "accuracy_bytes.csv").read_text().splitlines()
    assert lines[0] == "setting,method,seeds,bytes,accuracy,lowest,highest,single_rounds"
    assert lines[2] == ",random,2,80,0.505,0.5,0.51,0.505"


def test_a_method_that_sends_nothing_is_drawn(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1, 0.2], [[0], [1]])
    columns = {"bytes_up": [0, 0], "bytes_down": [0, 0]}
    write_run(tmp_path, [0.1, 0.2], [[0], [1]], choices={"selector": "gpfl"}, columns=columns)
    _, against_bytes, *_ = (plot.figure.axes[0] for plot in plots_of(tmp_path))
    assert against_bytes.get_xscale() == "linear"


def test_cheap_and_expensive_methods_share_a_logarithmic_axis(tmp_path: Path) -> None:
    """gpfl sends 11 times as much as random selection, afl 9 times."""
    scales = {}
    for other, factor in (("gpfl", 11), ("afl", 9)):
        folder = tmp_path / other
        write_run(folder, [0.1, 0.2], [[0], [1]])
        columns = {"bytes_up": [10 * factor] * 2, "bytes_down": [10 * factor] * 2}
        write_run(folder, [0.1, 0.2], [[0], [1]], choices={"selector": other}, columns=columns)
        for log_x in (None, True, False):
            rounds, against_bytes, *_ = (plot.figure.axes[0] for plot in plots_of(folder, log_x))
            scales[other, log_x] = rounds.get_xscale(), against_bytes.get_xscale()
            if log_x:
                assert against_bytes.get_xlabel() == "bytes sent, both ways (log scale)"
    assert scales == {
        ("gpfl", None): ("linear", "log"),
        ("gpfl", True): ("log", "log"),
        ("gpfl", False): ("linear", "linear"),
        ("afl", None): ("linear", "linear"),
        ("afl", True): ("log", "log"),
        ("afl", False): ("linear", "linear"),
    }


def test_styles_have_their_text_sizes_and_backgrounds(tmp_path: Path) -> None:
    two_methods(tmp_path)
    drawn = {}
    for name in ("paper", "slides", "dark"):
        with style(name):
            figure = plots_of(tmp_path)[0].figure
            (label, *_) = figure.axes[0].get_xticklabels()
            first = figure.axes[0].get_lines()[0].get_color()
            shade = round(sum(figure.get_facecolor()[:3]) / 3, 2)
            drawn[name] = label.get_fontsize(), shade, matplotlib.colors.to_hex(first)
    assert drawn == {
        "paper": (8, 1, "#000000"),
        "slides": (14.4, 1, "#000000"),
        "dark": (14.4, 0.07, "#ffffff"),
    }


# --- tables ---


def test_the_best_of_each_setting_is_bold_and_the_caption_names_the_spread(tmp_path: Path) -> None:
    """gpfl has 0.6, 0.61 and 0.62 with 2 shards: the mean is 0.61, the standard deviation 0.01, and
    the interval reaches 4.3027 * 0.01 / sqrt(3) = 0.0248. With 10 shards random selection is
    alone."""
    for seed in range(3):
        for selector, level in (("random", 0.5), ("gpfl", 0.6)):
            choices, accuracies = {"selector": selector}, [level + 0.01 * seed]
            partition = {"shards": 2}
            write_run(
                tmp_path / "2", accuracies, [[0]], seed=seed, choices=choices, partition=partition
            )
    write_run(tmp_path / "10", [0.9], [[0]], partition={"shards": 10})
    table = by_group("results", frame_of(tmp_path))
    latex = table.with_spread("sd").latex()
    assert latex.count(r"\textbf") == 1
    assert r"\textbf{0.6100 $\pm$ 0.0100}" in latex
    assert r"& 0.5100 $\pm$ 0.0100 &" in latex
    assert r"\caption{Results: mean $\pm$ standard deviation over seeds;" in latex
    assert [latex.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
    assert "### Results: mean [95 % interval] over seeds" in table.markdown()
    assert "**0.6100 [0.5852, 0.6348]**" in table.markdown()
