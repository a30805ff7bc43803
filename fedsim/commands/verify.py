"""`fedsim verify`: run finished runs of a folder or archive again, and compare them round by
round."""

import random
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from os import environ
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from fedsim.commands.dispatch import MistakeError
from fedsim.config.build import unknown
from fedsim.config.compose import make_plan
from fedsim.config.plan import Plan
from fedsim.config.user_code import changed_since
from fedsim.config.words import is_plain_assignment, parse
from fedsim.core.configs import IRRELEVANT_KEYS, has_key, leaves, merge, nest
from fedsim.core.disk import user_path
from fedsim.core.errors import ConfigError, DataError, check, rule
from fedsim.core.record import Record
from fedsim.core.text import printable
from fedsim.results.reading import FINAL
from fedsim.results.runs import ReportError, Run
from fedsim.results.sources import find_source, read_source
from fedsim.running.experiment import execute
from fedsim.running.process import STOP, STOP_CODES

COMPARED = [
    field.name
    for field in fields(Record)
    if not field.name.startswith("seconds_") and field.name not in ("wall_seconds", "learning_rate")
]
"""Fields of a record that are compared: all except measured seconds and the learning rate. The
latter follows from the config, and earlier versions did not record it."""
FOLDER_VARIABLES = {"data_dir": "FEDSIM_DATA", "cache_dir": "FEDSIM_CACHE"}
"""Folders of the machine, which archives leave out, and the variables that name them."""
FIXED_KEYS = set(IRRELEVANT_KEYS) - set(FOLDER_VARIABLES)
"""Keys that the command sets itself."""
DATA_REMEDY = (
    "say after the folder's name where its data are: data_dir=..., dataset.path=..., "
    "dataset.root=..."
)


def run(words: Sequence[str]) -> int:
    """Repeat runs, and print whether each repetition is equal.

    Returns 0 if all are equal, 1 if one differs or is damaged, and a signal's exit code if a signal
    ends the command.
    """
    options = _parser().parse_intermixed_args(words)
    if options.runs < 1:
        raise MistakeError(f"--runs {options.runs}: must be at least 1")
    changed = changed_values(options.words)
    damaged: list[str] = []
    runs = _read(options.folder, options.output_dir, damaged)
    runs = _runnable_here(runs, changed)
    for text in damaged:
        print(text)
    size = len(runs) if options.all else min(options.runs, len(runs))
    sample = random.sample(runs, size) if options.random else spread(runs, size)
    num_equal = 0
    with TemporaryDirectory(prefix="fedsim-verify-") as folder, STOP.working():
        plans = [plan_of(run, changed, f"{folder}/{n}") for n, run in enumerate(sample)]
        for number, (run, plan) in enumerate(zip(sample, plans, strict=True), 1):
            print(f"{number}/{len(sample)} {printable(str(run.folder))}", flush=True)
            repetition = _repeat(run, plan)
            if repetition.status in STOP_CODES:  # a signal has stopped it
                return STOP_CODES[repetition.status]
            lines = differences(run, repetition)
            if not lines:
                num_equal += 1
                lines = [f"equal, {len(run.records)} rounds"]
            if modules := changed_since(run.summary, plan.config):
                print(f"    the code of {modules} has changed since", flush=True)
            for line in lines:
                print(f"    {printable(line)}", flush=True)
    note = f"; {len(damaged)} are damaged and left out" if damaged else ""
    print(f"{num_equal} of {len(sample)} equal; {len(runs)} runs in {options.folder}{note}")
    return int(num_equal < len(sample) or bool(damaged))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="fedsim verify",
        description="Runs finished runs again, in a temporary folder and without trackers, and "
        "says whether every round is equal in all but measured seconds. If not, it prints the "
        "first round that differs, and what differs in the environment. The quickest run of each "
        "selector comes first. Exit code 1: a difference, or a damaged run.",
        allow_abbrev=False,
    )
    folder_help = "a folder with runs below it, the name of a preset, or an archive"
    parser.add_argument("folder", help=folder_help)
    words_help = "values of the config to change: dataset.path=..., where its data are"
    parser.add_argument("words", nargs="*", help=words_help)
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="how many in all (3)")
    parser.add_argument("--all", action="store_true", help="all of them")
    random_help = "random runs, not the quickest of each selector"
    parser.add_argument("--random", action="store_true", help=random_help)
    output_help = "where presets' folders are (outputs)"
    parser.add_argument("--output-dir", type=user_path, default=Path("outputs"), help=output_help)
    return parser


def changed_values(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of overrides by key.

    Raises `ConfigError` for keys that say where or how often results are written, because a run
    might then be compared with itself.
    """
    values: dict[str, Any] = {}
    for override in parse(words):
        key = override.key_or_group
        is_value = is_plain_assignment(override)
        check(rule(is_value, key, ..., "must have one value", "write key=value"))
        is_free = key.partition(".")[0] not in FIXED_KEYS
        text = "cannot be changed: verify runs in a folder of its own"
        check(rule(is_free, key, override.value(), text, "leave it out"))
        values[key] = override.value()
    return values


def _read(name: str, output_dir: Path, damaged: list[str]) -> list[Run]:
    """Return the ended runs below a folder or in an archive, and add texts on damaged ones to
    `damaged`.

    Raises `MistakeError` if there are none.
    """
    try:
        runs = read_source(find_source(name, output_dir), damaged)
    except ReportError as error:
        raise MistakeError("\n".join([str(error), *damaged])) from error
    ended = [run for run in runs if run.status in FINAL]
    if not ended:
        text = f"{name}: none of its {len(runs)} sound runs is done"
        raise MistakeError("\n".join([text, *damaged]))
    return ended


def _runnable_here(runs: list[Run], changed: Mapping[str, Any]) -> list[Run]:
    """Return the runs that can run here: those of a GPU only if there is one, or if `changed` has a
    device.

    Raises `MistakeError` if no run is left.
    """
    on_cpu = [run for run in runs if not str(run.config.get("device")).startswith("cuda")]
    num_on_gpu = len(runs) - len(on_cpu)
    if num_on_gpu == 0 or "device" in changed or torch.cuda.is_available():
        return runs
    text = f"{num_on_gpu} of {len(runs)} runs need a GPU; device=cpu compares them with a CPU's"
    if not on_cpu:
        raise MistakeError(text)
    print(f"left out: {text}")
    return on_cpu


def spread(runs: Sequence[Run], number: int) -> list[Run]:
    """Return `number` runs: the quickest of each selector, then the second quickest of each, and so
    on."""
    by_selector: dict[str | None, list[Run]] = {}
    for run in sorted(runs, key=lambda run: float(run.summary.get("wall_seconds") or 0)):
        by_selector.setdefault(run.choices.get("selector"), []).append(run)
    in_turn: list[Run] = []
    for turn in zip_longest(*by_selector.values()):
        in_turn += [run for run in turn if run is not None]
    return in_turn[:number]


def plan_of(run: Run, changed: Mapping[str, Any], folder: str) -> Plan:
    """Return the plan of a repetition of `run` below `folder`, with the values that are `changed`.

    Raises `ConfigError` if the changed config is not that of a run.
    """
    # Each line may replace values of the lines above it.
    config: dict[str, Any] = {key: environ.get(name) for key, name in FOLDER_VARIABLES.items()}
    config.update(run.config)
    if (run.summary.get("environment") or {}).get("device") == "cpu":
        config["device"] = "cpu"  # otherwise `auto` could mean a GPU here
    config.update(output_dir=folder, overwrite=False, tracker={})
    config["checkpoint"] = {"every": None, "other_code": False}
    for key, value in changed.items():
        if not has_key(config, key):
            raise ConfigError([unknown(key, dict(leaves(config)))])
        parent, _, name = key.rpartition(".")
        config = merge(config, nest({name: value}, parent))
    return make_plan(config, run.choices)


def _repeat(run: Run, plan: Plan) -> Run:
    """Return the run of a plan that repeats `run`. Raises `DataError` if its data are missing."""
    try:
        outcome = execute(plan)
    except DataError as error:
        raise DataError(f"{run.folder}: {error}\n    {DATA_REMEDY}") from error
    return Run(plan.folder, plan.config, outcome.summary)


def differences(run: Run, repetition: Run) -> list[str]:
    """Return how a repetition differs from its run, and what differs in the environment, as lines.

    There is no line if they are equal.
    """
    difference = _first_difference(run, repetition)
    if difference is None:
        return []
    before = _circumstances(run)
    now = _circumstances(repetition)
    lines = []
    for key in now | before:
        if before.get(key) != now.get(key):
            lines.append(f"{key}: {before.get(key)}, now {now.get(key)}")
    return [difference, *(lines or ["nothing that is recorded of the environment differs"])]


def _first_difference(run: Run, repetition: Run) -> str | None:
    """Return the first difference in words: before round 1, in a round, or in the outcome.

    None if there is none. A repetition that failed before round 1 differs in the outcome only.
    """
    outcome = None
    if run.status != repetition.status:
        error = repetition.summary.get("error")
        outcome = f"{run.status}, now {repetition.status}: {error}"
        if not repetition.records:
            return outcome
    old_accuracy = run.summary.get("initial_accuracy")
    new_accuracy = repetition.summary.get("initial_accuracy")
    if old_accuracy != new_accuracy:
        return f"differs before round 1: initial_accuracy {old_accuracy}, now {new_accuracy}"
    single_fields = _single_precision(run)
    for number, (old, new) in enumerate(zip_longest(run.records, repetition.records), 1):
        if old is None or new is None:
            texts = ["it is not recorded" if old is None else "it is missing now"]
            if outcome is not None:
                texts.append(outcome)
        else:
            texts = _differing_fields(run, old, new, single_fields)
        if texts:
            return f"differs from round {number} on: {'; '.join(texts)}"
    return outcome


def _differing_fields(
    run: Run, old: Mapping[str, Any], new: Mapping[str, Any], single_fields: set[str]
) -> list[str]:
    """Return the names of fields in which a record of `run` and its repetition differ, with the two
    values if they are short."""
    texts = []
    for name in COMPARED:
        was, now = old.get(name), new.get(name)
        if run.archived and was is None:
            continue  # archives may lack fields
        if name in single_fields and now is not None:
            now = float(np.float32(now))
        if was != now:
            texts.append(name if isinstance(was, list) else f"{name} {was}, now {now}")
    return texts


def _single_precision(run: Run) -> set[str]:
    """Return the fields that a run's archive holds in single precision; none for a run of a
    folder."""
    if not run.archived:
        return set()
    return {field.name for field in run.archived["rows"].schema if field.type == pa.float32()}


def _circumstances(run: Run) -> dict[str, Any]:
    """Return what the rounds of a run depend on besides its config, by name."""
    summary = run.summary
    circumstances = dict(leaves(summary.get("environment") or {}))
    circumstances["engine"] = summary.get("engine")
    circumstances["division of the data"] = summary.get("partition_hash")
    circumstances["code"] = summary.get("code")
    circumstances["data"] = (summary.get("data") or {}).get("fingerprint")
    circumstances["revision"] = run.commit
    return circumstances
