"""Measure the cost of a run besides local training, for each selector, as clients become many.

    uv run python scripts/benchmark.py clients             # N = 1,000, 10,000 and 100,000
    uv run python scripts/benchmark.py clients random pncs --clients 1000 10000
    uv run python scripts/benchmark.py clients --json docs/results/scale/selectors.json --markdown

Each case is a whole run of K = 100 clients on `dataset=synthetic`: N clients of 20 samples with a
random generator each, and a logistic model of 610 parameters. Times are processor seconds of one
core, so that other processes do not count. Each case runs in a process forked from one that has
made a small run, so that imports do not count. Results in the file of --json are not measured
again.

Warm-ups are cut to two rounds. "select" is what the server computes in `select` and `observe`,
without the clients' answers and local training. "ledger" is the part of it that counts bytes and
samples. "growth" is the exponent of N between the two largest sizes that ran, for a later round
without local training.
"""

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks.processes import growth_exponent

SIZES = [1_000, 10_000, 100_000]
NUM_ROUNDS = 6
COHORT_SIZE = 100
PATIENCE = 10.0
"""Processor seconds after which two rounds are enough."""
TIME_LIMIT = 900.0
"""Seconds after which a case is stopped."""
NO_METHOD = ("pair_study",)
"""Choices that no run trains with."""
PUBLIC_SAMPLES = ["server.public_samples=100"]
VALIDATION = ["server.validation_fraction=0.001"]
CLOCK = ["system=lognormal"]
NEEDS: Mapping[str, list[str]] = {
    "fedabc": PUBLIC_SAMPLES,
    "lefl": PUBLIC_SAMPLES,
    "gpfl_official": ["optimizer.momentum=0.9"],
    "s_fedavg": VALIDATION,
    "greedy_shapley": VALIDATION,
    "ucb_shapley": VALIDATION,
    "fedcs": CLOCK,
    "tifl": CLOCK,
    "oort_by_speed": CLOCK,
}
"""Overrides that a selector needs."""
SHORTER = {"warmup": 2, "interval": 2, "cover_rounds": 2, "warmup_rounds": 2, "first_steps": 20}
"""Parameters of selectors that are cut, so that every kind of round is among the measured ones."""
Result = dict[str, Any]


def plan_of(selector: str, num_clients: int, cache_dir: str) -> Any:
    """Return the plan of a case. Raises `ConfigError` if fedsim rejects it."""
    from fedsim.config.compose import compose_jobs, make_plan

    words = [
        f"selector={selector}",
        "dataset=synthetic",
        f"dataset.num_owners={num_clients}",
        "partition=natural",
        "partition.min_samples=1",
        f"num_clients={num_clients}",
        f"cohort_size={min(COHORT_SIZE, num_clients)}",
        f"num_rounds={NUM_ROUNDS}",
        "model=logistic",
        "local.epochs=1",
        "local.batch_size=20",
        "eval_every=1",
        "engine=batched",
        "tracker=files_only",
        f"cache_dir={cache_dir}",
        *NEEDS.get(selector, []),
    ]
    [job] = compose_jobs(words, multirun=False)
    node = job.config["selector"]
    for name in SHORTER.keys() & node.keys():
        node[name] = SHORTER[name]
    return make_plan(job.config, job.choices)


class Stopwatch:
    """Processor seconds of functions. A call inside another call counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def wrap(self, owner: Any, name: str) -> None:
        """Replace a function of a module or class by one that is timed."""
        function = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            with self.running():
                return function(*args, **named)

        setattr(owner, name, timed)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._depth += 1
        start = time.process_time()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.seconds += time.process_time() - start


def measure(selector: str, num_clients: int, cache_dir: str) -> Result:
    """Run a few rounds of one case in this process."""
    from fedsim.clients.clients import Clients
    from fedsim.core.errors import ConfigError
    from fedsim.running import assembly

    case = {"selector": selector, "clients": num_clients}
    try:
        plan = plan_of(selector, num_clients, cache_dir)
    except ConfigError as error:
        return case | {"refused": str(error.problems[0])}
    assembly.prepare(plan)  # draws the data, unless the process that forked this one has done so
    partition, ledger, building = Stopwatch(), Stopwatch(), Stopwatch()
    partition.wrap(assembly, "divide")
    with building.running():
        experiment = assembly.build(plan)
    ledger.wrap(Clients, "_exchange")
    ledger.wrap(Clients, "_tensors_to_send")
    simulation = experiment.simulation
    simulation.components = replace(simulation.components, now=time.process_time)
    rounds: list[dict[str, float]] = []
    start = time.process_time()
    while len(rounds) < NUM_ROUNDS and (len(rounds) < 2 or time.process_time() - start < PATIENCE):
        ledger.seconds = 0.0
        begin = time.process_time()
        record = simulation.step()
        rounds.append(
            {
                "round": time.process_time() - begin,
                "select": record.seconds_select,
                "ask": record.seconds_ask,
                "train": record.seconds_train,
                "ledger": ledger.seconds,
                "record_bytes": record_bytes(simulation, record),
            }
        )
    first, *later = rounds
    return case | {
        "partition": partition.seconds,
        "set_up": building.seconds - partition.seconds,
        "first": first,
        "later": {name: float(np.median([r[name] for r in later])) for name in first},
        "worst": {name: max(r[name] for r in later) for name in first},
        "rounds": len(rounds),
        "partition_bytes": len(experiment.division.to_bytes()),
        "checkpoint_bytes": checkpoint_bytes(simulation),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def record_bytes(simulation: Any, record: Any) -> int:
    """Return the size of the round's lines in metrics.jsonl and, if there is one, trace.jsonl."""
    trace = simulation.components.selector.trace
    lines = [record.as_dict()] if trace is None else [record.as_dict(), trace]
    return sum(len(json.dumps(line)) + 1 for line in lines)


def checkpoint_bytes(simulation: Any) -> int:
    """Return the size of the state that crosses rounds."""
    from fedsim.core.encoding import dataclasses_known_to, encode

    tensors: dict[str, Any] = {}
    known = dataclasses_known_to(simulation.components.selector, simulation.components.aggregator)
    text = json.dumps(encode(simulation.state_dict(), tensors, dataclasses=known))
    return len(text) + sum(tensor.nbytes for tensor in tensors.values())


def measure_apart(selector: str, num_clients: int, cache_dir: str) -> Result:
    """Measure a case in a process forked from this one."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        try:
            sender.send(measure(selector, num_clients, cache_dir))
        except BaseException as error:
            sender.send({"error": f"{type(error).__name__}: {error}"})

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        if receiver.poll(TIME_LIMIT):
            result = receiver.recv()
        else:
            result = {"error": f"more than {TIME_LIMIT:.0f} s"}
    except EOFError:  # the system killed it because memory was full
        result = {"error": "killed by the system"}
    process.kill()
    process.join()
    return {"selector": selector, "clients": num_clients, **result}


def rounded(value: Any) -> Any:
    """Round numbers to four decimals, at any depth."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value


# --- tables ---

Key = Callable[[Result], float]
COLUMNS: Mapping[str, Key] = {
    "select, first": lambda r: r["first"]["select"],
    "select, later": lambda r: r["later"]["select"],
    "ask + train, later": lambda r: r["later"]["ask"] + r["later"]["train"],
    "ledger, worst": lambda r: max(r["first"]["ledger"], r["worst"]["ledger"]),
}
AT_LARGEST: Mapping[str, Key] = {
    "record, kB": lambda r: r["later"]["record_bytes"] / 1e3,
    "checkpoint, MB": lambda r: r["checkpoint_bytes"] / 1e6,
    "peak, GiB": lambda r: r["peak_gib"],
}
COMMON: Mapping[str, Key] = {
    "partition, s": lambda r: r["partition"],
    "set-up besides, s": lambda r: r["set_up"],
    "partition.npz, MB": lambda r: r["partition_bytes"] / 1e6,
}


def markdown(results: Sequence[Result], sizes: Sequence[int]) -> str:
    """Return a table with a row for each selector.

    A cell of `COLUMNS` has the seconds at all sizes, and one of `AT_LARGEST` the value at the
    largest size that ran.
    """
    by_selector: dict[str, dict[int, Result]] = {}
    for result in results:
        by_selector.setdefault(result["selector"], {})[result["clients"]] = result
    lines = [["selector", *COLUMNS, "growth", *AT_LARGEST]]
    lines.append(["---"] * len(lines[0]))
    for selector, by_size in by_selector.items():
        cells = [selector]
        for key in COLUMNS.values():
            cells.append(" / ".join(_seconds(by_size.get(size), key) for size in sizes))
        cells.append(growth(by_size, sizes))
        ran = [by_size[size] for size in sizes if "later" in by_size.get(size, {})]
        for key in AT_LARGEST.values():
            cells.append(f"{key(ran[-1]):.1f}" if ran else "-")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def common(results: Sequence[Result], sizes: Sequence[int]) -> str:
    """Return a table of what does not depend on the selector: the median over all of them."""
    lines = [["", *(f"N = {size:,}" for size in sizes)], ["---"] * (len(sizes) + 1)]
    for name, key in COMMON.items():
        cells = [name]
        for size in sizes:
            values = [key(r) for r in results if r["clients"] == size and "later" in r]
            cells.append(f"{np.median(values):.2f}" if values else "-")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _seconds(result: Result | None, key: Key) -> str:
    if result is None:
        return "-"
    if "later" not in result:
        return "refused" if "refused" in result else "failed"
    value = key(result)
    if value < 1e-3:
        return "< .001"
    return f"{value:.3f}" if value < 1 else f"{value:.1f}"


def growth(by_size: Mapping[int, Result], sizes: Sequence[int]) -> str:
    """Return the exponent of N in the seconds of a later round without local training."""
    seconds = {}
    for size in sizes:
        later = by_size.get(size, {}).get("later")
        if later:
            seconds[size] = later["round"] - later["train"]
    return growth_exponent(seconds, negligible=0.01)


# --- the command ---


def main() -> None:
    if os.environ.get("OMP_NUM_THREADS") != "1":  # torch reads it when it is imported
        command = [sys.executable, "-m", "scripts.benchmarks.clients", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "OMP_NUM_THREADS": "1"})
    from fedsim.commands.catalogue import Catalogue
    from fedsim.config.compose import search_path
    from fedsim.running import assembly

    choices = Catalogue().group("selector").choices.values()
    methods = [c.name for c in choices if c.base is None and c.name not in NO_METHOD]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("selectors", nargs="*", default=methods)
    parser.add_argument("--clients", nargs="+", type=int, default=SIZES)
    parser.add_argument("--json", type=Path, help="a file of results, to which new ones are added")
    parser.add_argument("--markdown", action="store_true", help="print the results as tables")
    options = parser.parse_args()
    has_file = options.json and options.json.exists()
    results: list[Result] = json.loads(options.json.read_text()) if has_file else []
    done = {(result["selector"], result["clients"]) for result in results}
    sizes = sorted(options.clients)
    with search_path(), tempfile.TemporaryDirectory() as cache_dir:
        for selector in ("random", "pncs", "clustered2"):
            measure(selector, 20, cache_dir)  # imports, and what libraries do once
        for size in sizes:
            assembly.prepare(plan_of("random", size, cache_dir))
            for selector in options.selectors:
                if (selector, size) in done:
                    continue
                results.append(rounded(measure_apart(selector, size, cache_dir)))
                print(json.dumps(results[-1]), flush=True)
                if options.json:
                    options.json.parent.mkdir(parents=True, exist_ok=True)
                    lines = ",\n".join(json.dumps(result) for result in results)
                    options.json.write_text(f"[\n{lines}\n]\n")
    if options.markdown or not options.json:
        print(markdown(sorted(results, key=lambda result: result["selector"]), sizes))
        print(f"\n{common(results, sizes)}")


if __name__ == "__main__":
    main()
