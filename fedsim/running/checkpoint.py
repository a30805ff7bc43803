"""Checkpoints hold a run's whole state, so that the same command resumes it with the same bits.

A checkpoint is read only if its SHA-256 is right and it belongs to the same run. Reading it
executes no code that it names.
"""

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedsim
from fedsim.config.plan import Plan
from fedsim.config.user_code import user_code
from fedsim.core.configs import IRRELEVANT_KEYS, leaves
from fedsim.core.encoding import dataclasses_known_to, decode, encode
from fedsim.core.errors import ConfigError, FedsimError, Problem
from fedsim.core.record import Record
from fedsim.results.files import NEWEST, PREVIOUS, RunFolder, json_ready
from fedsim.results.reading import METRICS, Rounds, check_rounds, read_metrics, read_summary
from fedsim.running.assembly import Experiment
from fedsim.running.checkpoint_file import CheckpointError, checkpoint_content, pack, unpack
from fedsim.running.process import CODES

FORMAT = 2
"""Version of checkpoint files; raise it whenever older ones can no longer be read."""
MIN_SECONDS = 5.0
"""`checkpoint.every=auto` waits at least this long between two saves."""
MAX_SHARE = 0.01
"""`checkpoint.every=auto` spends at most this share of a run's time on saving."""
START_ANEW = "overwrite=true runs it from the start"
REMEDIES = {
    "dataset": "the run began with other data; use those again (data_dir, FEDSIM_DATA), or "
    f"{START_ANEW}",
    "partition": f"the run began with another division of the data; {START_ANEW}",
    "code": "the run was saved with other code of one of your classes; restore that code, resume "
    f"with the present code by checkpoint.other_code=true, or {START_ANEW}",
}


@dataclass(frozen=True)
class Checkpoint:
    """The `state` of the simulation, and what else a resumed run needs.

    `lengths` are those of the files of records [bytes]. `started` is when the run began [s since
    1970], and `overwrite` whether it began with `overwrite=true`. `earlier_code` has the
    `user_code` of the rounds up to `until_round`, if that has changed.
    """

    state: dict[str, Any]
    lengths: dict[str, int]
    initial_accuracy: float
    started: float
    overwrite: bool
    earlier_code: list[dict[str, Any]] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of one run: the newest and the one before it.

    Raises `EncodingError` if a checkpoint cannot hold the state of the selector, the aggregator or
    the local algorithm.
    """

    def __init__(self, folder: RunFolder, plan: Plan, experiment: Experiment) -> None:
        self.folder = folder
        self.settings = plan.checkpoint
        self.config = plan.config
        self.simulation = experiment.simulation
        self.identity = identity_of(plan.config, experiment)
        components = self.simulation.components
        stateful = {
            "selector": components.selector,
            "aggregator": components.aggregator,
            "local_algorithm": components.local_algorithm,
        }
        self.dataclasses = dataclasses_known_to(*stateful.values())
        states = {name: part.state_dict() for name, part in stateful.items()}
        encode(states, {}, dataclasses=self.dataclasses)
        self.device = components.server_data.test.x.device
        self.saved_at = 0.0
        self.cost = 0.0

    def due(self, round: int, wall_seconds: float) -> bool:
        """Return whether to save after `round`, when the run has taken `wall_seconds`."""
        every = self.settings.every
        if every == "auto":
            return wall_seconds - self.saved_at >= max(MIN_SECONDS, self.cost / MAX_SHARE)
        return every is not None and round % every == 0

    def save(self, origin: Checkpoint) -> None:
        """Write a checkpoint, and keep the one before it. `origin`: see `Checkpoint`."""
        start = time.monotonic()
        lengths = self.folder.sync_records()
        checkpoint = replace(origin, state=self.simulation.state_dict(), lengths=lengths)
        content = pack(self.identity, vars(checkpoint), self.dataclasses)
        self.folder.write_bytes(NEWEST, content, keep_as=PREVIOUS)
        self.saved_at = self.simulation.wall_seconds
        self.cost = time.monotonic() - start

    def load(self, overwrite: bool) -> tuple[Checkpoint, list[Record]] | None:
        """Return the latest sound checkpoint and the records of its rounds, or None.

        Damaged checkpoints are renamed. With `overwrite`, only a run counts that itself began with
        `overwrite=true` and was stopped. Raises `CheckpointError` if a file cannot be read for
        another reason than damage, and `ConfigError` if it belongs to another run.
        """
        if not overwrite:
            return self._latest()
        summary = read_summary(self.folder.path)
        if summary is not None and summary["status"] not in CODES:
            return None
        with suppress(FedsimError):
            latest = self._latest()
            if latest is not None and latest[0].overwrite:
                return latest
        return None

    def _latest(self) -> tuple[Checkpoint, list[Record]] | None:
        for path in (self.folder.path / NEWEST, self.folder.path / PREVIOUS):
            try:
                if path.exists():
                    return self._read(path)
            except ConfigError:
                raise
            except (OSError, MemoryError, RuntimeError) as error:  # the file may be sound
                reason = f"the run cannot be resumed: {path}: {error!r}; {START_ANEW}"
                raise CheckpointError(reason) from error
            except Exception as error:  # damage shows itself in many ways
                reason = str(error) if isinstance(error, FedsimError) else repr(error)
                aside = path.with_suffix(f".damaged{path.suffix}").name
                self.folder.rename(path.name, aside)
                sys.stderr.write(f"fedsim: {path}: {reason}; set aside as {aside}\n")
        return None

    def _read(self, path: Path) -> tuple[Checkpoint, list[Record]]:
        # 1. It must belong to this run; only the user's code may differ, if the user permits it.
        header, tensors = unpack(checkpoint_content(path))
        saved = header["identity"]
        problems = differences(path, saved, self.identity)
        forbidden = [p for p in problems if p.key != "code" or not self.settings.other_code]
        if forbidden:
            raise ConfigError(forbidden)
        checkpoint = Checkpoint(**decode(header["content"], tensors, self.device, self.dataclasses))
        until = checkpoint.state["round"]
        if problems:
            checkpoint.earlier_code.append({"code": saved["code"], "until_round": until})
            changed = f"your code has changed since round {until}"
            sys.stderr.write(
                f"fedsim: {path}: {changed}; the run is resumed with the present code\n"
            )
        # 2. The records of its rounds must be there.
        records = read_metrics(self.folder.path, end=checkpoint.lengths.get(METRICS, 0))
        check_rounds(Rounds.of(records), self.config, {"status": "preempted"})
        if len(records) != until:
            raise CheckpointError(f"{METRICS} lacks rounds that it needs")
        return checkpoint, [Record(**record) for record in records]

    def delete(self) -> None:
        """Delete the checkpoints of a run that has ended, as far as possible."""
        for name in (NEWEST, PREVIOUS):
            with suppress(OSError):
                (self.folder.path / name).unlink(missing_ok=True)


def identity_of(config: Mapping[str, Any], experiment: Experiment) -> dict[str, Any]:
    """Return everything that decides a result to the last bit.

    A checkpoint is resumed only if all of it is the same.
    """
    components = experiment.simulation.components
    return {
        "format": FORMAT,
        "fedsim": fedsim.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": components.server_data.test.x.device.type,
        "engine": components.engine.backend.description.partition(",")[0],
        "dataset": experiment.data_source.get("fingerprint"),
        "partition": experiment.division.hash,
        "code": user_code(config),
        "config": json_ready({k: v for k, v in config.items() if k not in IRRELEVANT_KEYS}),
    }


def differences(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each key in which a checkpoint's identity differs from the run's.

    A key that one config lacks counts as null there: new keys are null where nothing changes.
    """
    before = dict(leaves(saved))
    after = dict(leaves(now))
    problems = []
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            rule = f"is {before.get(key)!r} in {path}"
            remedy = REMEDIES.get(key, START_ANEW)
            problems.append(Problem(key.removeprefix("config."), after.get(key), rule, remedy))
    return problems
