"""What is measured on a GPU, by section. Each function adds rows to the bench."""

import copy
import os
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.flat import flat_rows
from fedsim.core.rng import Streams
from fedsim.engine.backend import Backend, Workload
from fedsim.engine.batched import BatchedBackend
from fedsim.engine.data import ClientData
from fedsim.engine.device import precision_context
from fedsim.engine.engine import Engine
from fedsim.engine.graph.backend import GraphBackend
from fedsim.engine.model import initial
from fedsim.engine.native.backend import NativeBackend
from fedsim.engine.reference import ReferenceBackend
from fedsim.engine.schedule import LocalWork
from scripts.benchmarks.gpu.workloads import (
    NUM_LANES,
    TEST_SAMPLES,
    Bench,
    Case,
    local_work,
    schedule_of,
    workload,
)

CHAINS = ("W1", "W2")
"""Workloads that lanes and C code can train."""


def batched(task: Workload) -> Backend:
    return BatchedBackend(task, precision="float32", chunk_size="auto", compile=False)


def graph(task: Workload) -> Backend:
    return GraphBackend(task, precision="float32", chunk_size="auto")


BACKENDS: dict[str, Callable[[Workload], Backend]] = {
    "sequential": lambda task: ReferenceBackend(task, precision="float32", workers=1),
    "batched": batched,
    "graph": graph,
    "graph, tf32": lambda task: GraphBackend(task, precision="tf32", chunk_size="auto"),
    "graph, bf16": lambda task: GraphBackend(task, precision="bf16", chunk_size="auto"),
}


def environment(bench: Bench) -> None:
    """Put versions, and the device's rates of copies and matrix products."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "cores": os.cpu_count()}
    if bench.on_gpu:
        versions["device"] = torch.cuda.get_device_properties(bench.device).name
        versions["cudnn"] = torch.backends.cudnn.version()
    bench.put("environment", "versions", **versions)
    source = torch.empty(bench.size(2**28, 2**12), device=bench.device)
    target = torch.empty_like(source)
    milliseconds = bench.milliseconds(lambda: target.copy_(source))
    bench.put("environment", "copy", terabytes_per_s=8 * len(source) / milliseconds / 1e9)
    side = bench.size(8192, 64)
    for precision in ("float32", "tf32", "bf16"):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        matrix = torch.randn(side, side, device=bench.device, dtype=dtype)
        with precision_context("tf32" if precision == "tf32" else "float32", bench.device):
            milliseconds = bench.milliseconds(partial(torch.matmul, matrix, matrix))
        teraflops = 2 * side**3 / milliseconds / 1e9
        bench.put("environment", f"product, {precision}", teraflops=teraflops)


def engines(bench: Bench) -> None:
    """Put the training of every workload on every engine, and the test set."""
    for name in bench.cases:
        case, task = workload(bench, name)
        start = [initial(task.model)] * case.clients
        schedule = schedule_of(bench, case, task)
        reference = flat_rows(BACKENDS["sequential"](task).train(start, schedule).delta)
        for label, build in BACKENDS.items():
            if label == "graph, tf32" and not bench.on_gpu:
                continue
            try:
                backend = build(task)
                begin = time.perf_counter()
                updates = flat_rows(backend.train(start, schedule).delta)
                first = time.perf_counter() - begin
                train = bench.milliseconds(partial(backend.train, start, schedule), 2.0)
                test = test_set(bench, backend, task, case)
            except Exception as error:  # the other rows are worth having
                message = f"{type(error).__name__}: {error}"[:300]
                bench.put("engines", f"{name}, {label}", error=message)
                continue
            bench.put(
                "engines",
                f"{name}, {label}",
                train_ms=train,
                test_ms=test,
                first_s=first,
                ran=backend.description,
                rounds_per_s=1e3 / (train + test / case.eval_every),
                difference=float((updates - reference).norm() / reference.norm()),
            )


def test_set(bench: Bench, backend: Backend, task: Workload, case: Case) -> float:
    """Return the milliseconds of an evaluation."""
    x = torch.randn(bench.size(TEST_SAMPLES, 16), *case.image, device=bench.device)
    y = torch.zeros(len(x), dtype=torch.int64, device=bench.device)
    engine = Engine(backend, task, case.work, Streams(0))
    params = initial(task.model)
    return bench.milliseconds(lambda: engine.evaluate(params, x, y))


def lanes(bench: Bench) -> None:
    """Put several runs that are trained together, each from its own model."""
    num_lanes = bench.size(NUM_LANES, 2)
    for name in bench.cases:
        if name not in CHAINS:
            continue
        case, task = workload(bench, name)
        schedule = schedule_of(bench, case, task, num_lanes)
        start = []
        for _ in range(num_lanes):
            start += [initial(task.model)] * case.clients
        for label in ("batched", "graph", "graph, bf16"):
            backend = BACKENDS[label](task)
            train = bench.milliseconds(partial(backend.train, start, schedule), 2.0)
            bench.put(
                "lanes",
                f"{name}, {num_lanes} lanes, {label}",
                train_ms=train,
                run_rounds_per_s=1e3 * num_lanes / train,
            )


def loop(bench: Bench) -> None:
    """Put the loop that one writes by hand: one client and batch after another."""
    for name in bench.cases:
        case, task = workload(bench, name)
        train = partial(train_by_hand, task, case, local_work(bench, case))
        bench.put("loop", name, train_ms=bench.milliseconds(train, 2.0))


def train_by_hand(task: Workload, case: Case, work: LocalWork) -> None:
    for positions in task.data.train:
        model = copy.deepcopy(task.model).train()
        train_client(model, task.data, torch.as_tensor(positions), case, work)


def train_client(
    model: nn.Module, data: ClientData, positions: Tensor, case: Case, work: LocalWork
) -> None:
    positions = positions.to(data.x.device)
    optimizer = case.optimizer.torch_optimizer(list(model.parameters()), case.optimizer.lr)
    steps_left = work.num_steps(len(positions))
    while steps_left:
        order = torch.randperm(len(positions), device=positions.device)
        for batch in positions[order].split(work.batch_size)[:steps_left]:
            optimizer.zero_grad()
            F.cross_entropy(model(data.x[batch]), data.y[batch]).backward()
            optimizer.step()
            steps_left -= 1


def native(bench: Bench) -> None:
    """Put the training in C on the cores of this machine."""
    for name in bench.cases:
        if name not in CHAINS:
            continue
        case, task = workload(bench, name, torch.device("cpu"))
        backend = NativeBackend(task, workers="auto")
        start = [initial(task.model)] * case.clients
        schedule = schedule_of(bench, case, task)
        train = bench.milliseconds(partial(backend.train, start, schedule), 2.0)
        bench.put("native", f"{name}, {backend.description}", train_ms=train)
