"""What is wrong with a model's values, told before its data set is loaded."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from fedsim.config.build import construct, inspect_node, resolve
from fedsim.config.stand_ins import told_whatever
from fedsim.data.base import TokenShape
from fedsim.errors import ConfigError, Problem, check

Form = tuple[tuple[int, ...], int]
"""The shape of an input, and the number of classes."""
MADE_UP: Sequence[Form] = (((8,), 2), ((1, 28, 28), 10), ((3, 32, 32), 100), (TokenShape(80, 90), 90))
"""Forms in the place of one that only files tell: features, grey and colour images, texts."""
SHIPPED = "fedsim.models."

_found: dict[tuple[object, str, str], list[Problem]] = {}
"""By class, values and form: the jobs of a sweep have few models."""


def check_model(node: Any, form: Form | None) -> None:
    """Raise `ConfigError` for a model's target, for names and types, and for what its constructor says of its values.

    `form`: that of the data set, None where it is not known before files are read. The constructor is called on torch's
    meta device for a model of this package, so that no weights are made. A class of the user's is built as a run builds
    it, since it may not know that device, and only with a `form`; one that has an `extractor`, and a function, may read
    files of weights and are called by the run alone.
    """
    cls = resolve(node, nn.Module, "model")
    shipped = cls.__module__.startswith(SHIPPED)
    forms = [form] if form is not None else MADE_UP if shipped else []
    if not forms or not (shipped or (isinstance(cls, type) and not hasattr(cls, "extractor"))):
        inspect_node(node, nn.Module, "model")
        return
    values = {k: v for k, v in node.items() if k != "_target_"}
    found = [_problems(cls, values, one, shipped) for one in forms]
    if form is None:  # a problem of no value is that the model does not fit the form
        found = [problems for problems in found if all(p.key != "model" for p in problems)]
    check(*(told_whatever(found) if found else ()))


def _problems(cls: Any, values: Mapping[str, Any], form: Form, shipped: bool) -> list[Problem]:
    key = (cls, json.dumps(values, sort_keys=True, default=lambda v: [type(v).__name__, repr(v)]), repr(form))
    if key not in _found:
        _found[key] = []
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta") if shipped else nullcontext():
                construct(cls, values, "model", [form])
        except ConfigError as error:
            _found[key] = list(error.problems)
    return _found[key]
