"""The top level of a config: its keys, types and ranges once (here), its values once
(conf/config.yaml)."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from annotated_types import Ge, Interval, Le

from fedsim.config.build import construct
from fedsim.core.errors import ConfigError, Problem, rule
from fedsim.core.parameters import Count, CountOrZero, Problems, parameters

T = TypeVar("T")
MAX_CLIENTS = 1_000_000
"""More than any data set can be divided among; every selector keeps numbers for each."""
MAX_ROUNDS = 10_000_000
"""Each leaves a line of some hundred bytes, and is kept in memory."""
MAX_EPOCHS, MAX_STEPS = 100_000, 1_000_000
"""Of one client in one round; all its batches are drawn before it begins
(`fedsim.engine.schedule`)."""
MAX_NAME = 255
"""Bytes of a folder's name, on nearly all file systems."""


@parameters
class Settings:
    """Scalars of the run; each group is a mapping that `fedsim.config.build` turns into an
    object."""

    name: str
    seed: CountOrZero
    partition_seed: CountOrZero | None
    init_seed: CountOrZero | Literal["per_client"] | None
    num_rounds: Annotated[int, Ge(1), Le(MAX_ROUNDS)]
    num_clients: Annotated[int, Ge(1), Le(MAX_CLIENTS)]
    cohort_size: Count
    eval_every: Count
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
        name, n, k, device = self.name, self.num_clients, self.cohort_size, self.device
        characters = (
            f"1 to {MAX_NAME} bytes that can be printed, none of "
            + '/ \\ : * ? " < > | and no dot in front'
        )
        allowed = (
            name.isprintable() and not set(name) & set('/\\:*?"<>|') and not name.startswith(".")
        )
        sound = allowed and 1 <= len(name.encode()) <= MAX_NAME
        yield rule(sound, "name", name, "must be usable as a folder's name", characters)
        known = re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is not None
        number = "cuda:1 is the second GPU"
        yield rule(
            known, "device", device, "must be one of auto, cpu, cuda or cuda:<number>", number
        )
        remedy = "selector=full takes all clients whatever cohort_size is"
        yield rule(k <= n or n < 1, "cohort_size", k, f"must lie in [1, num_clients={n}]", remedy)


@parameters
class CheckpointSettings:
    """How often a run is saved: every so many rounds; `auto`: at most every 5 s and 1 % of the
    time; None: on a signal only. `other_code`: it goes on although the code of the user's classes
    has changed since."""

    every: Count | Literal["auto"] | None
    other_code: bool


@parameters
class LocalSettings:
    """Work of a selected client in a round. `steps`, where given, takes the place of `epochs`."""

    epochs: Annotated[int, Ge(1), Le(MAX_EPOCHS)] | None
    steps: Annotated[int, Ge(1), Le(MAX_STEPS)] | None
    batch_size: Count
    holdout_fraction: Annotated[float, Interval(ge=0, lt=1)]
    evaluate_on: Literal["train", "holdout"]

    def problems(self) -> Problems:
        one = (self.epochs is None) != (self.steps is None)
        both = "one of local.epochs and local.steps must be given"
        yield rule(one, "epochs", self.epochs, both, "set local.epochs=1")
        held_out = self.evaluate_on == "train" or self.holdout_fraction > 0
        remedy = "set local.holdout_fraction=0.2, say"
        yield rule(
            held_out, "evaluate_on", self.evaluate_on, "needs samples that are held out", remedy
        )


def built(values: Any, cls: type[T], key: str) -> T:
    """`cls` made of the mapping at `key`. Raises `ConfigError` with all problems."""
    if not isinstance(values, Mapping):
        remedy = f"set its keys one by one, as in {key}.{next(iter(get_type_hints(cls)))}=..."
        raise ConfigError([Problem(key, values, "must be a mapping of keys to values", remedy)])
    return construct(cls, values, key)


def with_one_amount_of_work(config: Mapping[str, Any]) -> dict[str, Any]:
    """`local.steps`, where given, takes the place of `local.epochs`; the record says which one was
    used."""
    local = config.get("local")
    if isinstance(local, Mapping) and local.get("steps") is not None:
        local = {**local, "epochs": None}
    return {**config, "local": local}
