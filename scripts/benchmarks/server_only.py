"""Train the benchmark's model on the server's labelled samples, without any client.

    FEDSIM_DATA=path uv run python scripts/benchmark.py server-only                     # version 0
    FEDSIM_DATA=path uv run python scripts/benchmark.py server-only --settings v1_watch_10

Selectors such as gpfl judge models on labelled samples at the server, 5 % of the training set. This
script measures the accuracy that these samples give by themselves. Network, optimiser and schedule
are the same. The server makes as many steps as a client that takes part in every round.

- Without `--settings` it prints the accuracies in fmnist_iid of version 0, at the rate there.
- In settings of version 1 it has the benchmark's rates, schedules, rounds and seeds. The server has
  no other labels than its own. So rates are chosen by the accuracy on a tenth of them, on which it
  does not train then, at the two seeds of tuning. The results are written to
  docs/measured/benchmark_v1_server.csv. Settings with the same data and model have the same ones.
"""

import argparse
import json
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from fedsim import compose
from fedsim.benchmark.rules import HORIZONS, PRESET, RATES, SCHEDULES, SEEDS, TUNING_SEEDS
from fedsim.benchmark.study import regime_words
from fedsim.core.arrays import Floats
from fedsim.core.record import FINAL_WINDOW
from fedsim.core.types import Stack
from fedsim.running.assembly import build
from scripts.benchmarks.processes import ROOT

VERSION_0 = ("preset=selection_benchmark", "cell=fmnist_iid", "selector=gpfl", "tracker=files_only")
FILE = ROOT / "docs" / "measured" / "benchmark_v1_server.csv"
HELD_OUT = 0.1
"""Share of the labelled samples on which a rate is judged."""


def train_on_the_server(
    overrides: Sequence[str], seed: int, rates: Floats, held_out: float = 0.0
) -> Floats:
    """Return the final accuracies [M] of M models in per cent; that of a guess if one diverged.

    `rates` [rounds, M] has their learning rates. They see the same batches. Accuracies are measured
    on the share `held_out` of the labelled samples, or on the test set if that is 0.
    """
    [plan] = compose([*overrides, f"seed={seed}"])
    simulation = build(plan).simulation
    components = simulation.components
    labelled, test = components.server_data.validation, components.server_data.test
    assert labelled is not None
    x, y, test_x, test_y = labelled.x, labelled.y, test.x, test.y
    generator = torch.Generator().manual_seed(seed)
    if held_out:
        order = torch.randperm(len(y), generator=generator)
        judged, trained = order.tensor_split([round(held_out * len(y))])
        test_x, test_y = x[judged], y[judged]
        x, y = x[trained], y[trained]
    model = components.engine.workload.model
    num_models = rates.shape[1]
    params = {}
    for name, value in simulation.params.items():
        params[name] = value.expand(num_models, *value.shape).clone()

    def outputs(params: Stack, x: Tensor) -> Tensor:
        return functional_call(model, params, (x,))

    def loss(params: Stack, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(outputs(params, x), y)

    gradients = vmap(grad(loss), in_dims=(0, None, None))
    weight_decay = plan.config["optimizer"]["weight_decay"]
    accuracies: list[Tensor] = []
    for number, lr in enumerate(torch.from_numpy(rates).float(), 1):
        for _ in range(plan.local.steps or 1):
            batch = torch.randint(len(y), (plan.local.batch_size,), generator=generator)
            for name, slope in gradients(params, x[batch], y[batch]).items():
                value = params[name]
                steps = lr.view(-1, *[1] * (value.dim() - 1))
                value -= steps * (slope + weight_decay * value)
        is_last = number > len(rates) - (plan.settings.final_window or FINAL_WINDOW)
        if is_last and number % plan.settings.eval_every == 0:
            predictions = vmap(outputs, in_dims=(0, None))(params, test_x).argmax(-1)
            accuracies.append((predictions == test_y).double().mean(1))
    finals = 100 * torch.stack(accuracies).mean(0)
    guess = 100 / components.engine.workload.data.num_classes
    for value in params.values():
        finals[~value.flatten(1).isfinite().all(1)] = guess
    return finals.numpy()


def factors(words: Sequence[str], num_rounds: int) -> Floats:
    """Return the factors on the learning rate [rounds, schedules] of all schedules."""
    columns = []
    for schedule in SCHEDULES:
        [plan] = compose([*words, *regime_words(schedule, num_rounds), "optimizer.lr=1"])
        rate = build(plan).simulation.components.learning_rate
        columns.append([rate(number) for number in range(1, num_rounds + 1)])
    return np.array(columns).T


def study(setting: str) -> pd.DataFrame:
    """Return the server's accuracies in a setting: a row for each regime and scored seed."""
    words = [f"preset={PRESET}", f"cell={setting}", "selector=gpfl"]
    rows = []
    tried = np.tile(RATES, (len(SCHEDULES), 1))  # [schedules, rates]
    for num_rounds in HORIZONS:
        of_schedules = factors(words, num_rounds)
        # 1. The rate of each schedule.
        rates = (of_schedules[:, :, None] * tried).reshape(num_rounds, -1)
        trials = [train_on_the_server(words, seed, rates, HELD_OUT) for seed in TUNING_SEEDS]
        best = np.mean(trials, axis=0).reshape(tried.shape).argmax(1)  # of equal ones the lowest
        chosen = tried[np.arange(len(SCHEDULES)), best]
        # 2. The scored runs.
        rates = of_schedules * chosen
        for seed in SEEDS:
            finals = train_on_the_server(words, seed, rates).round(4)
            for schedule, rate, accuracy in zip(SCHEDULES, chosen, finals, strict=True):
                rows.append((setting, schedule, num_rounds, rate, seed, accuracy))
        # 3. Longer runs try this rate and the next lower one.
        lower = [RATES[max(RATES.index(rate) - 1, 0)] for rate in chosen]
        tried = np.stack([lower, chosen], axis=1)
    columns = ["setting", "schedule", "num_rounds", "learning_rate", "seed", "accuracy"]
    return pd.DataFrame(rows, columns=columns)


def data_of(setting: str) -> str:
    """Return what decides on the server's samples and its model, apart from the seed."""
    [plan] = compose([f"preset={PRESET}", f"cell={setting}", "selector=gpfl"])
    return json.dumps([plan.config[key] for key in ("dataset", "model", "server")], default=str)


def study_all(settings: Sequence[str]) -> None:
    """Add the results of the `settings` to the file."""
    results = pd.read_csv(FILE) if FILE.is_file() else pd.DataFrame({"setting": []})
    known = {data_of(setting): setting for setting in results["setting"].unique()}
    for setting in settings:
        twin = known.setdefault(data_of(setting), setting)
        if setting in set(results["setting"]):
            continue
        if twin == setting:
            rows = study(setting)
        else:
            rows = results[results["setting"] == twin].assign(setting=setting)
        results = pd.concat([results, rows], ignore_index=True)
        results = results.astype({"num_rounds": int, "seed": int})
        results.to_csv(FILE, index=False)
        print(f"{setting}: {rows['accuracy'].mean():.1f} % over all regimes")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2, help="of version 0")
    parser.add_argument("--settings", nargs="+", help="settings of version 1")
    options = parser.parse_args()
    if options.settings:
        study_all(options.settings)
        return
    [plan] = compose(VERSION_0)
    rates = np.full((plan.settings.num_rounds, 1), plan.config["optimizer"]["lr"])
    for seed in range(options.seeds):
        [accuracy] = train_on_the_server(VERSION_0, seed, rates)
        print(f"seed {seed}: final accuracy {accuracy:.1f} %")


if __name__ == "__main__":
    main()
