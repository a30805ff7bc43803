"""The speed race: its arithmetic, tables and command line. No peer is installed or timed."""

import json
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from fedsim import compose
from fedsim.core.rng import Streams
from fedsim.running.assembly import build_model
from scripts.benchmarks.peers import run_fedsim, stopwatch
from scripts.benchmarks.peers.networks import new_network, shuffled_batches, state_of, train
from scripts.benchmarks.peers.run_loop import average
from scripts.benchmarks.peers.run_torch_func import step_of
from scripts.benchmarks.peers.stopwatch import Case, Stopwatch
from scripts.benchmarks.peers.workloads import (
    WORKLOADS,
    Arrays,
    Convolution,
    Linear,
    Workload,
    read_arrays,
    write_arrays,
)
from scripts.benchmarks.peers.write_data import cohorts_of
from scripts.benchmarks.processes import ROOT, result_in
from scripts.benchmarks.race import command, entries, measuring, tables
from scripts.benchmarks.race.entries import PEERS, Entry
from scripts.benchmarks.race.measuring import Result
from tests.engines import schedule_of

W1, W2 = WORKLOADS["W1"], WORKLOADS["W2"]


# --- workloads ---


def test_operations_of_w1_by_hand() -> None:
    products = 784 * 64 + 64 * 30 + 30 * 10
    assert W1.forward_flops == 2 * products
    assert W1.training_flops == 6 * products - 2 * 784 * 64  # no gradient of the first input
    # 10 clients train 3 epochs of 600 samples, and the test set is passed in every round
    assert W1.round_flops == 18_000 * W1.training_flops + 10_000 * W1.forward_flops


def test_operations_of_w2_by_hand() -> None:
    first = 30 * 30 * 27 * 32
    products = first + 13 * 13 * 288 * 64 + 4 * 4 * 576 * 64 + 1024 * 64 + 64 * 10
    assert W2.forward_flops == 2 * products
    assert W2.training_flops == 6 * products - 2 * first
    # 5 clients train 4 epochs of 500 samples, and the test set is passed in every fifth round
    assert W2.round_flops == 10_000 * W2.training_flops + 2_000 * W2.forward_flops


@pytest.mark.parametrize(
    ("name", "epochs", "trained_samples", "parameters"),
    [
        ("W1", 3, 1_800, 52_500),
        ("W2", 4, 2_000, 122_570),
        ("pfl", 1, 50, 1_626_442),
        ("blazefl", 5, 2_500, 62_006),
        ("ResNet-20", 1, 640, 269_722),
        ("blazefl-resnet18", 5, 2_500, 11_181_642),
    ],
)
def test_the_layers_are_those_of_the_network(
    name: str, epochs: int, trained_samples: int, parameters: int
) -> None:
    workload = WORKLOADS[name]
    with torch.device("meta"):
        network = list(new_network(workload).parameters())
    weights = 0
    for layer in workload.layers:
        if isinstance(layer, Convolution):
            weights += layer.inputs * layer.kernel**2 * layer.outputs
        elif isinstance(layer, Linear):
            weights += layer.inputs * layer.outputs
    batches = list(shuffled_batches(workload))
    assert workload.epochs == epochs
    assert len(batches) == workload.steps
    assert sum(map(len, batches)) == workload.trained_samples == trained_samples
    assert sum(p.numel() for p in network) == parameters
    assert sum(p.numel() for p in network if p.dim() > 1) == weights


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda workload: workload.name)
def test_a_network_is_the_model_of_fedsim(workload: Workload) -> None:
    """With the same initial values, both compute the same."""
    [plan] = compose(run_fedsim.overrides_of(workload))
    assert plan.local.steps == workload.steps
    assert plan.server.validation_fraction == 0
    shape = (1, 28, 28) if workload.name == "W1" else (3, 32, 32)
    model = build_model(plan.config["model"], shape, 10, Streams(0)).eval()
    values = [value.numpy() for value in state_of(model).values()]
    network = new_network(workload, values).eval()
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    samples = images.flatten(1) if workload.name == "W1" else images
    with torch.no_grad():
        torch.testing.assert_close(network(samples), model(images))


def test_the_written_cohorts_are_those_of_the_run() -> None:
    simulation = run_fedsim.experiment_of(["num_rounds=3", "selector=random"]).simulation
    cohorts = cohorts_of(simulation, 3)
    assert cohorts.tolist() == [list(record.selected) for record in simulation]


def test_arrays_are_read_as_they_were_written(tmp_path: Path) -> None:
    tiny = W1.tiny()
    x, y = np.ones((100, 6, 4), np.float32), np.zeros((100, 6), np.int64)
    cohorts = np.arange(40).reshape(4, 10)
    model = [np.full(2, i, np.float32) for i in range(11)]
    written = Arrays(x, y, np.ones((900, 4), np.float32), np.zeros(900, np.int64), cohorts, model)
    write_arrays(tmp_path, W1, written)
    arrays = read_arrays(tmp_path, tiny)
    assert [value[0] for value in arrays.initial] == list(range(11))
    assert arrays.cohort(5).tolist() == [10, 11]  # of four rounds, the second
    assert len(arrays.x_test) == len(arrays.y_test) == tiny.test_samples


# --- the stopwatch ---


def test_the_stopwatch_stops_at_the_end_of_a_cycle(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The warm-up of W2 has five rounds and ends at 10 s. Cycles of five rounds end at 13 and 16 s.
    clock = iter([10.0, 13.0, 16.0])
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(Case(W2, Path(), seconds=5.0, threads=1, words=()))
    rounds = 1
    while not watch.end_round(0.5 if watch.evaluates else None):
        rounds += 1
    assert rounds == 15
    watch.report(["torch"], engine="x")
    result = result_in(capsys.readouterr().out)
    assert result is not None
    assert result["rounds_per_second"] == pytest.approx(10 / 6)
    assert result["accuracies"] == [[5, 0.5], [10, 0.5], [15, 0.5]]
    assert result["versions"]["torch"] == torch.__version__.split("+")[0]
    assert result["engine"] == "x"


# --- the table ---


def measured(*rates: float) -> list[Result]:
    versions = {"torch": "2", "jax": "3", "pfl": "4", "flwr": "5", "fedsim-selection": "1"}
    common = {"startup_seconds": 2.0, "accuracies": [[7, 0.5]], "versions": versions}
    return [{"rounds_per_second": rate, **common} for rate in rates]


def columns_of(
    results: Mapping[Entry, Sequence[Result]], ceiling: Mapping[str, float]
) -> dict[str, dict[str, str]]:
    """Return the cells of the table by column, then by the row's first word."""
    rows = tables.rows_of(results, W1, ceiling)
    columns: dict[str, dict[str, str]] = {}
    for row in rows:
        for name, cell in zip(tables.COLUMNS, row, strict=False):
            columns.setdefault(name, {})[row[0]] = cell
    return columns


def test_rates_are_compared_with_jax_with_the_fastest_framework_and_with_the_ceiling() -> None:
    results = {
        Entry("fedsim"): measured(100.0, 120.0, 110.0),
        Entry("fedsim", ("engine.precision=bf16",)): measured(200.0),
        Entry("jax"): measured(50.0),
        Entry("pfl"): measured(40.0),
        Entry("pfl2"): measured(55.0),
    }
    ceiling = {"float32": W1.round_flops * 220, "bf16": W1.round_flops * 800}  # 220 and 800 rounds
    results[Entry("pfl2")][0]["accuracies"] = [[5, 0.4], [7, 0.6], [9, 0.7]]
    columns = columns_of(results, ceiling)
    bf16 = "fedsim engine.precision=bf16"
    assert columns["rounds/s"]["fedsim"] == "110"  # the median
    assert columns["range"]["fedsim"] == "100 - 120"
    assert columns["clients/s"]["fedsim"] == "1100"  # 10 in a round
    assert columns["/ framework"]["fedsim"] == "2.00"  # pfl with two processes has 55
    assert columns["/ JAX"]["fedsim"] == "2.20"
    assert columns["of ceiling"]["fedsim"] == "50%"
    assert columns["of ceiling"][bf16] == "25%"  # of the ceiling in its own precision
    assert columns["version"]["pfl, 2 processes"] == "4"
    assert columns["accuracy @ round"]["JAX by hand"] == "0.5000 @ 7"
    assert columns["accuracy @ round"]["pfl, 2 processes"] == "0.6000 @ 7"  # all evaluated it


def test_errors_stand_in_the_first_column() -> None:
    results = {
        Entry("pfl"): [*measured(40.0), {"error": "ValueError: no"}],
        Entry("flower"): [{"error": "not installed"}],
    }
    rows = tables.rows_of(results, W1, {})
    assert [row[0] for row in rows] == ["pfl (ValueError: no)", "flower: not installed"]


def test_the_ceiling_is_the_best_of_the_repeats() -> None:
    repeats: list[Result] = [
        {"flops": {"float32": 1.0, "bf16": 5.0}},
        {"flops": {"float32": 2.0, "bf16": 4.0}},
        {"error": "x"},
    ]
    assert tables.ceiling_of(repeats) == {"float32": 2.0, "bf16": 5.0}


# --- the command line ---


def test_defaults_of_the_command_line() -> None:
    options = command.parse(["run"])
    assert (options.workload, options.repeats, options.seconds) == (["W1", "W2"], 3, 20.0)
    assert options.peers == [name for name in PEERS if name != "torch.func-graphs"]
    quick = command.parse(["run", "--quick", "--workload", "W2"])
    assert (quick.workload, quick.repeats, quick.seconds) == (["W2"], 1, 1.0)
    on_gpu = command.parse(["run", "--device", "cuda"])
    assert (on_gpu.workload, on_gpu.repeats, on_gpu.seconds) == (["W1", "W2", "pfl"], 1, 6.0)
    assert "flower" not in on_gpu.peers


@pytest.mark.parametrize(
    "words",
    [
        "install loop",
        "install nobody",
        "run --device cuda --peers loop flower",
        "run --precision tf32",
    ],
)
def test_what_is_not_possible_is_rejected(words: str) -> None:
    with pytest.raises(SystemExit):
        command.parse(words.split())


def test_variants_of_fedsim_are_entries_of_their_own() -> None:
    variants = [["engine=sequential"], ["engine=batched", "engine.precision=bf16"]]
    chosen = entries.entries_of(["fedsim", "loop"], variants)
    assert [(entry.label, entry.precision) for entry in chosen] == [
        ("fedsim", "float32"),
        ("fedsim engine=sequential", "float32"),
        ("fedsim engine=batched engine.precision=bf16", "bf16"),
        ("PyTorch by hand", "float32"),
    ]


def test_the_options_of_a_peer() -> None:
    options = "W1 --data d --seconds 2 --threads 1 --words engine=batched seed=1"
    case = stopwatch.parse_case(options.split())
    assert case == Case(W1, Path("d").resolve(), 2.0, 1, ("engine=batched", "seed=1"))


# --- peers ---


@pytest.mark.parametrize("peer", [*PEERS.values(), entries.CEILING], ids=lambda peer: peer.script)
def test_every_peer_has_a_script_and_requirements(peer: entries.Peer) -> None:
    assert (ROOT / "scripts" / "benchmarks" / "peers" / f"{peer.script}.py").is_file()
    assert peer.environment is None or entries.requirements_of(peer.environment, "cpu")


def test_peers_run_with_the_torch_of_fedsim() -> None:
    torch_version = torch.__version__.split("+")[0]
    assert entries.requirements_of("pfl", "cpu")[1] == f"torch=={torch_version}"
    assert entries.requirements_of("jax", "cuda")[0].startswith("jax[cuda13]==")


def test_the_command_of_a_peer() -> None:
    script = ["-m", "scripts.benchmarks.peers.run_loop"]
    assert PEERS["loop"].command == [sys.executable, *script]
    assert "torch.distributed.run" in PEERS["pfl2"].command


def test_a_peer_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(entries, "FOLDER", tmp_path)
    monkeypatch.setattr(entries, "find_spec", lambda _: None)
    result = measuring.measure(Entry("pfl2"), W1, command.parse(["run"]))
    assert result == {"error": "not installed: uv run python scripts/benchmark.py install pfl"}


def test_a_peer_runs_in_this_interpreter_if_its_package_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(entries, "FOLDER", tmp_path)
    monkeypatch.setattr(entries, "find_spec", lambda name: name == "jax" or None)
    assert PEERS["jax"].python == Path(sys.executable)
    assert PEERS["fedjax"].python is None


@pytest.mark.parametrize(
    ("name", "workload", "error"),
    [
        ("fedsim", "W1", "skipped: --budget 0 s is spent"),
        ("pfl", "ResNet-20", "does not train ResNet-20"),
    ],
)
def test_a_case_that_is_not_run_says_why(name: str, workload: str, error: str) -> None:
    options = command.parse(["run", "--budget", "0"])
    assert measuring.measure(Entry(name), WORKLOADS[workload], options) == {"error": error}


def test_a_race_continues_after_a_failure_and_reverses_every_other_repeat(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order: list[str] = []

    def measure(entry: Entry | None, *_: object) -> Result:
        order.append(entry.name if entry else "ceiling")
        if entry is None:
            return {"flops": {"float32": 1.0}}
        return {"error": "broken"} if entry.name == "jax" else measured(1.0)[0]

    monkeypatch.setattr(measuring, "measure", measure)
    racing = [Entry("fedsim"), Entry("jax"), Entry("loop")]
    options = command.parse(["run", "--repeats", "2", "--rows", str(tmp_path / "rows.jsonl")])
    results, ceilings = measuring.race(racing, W1, options)
    assert order == ["ceiling", "fedsim", "jax", "loop", "ceiling", "loop", "fedsim"]
    assert [len(repeats) for repeats in results.values()] == [2, 1, 2]
    assert len(ceilings) == 2
    assert json.dumps(results[Entry("jax")]) == '[{"error": "broken"}]'
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    assert [row["peer"] for row in rows[:2]] == ["fedsim", "JAX by hand"]
    assert [row.get("error") for row in rows] == [None, "broken", None, None, None]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_torch_func_by_hand_trains_as_the_loop_by_hand_does(
    optimizer: Literal["sgd", "adam"],
) -> None:
    workload = replace(W1, optimizer=optimizer)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = new_network(workload)
    x = torch.randn(2, 8, 784, generator=generator)
    y = torch.randint(10, (2, 8), generator=generator)
    step = step_of(workload, network)
    weights = {name: value.expand(2, *value.shape) for name, value in network.named_parameters()}
    zeros = {name: torch.zeros_like(value) for name, value in weights.items()}
    moments, number = [zeros, zeros], torch.zeros(())
    batches = [torch.arange(4), torch.arange(4, 8)]
    for batch in batches:
        number = number + 1
        weights, moments = step(weights, {}, moments, number, x[:, batch], y[:, batch])
    for client in range(2):
        local_model = deepcopy(network)
        train(local_model, x[client], y[client], batches, workload)
        for name, value in local_model.named_parameters():
            # Adam divides small gradients by their size, so rounding shows
            torch.testing.assert_close(weights[name][client], value, atol=1e-4, rtol=0)


def test_the_loop_by_hand_trains_as_the_sequential_engine_does() -> None:
    """Two rounds on the digits, with the same clients and batches."""
    workload = replace(W1, lr=0.1, weight_decay=1e-3)
    words = "engine=sequential engine.workers=1 device=cpu num_rounds=2 local.epochs=2"
    optimizer = [f"optimizer.lr={workload.lr}", f"optimizer.weight_decay={workload.weight_decay}"]
    simulation = run_fedsim.experiment_of([*words.split(), *optimizer]).simulation
    engine = simulation.components.engine
    model, data = engine.workload.model, engine.data
    for record in simulation:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        states = []
        schedule = schedule_of(engine, np.asarray(record.selected), record.round)
        for positions, counts in zip(schedule.positions, schedule.counts, strict=True):
            batches = [torch.as_tensor(p[:n]) for p, n in zip(positions, counts, strict=True) if n]
            model.load_state_dict(before)
            train(model, data.x, data.y, batches, workload)
            states.append({name: value.clone() for name, value in model.state_dict().items()})
        model.load_state_dict(average(states))
    assert simulation.round == 2
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, simulation.params[name], atol=1e-5, rtol=0)
