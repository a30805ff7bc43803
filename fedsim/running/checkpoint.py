"""Checkpoints: a run's whole state in one file, from which the same command goes on as if nothing
had happened.

The SHA-256 of what follows, and a file of safetensors whose metadata hold the state as JSON;
nothing in it is ever executed. As a SHA-256 can be forged, the types, shapes and ranges of what is
read are checked, too.
"""

import hashlib
import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

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
from fedsim.running.outcome import HASH_BYTES, CheckpointError, checkpoint_content, header_of
from fedsim.running.process import CODES

FORMAT = 2
"""Of checkpoint files; to be counted up whenever older ones can no longer be read."""
LEAST_SECONDS, LARGEST_SHARE = 5.0, 0.01
"""`checkpoint.every=auto` saves at most this often, and takes at most this part of the run's
time."""
STATEFUL = ("selector", "aggregator", "local_algorithm")
"""Parts with a state."""
START_ANEW = "overwrite=true runs it from the start"
REMEDIES = {
    "dataset": f"the run began with other data; give it those again (data_dir, FEDSIM_DATA), or {START_ANEW}",
    "partition": f"the run began with another division of the data between the clients; {START_ANEW}",
    "code": "it was saved with other code of a class of yours; give it that again, go on all the same with "
    f"checkpoint.other_code=true, or {START_ANEW}",
}


@dataclass(frozen=True)
class Checkpoint:
    """The `state` of the simulation, `lengths` of the files of records in bytes, when the run
    `started` (seconds since 1970), whether by `overwrite=true`, and the `user_code` of the rounds
    up to `until_round`, where it has changed."""

    state: dict[str, Any]
    lengths: dict[str, int]
    initial_accuracy: float
    started: float
    overwrite: bool
    earlier_code: list[dict[str, Any]] = field(default_factory=list)


class Checkpoints:
    """Those of one run. Raises `EncodingError` where one could not hold the state of its selector,
    aggregator or local algorithm."""

    def __init__(self, folder: RunFolder, plan: Plan, experiment: Experiment) -> None:
        self.folder, self.settings, self.simulation = folder, plan.checkpoint, experiment.simulation
        self.config = plan.config
        parts = self.simulation.components
        own = {name: getattr(parts, name) for name in STATEFUL}
        self.dataclasses = dataclasses_known_to(*own.values())
        self.first = {name: part.state_dict() for name, part in own.items()}
        encode(self.first, {}, dataclasses=self.dataclasses)
        self.device = parts.server_data.test.x.device
        self.identity = identity_of(plan, experiment)
        self.saved_at, self.cost = 0.0, 0.0

    def due(self, round: int, wall_seconds: float) -> bool:
        """Whether to save after `round`, the run having taken `wall_seconds` so far."""
        every = self.settings.every
        if every == "auto":
            return wall_seconds - self.saved_at >= max(LEAST_SECONDS, self.cost / LARGEST_SHARE)
        return every is not None and round % every == 0

    def save(self, begun: Checkpoint) -> None:
        """Write the checkpoint of a run since `begun`; the one before it is kept."""
        start = time.monotonic()
        checkpoint = replace(
            begun, state=self.simulation.state_dict(), lengths=self.folder.sync_records()
        )
        self.folder.write_bytes(
            NEWEST, pack(self.identity, vars(checkpoint), self.dataclasses), keep_as=PREVIOUS
        )
        self.saved_at, self.cost = self.simulation.wall_seconds, time.monotonic() - start

    def load(self, overwrite: bool) -> tuple[Checkpoint, list[Record]] | None:
        """The latest checkpoint that is sound, with the records of its rounds; damaged ones are set
        aside. `overwrite`: only one of a run by `overwrite=true` that was killed or asked to end.
        Raises `CheckpointError` if one cannot be read for another reason than damage, `ConfigError`
        if its identity is another."""
        if not overwrite:
            return self._latest()
        if (read_summary(self.folder.path) or {"status": "preempted"})["status"] not in CODES:
            return None
        with suppress(FedsimError):
            found = self._latest()
            return found if found is not None and found[0].overwrite else None
        return None

    def _latest(self) -> tuple[Checkpoint, list[Record]] | None:
        for path in (self.folder.path / NEWEST, self.folder.path / PREVIOUS):
            try:
                if path.exists():
                    return self._read(path)
            except ConfigError:
                raise
            except (
                OSError,
                MemoryError,
                RuntimeError,
            ) as error:  # of the machine; the file may be sound
                raise CheckpointError(
                    f"the run cannot go on: {path}: {error!r}; {START_ANEW}"
                ) from error
            except Exception as error:  # damage shows itself in many ways
                what = str(error) if isinstance(error, FedsimError) else repr(error)
                aside = path.with_suffix(f".damaged{path.suffix}").name
                self.folder.rename(path.name, aside)
                sys.stderr.write(f"fedsim: {path}: {what}; set aside as {aside}\n")
        return None

    def _read(self, path: Path) -> tuple[Checkpoint, list[Record]]:
        header, tensors = unpack(checkpoint_content(path))
        saved = header["identity"]
        found = differences(path, saved, self.identity)
        if problems := [p for p in found if not (self.settings.other_code and p.key == "code")]:
            raise ConfigError(problems)
        checkpoint = Checkpoint(**decode(header["content"], tensors, self.device, self.dataclasses))
        if wrong := self.fault(checkpoint):
            raise CheckpointError(f"is damaged: its {wrong} is of a wrong type or out of range")
        until = checkpoint.state["round"]
        if found:
            checkpoint.earlier_code.append({"code": saved["code"], "until_round": until})
            sys.stderr.write(
                f"fedsim: {path}: going on with other code of yours than up to round {until}\n"
            )
        records = read_metrics(self.folder.path, end=checkpoint.lengths.get(METRICS, 0))
        check_rounds(Rounds.of(records), self.config, {"status": "preempted"})
        if len(records) != until:
            raise CheckpointError(f"{METRICS} lacks rounds that it counts on")
        return checkpoint, [Record(**record) for record in records]

    def delete(self) -> None:
        """Delete them, as far as that can be done: the run is finished."""
        for name in (NEWEST, PREVIOUS):
            with suppress(OSError):
                (self.folder.path / name).unlink(missing_ok=True)

    def fault(self, checkpoint: Checkpoint) -> str | None:
        """The first of its fields that the run cannot go on from, or None."""
        state, parts, own = checkpoint.state, self.simulation.components, self.simulation.params
        population, covered, params = parts.population, state.get("covered"), state.get("params")
        num = population.num_clients
        holds = {
            "initial_accuracy": _within(checkpoint.initial_accuracy, 1),
            "started": _within(checkpoint.started),
            "lengths": all(
                isinstance(n, int) and _within(n, self._size(name))
                for name, n in checkpoint.lengths.items()
            ),
            "overwrite": isinstance(checkpoint.overwrite, bool),
            "earlier_code": isinstance(checkpoint.earlier_code, list),
            "state.round": isinstance(state.get("round"), int)
            and _within(state["round"], population.num_rounds),
            "state.started": isinstance(state.get("started"), bool),
            "state.wall_seconds": _within(state.get("wall_seconds")),
            "state.simulated_time": parts.simulated_clock is None
            or _within(state.get("simulated_time")),
            "state.covered": isinstance(covered, np.ndarray)
            and (covered.dtype, covered.shape) == (np.bool_, (num,)),
            "state.params": isinstance(params, dict)
            and params.keys() == own.keys()
            and all(_alike(params[name], value) for name, value in own.items()),
            **{
                f"state.{name}": fits(state.get(name), first, num)
                for name, first in self.first.items()
            },
        }
        return next((name for name, sound in holds.items() if not sound), None)

    def _size(self, name: str) -> int:
        path = self.folder.path / name
        return path.stat().st_size if path.is_file() else 0


def fits(state: Any, first: Mapping[str, Any], num_clients: int) -> bool:
    """Whether a part's state can be what became of `first`, that before round 1: the same names, a
    number for a number, an array for an array, with a row for each client where that has them. None
    may become anything."""
    return (
        isinstance(state, dict)
        and state.keys() == first.keys()
        and all(_fits(state[name], own, num_clients) for name, own in first.items())
    )


def _fits(value: Any, first: Any, num_clients: int) -> bool:
    if first is None or value is None:
        return first is None
    if isinstance(first, np.ndarray):
        rows = first.shape[:1] == (num_clients,)
        return isinstance(value, np.ndarray) and (not rows or value.shape[:1] == (num_clients,))
    numbers = int | float | np.number
    return isinstance(value, numbers if isinstance(first, numbers) else type(first))


def _alike(value: Any, own: Tensor) -> bool:
    alike = isinstance(value, Tensor) and (value.shape, value.dtype) == (own.shape, own.dtype)
    return alike and bool(value.isfinite().all())


def _within(value: Any, high: float = math.inf) -> bool:
    """Whether it is a finite number from 0 to `high`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 <= value <= high


def identity_of(plan: Plan, experiment: Experiment) -> dict[str, Any]:
    """All that must be the same for a checkpoint to be gone on from: what decides a result, to the
    last bit."""
    parts = experiment.simulation.components
    config = {k: v for k, v in plan.config.items() if k not in IRRELEVANT_KEYS}
    return {
        "format": FORMAT,
        "fedsim": fedsim.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": parts.server_data.test.x.device.type,
        "engine": parts.engine.backend.description.partition(",")[0],
        "dataset": experiment.data_source.get("fingerprint"),
        "partition": experiment.division.hash,
        "code": user_code(plan.config),
        "config": json_ready(config),
    }


def differences(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Problem]:
    """A problem for each key in which the identity of a checkpoint differs from that of the run. A
    key of the config that one side lacks is one that is null there: new keys are null where nothing
    changes."""
    before, after = dict(leaves(saved)), dict(leaves(now))
    found = []
    for key in sorted(key for key in {*before, *after} if before.get(key) != after.get(key)):
        told, remedy = f"is {before.get(key)!r} in {path}", REMEDIES.get(key, START_ANEW)
        found.append(Problem(key.removeprefix("config."), after.get(key), told, remedy))
    return found


def pack(
    identity: Mapping[str, Any],
    content: Mapping[str, Any],
    dataclasses: Mapping[str, type] | None = None,
) -> bytes:
    """The bytes of a checkpoint file. `dataclasses`: those that `content` may hold, by path."""
    tensors: dict[str, Tensor] = {}
    encoded = encode(dict(content), tensors, "checkpoint", dataclasses)
    own = {name: value.cpu().clone() for name, value in tensors.items()}
    data = safetensors.torch.save(
        own, {"checkpoint": json.dumps({"identity": identity, "content": encoded})}
    )
    return hashlib.sha256(data).digest() + data


def unpack(content: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON and the tensors of a checkpoint file. Raises `CheckpointError` if it is not as it
    was written."""
    return header_of(content), safetensors.torch.load(content[HASH_BYTES:])
