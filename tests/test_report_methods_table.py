"""The table of final accuracies with methods as rows and settings as columns."""

from pathlib import Path

import pytest

from fedsim.report.methods_table import methods_table
from fedsim.report.presentation import Presentation
from fedsim.report.table import Bold, Table
from tests.report_toys import frame_of, looks_of, make_report, rows_of, write_run


def write_runs(folder: Path, accuracies: dict[tuple[str, str], list[float]]) -> None:
    """Write a run for each accuracy, by partition and selector; its place is the seed."""
    for (partition, selector), values in accuracies.items():
        for seed, accuracy in enumerate(values):
            choices = {"partition": partition, "selector": selector}
            write_run(
                folder,
                [accuracy] * 2,
                [[0], [1]],
                seed=seed,
                choices=choices,
                partition={"_target_": partition},
            )


def table_of(folder: Path) -> Table:
    frame = frame_of(folder)
    return methods_table(frame, list(looks_of(frame)))


TWO_SETTINGS = {
    ("iid", "random"): [0.5, 0.6, 0.7],
    ("iid", "gpfl"): [0.6, 0.6, 0.6],
    ("shards", "random"): [0.4, 0.4, 0.4],
    ("shards", "gpfl"): [0.4, 0.5, 0.6],
}


def test_means_of_three_seeds_with_half_widths_of_their_intervals(tmp_path: Path) -> None:
    """The standard deviation of 0.5, 0.6, 0.7 is 0.1. The interval reaches t * 0.1 / sqrt(3) to
    each side, and t is 4.3027 (2 degrees of freedom)."""
    write_runs(tmp_path, TWO_SETTINGS)
    table = table_of(tmp_path)
    assert rows_of(table) == [
        {"method": "random", "iid": "0.6000 ± 0.2484", "shards": "0.4000 ± 0.0000"},
        {"method": "gpfl", "iid": "0.6000 ± 0.0000", "shards": "0.5000 ± 0.2484"},
    ]
    assert table.title.endswith("setting: mean ± half width of the 95 % interval over seeds")
    with_sd = table.with_spread("sd")
    assert with_sd.title.endswith("setting: mean ± standard deviation over seeds")
    assert rows_of(with_sd)[1]["shards"] == "0.5000 ± 0.1000"


def test_the_best_of_each_setting_is_bold(tmp_path: Path) -> None:
    write_runs(tmp_path, TWO_SETTINGS)
    texts = table_of(tmp_path).texts
    assert [isinstance(cell, Bold) for cell in texts["shards"]] == [False, True]
    assert [isinstance(cell, Bold) for cell in texts["iid"]] == [True, True]  # a tie


def test_methods_without_a_finished_run_and_single_seeds(tmp_path: Path) -> None:
    write_runs(
        tmp_path,
        {("iid", "random"): [0.5], ("shards", "random"): [0.4], ("shards", "gpfl"): [0.6]},
    )
    assert rows_of(table_of(tmp_path)) == [
        {"method": "random", "iid": "0.5000", "shards": "0.4000"},
        {"method": "gpfl", "iid": "-", "shards": "0.6000"},
    ]


def test_runs_that_diverged_are_left_out_and_counted(tmp_path: Path) -> None:
    write_runs(tmp_path, TWO_SETTINGS)
    choices = {"partition": "shards", "selector": "gpfl"}
    write_run(
        tmp_path,
        [0.1] * 2,
        [[0], [1]],
        seed=3,
        choices=choices,
        status="diverged",
        partition={"_target_": "shards"},
    )
    table = table_of(tmp_path)
    assert rows_of(table)[1]["shards"] == "0.5000 ± 0.2484"
    assert table.note.endswith("Runs that diverged are left out: gpfl in shards (1 of 4).")


@pytest.mark.parametrize(
    "accuracies",
    [
        {("iid", "random"): [0.5], ("iid", "gpfl"): [0.6]},  # one setting
        {("iid", "random"): [0.5], ("shards", "random"): [0.6]},  # one method
    ],
)
def test_one_setting_or_one_method_makes_no_such_table(
    accuracies: dict[tuple[str, str], list[float]], tmp_path: Path
) -> None:
    write_runs(tmp_path, accuracies)
    assert len(table_of(tmp_path).values) == 0


def test_rows_have_the_order_of_legends(tmp_path: Path) -> None:
    """Settings are sorted before methods: afl ran in the second one alone."""
    write_runs(
        tmp_path,
        {
            ("iid", "gpfl"): [0.5],
            ("iid", "random"): [0.5],
            ("shards", "afl"): [0.5],
            ("shards", "random"): [0.5],
        },
    )
    frame, looks = Presentation(order=["afl"]).arrange(frame_of(tmp_path))
    table = methods_table(frame, list(looks))
    assert [row["method"] for row in rows_of(table)] == ["afl", "random", "gpfl"]


@pytest.mark.parametrize("accuracies", [{("shards", "random"): [0.5]}, {("iid", "random"): [0.5]}])
def test_a_setting_or_method_without_a_finished_run_does_not_count(
    accuracies: dict[tuple[str, str], list[float]], tmp_path: Path
) -> None:
    write_runs(tmp_path, {("iid", "gpfl"): [0.5], **accuracies})
    for partition in ("iid", "shards"):
        write_run(
            tmp_path,
            [0.1] * 2,
            [[0], [1]],
            seed=1,
            choices={"partition": partition, "selector": "afl"},
            partition={"_target_": partition},
            status="diverged",
        )
    table = table_of(tmp_path)
    if ("iid", "random") in accuracies:  # shards has diverged runs alone
        assert len(table.values) == 0
    else:
        assert rows_of(table)[1] == {"method": "afl", "iid": "-", "shards": "-"}
        assert table.note.endswith("afl in iid (1 of 1), afl in shards (1 of 1).")


def test_the_table_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_runs(tmp_path, TWO_SETTINGS)
    assert make_report([str(tmp_path), "--no-figures", "--spread", "sd"]) == 0
    assert "Final accuracy by method and setting" in capsys.readouterr().out
    latex = (tmp_path / "report" / "methods.tex").read_text()
    assert r"gpfl & \textbf{0.6000 $\pm$ 0.0000} & \textbf{0.5000 $\pm$ 0.1000} \\" in latex
    assert r"\begin{tabular}{lrr}" in latex


def test_an_ablation_over_settings_prints_its_own_table_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for alpha in (0.1, 1.0, 10.0):
        for selector in ("random", "gpfl"):
            choices = {"partition": "dirichlet", "selector": selector}
            folder = tmp_path / f"{alpha}"
            write_run(folder, [0.5] * 2, [[0], [1]], choices=choices, partition={"alpha": alpha})
    assert make_report([str(tmp_path), "--no-figures"]) == 0
    out = capsys.readouterr().out
    assert "Final accuracy by partition.alpha" in out
    assert "by method and setting" not in out
    assert (tmp_path / "report" / "methods.tex").exists()


def test_with_more_settings_than_methods_settings_are_the_rows(tmp_path: Path) -> None:
    third = {("dirichlet", "random"): [0.3], ("dirichlet", "gpfl"): [0.2]}
    write_runs(tmp_path, TWO_SETTINGS | third)
    table = table_of(tmp_path)
    assert rows_of(table) == [
        {"setting": "dirichlet", "random": "0.3000", "gpfl": "0.2000"},
        {"setting": "iid", "random": "0.6000 ± 0.2484", "gpfl": "0.6000 ± 0.0000"},
        {"setting": "shards", "random": "0.4000 ± 0.0000", "gpfl": "0.5000 ± 0.2484"},
    ]
    bold = [[isinstance(cell, Bold) for cell in table.texts[name]] for name in ("random", "gpfl")]
    assert bold == [[True, True, False], [False, True, True]]


@pytest.mark.parametrize(("num_methods", "is_printed"), [(8, True), (9, False)])
def test_a_wide_table_is_written_and_not_printed(
    num_methods: int, is_printed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"m{number}" for number in range(num_methods)]
    settings = [f"p{number}" for number in range(9)]
    write_runs(tmp_path, {(setting, name): [0.5] for setting in settings for name in names})
    assert make_report([str(tmp_path), "--no-figures"]) == 0
    assert ("by method and setting" in capsys.readouterr().out) == is_printed
    assert (tmp_path / "report" / "methods.csv").exists()
