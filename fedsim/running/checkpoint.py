"""Checkpoints hold a run's whole state, so that the same command resumes it with the same bits.

`fedsim.running.experiment` loads, saves and deletes them. A checkpoint is resumed only if its
SHA-256 is right and its identity is the run's (`identity_of`: everything that decides the result).
Reading it executes no code that it names. A run keeps two, `NEWEST` and `PREVIOUS`, in case the
newest one is damaged.
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
from fedsim.config.settings import CheckpointSettings
from fedsim.config.user_code import user_code
from fedsim.core.configs import IRRELEVANT_KEYS, leaves
from fedsim.core.encoding import EncodingError, dataclasses_known_to, decode, encode
from fedsim.core.errors import ConfigError, FedsimError, Problem
from fedsim.core.record import Record
from fedsim.core.state import Stateful
from fedsim.results.files import NEWEST, PREVIOUS, TRACE, RunFolder, json_ready
from fedsim.results.reading import METRICS, Rounds, check_rounds, read_metrics, read_summary
from fedsim.rounds.checks import is_users
from fedsim.running.assembly import Experiment
from fedsim.running.checkpoint_file import (
    HASH_BYTES,
    CheckpointError,
    checkpoint_content,
    pack,
    unpack,
)
from fedsim.running.process import STOP_CODES

FORMAT = 3
"""Version of checkpoint files; raise it whenever older ones can no longer be read."""
MIN_SECONDS = 5.0
"""`checkpoint.every=auto` waits at least this long between two saves."""
MAX_SHARE = 0.01
"""`checkpoint.every=auto` spends at most this share of a run's time on saving."""
START_ANEW = "overwrite=true runs it from the start"
"""The remedy for a checkpoint that cannot be resumed."""
REMEDIES = {
    "dataset": "the run began with other data; use those again (data_dir, FEDSIM_DATA), or "
    f"{START_ANEW}",
    "partition": f"the run began with another division of the data; {START_ANEW}",
    "code": "the run was saved with other code of one of your classes; restore that code, resume "
    f"with the present code by checkpoint.other_code=true, or {START_ANEW}",
}


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint.

    - `state`: the state of the simulation after the round of the checkpoint.
    - `lengths`: the lengths of the files of records [bytes] by name. A resumed run cuts off what
      was written after the checkpoint.
    - `initial_accuracy`: the test accuracy before round 1.
    - `started`: when the run began [s since 1970].
    - `overwrite`: whether it began with `overwrite=true`.
    - `earlier_code`: an entry for each change of the user's code while the run was stopped. It has
      the code before the change (`code`, see `user_code`) and its last round (`until_round`).

    The field names are in the files of checkpoints.
    """

    state: dict[str, Any]
    lengths: dict[str, int]
    initial_accuracy: float
    started: float
    overwrite: bool
    earlier_code: list[dict[str, Any]] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of one run: the newest and the one before it.

    `saved_at` is the run's `wall_seconds` at the latest checkpoint, and `cost` the seconds that
    saving it took. Raises `EncodingError` at once if a checkpoint cannot hold the state of the
    selector, the aggregator or the local algorithm.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: Mapping[str, Any],
        settings: CheckpointSettings,
        experiment: Experiment,
    ) -> None:
        self.folder = folder
        self.config = config
        self.settings = settings
        self.simulation = experiment.simulation
        self.identity = identity_of(config, experiment)
        components = self.simulation.components
        self.stateful: dict[str, Stateful] = {
            "selector": components.selector,
            "aggregator": components.aggregator,
            "local_algorithm": components.local_algorithm,
        }
        self.dataclasses = dataclasses_known_to(*self.stateful.values())
        self._initial_hashes = self._hashes_of_unsaved()
        self._check_states()  # raises now instead of at the first save
        self.device = components.server_data.test.x.device
        self.saved_at = 0.0
        self.cost = 0.0

    def _check_states(self) -> None:
        """Raise `EncodingError` if a checkpoint cannot hold the state of a component."""
        for group, part in self.stateful.items():
            path = f"{group} {type(part).__module__}.{type(part).__qualname__}"
            for name, value in part.state_dict().items():
                encode(value, {}, f"{path}.{name}", self.dataclasses)

    def _hashes_of_unsaved(self) -> dict[str, bytes]:
        """Return a hash of each attribute of the user's components that is not in their `state`.

        Values that no checkpoint could hold are skipped.
        """
        hashes = {}
        for part in self.stateful.values():
            if not is_users(part):
                continue
            path = f"{type(part).__module__}.{type(part).__qualname__}"
            for name in vars(part).keys() - set(part.state):
                with suppress(Exception):  # a value may be of any type
                    content = pack({}, {name: vars(part)[name]}, self.dataclasses)
                    hashes[f"{path}.{name}"] = content[:HASH_BYTES]
        return hashes

    def unsaved_changes(self) -> list[str]:
        """Return the attributes of the user's components that have changed since the process began
        the run, although no checkpoint holds them."""
        before, now = self._initial_hashes, self._hashes_of_unsaved()
        # `get`: an attribute may be new, deleted, or of a type that cannot be hashed any more
        return sorted(name for name in before | now if before.get(name) != now.get(name))

    def due(self, round: int, wall_seconds: float) -> bool:
        """Return whether to save after `round`, when the run has taken `wall_seconds`."""
        every = self.settings.every
        if every == "auto":
            return wall_seconds - self.saved_at >= max(MIN_SECONDS, self.cost / MAX_SHARE)
        return every is not None and round % every == 0

    def save(self, origin: Checkpoint) -> None:
        """Write a checkpoint, and keep the one before it.

        The state and the lengths are those of now. All other fields are those of `origin`, the
        checkpoint that the run was resumed from or the facts of its start.
        """
        start = time.monotonic()
        lengths = self.folder.sync_records()  # first: a checkpoint needs the records of its rounds
        checkpoint = replace(origin, state=self.simulation.state_dict(), lengths=lengths)
        try:
            content = pack(self.identity, vars(checkpoint), self.dataclasses)
        except EncodingError:
            self._check_states()  # raises the same error, with the class and the attribute
            raise
        self.folder.write_bytes(NEWEST, content, keep_as=PREVIOUS)
        self.saved_at = self.simulation.wall_seconds
        self.cost = time.monotonic() - start

    def load(self, overwrite: bool) -> tuple[Checkpoint, list[Record]] | None:
        """Return the latest sound checkpoint and the records of its rounds.

        Returns None if the run is to start anew. `overwrite` is that of the config: then a run that
        has ended starts anew, and one that was stopped is resumed only if it began with
        `overwrite=true` itself. Checkpoints that are damaged, or whose records are incomplete, are
        renamed. Without `overwrite`, raises `CheckpointError` if a file cannot be
        read for another reason than damage, and `ConfigError` if it belongs to another run.
        """
        if not overwrite:
            return self._latest()
        summary = read_summary(self.folder.path)
        if summary is not None and summary["status"] not in STOP_CODES:
            return None
        with suppress(FedsimError):
            latest = self._latest()
            if latest is not None and latest[0].overwrite:
                return latest
        return None

    def _latest(self) -> tuple[Checkpoint, list[Record]] | None:
        """Return the newest checkpoint that is sound with its records, or None. See `load`."""
        for path in (self.folder.path / NEWEST, self.folder.path / PREVIOUS):
            try:
                if path.exists():
                    return self._read(path)
            except ConfigError:  # the file is sound, and of another run
                raise
            except (OSError, MemoryError, RuntimeError) as error:
                # The file may be sound, and the disk, memory or GPU at fault: do not rename it.
                reason = f"the run cannot be resumed: {path}: {error!r}; {START_ANEW}"
                raise CheckpointError(reason) from error
            except Exception as error:  # damaged bytes can raise almost anything
                reason = str(error) if isinstance(error, FedsimError) else repr(error)
                aside = path.with_suffix(f".damaged{path.suffix}").name
                self.folder.rename(path.name, aside)
                sys.stderr.write(f"fedsim: {path}: {reason}; set aside as {aside}\n")
        return None

    def _read(self, path: Path) -> tuple[Checkpoint, list[Record]]:
        """Return the checkpoint in a file, and the records of its rounds. See `load`."""
        # 1. Check that it belongs to this run. Only the user's code may differ, if the user
        #    permits it.
        header, tensors = unpack(checkpoint_content(path))
        saved = header["identity"]
        problems = differences(path, saved, self.identity)
        fatal_problems = problems
        if self.settings.other_code:
            fatal_problems = [problem for problem in problems if problem.key != "code"]
        if fatal_problems:
            raise ConfigError(fatal_problems)
        checkpoint = Checkpoint(**decode(header["content"], tensors, self.device, self.dataclasses))
        last_round = checkpoint.state["round"]
        if problems:  # only that of the code is left
            checkpoint.earlier_code.append({"code": saved["code"], "until_round": last_round})
            changed = f"your code has changed since round {last_round}"
            sys.stderr.write(
                f"fedsim: {path}: {changed}; the run is resumed with the present code\n"
            )
        # 2. Check that the records of its rounds are there. Rounds after it do not count, and the
        #    status of a stopped run lets `check_rounds` accept fewer rounds than the config has.
        records = read_metrics(self.folder.path, end=checkpoint.lengths.get(METRICS, 0))
        check_rounds(Rounds.of(records), self.config, {"status": "preempted"})
        if len(records) != last_round:
            raise CheckpointError(f"{METRICS} lacks rounds that it needs")
        # 3. Check that the selector's trace of these rounds is there.
        self._check_trace(checkpoint.lengths.get(TRACE, 0), last_round)
        return checkpoint, [Record(**record) for record in records]

    def _check_trace(self, length: int, last_round: int) -> None:
        """Raise `CheckpointError` if the trace is shorter than `length` bytes, or its rounds up to
        there do not ascend to at most `last_round`.

        A round that the selector did not observe has no line.
        """
        path = self.folder.path / TRACE
        size = path.stat().st_size if path.exists() else 0
        if size < length:
            raise CheckpointError(f"{TRACE} lacks rounds that it needs")
        previous_round = 0
        for line in read_metrics(self.folder.path, TRACE, length, whole=True):
            round = line.get("round")
            if type(round) is not int or not previous_round < round <= last_round:
                raise CheckpointError(f"{TRACE} has round {round} after round {previous_round}")
            previous_round = round

    def delete(self) -> None:
        """Delete the checkpoints of a run that has ended for good, as far as possible."""
        for name in (NEWEST, PREVIOUS):
            with suppress(OSError):
                (self.folder.path / name).unlink(missing_ok=True)


def identity_of(config: Mapping[str, Any], experiment: Experiment) -> dict[str, Any]:
    """Return everything that decides a result to the last bit, by key.

    A checkpoint is resumed only if all of it is the same. `config` lacks the keys that change no
    result, such as `output_dir`.
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

    A key that is missing counts as null. A version of fedsim that adds a key to the config lets
    null mean the former behaviour, so that earlier checkpoints still fit.
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
