"""The speed race's arithmetic, tables and command line; no peer is installed and nothing is
timed."""

import argparse
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from fedsim import compose
from scripts.benchmarks.peers import run_fedsim, run_loop, stopwatch
from scripts.benchmarks.peers.networks import new_network
from scripts.benchmarks.peers.stopwatch import Case, Stopwatch
from scripts.benchmarks.peers.workloads import WORKLOADS
from scripts.benchmarks.race import command as benchmark
from scripts.benchmarks.race import entries, measuring, tables
from scripts.benchmarks.race.entries import Entry
from scripts.benchmarks.race.measuring import Result
from tests.engines import schedule_of

W1, W2 = WORKLOADS["W1"], WORKLOADS["W2"]


def test_flops_against_hand_counts_and_workloads_are_those_of_the_networks() -> None:
    # products of a sample: 784 * 64 + 64 * 30 + 30 * 10 = 52,396; to train thrice, but for the
    # first input gradient
    assert (W1.forward_flops, W1.training_flops) == (2 * 52_396, 3 * 104_792 - 100_352)
    # 10 clients, 3 epochs of 600, and one test pass
    assert W1.round_flops == 18_000 * 214_024 + 10_000 * 104_792
    # 900 * 27 * 32 + 169 * 288 * 64 + 16 * 576 * 64 + 1024 * 64 + 64 * 10
    assert W2.forward_flops == 2 * (777_600 + 3_115_008 + 589_824 + 65_536 + 640)
    # 5 clients, 4 epochs of 500, and a fifth of a test pass
    assert W2.round_flops == 10_000 * (3 * 9_097_216 - 1_555_200) + 2_000 * 9_097_216
    for workload, epochs, parameters in ((W1, 3, 52_500), (W2, 4, 122_570)):
        sizes = [(p.dim(), p.numel()) for p in new_network(workload).parameters()]
        assert workload.epochs == epochs
        assert sum(size for _, size in sizes) == parameters
        assert sum(p.fan_in * p.fan_out for p in workload.layers) == sum(
            size for dim, size in sizes if dim > 1
        )


def test_the_stopwatch_ends_at_whole_cycles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([10.0, 13.0, 16.0])
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(now))
    watch = Stopwatch(Case(W2, Path(), seconds=5.0, threads=1, words=()))
    ended = []
    while not ended or not ended[-1]:
        ended.append(watch.end_round(0.5 if watch.evaluates else None))
    assert len(ended) == 15  # five to warm up, a cycle of 3 s and another one
    watch.report(["torch"], engine="x")
    reported = json.loads(capsys.readouterr().out.removeprefix(stopwatch.RESULT))
    assert reported["rounds_per_second"] == pytest.approx(10 / 6)
    assert reported["accuracies"] == [[5, 0.5], [10, 0.5], [15, 0.5]]
    assert (reported["versions"]["torch"], reported["engine"]) == (
        torch.__version__.split("+")[0],
        "x",
    )


def _result(rate: float, **more: object) -> Result:
    return {
        "rounds_per_second": rate,
        "startup_seconds": 2.0,
        "accuracies": [[7, 0.5]],
        "versions": {"torch": "2", "jax": "3", "pfl": "4", "flwr": "5", "fedsim-selection": "1"},
        **more,
    }


def test_table_of_rates_ratios_and_the_share_of_the_ceiling() -> None:
    results: dict[Entry, list[Result]] = {
        Entry("fedsim"): [_result(100.0), _result(120.0), _result(110.0)],
        Entry("fedsim", ("engine.precision=bf16",)): [_result(200.0)],
        Entry("jax"): [_result(50.0)],
        Entry("pfl"): [_result(40.0), {"error": "ValueError: no"}],
        Entry("pfl2"): [_result(55.0)],
        Entry("flower"): [{"error": "not installed: x install flower"}],
    }
    ceiling = {"float32": W1.round_flops * 220, "bf16": W1.round_flops * 800}
    summaries = [tables.summarise(entry, found) for entry, found in results.items()]
    table = tables.table_of(summaries, W1, ceiling)
    columns = {str(c.header): list(c.cells) for c in table.columns}
    assert columns["rounds/s"] == ["110", "200", "50", "40", "55", ""]
    assert columns["range"][0] == "100 - 120"
    assert columns["/ framework"][:2] == ["2.00", "3.64"]
    assert columns["/ JAX"][:3] == ["2.20", "4.00", "1.00"]
    assert columns["of ceiling"][:3] == ["50%", "25%", "23%"]
    assert columns["version"][:5] == ["1", "1", "3", "4", "4"]
    assert columns["accuracy @ round"][0] == "0.500 @ 7"
    assert columns["peer"][1] == "fedsim engine.precision=bf16"
    failed = ["pfl (ValueError: no)", "pfl, 2 processes", "flower: not installed: x install flower"]
    assert columns["peer"][3:] == failed
    measured: list[Result] = [
        {"flops": {"float32": 1.0, "bf16": 5.0}},
        {"flops": {"float32": 2.0, "bf16": 4.0}},
    ]
    assert tables.ceiling_of([*measured, {"error": "x"}]) == {
        "float32": 2.0,
        "bf16": 5.0,
    }  # the best of the repeats


def test_command_line() -> None:
    words = ["--fedsim", "engine=sequential", "--fedsim", "engine=batched", "engine.precision=bf16"]
    options = benchmark.parse(["run", *words])
    assert (options.workload, options.repeats, options.seconds) == (["W1", "W2"], 3, 20.0)
    assert len(options.peers) == len(entries.PEERS)
    chosen = measuring.entries_of(["fedsim", "loop"], options.fedsim)
    labels = [
        "fedsim",
        "fedsim engine=sequential",
        "fedsim engine=batched engine.precision=bf16",
        "PyTorch by hand",
    ]
    assert [e.label for e in chosen] == labels
    assert [e.precision for e in chosen] == ["float32", "float32", "bf16", "float32"]
    quick = benchmark.parse(["run", "--quick", "--workload", "W2"])
    assert (quick.workload, quick.repeats) == (["W2"], 1)
    assert benchmark.parse(["run", "--device", "cuda"]).peers == ["fedsim", "loop"]  # that can
    for refused in (["install", "loop"], ["run", "--device", "cuda", "--peers", "loop", "jax"]):
        with pytest.raises(SystemExit):
            benchmark.parse(refused)
    options = ["W1", "--data", "d", "--seconds", "2", "--threads", "1"]
    case = stopwatch.parse_case([*options, "--words", "engine=batched", "seed=1"])
    assert case == Case(W1, Path("d").resolve(), 2.0, 1, ("engine=batched", "seed=1"))


def test_every_peer_has_a_script_and_its_environment_requirements(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for peer in [*entries.PEERS.values(), entries.CEILING]:
        assert (entries.ROOT / "scripts" / "benchmarks" / "peers" / f"{peer.script}.py").is_file()
        assert peer.environment is None or entries.requirements_of(peer.environment)
    assert entries.requirements_of("pfl")[1] == f"torch=={torch.__version__.split('+')[0]}"
    assert measuring.launcher(entries.PEERS["loop"]) == [
        sys.executable,
        "-m",
        "scripts.benchmarks.peers.run_loop",
    ]
    assert "torch.distributed.run" in measuring.launcher(entries.PEERS["pfl2"])
    monkeypatch.setattr(entries, "FOLDER", tmp_path)
    result = measuring.measure(Entry("pfl2"), W1, benchmark.parse(["run"]))
    assert result == {"error": "not installed: uv run python scripts/benchmark.py install pfl"}


def test_a_race_goes_on_past_a_failure_and_turns_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def measure(entry: Entry | None, *_: object) -> Result:
        order.append(entry.peer if entry else "ceiling")
        if entry is None:
            return {"flops": {"float32": 1.0}}
        return {"error": "broken"} if entry.peer == "jax" else _result(1.0)

    monkeypatch.setattr(measuring, "measure", measure)
    options = argparse.Namespace(repeats=2, seconds=0.0, threads=1, timeout=1.0)
    entries = [Entry("fedsim"), Entry("jax"), Entry("loop")]
    results, ceilings = measuring.race(entries, W1, options, Console(file=io.StringIO()))
    assert order == ["ceiling", "fedsim", "jax", "loop", "ceiling", "loop", "fedsim"]
    assert ([len(r) for r in results.values()], len(ceilings)) == ([2, 1, 2], 2)
    record = json.loads(json.dumps(tables.as_record(Entry("jax"), W1, results[Entry("jax")])))
    assert (record["error"], record["rounds_per_second"]) == ("broken", None)


def test_the_workloads_compose() -> None:
    plans = [compose(run_fedsim.overrides_of(workload))[0] for workload in WORKLOADS.values()]
    assert [(p.local.steps, p.settings.eval_every) for p in plans] == [(30, 1), (40, 5)]
    assert [p.server.validation_fraction for p in plans] == [0, 0]


def test_the_loop_does_what_the_sequential_engine_does() -> None:
    """Two rounds on the digits with the same clients and batches."""
    lr, weight_decay = 0.1, 1e-3
    words = [
        "engine=sequential",
        "engine.workers=1",
        "device=cpu",
        "num_rounds=2",
        "local.epochs=2",
    ]
    words += [f"optimizer.lr={lr}", f"optimizer.weight_decay={weight_decay}"]
    simulation = run_fedsim.experiment_of(words).simulation
    engine, model = simulation.components.engine, simulation.components.engine.workload.model
    for record in simulation:
        states = []
        schedule = schedule_of(engine, np.asarray(record.selected), record.round)
        for positions, counts in zip(schedule.positions, schedule.counts, strict=True):
            cut = [torch.as_tensor(p[:n]) for p, n in zip(positions, counts, strict=True) if n]
            states.append(
                run_loop.train_client(model, engine.data.x, engine.data.y, cut, lr, weight_decay)
            )
        model.load_state_dict(run_loop.average(states))
    assert simulation.round == 2
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, simulation.params[name], atol=1e-5, rtol=0)
