"""Hashes of whole runs with `engine=native`, to the last bit, for tests/test_exact.py.

uv run python -m tests.exact_rounds                 # record all again after a deliberate change
uv run python -m tests.exact_rounds FILE NAME...    # record the named runs in FILE
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.config.job import ComposedJob
from fedsim.core.types import Params
from fedsim.running.assembly import build
from tests.clocks import NEED_A_CLOCK
from tests.goldens import SELECTORS, fitted

FILE = Path(__file__).with_name("exact_rounds.json")
CHOICES = Path(__file__).parents[1] / "conf" / "selector"
SETTING = [
    "num_rounds=20",
    "num_clients=12",
    "cohort_size=4",
    "device=cpu",
    "engine=native",
    "partition=dirichlet_client",
    "optimizer.momentum=0.5",
    "local.epochs=1",
    "local.batch_size=24",
    "server.public_samples=50",
    "server.validation_fraction=0.1",
    "tracker.wandb.mode=disabled",
    "aggregator=uniform",
]
MLP = ["model=mlp", "model.hidden=[21,13]", "model.dropout=0.2"]
CONVOLUTIONS = ["model=logistic", "model._target_=tests.goldens.Convolutions"]
FEMNIST_CNN = ["model=femnist_cnn", "model.dropout=0.5"]
MORE = {
    "fedadam": ["selector=random", "aggregator=fedadam", "aggregator.weighting=uniform"],
    "fedavgm": [
        "selector=random",
        "aggregator=fedavgm",
        "aggregator.weighting=uniform",
        *CONVOLUTIONS,
    ],
    "femnist_cnn": ["selector=random", *FEMNIST_CNN],
    "gpfl full_gradient": [
        "selector=gpfl",
        "selector.local_direction=full_gradient",
        "selector.per_tensor=true",
    ],
    "clustered2 l1": ["selector=clustered2", "selector.distance=l1"],
    "pncs p3 semi": ["selector=pncs", "selector.p=3", "selector.similarity=semi"],
    "pncs p1.3": ["selector=pncs", "selector.p=1.3"],
    "pncs polar": ["selector=pncs", "selector.similarity=polar"],
    "oort tiers": ["selector=oort", "system=tiers"],
    "skewed": ["selector=delta", "partition=quantity_skew"],
}
"""Configs by name. All other names are those of selectors."""
REAL = ["dataset=fashion_mnist", "num_clients=100", "partition=shards", "local.steps=20"]
FASHION_MNIST = {
    "fashion_mnist mlp": ["selector=gpfl", "model=mlp", "model.dropout=0.2", *REAL],
    "fashion_mnist cnn": ["selector=power_of_choice", "model=cnn", *REAL],
}
"""Configs that need the data set in `FEDSIM_DATA`."""
KINDS = []
"""One choice for each class of selectors: the others differ from one of these only by values."""
for selector in SELECTORS:
    if "\n_target_:" in (CHOICES / f"{selector}.yaml").read_text(encoding="utf-8"):
        KINDS.append(selector)


def words_of(name: str) -> list[str]:
    """Return the overrides of a config, without those of `SETTING`."""
    words = (MORE | FASHION_MNIST).get(name, [f"selector={name}"])
    if not any(word.startswith("model=") for word in words):
        words = [*MLP, *words]
    return ["system=tiers", *words] if name in NEED_A_CLOCK else words


def jobs_of(names: Sequence[str]) -> dict[str, ComposedJob]:
    """Return the jobs of configs by name. Those of selectors are composed as a sweep, which is ten
    times faster than one by one."""
    jobs = {}
    with search_path():
        for with_clock in (False, True):
            selectors = []
            for name in names:
                if name in SELECTORS and (name in NEED_A_CLOCK) == with_clock:
                    selectors.append(name)
            if selectors:
                common = words_of(selectors[0])[:-1]
                words = [*SETTING, *common, f"selector={','.join(selectors)}"]
                composed = compose_jobs(words, multirun=True)
                jobs.update(zip(selectors, composed, strict=True))
        for name in names:
            if name not in SELECTORS:
                (jobs[name],) = compose_jobs([*SETTING, *words_of(name)], multirun=False)
    return jobs


def rounds(job: ComposedJob) -> dict[str, str]:
    """Run a job, and return hashes of the selections, accuracies, losses and models of all rounds.

    The models include the one before round 1. Returns nothing for a selector that is not marked
    exact.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(fitted(deepcopy(dict(job.config))) | {"output_dir": folder}, job.choices)
        simulation = build(plan).simulation
        if not simulation.components.selector.exact:
            return {}
        models = [digest(simulation.params)]
        records = []
        for record in simulation:
            records.append(record.as_dict())
            models.append(digest(simulation.params))
    values: dict[str, list[Any]] = {}
    for key in ("selected", "test_accuracy", "test_loss", "train_loss"):
        values[key] = [record[key] for record in records]
    values["model"] = models
    hashes = {}
    for key, items in values.items():
        hashes[key] = hashlib.sha256(json.dumps(items).encode()).hexdigest()[:16]
    return hashes


def digest(params: Params) -> str:
    content = b"".join(value.numpy().tobytes() for value in params.values())
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    file, *names = sys.argv[1:] or [FILE, *SELECTORS, *MORE, *FASHION_MNIST]
    jobs = jobs_of(names)
    recorded = {name: rounds(jobs[name]) for name in names}
    Path(file).write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
