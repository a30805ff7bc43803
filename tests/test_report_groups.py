"""Groups of runs in a frame: which runs belong together, their names, and settings."""

from pathlib import Path

import pytest

from fedsim.report.summary import make_summary
from fedsim.report.tables import by_group, pairs, pooled_pairs
from fedsim.results.frames import by, by_setting, has_values
from fedsim.results.grouping import NATIVE
from fedsim.results.labels import show_labels, sort_key
from fedsim.results.sources import find_source
from tests.report_toys import frame_of, rows_of, two_methods, write_run


def seeds_by_group(folder: Path) -> dict[str, list[int]]:
    groups = by(frame_of(folder), "group")
    return {name: [run.seed for run in rows["run"]] for name, rows in groups.items()}


def group_names(folder: Path) -> list[str]:
    return list(seeds_by_group(folder))


def test_runs_that_differ_in_seeds_alone_are_a_group_named_by_its_selector(tmp_path: Path) -> None:
    two_methods(tmp_path)
    assert seeds_by_group(tmp_path) == {"random": [0, 1, 2], "gpfl": [0, 1, 2]}


def test_a_value_names_only_groups_that_it_distinguishes(tmp_path: Path) -> None:
    two_methods(tmp_path)
    write_run(tmp_path, [0.1, 0.2], [[0], [1]], lr=0.5)
    assert set(group_names(tmp_path)) == {"gpfl", "random lr=0.1", "random lr=0.5"}
    (lines,) = [by(rows, "method") for rows in by_setting(frame_of(tmp_path)).values()]
    assert set(lines) == {"gpfl", "random lr=0.1", "random lr=0.5"}


def test_another_choice_names_groups_in_place_of_the_values_that_it_sets(tmp_path: Path) -> None:
    runs = [("random", "uniform", 0.0), ("random", "fedadam", 0.1), ("gpfl", "fedadam", 0.1)]
    for selector, aggregator, lr in runs:
        choices = {"selector": selector, "aggregator": aggregator}
        config = {"_target_": aggregator, "lr": lr}
        write_run(tmp_path, [0.1], [[0]], choices=choices, aggregator=config)
    assert group_names(tmp_path) == ["random fedadam", "random uniform", "gpfl"]


def test_values_name_groups_of_the_same_choice(tmp_path: Path) -> None:
    choices = {"selector": "gpfl", "aggregator": "fedadam"}
    for lr in (0.1, 0.5):
        config = {"_target_": "fedadam", "lr": lr}
        write_run(tmp_path / str(lr), [0.1], [[0]], choices=choices, aggregator=config)
    assert group_names(tmp_path) == ["lr=0.1", "lr=0.5"]


ENGINES = {
    "auto": {"_target_": "fedsim.engine.choose.choose_backend", "compile": "auto"},
    "native": NATIVE,
    "sequential": "a text",
    "bf16": {"precision": "bf16"},
}


def write_with_engine(folder: Path, seed: int, engine: str, device: str = "auto") -> None:
    """Write a run of engine=<engine>; engine=auto took the native one."""
    write_run(
        folder,
        [0.1],
        [[0]],
        seed=seed,
        choices={"engine": engine},
        engine=ENGINES[engine],
        device=device,
        summary={"engine": f"native ({engine})"},
    )


def test_engines_and_devices_share_a_group_while_no_seed_repeats(tmp_path: Path) -> None:
    for seed, engine in enumerate(("native", "auto", "auto")):
        write_with_engine(tmp_path, seed, engine)
    write_with_engine(tmp_path, 3, "sequential", "cpu")
    assert seeds_by_group(tmp_path) == {"random": [0, 1, 2, 3]}


def test_engines_that_ran_the_same_seed_have_groups_and_another_precision_always_has(
    tmp_path: Path,
) -> None:
    for seed, engine in enumerate(("native", "auto", "auto")):
        write_with_engine(tmp_path, seed, engine)
    write_with_engine(tmp_path, 3, "sequential", "cpu")
    write_with_engine(tmp_path, 0, "sequential")
    write_with_engine(tmp_path, 4, "bf16")
    assert seeds_by_group(tmp_path) == {
        "precision=bf16": [4],
        "precision=float32 native": [0, 1, 2],
        "precision=float32 sequential device=auto": [0],
        "precision=float32 sequential device=cpu": [3],
    }


def test_a_value_names_groups_also_if_they_ran_on_different_engines(tmp_path: Path) -> None:
    """The engine does not change results, the rate does."""
    for lr, engine in ((0.1, "native"), (0.5, "sequential")):
        choices = {"engine": engine}
        write_run(tmp_path, [0.1], [[0]], lr=lr, choices=choices, engine=ENGINES[engine])
    assert group_names(tmp_path) == ["lr=0.1", "lr=0.5"]


def test_lines_of_random_selection_alone_are_compared_with_the_first_of_them(
    tmp_path: Path,
) -> None:
    for seed in range(3):
        write_run(tmp_path, [0.2 + 0.01 * seed], [[0]], seed=seed, lr=0.1)
        write_run(tmp_path, [0.6 + 0.01 * seed], [[0]], seed=seed, lr=0.5)
    (row,) = rows_of(pairs(frame_of(tmp_path)))
    assert (row["difference of final accuracy"], row["mean"]) == ("lr=0.5 - lr=0.1", "+0.4000")


def test_the_reference_is_the_random_selection_with_the_most_similar_config(
    tmp_path: Path,
) -> None:
    for seed in range(3):
        write_run(tmp_path, [0.2], [[0]], seed=seed, lr=0.1)
        write_run(tmp_path, [0.6], [[0]], seed=seed, lr=0.5)
        write_run(tmp_path, [0.9], [[0]], seed=seed, lr=0.5, choices={"selector": "gpfl"})
    (row,) = rows_of(pairs(frame_of(tmp_path)))
    assert (row["difference of final accuracy"], row["mean"]) == ("gpfl - random lr=0.5", "+0.3000")


def test_runs_that_differ_in_name_alone_count_once_and_the_finished_one_counts(
    tmp_path: Path,
) -> None:
    """Equal numbers, 1 and 1.0, are the same setting."""
    for name, status in (("a", "failed"), ("b", "done")):
        for seed, lr in enumerate((1, 1.0)):
            write_run(tmp_path / name, [0.1], [[0]], seed=seed, name=name, status=status, lr=lr)
    frame = frame_of(tmp_path)
    assert frame["group"].tolist() == ["random", "random"]
    assert frame["status"].tolist() == ["done", "done"]
    assert [run.folder.parent.name for run in frame["run"]] == ["b", "b"]


def test_equal_numbers_have_one_text_in_labels(tmp_path: Path) -> None:
    """random ran at 1.0 in one setting and at 1 in the other, in both also at 0.5."""
    for partition, lr in (("iid", 1.0), ("shards_2", 1)):
        for rate in (0.5, lr):
            choices = {"partition": partition}
            values = {"choices": choices, "partition": {"_target_": partition}, "lr": rate}
            write_run(tmp_path / partition, [0.1], [[0]], **values)
    assert set(frame_of(tmp_path)["method"]) == {"lr=0.5", "lr=1.0"}


def test_runs_are_paired_by_all_their_seeds(tmp_path: Path) -> None:
    """Unset seeds follow the root seed: init_seed=1 at seed 1 is the same draw as no init_seed."""
    seeds = [{"partition_seed": 7}, {"partition_seed": 8}, {"init_seed": 7}, {"seed": 1}]
    for number, own_seeds in enumerate(seeds):
        folder = tmp_path / str(number)
        write_run(folder, [0.1], [[0]], **own_seeds)
        gpfl = {"choices": {"selector": "gpfl"}, **own_seeds}
        if own_seeds == {"seed": 1}:
            gpfl["init_seed"] = 1
        write_run(folder, [0.2 + 0.1 * number], [[0]], **gpfl)
    frame = frame_of(tmp_path)
    (row,) = rows_of(pairs(frame))
    assert (row["mean"], row["pairs"]) == ("+0.2500", "4")  # mean of 0.1, 0.2, 0.3, 0.4
    random = make_summary(frame)["groups"][0]
    assert list(random["seeds"]) == [
        "0 init_seed=7",
        "0 partition_seed=7",
        "0 partition_seed=8",
        "1",
    ]


def test_differences_to_different_methods_are_not_pooled(tmp_path: Path) -> None:
    """Without random selection, the first method of each setting is its reference."""
    for shards, selectors in ((2, ("afl", "fedcor", "pncs")), (10, ("fedcor", "pncs"))):
        for selector in selectors:
            for seed in range(3):
                accuracy = 0.1 * selectors.index(selector) + 0.01 * seed
                setting = {"choices": {"selector": selector}, "partition": {"shards": shards}}
                write_run(tmp_path / str(shards), [accuracy], [[0]], seed=seed, **setting)
    frame = frame_of(tmp_path)
    names = [row["difference of final accuracy"] for row in rows_of(pairs(frame))]
    assert names == ["fedcor - afl", "pncs - afl", "pncs - fedcor"]
    assert rows_of(pooled_pairs(frame)) == []


def test_a_method_has_one_name_in_all_settings(tmp_path: Path) -> None:
    """In one of the settings, gpfl also ran with another rho."""
    for partition in ("iid", "shards_2"):
        for seed in range(3):
            for selector, rho in (("random", None), ("gpfl", 1.0), ("gpfl", 2.0)):
                if (partition, rho) == ("iid", 2.0):
                    continue
                node = {"_target_": selector} | ({} if rho is None else {"rho": rho})
                choices = {"selector": selector, "partition": partition}
                folder = tmp_path / f"{partition}-{rho}"
                values = {"choices": choices, "selector": node, "seed": seed}
                values["partition"] = {"_target_": partition}
                write_run(folder, [0.1 + 0.01 * seed], [[0]], **values)
    frame = frame_of(tmp_path)
    assert set(frame["method"]) == {"random", "gpfl rho=1.0", "gpfl rho=2.0"}
    (row,) = rows_of(pooled_pairs(frame))
    assert (row["difference of final accuracy"], row["settings"]) == ("gpfl rho=1.0 - random", "2")


def test_a_setting_has_one_name_whatever_its_methods_ran_with(tmp_path: Path) -> None:
    """gpfl ran with two values of both keys of the setting, random with two of one."""
    settings = [("gpfl", 1, 1), ("gpfl", 2, 2), ("random", 1, 1), ("random", 1, 2)]
    for selector, samples, alpha in settings:
        values = {"dataset": {"samples": samples}, "partition": {"alpha": alpha}}
        folder = tmp_path / f"{samples}-{alpha}"
        write_run(folder, [0.1], [[0]], choices={"selector": selector}, **values)
    expected = {"samples=1 alpha=1", "samples=2 alpha=2", "samples=1 alpha=2"}
    assert set(frame_of(tmp_path)["setting"]) == expected


def test_a_setting_has_one_name_if_some_configs_do_not_have_its_key(tmp_path: Path) -> None:
    """gpfl ran with alpha and without, random only without."""
    for selector, partition in (("gpfl", {"alpha": 1}), ("gpfl", {}), ("random", {})):
        folder = tmp_path / str(len(partition))
        write_run(folder, [0.1], [[0]], choices={"selector": selector}, partition=partition)
    frame = frame_of(tmp_path)
    settings = {method: set(rows["setting"]) for method, rows in by(frame, "method").items()}
    assert settings == {"random": {""}, "gpfl": {"", "alpha=1"}}


def test_cells_are_pooled_only_if_they_differ_in_the_partition_alone(tmp_path: Path) -> None:
    cells = {"a": (2, 1), "b": (10, 1), "c": (2, 3)}
    for cell, (shards, cohort_size) in cells.items():
        for seed in range(3):
            for selector in ("random", "gpfl"):
                values = {"partition": {"shards": shards}, "cohort_size": cohort_size}
                choices = {"selector": selector, "cell": cell, "partition": cell}
                folder = tmp_path / cell
                write_run(folder, [0.1 * seed], [[0]], seed=seed, choices=choices, **values)
    (row,) = rows_of(pooled_pairs(frame_of(tmp_path)))
    assert (row[""], row["settings"]) == ("a, b", "2")


def test_labels_show_choices_alone_and_the_last_part_of_keys_that_tells_them_apart() -> None:
    choices = {"cell": "gpfl_2spc", "selector": "gpfl", "selector/exploration": "linear"}
    labels = {**choices, "cohort_size": "5", "model.dropout": "0.5"}
    assert show_labels(labels) == "gpfl_2spc gpfl linear cohort_size=5 dropout=0.5"
    labels = {"partition.alpha": "1", "selector.exploration.value": "2", "selector.rho": "3"}
    assert show_labels(labels) == "partition.alpha=1 selector.alpha=2 rho=3"
    labels = {"local.schedule.lr": "1", "optimizer.schedule.lr": "2", "optimizer.lr": "3"}
    assert show_labels(labels) == "local.schedule.lr=1 optimizer.schedule.lr=2 optimizer.lr=3"


def test_several_values_that_tell_groups_apart_have_a_column_each(tmp_path: Path) -> None:
    for lr in (0.1, 0.5):
        for queue in (0, 2):
            pncs = {"_target_": "pncs", "queue_length": queue}
            place, choices = tmp_path / str(queue), {"selector": "pncs"}
            write_run(place, [0.1], [[0]], lr=lr, choices=choices, selector=pncs)
    write_run(tmp_path, [0.1], [[0]], lr=0.1)
    table = by_group("results", frame_of(tmp_path))
    names = [[row["run"], row["lr"], row["queue_length"]] for row in rows_of(table)]
    assert names == [
        ["random", "0.1", "-"],
        ["pncs", "0.1", "0"],
        ["pncs", "0.1", "2"],
        ["pncs", "0.5", "0"],
        ["pncs", "0.5", "2"],
    ]
    assert list(table.shown)[:4] == ["run", "lr", "queue_length", "seeds"]


def test_a_cell_stands_for_what_it_determines(tmp_path: Path) -> None:
    """The cell determines the data set, but not the model, of which cell a has two."""
    for cell, dataset, model in (("a", "digits", "mlp"), ("a", "digits", "cnn"), ("b", "x", "cnn")):
        choices = {"cell": cell, "dataset": dataset, "model": model, "selector": "random"}
        config = {"model": {"_target_": model}, "dataset": {"_target_": dataset}}
        write_run(tmp_path, [0.1], [[0]], choices=choices, **config)
    assert group_names(tmp_path) == ["a cnn", "a mlp", "b cnn"]


def test_cells_of_different_data_are_settings_and_cells_of_the_same_data_are_compared(
    tmp_path: Path,
) -> None:
    """One method ran in all cells."""
    for place, datasets in (("different", ("digits", "x")), ("same", ("digits", "digits"))):
        for cell, dataset in zip("ab", datasets, strict=True):
            choices = {"cell": cell, "dataset": dataset}
            values = {"cohort_size": {"a": 1, "b": 2}[cell], "dataset": {"_target_": dataset}}
            write_run(tmp_path / place / cell, [0.1], [[0]], choices=choices, **values)
    frame = frame_of(tmp_path / "different")
    assert list(zip(frame["setting"], frame["method"], strict=True)) == [
        ("a", "random"),
        ("b", "random"),
    ]
    frame = frame_of(tmp_path / "same")
    assert list(zip(frame["setting"], frame["method"], strict=True)) == [("", "a"), ("", "b")]


PATHS = {  # the setting of the data at a path, with and without dataset.name
    "folders": ({"path": "/data/chest_xray"}, {"path": "brain/"}),
    "names": ({"path": "/data/v1", "name": "chest_xray"}, {"path": "/data/v2", "name": "brain"}),
}


@pytest.mark.parametrize("case", PATHS)
def test_data_at_different_paths_are_settings_named_by_a_name_or_a_folder(
    tmp_path: Path, case: str
) -> None:
    for number, dataset in enumerate(PATHS[case]):
        choices = {"selector": "gpfl", "dataset": "parquet"}
        write_run(tmp_path / str(number), [0.1], [[0]], choices=choices, dataset=dataset)
    frame = frame_of(tmp_path)
    named = dict(zip(frame["setting"], frame["method"], strict=True))
    assert named == {"brain": "gpfl", "chest_xray": "gpfl"}


def test_a_folder_without_runs_does_not_hide_results_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("paper").mkdir()
    assert find_source("paper") == Path("paper")
    write_run(Path("outputs/paper/a"), [0.5], [[0]])
    assert find_source("paper") == Path("outputs/paper")
    write_run(Path("paper/a"), [0.5], [[0]])
    assert find_source("paper") == Path("paper")


def test_folders_of_the_same_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    for place in ("a", "b"):
        dataset = {"path": f"{place}/images"}
        choices = {"dataset": "image_folder"}
        write_run(tmp_path / place, [0.1], [[0]], choices=choices, dataset=dataset)
    assert list(by_setting(frame_of(tmp_path))) == ["path=a/images", "path=b/images"]


def test_values_of_the_partition_make_settings(tmp_path: Path) -> None:
    """afl was run in one setting alone; it is in that setting."""
    for selector, shards in (("random", 10), ("afl", 10), ("random", 2)):
        setting = {"choices": {"selector": selector}, "partition": {"shards": shards}}
        write_run(tmp_path / str(shards), [0.1], [[0]], **setting)
    settings = by_setting(frame_of(tmp_path))
    methods = {setting: list(by(rows, "method")) for setting, rows in settings.items()}
    assert list(methods.items()) == [("shards=2", ["random"]), ("shards=10", ["random", "afl"])]


def test_runs_from_before_a_config_group_made_its_usual_choice(tmp_path: Path) -> None:
    """Seed 0 was run before there was a group `system`."""
    write_run(tmp_path, [0.1], [[0]])
    write_run(tmp_path, [0.1], [[0]], seed=1, choices={"system": "none"})
    assert seeds_by_group(tmp_path) == {"random": [0, 1]}
    write_run(tmp_path, [0.1], [[0]], choices={"system": "tiers"}, system={"latency": 0.1})
    assert group_names(tmp_path) == ["none", "tiers"]
    old_runs = by(frame_of(tmp_path), "group")["none"]
    assert has_values(old_runs, {"local_algorithm": "plain", "system": "none", "seed": 0})
    assert not has_values(old_runs, {"local_algorithm": "scaffold"})
    assert set(frame_of(tmp_path)["choice.system"]) == {"none", "tiers"}


def test_groups_are_sorted_by_numbers_and_random_selection_comes_first(tmp_path: Path) -> None:
    values = ["lr=0.1", "lr=1e-05", "lr=-2 b", "lr=1e+20", "lr=0.001", "lr=-10"]
    expected = ["lr=-10", "lr=-2 b", "lr=1e-05", "lr=0.001", "lr=0.1", "lr=1e+20"]
    assert sorted(values, key=sort_key) == expected
    names = ["dirichlet-1", "dirichlet-2"]  # this is no sign
    assert sorted(["dirichlet-2", "dirichlet-1"], key=sort_key) == names
    for selector in ("gpfl", "random", "afl"):
        write_run(tmp_path, [0.1], [[0]], choices={"selector": selector})
    for lr in (5.0, 10.0):
        write_run(tmp_path, [0.1], [[0]], lr=lr)
    assert group_names(tmp_path) == [
        "random lr=0.1",
        "random lr=5.0",
        "random lr=10.0",
        "afl",
        "gpfl",
    ]
