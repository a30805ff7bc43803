"""`fedsim verify`: runs some of the runs of a folder or archive again, and compares them round by
round."""

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from os import environ
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from fedsim.commands.dispatch import MistakeError
from fedsim.config.build import unknown
from fedsim.config.compose import make_plan
from fedsim.config.plan import Plan
from fedsim.config.user_code import changed_since
from fedsim.config.words import parse
from fedsim.core.configs import IRRELEVANT_KEYS, has_key, leaves, merge, nest
from fedsim.core.disk import user_path
from fedsim.core.errors import ConfigError, DataError, check, rule
from fedsim.core.record import Record
from fedsim.core.text import printable
from fedsim.report.command import find_source
from fedsim.results.reading import FINAL
from fedsim.results.runs import ReportError, Run
from fedsim.results.sources import read_source
from fedsim.running.experiment import execute
from fedsim.running.process import CODES, STOP

COMPARED = [
    f.name for f in fields(Record) if not f.name.startswith("seconds_") and f.name != "wall_seconds"
]
"""All that is recorded of a round but measured seconds."""
PLACES = {"data_dir": "FEDSIM_DATA", "cache_dir": "FEDSIM_CACHE"}
"""Folders of the machine, which archives leave out, and the variables that name them."""
OWN = {*IRRELEVANT_KEYS} - {*PLACES}
"""Keys that `fedsim verify` sets itself."""
WHERE_DATA_ARE = "say behind the folder's name where its data are: data_dir=..., dataset.path=..., dataset.root=..."


def run(words: Sequence[str]) -> int:
    """Compare runs with their repetitions; 0 if all are equal, 1 if one differs, that of a signal
    that ends it."""
    options = _parser().parse_intermixed_args(words)
    if options.runs < 1:
        raise MistakeError(f"--runs {options.runs}: must be at least 1")
    changed = changes(options.words)
    left_out: list[str] = []
    runs = _comparable(_read(options.folder, options.output_dir, left_out), changed)
    for text in left_out:
        print(text)
    chosen = runs if options.all else spread(runs, options.runs)
    with TemporaryDirectory(prefix="fedsim-verify-") as place, STOP.working():
        plans = [plan_of(one, changed, f"{place}/{number}") for number, one in enumerate(chosen)]
        equal = 0
        for number, (one, plan) in enumerate(zip(chosen, plans, strict=True), 1):
            print(f"{number}/{len(chosen)} {printable(str(one.folder))}", flush=True)
            try:
                outcome = execute(plan)
            except DataError as error:
                raise DataError(f"{one.folder}: {error}\n    {WHERE_DATA_ARE}") from error
            again = Run(plan.folder, plan.config, outcome.summary)
            if again.status in CODES:
                return CODES[again.status]
            found = differences(one, again)
            equal += not found
            if modules := changed_since(one.summary, plan.config):
                print(f"    the code of {modules} has changed since", flush=True)
            for line in found or [f"equal, {len(one.records)} rounds"]:
                print(f"    {printable(line)}", flush=True)
    damaged = f"; {len(left_out)} are damaged and left out" if left_out else ""
    print(f"{equal} of {len(chosen)} equal; {len(runs)} runs in {options.folder}{damaged}")
    return int(equal < len(chosen) or bool(left_out))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="fedsim verify",
        description="Runs finished runs again, in a temporary folder and without trackers, and says whether every "
        "round is equal in all but measured seconds; if not, the first that is not, and what differs in the "
        "environment. The quickest run of each selector comes first. Exit code 1: a difference, or a damaged run.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", help="a folder with runs below it, the name of a preset, or an archive"
    )
    parser.add_argument(
        "words",
        nargs="*",
        help="values of the config to change: dataset.path=..., where its data are",
    )
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="how many (3)")
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument(
        "--output-dir",
        type=user_path,
        default=Path("outputs"),
        help="where presets' folders are (outputs)",
    )
    return parser


def changes(words: Sequence[str]) -> dict[str, Any]:
    """Return the values that overrides give to keys. Raises `ConfigError` for keys that verify sets
    itself: they say where or how often results are written, and a run would be compared with
    itself."""
    changed = {override.key_or_group: override.value() for override in parse(words)}
    text, remedy = "cannot be changed: verify runs in a folder of its own", "leave it out"
    check(
        *(
            rule(key.partition(".")[0] not in OWN, key, value, text, remedy)
            for key, value in changed.items()
        )
    )
    return changed


def _read(name: str, output_dir: Path, left_out: list[str]) -> list[Run]:
    """The sound runs below a folder or in an archive that have an end; the others are added to
    `left_out`. Raises `MistakeError` if there are none."""
    try:
        found = read_source(find_source(name, output_dir), left_out)
    except ReportError as error:
        raise MistakeError("\n".join([str(error), *left_out])) from error
    if ended := [run for run in found if run.status in FINAL]:
        return ended
    raise MistakeError(
        "\n".join([f"{name}: none of its {len(found)} sound runs is done", *left_out])
    )


def _comparable(runs: list[Run], changed: Mapping[str, Any]) -> list[Run]:
    """Without those of a GPU where there is none, unless the device is `changed`. Raises
    `MistakeError` if none is left."""
    own = [run for run in runs if not str(run.config.get("device")).startswith("cuda")]
    if len(own) == len(runs) or "device" in changed or torch.cuda.is_available():
        return runs
    told = f"{len(runs) - len(own)} of {len(runs)} runs need a GPU; device=cpu compares them with a CPU's"
    if not own:
        raise MistakeError(told)
    print(f"left out: {told}")
    return own


def spread(runs: Sequence[Run], number: int) -> list[Run]:
    """`number` of `runs`: the quickest of each selector, then the second quickest of each, and so
    on."""
    by_selector: dict[str | None, list[Run]] = {}
    for run in sorted(runs, key=lambda run: float(run.summary.get("wall_seconds") or 0)):
        by_selector.setdefault(run.choices.get("selector"), []).append(run)
    return [run for turn in zip_longest(*by_selector.values()) for run in turn if run is not None][
        :number
    ]


def plan_of(run: Run, changed: Mapping[str, Any], place: str) -> Plan:
    """`run` as it is to be run again below the folder `place`, with the values that are `changed`.

    Raises `ConfigError`.
    """
    config: dict[str, Any] = {
        **{key: environ.get(name) for key, name in PLACES.items()},
        **run.config,
    }
    if (run.summary.get("environment") or {}).get("device") == "cpu":
        config["device"] = "cpu"
    config |= {"output_dir": place, "overwrite": False, "tracker": {}}
    config["checkpoint"] = {"every": None, "other_code": False}
    for key, value in changed.items():
        if not has_key(config, key):
            raise ConfigError([unknown(key, dict(leaves(config)))])
        above, _, last = key.rpartition(".")
        config = merge(config, nest({last: value}, above))
    return make_plan(config, run.choices)


def differences(run: Run, again: Run) -> list[str]:
    """How the repetition `again` of `run` differs from it, and in what environment; nothing if it
    does not."""
    found, before, now = _first_difference(run, again), _circumstances(run), _circumstances(again)
    changed = [key for key in {**now, **before} if before.get(key) != now.get(key)]
    told = [f"{key}: {before.get(key)}, now {now.get(key)}" for key in changed]
    return (
        [found, *(told or ["nothing that is recorded of the environment differs"])] if found else []
    )


def _first_difference(run: Run, again: Run) -> str | None:
    ended = (
        None
        if run.status == again.status
        else f"{run.status}, now {again.status}: {again.summary.get('error')}"
    )
    if ended and not again.records:
        return ended
    was, now = (one.summary.get("initial_accuracy") for one in (run, again))
    if was != now:
        return f"differs before round 1: initial_accuracy {was}, now {now}"
    single = bool(
        run.archived
    )  # an archive has losses in single precision, and may lack what it is not about
    for number, (one, other) in enumerate(zip_longest(run.records, again.records), 1):
        if one is None or other is None:
            return f"differs from round {number} on: it is {'not recorded' if one is None else 'missing now'}"
        found = [
            name
            if isinstance(one.get(name), list)
            else f"{name} {one.get(name)}, now {other.get(name)}"
            for name in COMPARED
            if not (single and one.get(name) is None)
            and not _same(one.get(name), other.get(name), single and name.endswith("_loss"))
        ]
        if found:
            return f"differs from round {number} on: {'; '.join(found)}"
    return ended


def _same(was: Any, now: Any, single: bool) -> bool:
    return bool(
        np.float32(was) == np.float32(now) if single and None not in (was, now) else was == now
    )


def _circumstances(run: Run) -> dict[str, Any]:
    """What the rounds of a run depend on besides its config, by name."""
    told = {"engine": "engine", "division of the data": "partition_hash", "code": "code"}
    found = {name: run.summary.get(key) for name, key in told.items()}
    found |= {"data": (run.summary.get("data") or {}).get("fingerprint"), "revision": run.commit}
    return {**dict(leaves(run.summary.get("environment") or {})), **found}
