import math
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Floats
from fedsim.core.errors import DivergedError, FedsimError
from fedsim.core.types import Cohort, Ids, Params, Selection


class SelectionError(FedsimError):
    """A selector returned what is not a selection, or did what it must not do."""


class AggregationError(FedsimError):
    """An aggregator returned what is not a model, or did what it must not do."""


class AvailabilityError(FedsimError):
    """An availability model returned what is not a mask of the clients."""


def refuse(kind: type[FedsimError], part: object, round: int, fault: str | None) -> None:
    """Raise an error that says which part it was, in which round, and what was wrong, if
    anything."""
    if fault:
        raise kind(f"round {round}: {type(part).__name__} {fault}")


def selection_fault(selection: object, available: Ids, expected: int | None) -> str | None:
    """What is wrong with a selection, in words, or None. `expected` is the number of clients, None
    for adaptive."""
    if not isinstance(selection, Selection):
        return f"must return a fedsim.core.types.Selection, not {_shown(selection)}"
    ids, weights = selection.ids, selection.weights
    if not (isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype == np.int64):
        return f"must return ids as a one-dimensional int64 array, not {_shown(ids)}"
    if np.any(np.diff(ids) <= 0):
        return f"must return unique ids in ascending order, not {ids.tolist()}"
    strangers = ids[~np.isin(ids, available)]
    if len(strangers):
        return f"selected clients that are not available this round: {strangers.tolist()}"
    if expected is not None and len(ids) != expected:
        return f"must return {expected} clients, not {len(ids)} (`adaptive = True` if the method decides the number)"
    if weights is not None and not (
        _is_numeric(weights) and weights.shape == ids.shape and np.isfinite(weights).all()
    ):
        return (
            f"must return weights as an array with one finite number per id, not {_shown(weights)}"
        )
    return None


def check_unmodified(
    part: object, round: int, model: Sequence[str], updates: Sequence[str] = ()
) -> None:
    """Raise `SelectionError` if a selector has modified these tensors of the model or of the
    clients' updates."""
    fault = _updates_fault(updates)
    if model:
        names = ", ".join(model[:3])
        copy = "{name: value.clone() for name, value in clients.params.items()}"
        fault = f"modified the model's {names} in place; work on a copy: {copy}"
    refuse(SelectionError, part, round, fault)


def _updates_fault(modified: Sequence[str]) -> str | None:
    names, remedy = (
        ", ".join(modified[:3]),
        "compute new tensors, as in m / norm in place of m /= norm",
    )
    return (
        f"modified the updates' {names} in place, which others use, too; {remedy}"
        if modified
        else None
    )


def check_available(part: object, round: int, mask: object, num_clients: int) -> None:
    """Raise `AvailabilityError` unless the mask that an availability model returned is one."""
    if isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (num_clients,):
        return
    rule = f"must return a mask of booleans with one entry for each of the {num_clients} clients, not {_shown(mask)}"
    hint = "; np.isin(np.arange(num_clients), ids) makes one of ids" if _is_numeric(mask) else ""
    refuse(AvailabilityError, part, round, rule + hint)


def check_model(
    part: object, round: int, model: Params, like: Params, modified: Sequence[str]
) -> None:
    """Raise `AggregationError` unless an aggregator has left the updates as they were and returned
    a model with the tensors of the one before, and `DivergedError` where that holds a nan or
    infinity; on a GPU there is one answer to wait for."""
    refuse(AggregationError, part, round, _updates_fault(modified) or _model_fault(model, like))
    require_finite(model, round)


def check_combined(part: object, round: int, cohort: object, modified: Sequence[str]) -> None:
    """Raise `AggregationError` unless a local algorithm has left the updates as they were and
    returned a cohort."""
    fault = _updates_fault(modified)
    if fault is None and not isinstance(cohort, Cohort):
        fault = f"must return the cohort for the aggregator from `combine`, not {_shown(cohort)}"
    refuse(AggregationError, part, round, fault)


def _model_fault(model: object, like: Params) -> str | None:
    if not isinstance(model, Mapping):
        return f"must return a model, that is, a dict of tensors by name, not {_shown(model)}"
    if model.keys() != like.keys():
        lacks, more = [n for n in like if n not in model], [n for n in model if n not in like]
        return (
            f"must return the tensors of `params`: it lacks {lacks[:3]}, and has {more[:3]} besides"
        )
    for name, old in like.items():
        new = model[name]
        if not isinstance(new, Tensor):
            return f"must return tensors: {name} is {_shown(new)}"
        if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
            found, wanted = (f"{list(t.shape)} {t.dtype} {t.device}" for t in (new, old))
            return f"must return tensors like those of `params`: {name} is {found}, not {wanted}"
    return None


def _is_numeric(value: object) -> TypeGuard[Floats]:
    return isinstance(value, np.ndarray) and value.dtype.kind in "iuf"


def _shown(value: object) -> str:
    text = repr(value) if value is None else f"{type(value).__name__} {value!r}"
    return shorten(text, 160)


def require_finite(params: Params, t: int) -> None:
    """Raise `DivergedError` for a model with nan or infinity; on a GPU there is one answer to wait
    for."""
    values = list(params.values())
    if any(p.is_cuda for p in values):
        finite = math.isfinite(torch.cat([p.flatten() for p in values]).sum().item())
    else:
        finite = all(np.isfinite(p.numpy()).all() for p in values)
    if not finite:
        raise DivergedError(
            f"round {t}: the aggregated model holds a nan or infinity: a lower optimizer.lr may help"
        )
