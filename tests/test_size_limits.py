"""Numbers that are absurdly large are refused before anything of their size is made, or size
nothing.

Every key of conf/ that takes an integer is tried with limited memory.
"""

import inspect
import resource
import tracemalloc
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np
import pytest
from torch import nn

from fedsim.config.build import instantiate, resolve
from fedsim.config.choice_files import ChoiceFiles
from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.config.settings import CheckpointSettings, LocalSettings, RunSettings
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.rng import Streams
from fedsim.data.base import TokenShape
from fedsim.engine.schedule import LocalWork, make_schedule
from fedsim.partitions.division import ServerSplit
from fedsim.running.assembly import build
from tests.test_random_configs import limited_time

HUGE = (10**9, 2**63)
SMALL = (
    *("num_clients=6", "cohort_size=2", "num_rounds=1", "local.epochs=null", "local.steps=1"),
    *("tracker=files_only", "system=lognormal"),
)
ROOM = 2**30
"""Bytes that a config may take above what the process has."""
PLAIN = {
    *("seed", "partition_seed", "init_seed", "eval_every", "checkpoint.every", "local.batch_size"),
    *(
        "dataset.seed",
        "model.backbone_seed",
        "partition.cap",
        "engine.chunk_size",
        "optimizer.schedule.milestones",
    ),
    *(
        "selector.queue_length",
        "selector.warmup",
        "selector.hold_off",
        "selector.interval",
        "selector.window",
        "selector.cover_rounds",
    ),
    *(
        "selector.exploration.peak",
        "selector.num_clusters",
        "selector.iterations",
        "selector.pacer_window",
    ),
    *(
        "selector.swap_passes",
        "selector.sketch.size",
        "selector.threshold.every",
        "aggregator.denominator",
    ),
}
"""Keys that size nothing: runs at 10^9 are like others."""
GROUPS = (
    "dataset",
    "partition",
    "availability",
    "model",
    "optimizer",
    "selector",
    "aggregator",
    "engine",
)
OWNERS = {
    "sketch": "pncs",
    "exploration": "gpfl",
    "threshold": "fedabc",
    "valuation": "s_fedavg",
    "schedule": "sgd",
}
"""Choices whose nodes have the groups below other groups."""
Path_ = tuple[str, ...]
DATA_WITH_OWNERS = {
    "_target_": "fedsim.data.femnist_generated.FemnistGenerated",
    **{
        "num_classes": 10,
        "num_writers": 20,
        "classes_per_writer": 5,
        "test_samples": 10,
        "samples_per_writer": 30.0,
    },
    **{"size_deviation": 0.4, "style": 0.3, "noise": 0.2, "seed": 0, "mean": [0.5], "std": [0.5]},
}


@cache
def parameters_of(cls: Any) -> dict[str, Any]:
    """Names and annotations of what a config may set."""
    hints = typing.get_type_hints(cls.__init__ if isinstance(cls, type) else cls)
    return {
        p.name: hints[p.name]
        for p in inspect.signature(cls).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }


def integer(hint: Any) -> bool:
    return hint is int or (
        typing.get_origin(hint) in (typing.Union, UnionType) and int in typing.get_args(hint)
    )


def keys_of(node: Any, path: Path_, cls: Any = None) -> Iterator[tuple[Any, Path_, bool]]:
    """Class, path and whether it is a list, of every key for integers of a node and those within
    it."""
    cls = resolve(node, object, "x") if cls is None else cls
    for name, hint in parameters_of(cls).items():
        value = node.get(name)
        if isinstance(value, dict) and "_target_" in value:
            yield from keys_of(value, (*path, name))
        elif integer(hint) or hint == list[int]:
            yield cls, (*path, name), hint == list[int]


def cases(cache_dir: Path) -> Iterator[tuple[dict[str, Any], Path_, Any]]:
    """Config, key and huge value, once for every key of every class that conf/ names."""
    with search_path():
        (job,) = compose_jobs([*SMALL, f"cache_dir={cache_dir}"], multirun=False)
    seen: set[tuple[Any, str]] = set()
    config = job.config
    nodes = [("local", LocalSettings), ("server", ServerSplit), ("checkpoint", CheckpointSettings)]
    found = [(config, key) for name, cls in nodes for key in keys_of(config[name], (name,), cls)]
    scalars = {k: v for k, v in config.items() if not isinstance(v, dict)}
    found += [(config, key) for key in keys_of(scalars, (), RunSettings)]
    for group, changes in all_choices():
        found += [({**config, **changes}, key) for key in keys_of(changes[group], (group,))]
    for config, (cls, path, many) in found:
        if (cls, path[-1]) not in seen:
            seen.add((cls, path[-1]))
            yield from (
                (with_value(config, path, [value] if many else value), path, value)
                for value in HUGE
            )


def all_choices() -> Iterator[tuple[str, dict[str, Any]]]:
    """The group of every file of conf/, and what it puts into a config."""
    files = ChoiceFiles([conf_dir()])
    for group, name in [(one, name) for one in files.groups for name in files.names(one)]:
        top, _, below = group.partition("/")
        if top not in GROUPS:
            continue
        node = files.config(group, name)[top]
        changes = {top: {**files.config(top, OWNERS[below])[top], **node} if below else node}
        if name == "natural":
            changes["dataset"] = DATA_WITH_OWNERS
        if "fedabc" in changes[top]["_target_"]:
            changes["server"] = {
                "validation_fraction": 0.05,
                "public_samples": 10,
                "public_stratified": False,
            }
        yield top, changes


def with_value(config: dict[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    changed = deepcopy(config)
    node = changed
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    if path == ("local", "epochs"):
        node["steps"] = None
    return changed


def attempt(config: dict[str, Any], path: Path_) -> str:
    """What comes of it: the kind of error, or `ran`."""
    try:
        with limited_time():
            if path[0] == "model":
                reads_text = "text" in config["model"]["_target_"]
                instantiate(
                    config["model"],
                    nn.Module,
                    "model",
                    TokenShape(20, 100) if reads_text else (3, 32, 32),
                    10,
                )
            else:
                plan = make_plan(config, {})
                if path[0] != "dataset":
                    build(plan).simulation.step()
        return "ran"
    except (ConfigError, DataError) as error:
        named = ".".join(path) in str(error) or path[-1] in str(error)
        return f"{type(error).__name__}" if named else f"does not name the key: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def limited_memory() -> Iterator[None]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], Path_, Any]]:
    return list(cases(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def outcomes(
    everything: list[tuple[dict[str, Any], Path_, Any]],
) -> dict[tuple[str, int], set[str]]:
    """What comes of every key at every value, with limited memory."""
    found: dict[tuple[str, int], set[str]] = {}
    with limited_memory():
        for config, path, value in everything:
            found.setdefault((".".join(path), value), set()).add(attempt(config, path))
    return found


def test_large_integers_are_refused_where_they_size_something(
    outcomes: dict[tuple[str, int], set[str]],
) -> None:
    assert len(outcomes) >= 90
    assert {
        key: found
        for (key, value), found in outcomes.items()
        if value == 2**63 and found != {"ConfigError"}
    } == {}
    large = {key: found for (key, value), found in outcomes.items() if value == 10**9}
    assert {
        key: found
        for key, found in large.items()
        if not found <= {"ConfigError", "DataError", "ran"}
    } == {}
    assert sorted(key for key, found in large.items() if "ran" in found) == sorted(PLAIN)


def test_without_the_limit_memory_runs_out(
    everything: list[tuple[dict[str, Any], Path_, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    mine = [
        config for config, key, value in everything if key == ("model", "hidden") and value == 10**9
    ]
    config = next(config for config in mine if config["model"]["_target_"].endswith("MLP"))
    monkeypatch.setattr("fedsim.models.shapes.MAX_PARAMETERS", 10**15)
    with limited_memory():
        assert "ror: " in attempt(config, ("model", "hidden"))


def test_memory_grows_with_the_clients_data_and_not_with_the_batch_size() -> None:
    """That whole runs have room is in `test_large_integers_...`: batch_size is in `PLAIN`."""
    peaks = []
    for batch_size in (100, 10**9):
        positions, ids = [np.arange(100) for _ in range(5)], np.arange(5)
        tracemalloc.start()
        make_schedule(
            positions, LocalWork(2, None, batch_size), Streams(0), 1, ids, 0.1, dropout=True
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] == pytest.approx(peaks[0], rel=0.1)


def test_the_work_of_a_round_is_limited() -> None:
    sizes = np.array([10, 1000])
    assert LocalWork(None, 1_000_000, 16).too_large(sizes, 10) is None
    found = LocalWork(None, 1_000_000, 10**9).too_large(sizes, 1)
    assert "local.steps=1000000: makes batches of 1000000000 samples" in str(found)
    assert "local.epochs=100000" in str(LocalWork(100_000, None, 16).too_large(sizes, 10))
