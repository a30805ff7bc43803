"""Whether a checkpoint's values are of the types, shapes and ranges that a run needs: a SHA-256 can be forged."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fedsim.record import Record
from fedsim.running.checkpoint import Checkpoint
from fedsim.simulation import Simulation
from fedsim.tracking.files import METRICS, TRACE


def fault(checkpoint: Checkpoint, records: Sequence[Record], simulation: Simulation) -> str | None:
    """The first of its fields that `simulation` cannot go on from, or None. What selector and aggregator keep, they
    check themselves."""
    state, lengths = checkpoint.state, checkpoint.lengths
    holds = {
        "initial_accuracy": _number(checkpoint.initial_accuracy, 1),
        "started": _number(checkpoint.started),
        "overwrite": isinstance(checkpoint.overwrite, bool),
        "earlier_code": isinstance(checkpoint.earlier_code, list)
        and all(isinstance(one, dict) for one in checkpoint.earlier_code),
        "lengths": isinstance(lengths, dict)
        and set(lengths) <= {METRICS, TRACE}
        and all(_count(value) for value in lengths.values()),
    }
    wrong = [name for name, sound in holds.items() if not sound]
    wrong += [f"state.{name}" for name in _wrong_in_state(state, simulation)]
    wrong += [f"round {number} of {METRICS}" for number, one in enumerate(records, 1) if not _sound(one, simulation)]
    return wrong[0] if wrong else None


def _wrong_in_state(state: Mapping[str, Any], simulation: Simulation) -> Iterator[str]:
    population, covered, params = simulation.components.population, state.get("covered"), state.get("params")
    holds = {
        "round": _count(state.get("round"), population.num_rounds),
        "started": isinstance(state.get("started", False), bool),
        "wall_seconds": _number(state.get("wall_seconds")),
        "simulated_time": simulation.components.simulated is None or _number(state.get("simulated_time")),
        "covered": isinstance(covered, np.ndarray)
        and covered.dtype == np.bool_
        and covered.shape == (population.num_clients,),
        "params": isinstance(params, dict)
        and params.keys() == simulation.params.keys()
        and all(_alike(params[name], own) for name, own in simulation.params.items()),
        "selector": isinstance(state.get("selector"), dict),
        "aggregator": isinstance(state.get("aggregator"), dict),
    }
    return (name for name, sound in holds.items() if not sound)


def _alike(value: Any, own: Tensor) -> bool:
    alike = isinstance(value, Tensor) and value.shape == own.shape and value.dtype == own.dtype
    return alike and bool(value.isfinite().all())


def _sound(record: Record, simulation: Simulation) -> bool:
    """Whether the numbers of a round are numbers, and its clients clients."""
    values = dict(vars(record))
    ids = [*_list(values.pop("selected")), *_list(values.pop("late") or [])]
    return all(_count(i, simulation.components.population.num_clients - 1) for i in ids) and all(
        value is None or _number(value) for value in values.values()
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _number(value: Any, high: float = math.inf) -> bool:
    """Whether it is a finite number from 0 to `high`."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and math.isfinite(value) and 0 <= value <= high


def _count(value: Any, high: float = math.inf) -> bool:
    return isinstance(value, int) and _number(value, high)
