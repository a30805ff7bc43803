"""Absurdly large integers in a config are rejected before fedsim makes anything of their size.

Every key of conf/ that takes an integer is tried with limited memory. Keys that size nothing run.
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
from typing import Any, NamedTuple

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

LARGE = 10**9
TOO_LARGE = 2**63
SMALL_RUN = [
    "num_clients=6",
    "cohort_size=2",
    "num_rounds=1",
    "local.epochs=null",
    "local.steps=1",
    "tracker=files_only",
    "system=lognormal",
]
MEMORY = 2**30
"""Bytes that a config may take above what the process has."""
SIZE_NOTHING = {
    "aggregator.denominator",
    "availability.period",
    "availability.rounds_per_label",
    "checkpoint.every",
    "dataset.min_speeches",
    "dataset.seed",
    "dataset.step",
    "engine.chunk_size",
    "eval_every",
    "final_window",
    "init_seed",
    "local.batch_size",
    "model.backbone_seed",
    "optimizer.schedule.milestones",
    "partition.cap",
    "partition_seed",
    "seed",
    "selector.cover_rounds",
    "selector.exploration.peak",
    "selector.hold_off",
    "selector.interval",
    "selector.iterations",
    "selector.num_clusters",
    "selector.pacer_window",
    "selector.queue_length",
    "selector.sketch.size",
    "selector.swap_passes",
    "selector.threshold.every",
    "selector.warmup",
    "selector.window",
}
"""Keys whose runs at 10^9 are like others."""
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
"""Choices that have the groups below other groups."""
DATA_WITH_OWNERS = {
    "_target_": "fedsim.data.femnist_generated.FemnistGenerated",
    "num_classes": 10,
    "num_writers": 20,
    "classes_per_writer": 5,
    "test_samples": 10,
    "samples_per_writer": 30.0,
    "size_deviation": 0.4,
    "style": 0.3,
    "noise": 0.2,
    "seed": 0,
    "mean": [0.5],
    "std": [0.5],
}


# --- keys for integers ---


class Key(NamedTuple):
    """A key that takes an integer, or a list of integers, of a class."""

    owner: Any
    path: tuple[str, ...]
    is_list: bool

    def __str__(self) -> str:
        return ".".join(self.path)


class Case(NamedTuple):
    """A config in which a key has a large value."""

    config: dict[str, Any]
    key: Key
    value: int


@cache
def annotations_of(owner: Any) -> dict[str, Any]:
    """Return the annotations of the parameters that a config may set."""
    hints = typing.get_type_hints(owner.__init__ if isinstance(owner, type) else owner)
    parameters = inspect.signature(owner).parameters.values()
    return {p.name: hints[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}


def takes_integer(hint: Any) -> bool:
    is_union = typing.get_origin(hint) in (typing.Union, UnionType)
    return hint is int or (is_union and int in typing.get_args(hint))


def keys_of(node: dict[str, Any], path: tuple[str, ...], owner: Any = None) -> Iterator[Key]:
    """Yield the keys for integers of a node and of the nodes within it."""
    owner = owner or resolve(node, object, "x")
    for name, hint in annotations_of(owner).items():
        value = node.get(name)
        if isinstance(value, dict) and "_target_" in value:
            yield from keys_of(value, (*path, name))
        elif takes_integer(hint) or hint == list[int]:
            yield Key(owner, (*path, name), hint == list[int])


def choices() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the top group of every file of conf/, and what the file changes in a config."""
    files = ChoiceFiles([conf_dir()])
    for group in files.groups:
        top, _, below = group.partition("/")
        if top not in GROUPS:
            continue
        for name in files.names(group):
            node = files.config(group, name)[top]
            if below:
                node = files.config(top, OWNERS[below])[top] | node
            changes: dict[str, Any] = {top: node}
            if name == "natural":
                changes["dataset"] = DATA_WITH_OWNERS
            if name == "shakespeare":
                changes["model"] = files.config("model", "text_mlp")["model"]
            if "fedabc" in node["_target_"]:
                changes["server"] = {
                    "validation_fraction": 0.05,
                    "public_samples": 10,
                    "public_stratified": False,
                }
            yield top, changes


def keys_in_configs(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Key]]:
    """Yield every key for integers, with a config that has it."""
    nodes = {"local": LocalSettings, "server": ServerSplit, "checkpoint": CheckpointSettings}
    for name, owner in nodes.items():
        for key in keys_of(config[name], (name,), owner):
            yield config, key
    scalars = {name: value for name, value in config.items() if not isinstance(value, dict)}
    for key in keys_of(scalars, (), RunSettings):
        yield config, key
    for group, changes in choices():
        for key in keys_of(changes[group], (group,)):
            yield config | changes, key


def make_cases(cache_dir: Path) -> Iterator[Case]:
    """Yield each key of each class once with each value."""
    with search_path():
        [job] = compose_jobs([*SMALL_RUN, f"cache_dir={cache_dir}"], multirun=False)
    seen = set()
    for config, key in keys_in_configs(job.config):
        identity = key.owner, key.path[-1]
        if identity not in seen:
            seen.add(identity)
            for value in (LARGE, TOO_LARGE):
                yield Case(with_value(config, key, value), key, value)


def with_value(config: dict[str, Any], key: Key, value: int) -> dict[str, Any]:
    changed = deepcopy(config)
    node = changed
    for part in key.path[:-1]:
        node = node[part]
    node[key.path[-1]] = [value] if key.is_list else value
    if str(key) == "local.epochs":
        node["steps"] = None
    return changed


# --- trying them ---


def attempt(case: Case) -> str:
    """Return the kind of the error that a case causes, or `ran`."""
    config, key, _ = case
    try:
        with limited_time():
            if key.path[0] == "model":
                reads_text = "text" in config["model"]["_target_"]
                shape = TokenShape(20, 100) if reads_text else (3, 32, 32)
                instantiate(config["model"], nn.Module, "model", shape, 10)
            else:
                plan = make_plan(config, {})
                if key.path[0] != "dataset":
                    build(plan).simulation.step()
        return "ran"
    except (ConfigError, DataError) as error:
        names_key = str(key) in str(error) or key.path[-1] in str(error)
        return type(error).__name__ if names_key else f"does not name the key: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def limited_memory() -> Iterator[None]:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return list(make_cases(tmp_path_factory.mktemp("cache")))


Outcomes = dict[int, dict[str, set[str]]]
"""The results of `attempt` by value and key."""


@pytest.fixture(scope="module")
def outcomes(cases: list[Case]) -> Outcomes:
    by_value: Outcomes = {LARGE: {}, TOO_LARGE: {}}
    with limited_memory():
        for case in cases:
            by_value[case.value].setdefault(str(case.key), set()).add(attempt(case))
    return by_value


def test_integers_that_no_computer_holds_are_rejected_everywhere(outcomes: Outcomes) -> None:
    others = {key: some for key, some in outcomes[TOO_LARGE].items() if some != {"ConfigError"}}
    assert others == {}


def test_large_integers_are_rejected_if_they_size_something(outcomes: Outcomes) -> None:
    assert len(outcomes[LARGE]) >= 45
    expected = {"ConfigError", "DataError", "ran"}
    others = {key: some for key, some in outcomes[LARGE].items() if not some <= expected}
    assert others == {}
    assert {key for key, some in outcomes[LARGE].items() if "ran" in some} == SIZE_NOTHING


def test_without_the_limit_of_parameters_memory_runs_out(
    cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This shows that the tests above would notice a missing limit."""
    monkeypatch.setattr("fedsim.models.shapes.MAX_PARAMETERS", 10**15)
    with_mlp = [
        case
        for case in cases
        if str(case.key) == "model.hidden"
        and case.value == LARGE
        and case.config["model"]["_target_"].endswith("MLP")
    ]
    with limited_memory():
        assert "ror: " in attempt(with_mlp[0])  # MemoryError, or torch's RuntimeError


def test_memory_grows_with_the_clients_data_and_not_with_the_batch_size() -> None:
    peaks = []
    positions = [np.arange(100) for _ in range(5)]

    def make(batch_size: int) -> None:
        work = LocalWork(2, None, batch_size)
        make_schedule(positions, work, Streams(0), 1, np.arange(5), 0.1, dropout=True)

    make(100)  # allocates what is kept for all calls
    for batch_size in (100, LARGE):
        tracemalloc.start()
        make(batch_size)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] == pytest.approx(peaks[0], rel=0.1)


SIZES = np.array([10, 1000])


@pytest.mark.parametrize(
    ("work", "num_selected", "message"),
    [
        (LocalWork(None, 1_000_000, 16), 10, ""),
        (
            LocalWork(None, 1_000_000, 10**9),
            1,
            "local.steps=1000000: makes batches of 1000000000 samples",
        ),
        (LocalWork(100_000, None, 16), 10, "local.epochs=100000"),
    ],
)
def test_the_work_of_a_round_is_limited(work: LocalWork, num_selected: int, message: str) -> None:
    problem = work.too_large(SIZES, num_selected)
    assert (problem is None) == (message == "")
    assert message in str(problem)
