"""The speed race: its arithmetic, tables and command line. No peer is installed or timed."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim import compose
from scripts.benchmarks.peers import run_fedsim, stopwatch
from scripts.benchmarks.peers.networks import new_network, train
from scripts.benchmarks.peers.run_loop import average
from scripts.benchmarks.peers.stopwatch import Case, Stopwatch
from scripts.benchmarks.peers.workloads import WORKLOADS
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


@pytest.mark.parametrize(("name", "epochs", "parameters"), [("W1", 3, 52_500), ("W2", 4, 122_570)])
def test_the_layers_are_those_of_the_network(name: str, epochs: int, parameters: int) -> None:
    workload = WORKLOADS[name]
    network = list(new_network(workload).parameters())
    weights = sum(layer.fan_in * layer.fan_out for layer in workload.layers)
    assert workload.epochs == epochs
    assert sum(p.numel() for p in network) == parameters
    assert sum(p.numel() for p in network if p.dim() > 1) == weights


def test_the_workloads_compose() -> None:
    plans = [compose(run_fedsim.overrides_of(workload))[0] for workload in (W1, W2)]
    assert [(p.local.steps, p.settings.eval_every) for p in plans] == [(30, 1), (40, 5)]
    assert [p.server.validation_fraction for p in plans] == [0, 0]


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
    columns = columns_of(results, ceiling)
    bf16 = "fedsim engine.precision=bf16"
    assert columns["rounds/s"]["fedsim"] == "110"  # the median
    assert columns["range"]["fedsim"] == "100 - 120"
    assert columns["/ framework"]["fedsim"] == "2.00"  # pfl with two processes has 55
    assert columns["/ JAX"]["fedsim"] == "2.20"
    assert columns["of ceiling"]["fedsim"] == "50%"
    assert columns["of ceiling"][bf16] == "25%"  # of the ceiling in its own precision
    assert columns["version"]["pfl, 2 processes"] == "4"
    assert columns["accuracy @ round"]["JAX by hand"] == "0.500 @ 7"


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
    assert options.peers == list(PEERS)
    quick = command.parse(["run", "--quick", "--workload", "W2"])
    assert (quick.workload, quick.repeats, quick.seconds) == (["W2"], 1, 1.0)
    assert command.parse(["run", "--device", "cuda"]).peers == ["fedsim", "loop"]


@pytest.mark.parametrize(
    "words", ["install loop", "install nobody", "run --device cuda --peers loop jax"]
)
def test_peers_that_are_not_possible_are_rejected(words: str) -> None:
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
    assert peer.environment is None or entries.requirements_of(peer.environment)


def test_peers_run_with_the_torch_of_fedsim() -> None:
    assert entries.requirements_of("pfl")[1] == f"torch=={torch.__version__.split('+')[0]}"


def test_the_command_of_a_peer() -> None:
    script = ["-m", "scripts.benchmarks.peers.run_loop"]
    assert PEERS["loop"].command == [sys.executable, *script]
    assert "torch.distributed.run" in PEERS["pfl2"].command


def test_a_peer_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(entries, "FOLDER", tmp_path)
    result = measuring.measure(Entry("pfl2"), W1, command.parse(["run"]))
    assert result == {"error": "not installed: uv run python scripts/benchmark.py install pfl"}


def test_a_race_continues_after_a_failure_and_reverses_every_other_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    def measure(entry: Entry | None, *_: object) -> Result:
        order.append(entry.name if entry else "ceiling")
        if entry is None:
            return {"flops": {"float32": 1.0}}
        return {"error": "broken"} if entry.name == "jax" else measured(1.0)[0]

    monkeypatch.setattr(measuring, "measure", measure)
    racing = [Entry("fedsim"), Entry("jax"), Entry("loop")]
    results, ceilings = measuring.race(racing, W1, argparse.Namespace(repeats=2))
    assert order == ["ceiling", "fedsim", "jax", "loop", "ceiling", "loop", "fedsim"]
    assert [len(repeats) for repeats in results.values()] == [2, 1, 2]
    assert len(ceilings) == 2
    assert json.dumps(results[Entry("jax")]) == '[{"error": "broken"}]'


def test_the_loop_by_hand_trains_as_the_sequential_engine_does() -> None:
    """Two rounds on the digits, with the same clients and batches."""
    lr, weight_decay = 0.1, 1e-3
    words = "engine=sequential engine.workers=1 device=cpu num_rounds=2 local.epochs=2"
    optimizer = [f"optimizer.lr={lr}", f"optimizer.weight_decay={weight_decay}"]
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
            train(model, data.x, data.y, batches, lr, weight_decay)
            states.append({name: value.clone() for name, value in model.state_dict().items()})
        model.load_state_dict(average(states))
    assert simulation.round == 2
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, simulation.params[name], atol=1e-5, rtol=0)
