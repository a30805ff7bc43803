"""Results to the last bit, recorded before a change of structure and compared after it.

    uv run python -m tests.goldens record      # before
    uv run python -m tests.goldens compare     # after

tests/test_goldens.py compares a part of the cases by default, and all of them with -m slow.

A case is a selector, a setting (model, optimiser, partition of the digits) and a backend: 12
rounds, hashed into ids, ledger and parameters. Sums of floating-point numbers depend on the
processor and on the versions of torch and numpy, so records carry both, and are compared only where
they were made.
"""

import copy
import hashlib
import json
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.config.job import ComposedJob
from fedsim.running.assembly import build
from tests.clocks import NEED_A_CLOCK

FILE = Path(__file__).parent / "goldens.json"
SELECTORS = sorted(p.stem for p in (Path(__file__).parents[1] / "conf" / "selector").glob("*.yaml"))
BACKENDS = ("batched", "sequential", "native")
COMMON = [
    *(
        "num_clients=8",
        "cohort_size=3",
        "num_rounds=12",
        "eval_every=4",
        "device=cpu",
        "local.epochs=1",
    ),
    *("local.batch_size=32", "server.public_samples=40", "server.validation_fraction=0.1"),
    *("tracker.wandb.mode=disabled", "aggregator=uniform"),
]
RAGGED = ["partition=dirichlet_client", "model.dropout=0.3", "optimizer.momentum=0.9"]
SETTINGS = {
    "mlp": ["model=mlp", "model.hidden=[16,8]", *RAGGED],
    "convolutions": [
        "model=logistic",
        "model._target_=tests.goldens.Convolutions",
        "optimizer.weight_decay=0.01",
    ],
    "norms": [
        *("model=logistic", "model._target_=tests.goldens.Norms", "optimizer=adam"),
        *("aggregator=fedadam", "aggregator.weighting=uniform"),
    ],
}
FEW = ("full", "gpfl", "random")
"""The selectors of the setting `norms`."""


class Convolutions(nn.Sequential):
    """A chain that all backends train."""

    def __init__(self, shape: Sequence[int], num_classes: int) -> None:
        layers = (
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, num_classes),
        )
        super().__init__(*layers)


class Norms(nn.Sequential):
    """No chain: BatchNorm and a dropout at a place of its own."""

    def __init__(self, shape: Sequence[int], num_classes: int) -> None:
        first = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(0.2), nn.Flatten()
        super().__init__(*first, nn.Linear(144, num_classes))


def environment() -> dict[str, str]:
    """What the last bits depend on."""
    processor = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return {
        "processor": processor.partition(":")[2].strip() or platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "compiler": str(shutil.which("cc")),
    }


@cache
def compositions(setting: str) -> dict[str, ComposedJob]:
    """One job for each selector; the backend is put in later."""
    names = SELECTORS if setting != "norms" else FEW
    by_clock = {
        "none": [n for n in names if n not in NEED_A_CLOCK],
        "tiers": [n for n in names if n in NEED_A_CLOCK],
    }
    found = {}
    with search_path():
        for clock, some in by_clock.items():
            words = [f"selector={','.join(some)}", f"system={clock}", *COMMON, *SETTINGS[setting]]
            found |= {
                job.choices["selector"]: job
                for job in (compose_jobs(words, multirun=True) if some else [])
            }
    return {name: found[name] for name in names}


@cache
def engine_nodes() -> dict[str, Any]:
    with search_path():
        jobs = {b: compose_jobs([f"engine={b}"], multirun=False)[0] for b in BACKENDS}
    return {b: job.config["engine"] for b, job in jobs.items()}


def fitted(config: dict[str, Any]) -> dict[str, Any]:
    """Selectors' values that a population of eight and these models would refuse, or that take
    long."""
    node = config["selector"]
    for key, value in {"num_candidates": 5, "count": 4}.items():
        if node.get(key) is not None:
            node[key] = value
    if node.get("layers") not in (None, "each"):
        node["layers"] = None
    node |= {key: 3 for key in ("warmup", "cover_rounds") if key in node}
    if "first_steps" in node:
        node |= {"interval": 2, "first_steps": 20, "refit_steps": 5, "warmup_steps": 5}
    return config


def outcome(config: dict[str, Any], choices: dict[str, str]) -> dict[str, str]:
    """Hashes of what a run selects, what that costs, and the model that comes out."""
    experiment = build(make_plan(config, choices))
    simulation = experiment.simulation
    records = [record.as_dict() for record in simulation]
    costs = [
        {k: v for k, v in r.items() if not re.search("seconds|loss|^selected$|^learning_rate$", k)}
        for r in records
    ]
    model = b"".join(value.contiguous().numpy().tobytes() for value in simulation.params.values())
    return {
        "ids": digest(json.dumps([r["selected"] for r in records]).encode()),
        "ledger": digest(json.dumps(costs, sort_keys=True).encode()),
        "parameters": digest(model),
        "train_loss": repr(
            float(
                np.nanmean([r["train_loss"] for r in records if r["train_loss"] is not None] or [0])
            )
        ),
    }


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def outcomes(setting: str, backend: str, share: int = 1) -> Iterator[tuple[str, dict[str, str]]]:
    """Cases of a setting and a backend by name: all, or those of every `share`-th selector, of each
    backend others."""
    torch.set_num_threads(1)
    number = list(SETTINGS).index(setting) * len(BACKENDS) + BACKENDS.index(backend)
    first = number % share
    for selector, job in list(compositions(setting).items())[first::share]:
        config = fitted(copy.deepcopy(job.config))
        config["engine"] = engine_nodes()[backend]
        with tempfile.TemporaryDirectory() as folder:
            config["output_dir"] = folder
            try:
                yield f"{selector}/{setting}/{backend}", outcome(config, job.choices)
            except Exception as error:  # which is an outcome, too
                yield (
                    f"{selector}/{setting}/{backend}",
                    {"error": f"{type(error).__name__}: {error}"},
                )


def differences(recorded: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """In words. Losses may differ by rounding, all else not at all; cases that were not recorded
    are no difference."""
    lines = [f"{name}: not there any more" for name in recorded.keys() - found.keys()]
    for name in recorded.keys() & found.keys():
        before, now = recorded[name], found[name]
        lines += [
            f"{name}: {key} differs"
            for key in now
            if key != "train_loss" and before.get(key) != now[key]
        ]
        if (
            "train_loss" in now
            and abs(float(before.get("train_loss", "nan")) - float(now["train_loss"])) > 1e-12
        ):
            lines.append(f"{name}: train_loss {before.get('train_loss')} -> {now['train_loss']}")
    return sorted(lines)


def main() -> None:
    found = {
        name: case for setting in SETTINGS for b in BACKENDS for name, case in outcomes(setting, b)
    }
    if sys.argv[1:] == ["record"]:
        text = json.dumps({"environment": environment(), "cases": found}, indent=1)
        FILE.write_text(text + "\n", encoding="utf-8")
        sys.stdout.write(
            f"{len(found)} cases recorded, {sum('error' in c for c in found.values())} of them errors\n"
        )
        return
    lines = differences(json.loads(FILE.read_text(encoding="utf-8"))["cases"], found)
    sys.stdout.write(("\n".join(lines) or f"{len(found)} cases, all equal") + "\n")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
