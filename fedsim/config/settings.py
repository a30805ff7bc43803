"""The top level of a config: its keys and types once (here), its values once (conf/config.yaml)."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedsim.core.errors import at_least, at_most, between, check, rule

MAX_CLIENTS = 1_000_000
"""More than any data set can be divided among; every selector keeps numbers for each."""
MAX_ROUNDS = 10_000_000
"""Each leaves a line of some hundred bytes, and is kept in memory."""
MAX_EPOCHS, MAX_STEPS = 100_000, 1_000_000
"""Of one client in one round; all its batches are drawn before it begins (`fedsim.engine.schedule`)."""
MAX_NAME = 255
"""Bytes of a folder's name, on nearly all file systems."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Scalars of the run; each group is a mapping that `fedsim.config.build` turns into an object."""

    name: str
    seed: int
    partition_seed: int | None
    init_seed: int | Literal["per_client"] | None
    num_rounds: int
    num_clients: int
    cohort_size: int
    eval_every: int
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

    def __post_init__(self) -> None:
        n, k = self.num_clients, self.cohort_size
        check(
            rule(
                _is_folder_name(self.name),
                "name",
                self.name,
                "must be usable as a folder's name",
                f"1 to {MAX_NAME} bytes that can be printed, none of " + '/ \\ : * ? " < > | and no dot in front',
            ),
            rule(
                re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None,
                "device",
                self.device,
                "must be one of auto, cpu, cuda or cuda:<number>",
                "cuda:1 is the second GPU",
            ),
            at_least("seed", self.seed, 0),
            None if self.partition_seed is None else at_least("partition_seed", self.partition_seed, 0),
            at_least("init_seed", self.init_seed, 0) if isinstance(self.init_seed, int) else None,
            at_least("num_rounds", self.num_rounds, 1),
            at_most("num_rounds", self.num_rounds, MAX_ROUNDS),
            at_least("num_clients", n, 1),
            at_most("num_clients", n, MAX_CLIENTS),
            at_least("cohort_size", k, 1),
            rule(
                k <= n or n < 1,
                "cohort_size",
                k,
                f"must lie in [1, num_clients={n}]",
                "selector=full takes all clients whatever cohort_size is",
            ),
            at_least("eval_every", self.eval_every, 1),
        )


def _is_folder_name(name: str) -> bool:
    allowed = name.isprintable() and not set(name) & set('/\\:*?"<>|') and not name.startswith(".")
    return allowed and 1 <= len(name.encode()) <= MAX_NAME


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """How often a run is saved: every so many rounds; `auto`: at most every 5 s and 1 % of the time; None: on a signal
    only. `other_code`: it goes on although the code of the user's classes has changed since."""

    every: int | Literal["auto"] | None
    other_code: bool

    def __post_init__(self) -> None:
        check(at_least("every", self.every, 1, "null saves on a signal only") if isinstance(self.every, int) else None)


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """Work of a selected client in a round. `steps`, where given, takes the place of `epochs`."""

    epochs: int | None
    steps: int | None
    batch_size: int
    holdout_fraction: float
    evaluate_on: Literal["train", "holdout"]

    def __post_init__(self) -> None:
        check(
            rule(
                (self.epochs is None) != (self.steps is None),
                "epochs",
                self.epochs,
                "one of local.epochs and local.steps must be given",
                "set local.epochs=1",
            ),
            None if self.epochs is None else at_least("epochs", self.epochs, 1),
            None if self.epochs is None else at_most("epochs", self.epochs, MAX_EPOCHS),
            None if self.steps is None else at_least("steps", self.steps, 1),
            None if self.steps is None else at_most("steps", self.steps, MAX_STEPS),
            at_least("batch_size", self.batch_size, 1),
            between("holdout_fraction", self.holdout_fraction, 0, 1, open_high=True),
            rule(
                self.evaluate_on == "train" or self.holdout_fraction > 0,
                "evaluate_on",
                self.evaluate_on,
                "needs samples that are held out",
                "set local.holdout_fraction=0.2, say",
            ),
        )
