"""The keys at the top level of a config, with their types and ranges.

`fedsim.config.plan` reads the settings of a run by these classes. Their default values stand in
conf/config.yaml and nowhere else, together with a description of each key.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from annotated_types import Ge, Interval, Le

from fedsim.config.build import construct
from fedsim.core.errors import ConfigError, Problem, rule
from fedsim.core.parameters import Count, CountOrZero, Problems, Share, parameters

T = TypeVar("T")
MAX_CLIENTS = 1_000_000
"""No data set can be divided among more clients. Every selector keeps numbers for each client."""
MAX_ROUNDS = 10_000_000
"""Each round leaves a record of some hundred bytes, which is kept in memory."""
MAX_EPOCHS = 100_000
"""Local epochs of a client in a round. Its batches are all drawn before it begins to train."""
MAX_STEPS = 1_000_000
"""Local steps of a client in a round, limited for the same reason."""
MAX_NAME = 255
"""Bytes of a folder's name on nearly all file systems."""
FORBIDDEN = '/\\:*?"<>|'
"""Characters that a folder's name must not have on some file system."""


@parameters
class RunSettings:
    """The scalars of a run, and one mapping for each config group, of which fedsim.config.build
    makes an object."""

    name: str
    seed: CountOrZero
    partition_seed: CountOrZero | None
    init_seed: CountOrZero | Literal["per_client"] | None
    num_rounds: Annotated[int, Ge(1), Le(MAX_ROUNDS)]
    num_clients: Annotated[int, Ge(1), Le(MAX_CLIENTS)]
    cohort_size: Count
    eval_every: Count
    final_window: Count | None = None
    stop_at: Annotated[float, Interval(ge=0, le=1)] | None = None
    secure_aggregation: bool | None = None
    test_on: Literal["holdout"] | None = None
    client_accuracy: Literal["labels", "test", "holdout", "train"] | None = None
    device: str
    data_dir: Path | None
    cache_dir: Path | None
    output_dir: Path
    overwrite: bool
    checkpoint: dict[str, Any]
    local: dict[str, Any]
    server: dict[str, Any]
    dataset: dict[str, Any]
    partition: dict[str, Any]
    availability: dict[str, Any]
    model: dict[str, Any]
    optimizer: dict[str, Any]
    selector: dict[str, Any]
    aggregator: dict[str, Any]
    engine: dict[str, Any]
    tracker: dict[str, Any]
    system: dict[str, Any] | None = None
    clients: dict[str, Any] | None = None
    local_algorithm: dict[str, Any] | None = None

    def problems(self) -> Problems:
        """Yield a problem for a name, a device or a cohort size that cannot be used."""
        name = self.name
        is_allowed = name.isprintable() and not name.startswith(".")
        is_short = 1 <= len(name.encode()) <= MAX_NAME
        yield rule(
            is_allowed and is_short and set(FORBIDDEN).isdisjoint(name),
            "name",
            name,
            "must be usable as a folder's name",
            f"1 to {MAX_NAME} bytes that can be printed, none of {' '.join(FORBIDDEN)} "
            "and no dot in front",
        )
        yield rule(
            re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None,
            "device",
            self.device,
            "must be one of auto, cpu, cuda or cuda:<number>",
            "cuda:1 is the second GPU",
        )
        yield rule(
            self.cohort_size <= self.num_clients or self.num_clients < 1,
            "cohort_size",
            self.cohort_size,
            f"must lie in [1, num_clients={self.num_clients}]",
            "selector=full takes all clients whatever cohort_size is",
        )


@parameters
class CheckpointSettings:
    """When a run is saved, and whether it may resume with other code.

    `every`: the rounds between two checkpoints; `auto` saves at most every 5 s and spends at most 1
    % of the time on it; None saves on a signal only. `other_code`: resume although the code of the
    user's classes has changed since the checkpoint.
    """

    every: Count | Literal["auto"] | None
    other_code: bool


@parameters
class LocalSettings:
    """The work of a selected client in a round: `epochs` over its data, or a number of local
    `steps`. One of the two is None.

    `holdout_fraction` is the share of a client's samples on which it does not train. `evaluate_on`
    says on which of its samples a client reports losses and accuracies. `drop_out` is the
    probability that a selected client is lost in a round. `partial_rate` and `partial_draw` are
    those of `LocalWork`. None stands for 0, and for `round`.
    """

    epochs: Annotated[int, Ge(1), Le(MAX_EPOCHS)] | None
    steps: Annotated[int, Ge(1), Le(MAX_STEPS)] | None
    batch_size: Count
    holdout_fraction: Annotated[float, Interval(ge=0, lt=1)]
    evaluate_on: Literal["train", "holdout"]
    drop_out: Share | None = None
    partial_rate: Share | None = None
    partial_draw: Literal["round", "client"] | None = None

    def problems(self) -> Problems:
        """Yield a problem unless one of epochs and steps is given, and held-out samples if
        needed."""
        yield rule(
            (self.epochs is None) != (self.steps is None),
            "epochs",
            self.epochs,
            "one of local.epochs and local.steps must be given",
            "set local.epochs=1",
        )
        yield rule(
            self.evaluate_on == "train" or self.holdout_fraction > 0,
            "evaluate_on",
            self.evaluate_on,
            "needs samples that are held out",
            "set local.holdout_fraction=0.2, say",
        )
        yield rule(
            self.partial_draw is None or self.partial_rate is not None,
            "partial_draw",
            self.partial_draw,
            "needs a probability of partial work",
            "set local.partial_rate=0.5, say",
        )


def settings_from(values: Any, cls: type[T], key: str) -> T:
    """Return an object of `cls` with the `values` of the mapping at `key`. Raises `ConfigError`."""
    if not isinstance(values, Mapping):
        example = next(iter(get_type_hints(cls)))
        remedy = f"set its keys one by one, as in {key}.{example}=..."
        raise ConfigError([Problem(key, values, "must be a mapping of keys to values", remedy)])
    return construct(cls, values, key)


def with_one_amount_of_work(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `config` in which `local.steps`, if given, has replaced `local.epochs`.

    The run's config.yaml then shows which of the two was used.
    """
    local = config.get("local")
    if isinstance(local, Mapping) and local.get("steps") is not None:
        local = dict(local, epochs=None)
    return dict(config, local=local)
