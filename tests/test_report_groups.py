"""Runs of a report in groups, their names, and panels."""

import itertools
import json
from pathlib import Path

from fedsim.report import tables as results
from fedsim.report.summary import make_summary
from fedsim.results.groups import NATIVE, group_runs, make_panels, show_labels
from fedsim.results.runs import read_runs
from tests.report_toys import two_methods, write_run


def test_groups_are_named_by_what_differs(tmp_path: Path) -> None:
    two_methods(tmp_path)
    groups = group_runs(read_runs(tmp_path))
    assert {g.name: [r.seed for r in g.runs] for g in groups} == {"gpfl": [0, 1, 2], "random": [0, 1, 2]}
    write_run(tmp_path, [0.1, 0.2], [[0], [1]], lr=0.5)
    names = {g.name for g in group_runs(read_runs(tmp_path))}
    assert names == {"gpfl", "random lr=0.1", "random lr=0.5"}
    (panel,) = make_panels(group_runs(read_runs(tmp_path)))
    assert set(panel.lines) == names


def test_choices_name_groups_that_differ_in_nothing_before_them(tmp_path: Path) -> None:
    """The aggregator is named by its choice; beside another selector it says nothing more."""
    for selector, aggregator, lr in (("random", "uniform", 0.0), ("random", "fedadam", 0.1), ("gpfl", "fedadam", 0.1)):
        choices = {"selector": selector, "aggregator": aggregator}
        write_run(tmp_path, [0.1], [[0]], choices=choices, aggregator={"_target_": aggregator, "lr": lr})
    assert [g.name for g in group_runs(read_runs(tmp_path))] == ["random fedadam", "random uniform", "gpfl"]
    write_run(tmp_path / "b", [0.1], [[0]], choices=choices, aggregator={"_target_": "fedadam", "lr": 0.5})
    names = [g.name for g in group_runs(read_runs(tmp_path))]
    assert names[2:] == ["gpfl lr=0.1", "gpfl lr=0.5"]


def test_runs_on_the_engine_that_auto_took_are_those_of_that_engine(tmp_path: Path) -> None:
    """Another engine is told by its choice."""
    auto = {"_target_": "fedsim.engine.choose.choose_backend", "compile": "auto"}
    engines = {"auto": auto, "native": NATIVE, "sequential": {"_target_": "sequential"}}
    for seed, choice in enumerate(["native", "auto", "auto", "sequential"]):
        path = write_run(tmp_path, [0.1], [[0]], seed=seed, choices={"engine": choice}, engine=engines[choice])
        told = json.loads((path / "summary.json").read_text()) | {"engine": f"native ({choice})"}
        (path / "summary.json").write_text(json.dumps(told))
    groups = group_runs(read_runs(tmp_path))
    assert {g.name: [run.seed for run in g.runs] for g in groups} == {"native": [0, 1, 2], "sequential": [3]}
    write_run(tmp_path, [0.1], [[0]], seed=1, lr=0.7, choices={"engine": "auto"}, engine=NATIVE)
    assert {g.name for g in group_runs(read_runs(tmp_path))} == {"native lr=0.1", "native lr=0.7", "sequential"}


def test_lines_of_random_selection_alone_are_compared_with_the_first_of_them(tmp_path: Path) -> None:
    """Beside another selector that one of them is the reference which has its values, told or not."""
    for seed in range(3):
        for lr in (0.1, 0.5):
            write_run(tmp_path, [0.1 + lr + 0.01 * seed], [[0]], seed=seed, lr=lr)
    rows = results.pairs(make_panels(group_runs(read_runs(tmp_path)))).rows
    assert [row[1:3] for row in rows] == [["lr=0.5 - lr=0.1", "+0.4000"]]
    for seed in range(3):
        write_run(tmp_path, [0.9], [[0]], seed=seed, lr=0.5, choices={"selector": "gpfl"})
    rows = results.pairs(make_panels(group_runs(read_runs(tmp_path)))).rows
    assert [row[1:3] for row in rows] == [["gpfl - random lr=0.5", "+0.2900"]]  # of its own learning rate


def test_runs_that_differ_in_name_alone_count_once(tmp_path: Path) -> None:
    """As where two presets hold the same runs, in a report over both."""
    for name in ("a", "b"):
        for seed in (0, 1):
            write_run(tmp_path / name, [0.1], [[0]], seed=seed, name=name, status="done" if name == "b" else "failed")
    (group,) = group_runs(read_runs(tmp_path))
    assert [(run.seed, run.status, run.folder.parent.name) for run in group.runs] == [
        (0, "done", "b"),
        (1, "done", "b"),
    ]
    write_run(tmp_path / "c", [0.1], [[0]], init_seed=7)  # another first model
    (group,) = group_runs(read_runs(tmp_path))
    assert len(group.runs) == 3


def test_runs_are_paired_by_all_their_seeds(tmp_path: Path) -> None:
    """Several partitions or first models at one root seed are as many pairs; what is unset follows the root seed."""
    draws = ({"partition_seed": 7}, {"partition_seed": 8}, {"init_seed": 7}, {"seed": 1, "init_seed": 1})
    for number, seeds in enumerate(draws):
        for selector, level in (("random", 0.1), ("gpfl", 0.2 + 0.1 * number)):
            write_run(tmp_path / str(number), [level], [[0]], choices={"selector": selector}, **seeds)
    write_run(tmp_path / "unset", [0.1], [[0]], seed=1)  # the same draws as the last of random selection
    groups = group_runs(read_runs(tmp_path))
    (table_row,) = results.pairs(make_panels(groups)).rows
    header = results.pairs([]).header
    assert (table_row[1:3], table_row[header.index("pairs")]) == (["gpfl - random", "+0.2500"], "4")
    found = make_summary(groups, {})["groups"][0]["seeds"]
    assert list(found) == ["0 init_seed=7", "0 partition_seed=7", "0 partition_seed=8", "1"]


def test_equal_numbers_are_one_setting(tmp_path: Path) -> None:
    for seed, lr in ((0, 1), (1, 1.0)):
        write_run(tmp_path, [0.1], [[0]], seed=seed, lr=lr)
    (group,) = group_runs(read_runs(tmp_path))
    assert [run.seed for run in group.runs] == [0, 1]


def test_lines_are_compared_with_random_selection_in_the_same_setting(tmp_path: Path) -> None:
    for lr, levels in ((0.1, (0.1, 0.2)), (1.0, (0.5, 0.9))):
        for seed, (selector, level) in itertools.product(range(3), zip(("random", "gpfl"), levels, strict=True)):
            write_run(tmp_path, [level + 0.01 * seed], [[0]], seed=seed, lr=lr, choices={"selector": selector})
    (panel,) = make_panels(group_runs(read_runs(tmp_path)))
    compared = {row[1]: row[2] for row in results.pairs([panel]).rows}
    assert compared == {"gpfl lr=0.1 - random lr=0.1": "+0.1000", "gpfl lr=1.0 - random lr=1.0": "+0.4000"}


def test_differences_to_different_methods_are_not_pooled(tmp_path: Path) -> None:
    for shards, selectors in ((2, ("afl", "fedcor", "pncs")), (10, ("fedcor", "pncs"))):
        for seed, (number, selector) in itertools.product(range(3), enumerate(selectors)):
            setting = {"choices": {"selector": selector}, "partition": {"shards": shards}}
            write_run(tmp_path / str(shards), [0.1 * number + 0.01 * seed], [[0]], seed=seed, **setting)
    panels = make_panels(group_runs(read_runs(tmp_path)))
    assert [row[1] for row in results.pairs(panels).rows] == ["fedcor - afl", "pncs - afl", "pncs - fedcor"]
    assert results.pooled_pairs(panels).rows == []


def test_labels_name_their_keys() -> None:
    choices = {"cell": "gpfl_2spc", "selector": "gpfl", "selector/exploration": "linear"}
    assert show_labels({**choices, "cohort_size": "5", "model.dropout": "0.5"}) == (
        "gpfl_2spc gpfl linear cohort_size=5 dropout=0.5"
    )
    assert show_labels({"partition.alpha": "1", "selector.alpha": "2", "selector.rho": "3"}) == (
        "partition.alpha=1 selector.alpha=2 rho=3"
    )


def test_values_of_the_partition_make_panels(tmp_path: Path) -> None:
    for selector in ("gpfl", "random"):
        for shards in (10, 2):
            write_run(
                tmp_path / str(shards), [0.1], [[0]], choices={"selector": selector}, partition={"shards": shards}
            )
    panels = make_panels(group_runs(read_runs(tmp_path)))
    assert [(p.title, list(p.lines)) for p in panels] == [
        ("shards=2", ["random", "gpfl"]),
        ("shards=10", ["random", "gpfl"]),
    ]


def test_a_method_that_was_run_in_one_setting_alone_is_in_its_panel(tmp_path: Path) -> None:
    for selector, shards in (("random", 2), ("random", 10), ("afl", 10)):
        write_run(tmp_path / str(shards), [0.1], [[0]], choices={"selector": selector}, partition={"shards": shards})
    panels = make_panels(group_runs(read_runs(tmp_path)))
    assert [(p.title, list(p.lines)) for p in panels] == [("shards=2", ["random"]), ("shards=10", ["random", "afl"])]


def test_groups_come_in_the_order_of_their_labels(tmp_path: Path) -> None:
    for selector in ("gpfl", "random", "afl"):
        write_run(tmp_path, [0.1], [[0]], choices={"selector": selector})
    for lr in (5.0, 10.0, 0.5):
        write_run(tmp_path, [0.1], [[0]], lr=lr, choices={"selector": "random"})
    names = [group.name for group in group_runs(read_runs(tmp_path))]
    assert names == [*(f"random lr={lr}" for lr in ("0.1", "0.5", "5.0", "10.0")), "afl", "gpfl"]


def test_an_interval_of_an_accuracy_ends_at_one(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.99, 1.0, 0.98, 0.999)):
        write_run(tmp_path, [accuracy], [[0]], seed=seed)
    (row,) = results.overview(group_runs(read_runs(tmp_path))).rows
    assert row[2].startswith("0.9922 [")
    assert row[2].endswith(", 1.0000]")
