"""Runs of a report in groups, their names, and panels."""

import itertools
from pathlib import Path

from fedsim.report import tables as results
from fedsim.report.summary import make_summary
from fedsim.results.groups import NATIVE, make_panels, show_labels, sort_key
from tests.report_toys import groups_of, two_methods, write_run


def test_groups_are_named_by_what_differs(tmp_path: Path) -> None:
    two_methods(tmp_path)
    groups = groups_of(tmp_path)
    assert {g.name: [r.seed for r in g.runs] for g in groups} == {
        "gpfl": [0, 1, 2],
        "random": [0, 1, 2],
    }
    write_run(tmp_path, [0.1, 0.2], [[0], [1]], lr=0.5)
    names = {g.name for g in groups_of(tmp_path)}
    assert names == {"gpfl", "random lr=0.1", "random lr=0.5"}
    assert [set(panel.lines) for panel in make_panels(groups_of(tmp_path))] == [names]


def test_choices_name_groups_that_differ_in_nothing_before_them(tmp_path: Path) -> None:
    """The aggregator is named by its choice; beside another selector it says nothing more."""
    for selector, aggregator, lr in (
        ("random", "uniform", 0.0),
        ("random", "fedadam", 0.1),
        ("gpfl", "fedadam", 0.1),
    ):
        choices = {"selector": selector, "aggregator": aggregator}
        write_run(
            tmp_path, [0.1], [[0]], choices=choices, aggregator={"_target_": aggregator, "lr": lr}
        )
    assert [g.name for g in groups_of(tmp_path)] == ["random fedadam", "random uniform", "gpfl"]
    write_run(
        tmp_path / "b", [0.1], [[0]], choices=choices, aggregator={"_target_": "fedadam", "lr": 0.5}
    )
    assert [g.name for g in groups_of(tmp_path)][2:] == ["gpfl lr=0.1", "gpfl lr=0.5"]


def test_runs_on_the_engine_that_auto_took_are_those_of_that_engine(tmp_path: Path) -> None:
    """Another engine is told by its choice if it ran a seed that the others ran, too, or with
    another precision."""
    auto = {"_target_": "fedsim.engine.choose.choose_backend", "compile": "auto"}
    engines = {
        "auto": auto,
        "native": NATIVE,
        "sequential": "a text",
        "bf16": {"precision": "bf16"},
    }
    first = [(0, "native"), (1, "auto"), (2, "auto"), (3, "sequential")], {"random": [0, 1, 2, 3]}
    names = {
        "native": [0, 1, 2],
        "sequential device=auto": [0],
        "sequential device=cpu": [3],
        "bf16": [4],
    }
    for ran, expected in (first, ([(0, "sequential"), (4, "bf16")], names)):
        for seed, choice in ran:
            more = {
                "choices": {"engine": choice},
                "engine": engines[choice],
                "device": ("auto", "cpu")[seed == 3],
            }
            write_run(
                tmp_path, [0.1], [[0]], seed=seed, summary={"engine": f"native ({choice})"}, **more
            )
        assert {g.name: [run.seed for run in g.runs] for g in groups_of(tmp_path)} == expected
    write_run(
        tmp_path,
        [0.1],
        [[0]],
        seed=1,
        lr=0.7,
        choices={"engine": "auto"},
        engine=NATIVE,
        device="auto",
    )
    assert {g.name for g in groups_of(tmp_path)} == {*names, "native lr=0.1", "native lr=0.7"} - {
        "native"
    }


def test_lines_of_random_selection_alone_are_compared_with_the_first_of_them(
    tmp_path: Path,
) -> None:
    """Beside another selector that one of them is the reference which has its values, told or
    not."""
    for seed in range(3):
        for lr in (0.1, 0.5):
            write_run(tmp_path, [0.1 + lr + 0.01 * seed], [[0]], seed=seed, lr=lr)
    rows = results.pairs(make_panels(groups_of(tmp_path))).rows
    assert [row[1:3] for row in rows] == [["lr=0.5 - lr=0.1", "+0.4000"]]
    for seed in range(3):
        write_run(tmp_path, [0.9], [[0]], seed=seed, lr=0.5, choices={"selector": "gpfl"})
    rows = results.pairs(make_panels(groups_of(tmp_path))).rows
    assert [row[1:3] for row in rows] == [
        ["gpfl - random lr=0.5", "+0.2900"]
    ]  # of its own learning rate


def test_runs_that_differ_in_name_alone_count_once(tmp_path: Path) -> None:
    """As where two presets hold the same runs, in a report over both; equal numbers are one
    setting."""
    for name, status in (("a", "failed"), ("b", "done")):
        for seed, lr in enumerate((1, 1.0)):
            write_run(tmp_path / name, [0.1], [[0]], seed=seed, name=name, status=status, lr=lr)
    (group,) = groups_of(tmp_path)
    found = [(run.seed, run.status, run.folder.parent.name) for run in group.runs]
    assert found == [(0, "done", "b"), (1, "done", "b")]
    write_run(tmp_path / "c", [0.1], [[0]], init_seed=7, lr=1)  # another first model
    (group,) = groups_of(tmp_path)
    assert len(group.runs) == 3


def test_runs_are_paired_by_all_their_seeds(tmp_path: Path) -> None:
    """Several partitions or first models at one root seed are as many pairs; what is unset follows
    the root seed."""
    draws = (
        {"partition_seed": 7},
        {"partition_seed": 8},
        {"init_seed": 7},
        {"seed": 1, "init_seed": 1},
    )
    for number, seeds in enumerate(draws):
        for selector, level in (("random", 0.1), ("gpfl", 0.2 + 0.1 * number)):
            write_run(
                tmp_path / str(number), [level], [[0]], choices={"selector": selector}, **seeds
            )
    write_run(
        tmp_path / "unset", [0.1], [[0]], seed=1
    )  # the same draws as the last of random selection
    groups = groups_of(tmp_path)
    (table_row,) = results.pairs(make_panels(groups)).rows
    header = results.pairs([]).header
    assert (table_row[1:3], table_row[header.index("pairs")]) == (["gpfl - random", "+0.2500"], "4")
    found = make_summary(groups, {})["groups"][0]["seeds"]
    assert list(found) == ["0 init_seed=7", "0 partition_seed=7", "0 partition_seed=8", "1"]


def test_differences_to_different_methods_are_not_pooled(tmp_path: Path) -> None:
    for shards, selectors in ((2, ("afl", "fedcor", "pncs")), (10, ("fedcor", "pncs"))):
        for seed, (number, selector) in itertools.product(range(3), enumerate(selectors)):
            setting = {"choices": {"selector": selector}, "partition": {"shards": shards}}
            write_run(
                tmp_path / str(shards), [0.1 * number + 0.01 * seed], [[0]], seed=seed, **setting
            )
    panels = make_panels(groups_of(tmp_path))
    assert [row[1] for row in results.pairs(panels).rows] == [
        "fedcor - afl",
        "pncs - afl",
        "pncs - fedcor",
    ]
    assert results.pooled_pairs(panels).rows == []


def test_labels_name_their_keys() -> None:
    choices = {"cell": "gpfl_2spc", "selector": "gpfl", "selector/exploration": "linear"}
    labels = {**choices, "cohort_size": "5", "model.dropout": "0.5"}
    assert show_labels(labels) == "gpfl_2spc gpfl linear cohort_size=5 dropout=0.5"
    labels = {"partition.alpha": "1", "selector.alpha": "2", "selector.rho": "3"}
    assert show_labels(labels) == "partition.alpha=1 selector.alpha=2 rho=3"


def test_a_cell_stands_for_what_it_determines(tmp_path: Path) -> None:
    """The data set, but not the model, of which the first cell has two."""
    for cell, dataset, model in (
        ("a", "digits", "mlp"),
        ("a", "digits", "cnn"),
        ("b", "text", "cnn"),
    ):
        choices = {"cell": cell, "dataset": dataset, "model": model, "selector": "random"}
        write_run(
            tmp_path,
            [0.1],
            [[0]],
            choices=choices,
            model={"_target_": model},
            dataset={"_target_": dataset},
        )
    assert [group.name for group in groups_of(tmp_path)] == ["a cnn", "a mlp", "b cnn"]


def test_values_of_the_partition_make_panels(tmp_path: Path) -> None:
    """A method that was run in one setting alone is in its panel."""
    for selector, shards in (("random", 10), ("afl", 10), ("random", 2)):
        write_run(
            tmp_path / str(shards),
            [0.1],
            [[0]],
            choices={"selector": selector},
            partition={"shards": shards},
        )
    panels = make_panels(groups_of(tmp_path))
    assert [(p.title, list(p.lines)) for p in panels] == [
        ("shards=2", ["random"]),
        ("shards=10", ["random", "afl"]),
    ]


def test_groups_come_in_the_order_of_their_labels(tmp_path: Path) -> None:
    values = ["lr=1e-05", "lr=0.001", "lr=0.1", "lr=1e+20"]
    assert sorted(values[::2] + values[1::2], key=sort_key) == values
    for selector in ("gpfl", "random", "afl"):
        write_run(tmp_path, [0.1], [[0]], choices={"selector": selector})
    for lr in (5.0, 10.0, 0.5):
        write_run(tmp_path, [0.1], [[0]], lr=lr, choices={"selector": "random"})
    names = [group.name for group in groups_of(tmp_path)]
    assert names == [*(f"random lr={lr}" for lr in ("0.1", "0.5", "5.0", "10.0")), "afl", "gpfl"]
