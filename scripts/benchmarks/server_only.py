"""Train the selection benchmark's network on the server's own labelled samples, without any client.

    FEDSIM_DATA=path uv run python scripts/benchmark.py server-only

Selectors such as gpfl judge models on labelled samples at the server, 5 % of the training set. This
is the accuracy that these samples give by themselves: the same network and optimiser, as many steps
as one client would make if it took part in every round, and the mean test accuracy of the last 11
of 200 evaluations.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.running.assembly import build

WINDOW = 11


def train_on_the_server(overrides: Sequence[str], seed: int) -> tuple[float, int]:
    """Return the final test accuracy in per cent, and the number of labelled samples."""
    with search_path():
        (job,) = compose_jobs([*overrides, f"seed={seed}"], multirun=False)
    plan = make_plan(job.config, job.choices)
    simulation = build(plan).simulation
    components = simulation.components
    labelled, test = components.server_data.validation, components.server_data.test
    assert labelled is not None
    model = components.engine.workload.model
    model.load_state_dict(simulation.params)
    settings = plan.config["optimizer"]
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings["lr"], weight_decay=settings["weight_decay"]
    )
    generator = torch.Generator().manual_seed(seed)
    accuracies = []
    for _ in range(plan.settings.num_rounds):
        model.train()
        for _ in range(plan.local.steps or 1):
            batch = torch.randint(len(labelled.y), (plan.local.batch_size,), generator=generator)
            optimizer.zero_grad()
            cross_entropy(model(labelled.x[batch]), labelled.y[batch]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            hits = model(test.x).argmax(1) == test.y
        accuracies.append(hits.double().mean().item())
    return 100 * float(np.mean(accuracies[-WINDOW:])), len(labelled.y)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args(arguments)
    overrides = [
        "preset=selection_benchmark",
        "cell=fmnist_iid",
        "selector=gpfl",
        "tracker=files_only",
    ]
    for seed in range(options.seeds):
        accuracy, count = train_on_the_server(overrides, seed)
        print(
            f"seed {seed}: {count:,} labelled samples at the server, final accuracy {accuracy:.1f} %"
        )


if __name__ == "__main__":
    main()
