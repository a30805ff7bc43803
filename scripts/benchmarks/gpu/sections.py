"""The figures of a GPU, by section."""

import copy
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.flat import flat_rows
from fedsim.core.rng import Streams
from fedsim.engine.backend import Backend, Workload
from fedsim.engine.batched import BatchedBackend
from fedsim.engine.data import ClientData
from fedsim.engine.device import passes_in
from fedsim.engine.engine import Engine
from fedsim.engine.graph.backend import GraphBackend
from fedsim.engine.graph.recorder import recorder_for
from fedsim.engine.model import initial
from fedsim.engine.native.backend import NativeBackend
from fedsim.engine.reference import ReferenceBackend
from scripts.benchmarks.gpu.workloads import LANES, TEST_SAMPLES, Bench, Case, schedule_of, workload

BACKENDS: dict[str, Callable[[Workload], Backend]] = {
    "sequential": lambda task: ReferenceBackend(task, precision="float32", workers=1),
    "batched": lambda task: BatchedBackend(
        task, precision="float32", chunk_size="auto", compile=False
    ),
    "graph": lambda task: GraphBackend(task, precision="float32", chunk_size="auto"),
    "graph, tf32": lambda task: GraphBackend(task, precision="tf32", chunk_size="auto"),
    "graph, bf16": lambda task: GraphBackend(task, precision="bf16", chunk_size="auto"),
}


def environment(bench: Bench) -> None:
    """Versions, and the device's ceilings."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "cores": os.cpu_count()}
    if bench.on_gpu:
        properties = torch.cuda.get_device_properties(bench.device)
        versions |= {"device": properties.name, "cudnn": torch.backends.cudnn.version()}
    bench.put("environment", "versions", **versions)
    source = torch.empty(bench.size(2**28, 2**12), device=bench.device)
    target = torch.empty_like(source)
    ms = bench.milliseconds(lambda: target.copy_(source))
    bench.put("environment", "copy", terabytes_per_s=8 * len(source) / ms / 1e9)
    side = bench.size(8192, 64)
    for label, dtype in (
        ("float32", torch.float32),
        ("tf32", torch.float32),
        ("bf16", torch.bfloat16),
    ):
        matrix = torch.randn(side, side, device=bench.device).to(dtype)
        with passes_in("tf32" if label == "tf32" else "float32", bench.device):
            ms = bench.milliseconds(lambda matrix=matrix: matrix @ matrix)
        bench.put("environment", f"product, {label}", teraflops=2 * side**3 / ms / 1e9)


def latencies(bench: Bench) -> None:
    """What the host pays for a launch, and for the node of a graph; and small copies."""
    value, number = torch.zeros(64, device=bench.device), 1000
    recorder = recorder_for(bench.device)

    def step() -> None:
        value.add_(1)

    def many() -> None:
        for _ in range(number):
            step()

    bench.put("latencies", "launch", microseconds=bench.milliseconds(many) * 1e3 / number)
    replay = recorder.record(step, number, lambda: None, 0)
    bench.put(
        "latencies", "node of a graph", microseconds=bench.milliseconds(replay) * 1e3 / number
    )
    replay = recorder.record(step, 1, lambda: None, 0)
    bench.put("latencies", "graph of one node", microseconds=bench.milliseconds(replay) * 1e3)
    small = np.zeros(16, np.float32)
    to_device = bench.milliseconds(lambda: torch.as_tensor(small, device=bench.device))
    bench.put("latencies", "64 bytes to the device", microseconds=to_device * 1e3)
    bench.put(
        "latencies", "256 bytes to the host", microseconds=bench.milliseconds(value.cpu) * 1e3
    )


def engines(bench: Bench) -> None:
    """Every workload on every engine, and the test set."""
    for name in bench.cases:
        case, task, ids = workload(bench, name)
        params = initial(task.model)
        start, schedule = [params] * len(ids), schedule_of(case, task, ids, 1)
        wanted = flat_rows(BACKENDS["sequential"](task).train(start, schedule).delta)
        for label, build in BACKENDS.items():
            if label == "graph, tf32" and not bench.on_gpu:
                continue
            try:
                backend = build(task)
                begin = time.perf_counter()
                found = backend.train(start, schedule).delta
                first = time.perf_counter() - begin
                train_ms = bench.milliseconds(
                    lambda b=backend, s=start, t=schedule: b.train(s, t), 2.0
                )
                test_ms = test_set(bench, backend, task, case)
            except Exception as error:  # the other rows are worth having
                bench.put(
                    "engines", f"{name}, {label}", error=f"{type(error).__name__}: {error}"[:300]
                )
                continue
            bench.put(
                *("engines", f"{name}, {label}"),
                **{
                    "train_ms": train_ms,
                    "test_ms": test_ms,
                    "first_s": first,
                    "ran": backend.description,
                },
                rounds_per_s=1e3 / (train_ms + test_ms / case.eval_every),
                difference=float((flat_rows(found) - wanted).norm() / wanted.norm()),
            )


def test_set(bench: Bench, backend: Backend, task: Workload, case: Case) -> float:
    """Milliseconds of an evaluation."""
    x = torch.randn(bench.size(TEST_SAMPLES, 16), *case.shape, device=bench.device)
    y = torch.zeros(len(x), dtype=torch.int64, device=bench.device)
    engine, params = Engine(backend, task, case.work, Streams(0)), initial(task.model)
    return bench.milliseconds(lambda: engine.evaluate(params, x, y))


def lanes(bench: Bench) -> None:
    """Several runs trained together, each from a model of its own."""
    count = bench.size(LANES, 2)
    for name in [case for case in bench.cases if case in ("W1", "W2")]:
        case, task, ids = workload(bench, name)
        schedule = schedule_of(case, task, ids * count, 1)
        models = [initial(task.model) for _ in range(count)]
        start = [model for model in models for _ in ids]
        for label in ("batched", "graph"):
            backend = BACKENDS[label](task)
            ms = bench.milliseconds(lambda b=backend, s=start, t=schedule: b.train(s, t), 2.0)
            bench.put(
                "lanes",
                f"{name}, {count} lanes, {label}",
                train_ms=ms,
                run_rounds_per_s=1e3 * count / ms,
            )


def loop(bench: Bench) -> None:
    """The loop that one writes by hand: client after client, batch after batch, a copy of the model
    for each."""
    for name in bench.cases:
        case, task, ids = workload(bench, name)
        model, data = task.model, task.data
        positions = [torch.as_tensor(data.train[i], device=bench.device) for i in ids]

        def train(
            case: Case = case,
            model: nn.Module = model,
            data: ClientData = data,
            own: Any = positions,
        ) -> None:
            for mine in own:
                train_client(copy.deepcopy(model).train(), data, mine, case)

        ms = bench.milliseconds(train, 2.0)
        bench.put("loop", name, train_ms=ms)


def train_client(model: nn.Module, data: ClientData, own: Tensor, case: Case) -> None:
    optimizer = case.optimizer.torch_optimizer(list(model.parameters()), case.optimizer.lr)
    left = case.work.num_steps(len(own))
    while left:
        for batch in own[torch.randperm(len(own), device=own.device)].split(case.work.batch_size)[
            :left
        ]:
            optimizer.zero_grad()
            F.cross_entropy(model(data.x[batch]), data.y[batch]).backward()
            optimizer.step()
            left -= 1


def native(bench: Bench) -> None:
    """Training in C on the cores of this machine."""
    for name in [case for case in bench.cases if case in ("W1", "W2")]:
        case, task, ids = workload(bench, name, torch.device("cpu"))
        backend = NativeBackend(task, workers="auto")
        start, schedule = [initial(task.model)] * len(ids), schedule_of(case, task, ids, 1)
        ms = bench.milliseconds(lambda b=backend, s=start, t=schedule: b.train(s, t), 2.0)
        bench.put("native", f"{name}, {backend.description}", train_ms=ms)
