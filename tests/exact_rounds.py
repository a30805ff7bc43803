"""Rounds of every selector with `engine=native`, to the last bit, in a process of its own environment.

    uv run python -m tests.exact_rounds FILE [SELECTOR ...]

writes what each selector's rounds came to, as JSON; tests/test_exact.py compares what different processors' instruction
sets give.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.plan import make_plan
from fedsim.running.assembly import build
from tests.clocks import NEED_A_CLOCK
from tests.goldens import SELECTORS, fitted

SETTING = [
    "num_rounds=20",
    "device=cpu",
    "engine=native",
    "partition=dirichlet_client",
    "model=mlp",
    "model.hidden=[21,13]",
    "model.dropout=0.2",
    "optimizer.momentum=0.5",
    "optimizer.lr=0.05",
    "local.epochs=1",
    "local.batch_size=24",
    "server.public_samples=50",
    "server.validation_fraction=0.1",
    "tracker.wandb.mode=disabled",
]


def rounds(selector: str, *words: str) -> dict[str, list[Any]]:
    """By name, what each round came to: selections, accuracies, losses, and hashes of the model."""
    more = ["system=tiers"] if selector in NEED_A_CLOCK else []
    with search_path():
        (job,) = compose_jobs([f"selector={selector}", *SETTING, *more, *words], multirun=False)
    with tempfile.TemporaryDirectory() as folder:
        simulation = build(make_plan(fitted(dict(job.config)) | {"output_dir": folder}, job.choices)).simulation
        models, records = [digest(simulation.params)], []
        for record in simulation:
            records.append(record.as_dict())
            models.append(digest(simulation.params))
    names = ("selected", "test_accuracy", "test_loss", "train_loss")
    return {name: [record[name] for record in records] for name in names} | {"model": models}


def digest(params: Any) -> str:
    return hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in params.values())).hexdigest()[:16]


if __name__ == "__main__":
    found = {selector: rounds(selector) for selector in sys.argv[2:] or SELECTORS}
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
