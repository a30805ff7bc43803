"""Flower's simulation runtime on Ray with its FedAvg strategy: one actor a core, with one thread.

Each actor reads the data once. Batches are cut from tensors, without a DataLoader.
"""

from functools import cache

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from scripts.benchmarks.peers.networks import (
    accuracy,
    new_network,
    prepare,
    shuffled_batches,
    train,
)
from scripts.benchmarks.peers.stopwatch import ENDLESS, Case, Stopwatch, parse_case
from scripts.benchmarks.peers.workloads import read_arrays


class EnoughError(Exception):
    """Ends the strategy, which knows only a number of rounds."""


@cache
def client_tensors(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = read_arrays(case.data, case.workload)
    return torch.from_numpy(arrays.x), torch.from_numpy(arrays.y)


def train_client(case: Case, client: int, arrays: ArrayRecord) -> RecordDict:
    workload = case.workload
    torch.set_num_threads(1)
    x, y = client_tensors(case)
    model = new_network(workload)
    model.load_state_dict(arrays.to_torch_state_dict())
    train(model, x[client], y[client], shuffled_batches(workload), workload)
    metrics = MetricRecord({"num-examples": workload.samples})
    return RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})


def client_app(case: Case) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        # the actor's own module, whose cache outlives a message
        from scripts.benchmarks.peers.run_flower import train_client

        client = int(context.node_config["partition-id"])
        return Message(train_client(case, client, message.content["arrays"]), reply_to=message)

    return app


def server_app(case: Case, watch: Stopwatch) -> ServerApp:
    app = ServerApp()
    workload = case.workload

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        prepare(case)
        arrays = read_arrays(case.data, workload)
        x_test, y_test = torch.from_numpy(arrays.x_test), torch.from_numpy(arrays.y_test)
        model = new_network(workload, arrays.initial)

        def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord | None:
            if round == 0:
                return None
            value = None
            if watch.evaluates:
                model.load_state_dict(arrays.to_torch_state_dict())
                value = accuracy(model, x_test, y_test)
            if watch.end_round(value):
                raise EnoughError
            return None if value is None else MetricRecord({"accuracy": value})

        strategy = FedAvg(
            fraction_train=workload.cohort_size / workload.num_clients,
            fraction_evaluate=0.0,
            min_available_nodes=workload.num_clients,
        )
        try:
            strategy.start(
                grid=grid,
                initial_arrays=ArrayRecord(model.state_dict()),
                num_rounds=ENDLESS,
                train_config=ConfigRecord(),
                evaluate_fn=evaluate,
            )
        except EnoughError:
            watch.report(["flwr", "ray", "torch"])

    return app


def main() -> None:
    case = parse_case()
    ray = {"num_cpus": case.threads, "include_dashboard": False, "log_to_driver": False}
    run_simulation(
        server_app(case, Stopwatch(case)),
        client_app(case),
        num_supernodes=case.workload.num_clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": ray,
        },
    )


if __name__ == "__main__":
    main()
