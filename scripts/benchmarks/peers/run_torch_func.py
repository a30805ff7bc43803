"""Hand-written torch.func: all clients of the cohort at once, and one step compiled.

`vmap` runs over the clients, and torch.compile makes one function of a step. With the word
`reduce-overhead` torch.compile also records the step as a CUDA graph.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from scripts.benchmarks.peers.networks import accuracy, new_network, prepare, state_of
from scripts.benchmarks.peers.stopwatch import Stopwatch, parse_case
from scripts.benchmarks.peers.workloads import Workload, read_arrays

State = dict[str, Tensor]
Step = Callable[[State, State, list[State], Tensor, Tensor, Tensor], tuple[State, list[State]]]
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""Adam's constants in torch."""


def step_of(workload: Workload, model: nn.Module) -> Step:
    """Return a step of the workload's optimiser for all clients.

    It takes and returns tensors stacked over clients: weights, BatchNorm's statistics, which it
    changes in place, and Adam's two moments. Its last arguments are the number of the step, samples
    [K, b, ...] and labels [K, b].
    """

    def loss(weights: State, statistics: State, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, (weights, statistics), (x,)), y)

    gradients_of = vmap(grad_and_value(loss), randomness="different")

    def step(
        weights: State,
        statistics: State,
        moments: list[State],
        number: Tensor,
        x: Tensor,
        y: Tensor,
    ) -> tuple[State, list[State]]:
        gradients, _ = gradients_of(weights, statistics, x, y)
        following: State = {}
        first: State = {}
        second: State = {}
        for name, weight in weights.items():
            gradient = gradients[name] + workload.weight_decay * weight
            change = gradient
            if workload.optimizer == "adam":
                first[name] = BETA1 * moments[0][name] + (1 - BETA1) * gradient
                second[name] = BETA2 * moments[1][name] + (1 - BETA2) * gradient**2
                root = (second[name] / (1 - BETA2**number)).sqrt()
                change = first[name] / (1 - BETA1**number) / (root + EPSILON)
            following[name] = weight - workload.lr * change
        return following, [first, second]

    return step


def main() -> None:
    case = parse_case()
    workload = case.workload
    prepare(case)
    arrays = read_arrays(case.data, workload)
    x, y, x_test, y_test = (torch.from_numpy(array).to(case.device) for array in arrays.data)
    model = new_network(workload, arrays.initial).to(case.device)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.num_batches_tracked = None  # nothing reads it if there is a momentum
    names = [name for name, _ in model.named_parameters()]
    mode = case.words[0] if case.words else "default"
    step = torch.compile(step_of(workload, model), mode=mode, dynamic=False)
    watch = Stopwatch(case)
    enough = False
    while not enough:
        clients = torch.from_numpy(arrays.cohort(watch.round)).to(case.device)
        count = len(clients)
        stacked = {}
        for name, value in state_of(model).items():
            stacked[name] = value.expand(count, *value.shape).clone()
        weights = {name: stacked[name] for name in names}
        statistics = {name: stacked[name] for name in stacked if name not in weights}
        moments: list[State] = [{}, {}]
        if workload.optimizer == "adam":
            moments = [{name: torch.zeros_like(weights[name]) for name in names} for _ in range(2)]
        model.train()
        number = torch.zeros((), device=case.device)
        for batch in batches_of(workload, count, case.device):
            rows = clients[:, None]
            torch.compiler.cudagraph_mark_step_begin()
            number = number + 1
            weights, moments = step(
                weights, statistics, moments, number, x[rows, batch], y[rows, batch]
            )
        trained = weights | statistics
        mean = {name: value.mean(0) for name, value in trained.items()}
        model.load_state_dict(mean, strict=False)
        enough = watch.end_round(accuracy(model, x_test, y_test) if watch.evaluates else None)
    watch.report(["torch"])


def batches_of(workload: Workload, clients: int, device: str) -> list[Tensor]:
    """Return the positions [K, b] of each step."""
    batches: list[Tensor] = []
    for _ in range(workload.epochs):
        order = torch.rand(clients, workload.samples, device=device).argsort(1)
        batches += order.split(workload.batch_size, 1)
    return batches[: workload.steps]


if __name__ == "__main__":
    main()
