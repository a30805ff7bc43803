"""Federated averaging with client selection: plain PyTorch, one client after another.

20 clients hold handwritten digits. In each round the server selects 5 of them, they train the
global model on their own digits, and the server averages their models. Methods of client selection
differ in `select` alone: this script selects at random, or the clients with the highest loss.

fedsim computes the same, but faster, for many methods, and with an account of what each one costs.
The script takes only its random numbers from fedsim, so these two commands select the same clients
and reach the same accuracy:

    uv run python examples/one_round.py top_loss
    uv run fedsim num_rounds=10 server.validation_fraction=0 selector=top_loss \
        selector.first_round_full=false
"""

import copy
import sys
from collections.abc import Iterator

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedsim.core.rng import Purpose, Streams  # random numbers by purpose, round and client

NUM_CLIENTS, COHORT_SIZE, NUM_ROUNDS = 20, 5, 10
EPOCHS, BATCH_SIZE, LEARNING_RATE = 5, 16, 0.1

Samples = tuple[Tensor, Tensor]  # images [n, 64] and labels [n]


def load() -> tuple[Samples, Samples]:
    """Return the training samples and the test samples, a fifth of each class."""
    digits = load_digits()
    pixels = np.round(digits.data * 255 / 16) / 255
    x = torch.tensor((pixels - 0.3053) / 0.3759, dtype=torch.float32)
    y = torch.tensor(digits.target)
    rng = np.random.default_rng(0)
    is_test = np.zeros(len(y), bool)
    for digit in range(10):
        positions = rng.permutation(np.flatnonzero(digits.target == digit))
        is_test[positions[: round(0.2 * len(positions))]] = True
    return (x[~is_test], y[~is_test]), (x[is_test], y[is_test])


def divide(samples: Samples, rng: np.random.Generator) -> list[Samples]:
    """Sort the samples by label, cut them into 40 shards, and deal two shards to each client."""
    x, y = samples
    by_label = np.concatenate([rng.permutation(np.flatnonzero(y == digit)) for digit in range(10)])
    shard_size = len(by_label) // (2 * NUM_CLIENTS)
    shards = by_label[: 2 * NUM_CLIENTS * shard_size].reshape(2 * NUM_CLIENTS, shard_size)
    hands = rng.permutation(2 * NUM_CLIENTS).reshape(NUM_CLIENTS, 2)
    return [(x[shards[hand].ravel()], y[shards[hand].ravel()]) for hand in hands]


def train(model: nn.Module, client: Samples, rng: np.random.Generator) -> nn.Module:
    """Return the model that a client has after some epochs of SGD on its own samples."""
    x, y = client
    local_model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(local_model.parameters(), LEARNING_RATE)
    for _ in range(EPOCHS):
        for batch in torch.tensor(rng.permutation(len(y))).split(BATCH_SIZE):
            optimizer.zero_grad()
            cross_entropy(local_model(x[batch]), y[batch]).backward()
            optimizer.step()
    return local_model


def select(
    method: str, model: nn.Module, clients: list[Samples], rng: np.random.Generator
) -> list[int]:
    """Return the clients that train in this round. Only this function knows the method."""
    if method == "random":
        return sorted(rng.choice(NUM_CLIENTS, COHORT_SIZE, replace=False).tolist())
    losses = [cross_entropy(model(x), y).item() for x, y in clients]  # reported by each client
    return sorted(np.argsort(losses)[-COHORT_SIZE:].tolist())


def one_round(
    method: str, model: nn.Module, clients: list[Samples], streams: Streams, round: int
) -> list[int]:
    """Run a round, which changes the global model, and return the clients that were selected."""
    selected = select(method, model, clients, streams.generator(Purpose.SELECT, round))
    cohort_samples = sum(len(clients[client][1]) for client in selected)
    average = torch.zeros_like(parameters_to_vector(model.parameters()))
    for client in selected:
        batches = streams.generator(Purpose.TRAIN, round, client)
        local_model = train(model, clients[client], batches)
        weight = len(clients[client][1]) / cohort_samples
        average += weight * parameters_to_vector(local_model.parameters()).detach()
    vector_to_parameters(average, model.parameters())
    return selected


def run(method: str, seed: int) -> Iterator[tuple[list[int], float]]:
    """Yield the selected clients and the test accuracy of each round."""
    streams = Streams(seed)
    train_samples, (test_x, test_y) = load()
    clients = divide(train_samples, streams.generator(Purpose.PARTITION))
    torch.manual_seed(streams.key(Purpose.INIT))
    layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 10)
    model = nn.Sequential(*layers)
    for round in range(1, NUM_ROUNDS + 1):
        selected = one_round(method, model, clients, streams, round)
        accuracy = (model(test_x).argmax(1) == test_y).double().mean().item()
        yield selected, accuracy


if __name__ == "__main__":
    method = sys.argv[1] if len(sys.argv) > 1 else "random"
    for number, (selected, accuracy) in enumerate(run(method, seed=0), start=1):
        print(f"round {number:2}  clients {selected}  test accuracy {accuracy:.2%}")
