"""Checks of the values that a user's classes return in a round: selections, models and masks of
available clients.

The round loop (`fedsim.rounds.loop`) calls them. A fault is a text that follows the name of the
class in a message: "must return ...".
"""

import math
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Floats
from fedsim.core.errors import DivergedError, FedsimError
from fedsim.core.types import Cohort, Ids, Params, Selection


class SelectionError(FedsimError):
    """A selector returned no valid selection, or did something that it must not do."""


class AggregationError(FedsimError):
    """An aggregator returned no valid model, or a local algorithm no cohort; or one of them did
    something that it must not do."""


class AvailabilityError(FedsimError):
    """An availability model returned no valid mask of the clients."""


class GuardedTensors:
    """Tensors that fedsim lends to a user's class and still needs. The class must not modify them.

    `modified` names the tensors that it has modified all the same. The guard compares a tensor's
    version (`Tensor._version`), which counts torch's operations in place on it and on its views.
    Writes through `numpy()` or `data` are not counted.
    """

    def __init__(self, tensors: Params) -> None:
        self._lent: list[tuple[Params, dict[str, tuple[Tensor, int]]]] = []
        """Each lent mapping, and its tensors and their versions when it was lent."""
        self.add(tensors)

    def add(self, tensors: Params) -> None:
        """Guard these tensors, too."""
        versions = {name: (tensor, tensor._version) for name, tensor in tensors.items()}
        self._lent.append((tensors, versions))

    @property
    def modified(self) -> list[str]:
        """Names of tensors that have been modified, replaced, added or deleted."""
        names: dict[str, None] = {}  # a set that keeps its order
        for tensors, versions in self._lent:
            for name, (tensor, version) in versions.items():
                if tensors.get(name) is not tensor or tensor._version != version:
                    names[name] = None
            for name in tensors:
                if name not in versions:
                    names[name] = None
        return list(names)


def is_users(component: object) -> bool:
    """Return whether a component is of a class outside fedsim, which fedsim does not trust."""
    return not type(component).__module__.startswith("fedsim.")


def raise_fault(error: type[FedsimError], component: object, round: int, fault: str | None) -> None:
    """Raise an `error` that names the component, the round and the fault, if there is a fault."""
    if fault:
        raise error(f"round {round}: {type(component).__name__} {fault}")


@contextmanager
def no_global_draws(selector: object, round: int, method: str) -> Iterator[None]:
    """Raise `SelectionError` if a selector outside fedsim draws from a global generator in this
    context, in which fedsim calls its `method`.

    fedsim neither seeds nor saves such a generator, so the run could not be repeated or resumed.
    """
    if not is_users(selector):
        yield
        return
    before = _global_states()
    yield
    for library, state in _global_states().items():
        if state != before[library]:
            fault = (
                f"drew from {library}'s global generator in `{method}`, itself or in code that it "
                "calls; draw with the `rng` that `select` gets, so that the run can be repeated "
                "and resumed"
            )
            raise_fault(SelectionError, selector, round, fault)


def _global_states() -> dict[str, object]:
    """Return the state of the global generator of each library, on the CPU."""
    return {
        "NumPy": pickle.dumps(np.random.get_state(legacy=False)),  # noqa: NPY002
        "Python": random.getstate(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


def selection_fault(selection: object, available: Ids, expected: int | None) -> str | None:
    """Return the fault of a selection, or None.

    `available` are the ids of available clients. `expected` is the number of clients that must be
    selected; None: the selector decides it.
    """
    if not isinstance(selection, Selection):
        return f"must return a fedsim.core.types.Selection, not {_shown(selection)}"
    ids = selection.ids
    if not (isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype == np.int64):
        return f"must return ids as a one-dimensional int64 array, not {_shown(ids)}"
    if np.any(np.diff(ids) <= 0):
        return f"must return unique ids in ascending order, not {ids.tolist()}"
    unavailable = ids[~np.isin(ids, available)]
    if len(unavailable):
        return f"selected clients that are not available this round: {unavailable.tolist()}"
    if expected is not None and len(ids) != expected:
        remedy = "`adaptive = True` if the method decides the number"
        return f"must return {expected} clients, not {len(ids)} ({remedy})"
    weights = selection.weights
    if weights is None or (
        _is_numeric(weights) and weights.shape == ids.shape and np.isfinite(weights).all()
    ):
        return None
    return f"must return weights as an array with one finite number per id, not {_shown(weights)}"


def _updates_fault(modified: Sequence[str]) -> str | None:
    """Return the fault of a component that has modified tensors of the updates, or None."""
    if not modified:
        return None
    names = ", ".join(modified[:3])
    remedy = "compute new tensors, as in m / norm in place of m /= norm"
    return f"modified the updates' {names} in place, which others use, too; {remedy}"


def check_available(component: object, round: int, mask: object, num_clients: int) -> None:
    """Raise `AvailabilityError` unless `mask` is an array with a boolean for each client."""
    if isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (num_clients,):
        return
    fault = (
        f"must return a mask of booleans with one entry for each of the {num_clients} clients, "
        f"not {_shown(mask)}"
    )
    if _is_numeric(mask):
        fault += "; np.isin(np.arange(num_clients), ids) makes a mask from ids"
    raise_fault(AvailabilityError, component, round, fault)


def check_model(
    component: object, round: int, model: Params, like: Params, modified: Sequence[str]
) -> None:
    """Check the `model` that an aggregator returned.

    `like` is the present model, and `modified` are the names of modified tensors of the updates.
    Raises `AggregationError` if there are such tensors, or if `model` does not have the tensors of
    `like`. Raises `DivergedError` if the model holds a nan or infinity.
    """
    fault = _updates_fault(modified) or _model_fault(model, like)
    raise_fault(AggregationError, component, round, fault)
    require_finite(model, round)


def check_combined(component: object, round: int, cohort: object, modified: Sequence[str]) -> None:
    """Raise `AggregationError` if a local algorithm has returned no `cohort`, or has modified
    tensors of the updates, whose names are `modified`."""
    fault = _updates_fault(modified)
    if fault is None and not isinstance(cohort, Cohort):
        fault = f"must return the cohort for the aggregator from `combine`, not {_shown(cohort)}"
    raise_fault(AggregationError, component, round, fault)


def _model_fault(model: object, like: Params) -> str | None:
    """Return the fault of a model that lacks the tensors of `like`, or None."""
    if not isinstance(model, Mapping):
        return f"must return a model, that is, a dict of tensors by name, not {_shown(model)}"
    missing = [name for name in like if name not in model]
    unknown = [name for name in model if name not in like]
    if missing or unknown:
        lists = f"it lacks {missing[:3]}, and has {unknown[:3]} besides"
        return f"must return the tensors of `params`: {lists}"
    for name, old in like.items():
        new = model[name]
        if not isinstance(new, Tensor):
            return f"must return tensors: {name} is {_shown(new)}"
        if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
            kinds = f"{name} is {_kind(new)}, not {_kind(old)}"
            return f"must return tensors like those of `params`: {kinds}"
    return None


def _kind(tensor: Tensor) -> str:
    """Return shape, type and device of a tensor, for a message."""
    return f"{list(tensor.shape)} {tensor.dtype} {tensor.device}"


def _is_numeric(value: object) -> TypeGuard[Floats]:
    """Return whether `value` is an array of real numbers."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "iuf"


def _shown(value: object) -> str:
    """Return the type and value in at most 160 characters, for a message."""
    text = repr(value) if value is None else f"{type(value).__name__} {value!r}"
    return shorten(text, 160)


def require_finite(params: Params, round: int) -> None:
    """Raise `DivergedError` for a model with a nan or infinity."""
    values = list(params.values())
    # On a GPU, one sum over all tensors: it is finite only if all entries are, and the host waits
    # for the GPU once.
    if any(value.is_cuda for value in values):
        entries = torch.cat([value.flatten() for value in values])
        wide_enough = torch.promote_types(entries.dtype, torch.float32)
        is_finite = math.isfinite(entries.sum(dtype=wide_enough).item())
    else:
        # NumPy is faster here, but has no bfloat16.
        known = [value.float() if value.dtype == torch.bfloat16 else value for value in values]
        is_finite = all(np.isfinite(value.numpy()).all() for value in known)
    if not is_finite:
        raise DivergedError(
            f"round {round}: the aggregated model holds a nan or infinity: "
            "a lower optimizer.lr may help"
        )
