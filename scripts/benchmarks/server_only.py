"""Train the selection benchmark's network on the server's labelled samples, without any client.

    FEDSIM_DATA=path uv run python scripts/benchmark.py server-only

Selectors such as gpfl judge models on labelled samples at the server, 5 % of the training set. This
script prints the accuracy that these samples give by themselves. Network and optimiser are the
same. The server makes as many steps as a client that takes part in every round. The final accuracy
is the mean of the last 11 of 200 evaluations.
"""

import argparse
from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy

from fedsim import compose
from fedsim.core.record import mean_of_last
from fedsim.running.assembly import build

OVERRIDES = ("preset=selection_benchmark", "cell=fmnist_iid", "selector=gpfl", "tracker=files_only")


def train_on_the_server(overrides: Sequence[str], seed: int) -> tuple[float, int]:
    """Return the final test accuracy in per cent, and the number of labelled samples."""
    [plan] = compose([*overrides, f"seed={seed}"])
    simulation = build(plan).simulation
    server_data = simulation.components.server_data
    labelled, test = server_data.validation, server_data.test
    assert labelled is not None
    model = simulation.components.engine.workload.model
    model.load_state_dict(simulation.params)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=plan.config["optimizer"]["lr"],
        weight_decay=plan.config["optimizer"]["weight_decay"],
    )
    generator = torch.Generator().manual_seed(seed)
    accuracies: list[float | None] = []
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
    final = mean_of_last(accuracies)
    assert final is not None
    return 100 * final, len(labelled.y)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    for seed in range(parser.parse_args().seeds):
        accuracy, count = train_on_the_server(OVERRIDES, seed)
        print(f"seed {seed}: {count:,} labelled samples, final accuracy {accuracy:.1f} %")


if __name__ == "__main__":
    main()
