"""What a run costs beside local training, for each selector, as the number of clients grows.

    uv run python scripts/benchmark.py clients             # all selectors, N = 1,000, 10,000 and
    100,000 uv run python scripts/benchmark.py clients random pncs --clients 1000 10000 uv run
    python scripts/benchmark.py clients --json docs/results/scale/selectors.json --markdown   #
    prints a table

Whole runs of K = 100 clients on `dataset=synthetic`, whose N clients have 20 samples each and a
generator of their own, with a logistic model of 610 parameters. Times are seconds of the processor
(of one core: OMP_NUM_THREADS=1), so that other processes of the machine do not count. Each case is
a process of its own, forked from one that has made a small run, so that imports do not count. Cases
that are in the file of --json already are not measured again.

Warm-ups are cut to two rounds. "select" is what the server computes in `select` and `observe`,
without what it waits for (clients' answers, local training); "ledger" is what of it the account of
bytes and samples takes; "growth" is the exponent of N, in a later round without local training,
between the two largest sizes that ran.
"""

import argparse
import json
import math
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

ROOT = Path(__file__).parents[2]
SIZES = [1_000, 10_000, 100_000]
NUM_ROUNDS, COHORT_SIZE = 6, 100
PATIENCE, LIMIT = 10.0, 900.0
"""Seconds of the processor after which a case has shown enough (two rounds at least), and seconds
after which it is ended."""
SAME = {
    *(
        "fedcor_2022",
        "fedcor_cifar",
        "fedcor_cifar_2022",
        "fedcor_gpfl",
        "fedcor_short",
        "fedcs_sequential",
    ),
    *(
        "gpfl_alpha0",
        "gpfl_cosine",
        "hics_code",
        "oort_code",
        "pncs_each",
        "pncs_gradient",
        "pncs_q0",
        "pncs_q2",
    ),
    *(
        "pncs_q4",
        "pncs_q6",
        "pncs_two",
        "power_of_choice_d10",
        "power_of_choice_trained_d10",
        "tifl_uniform",
    ),
    *("top_loss_7", "pair_study"),
}
"""Files of conf/selector/ whose cost is that of another (other values of the same numbers), which
select few clients, or which are no method to train with."""
_VALUES = ("s_fedavg", "greedy_shapley", "ucb_shapley")
_CLOCK = ("fedcs", "tifl", "oort_by_speed")
WORDS = {
    "fedabc": ["server.public_samples=100"],
    "lefl": ["server.public_samples=100"],
    "gpfl_official": ["optimizer.momentum=0.9"],
    **{name: ["server.validation_fraction=0.001"] for name in _VALUES},
    **{name: ["system=lognormal"] for name in _CLOCK},
}
"""What a selector needs of the rest of the config."""
SHORTER = {"warmup": 2, "interval": 2, "cover_rounds": 2, "warmup_rounds": 2, "first_steps": 20}
"""Warm-ups and a fit cut so that every kind of round is among the measured ones."""


def config(selector: str, num_clients: int, cache_dir: str) -> Any:
    """The plan of a case. Raises `ConfigError` where it is refused."""
    from fedsim.config.compose import compose_jobs, make_plan

    words = [
        *(
            f"selector={selector}",
            "dataset=synthetic",
            f"dataset.num_owners={num_clients}",
            "partition=natural",
        ),
        *(
            "partition.min_samples=1",
            f"num_clients={num_clients}",
            f"cohort_size={min(COHORT_SIZE, num_clients)}",
        ),
        *(
            f"num_rounds={NUM_ROUNDS}",
            "model=logistic",
            "local.epochs=1",
            "local.batch_size=20",
            "eval_every=1",
        ),
        *(
            "engine=batched",
            "tracker=files_only",
            f"cache_dir={cache_dir}",
            *WORDS.get(selector, []),
        ),
    ]
    (job,) = compose_jobs(words, multirun=False)
    node = job.config["selector"]
    node |= {name: value for name, value in SHORTER.items() if name in node}
    return make_plan(job.config, job.choices)


class Stopwatch:
    """Processor seconds of wrapped functions; one inside another is counted once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def wrap(self, owner: Any, name: str) -> None:
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
            self.seconds += 0.0 if self._depth else time.process_time() - start


def measure(selector: str, num_clients: int, cache_dir: str) -> dict[str, Any]:
    """A few rounds of one case in this process."""
    from fedsim.clients.clients import Clients
    from fedsim.core.errors import ConfigError
    from fedsim.running import assembly

    try:
        plan = config(selector, num_clients, cache_dir)
    except ConfigError as error:
        return {"selector": selector, "clients": num_clients, "refused": str(error.problems[0])}
    assembly.prepare(
        plan
    )  # the labels of all clients, unless the process that this one is forked from has them
    partition, ledger, building = Stopwatch(), Stopwatch(), Stopwatch()
    partition.wrap(assembly, "divide")
    with building.running():
        made = assembly.build(plan)
    for name in ("_exchange", "_tensors_to_send"):
        ledger.wrap(Clients, name)
    simulation = made.simulation
    simulation.components = replace(simulation.components, now=time.process_time)
    rounds: list[dict[str, float]] = []
    start = time.process_time()
    while len(rounds) < NUM_ROUNDS and (len(rounds) < 2 or time.process_time() - start < PATIENCE):
        ledger.seconds, begin = 0.0, time.process_time()
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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "selector": selector,
        "clients": num_clients,
        "partition": partition.seconds,
        "set_up": building.seconds - partition.seconds,
        "first": rounds[0],
        "later": {name: float(np.median([r[name] for r in rounds[1:]])) for name in rounds[0]},
        "worst": {name: max(r[name] for r in rounds[1:]) for name in rounds[0]},
        "rounds": len(rounds),
        "partition_bytes": len(made.division.to_bytes()),
        "checkpoint_bytes": checkpoint_bytes(simulation),
        "peak_gib": peak,
    }


def record_bytes(simulation: Any, record: Any) -> int:
    """What the round writes: its line of metrics.jsonl, and that of trace.jsonl where the selector
    has one."""
    trace = simulation.components.selector.trace
    return sum(len(json.dumps(line)) + 1 for line in (record.as_dict(), trace) if line is not None)


def checkpoint_bytes(simulation: Any) -> int:
    """Of the state that crosses rounds."""
    from fedsim.core.encoding import dataclasses_known_to, encode

    tensors: dict[str, Any] = {}
    known = dataclasses_known_to(simulation.components.selector, simulation.components.aggregator)
    text = json.dumps(encode(simulation.state_dict(), tensors, dataclasses=known))
    return len(text) + sum(t.nbytes for t in tensors.values())


def measure_apart(selector: str, num_clients: int, cache_dir: str) -> dict[str, Any]:
    """`measure` in a process forked from this one."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def work() -> None:
        try:
            theirs.send(measure(selector, num_clients, cache_dir))
        except BaseException as error:
            theirs.send(
                {
                    "selector": selector,
                    "clients": num_clients,
                    "error": f"{type(error).__name__}: {error}",
                }
            )

    process = context.Process(target=work)
    process.start()
    theirs.close()
    if ours.poll(LIMIT):
        try:
            result: dict[str, Any] = ours.recv()
        except EOFError:  # the kernel ended it: out of memory
            result = {"selector": selector, "clients": num_clients, "error": "ended by the system"}
    else:
        result = {"selector": selector, "clients": num_clients, "error": f"more than {LIMIT:.0f} s"}
    process.kill()
    process.join()
    return result


Key = Callable[[dict[str, Any]], float]
COLUMNS: list[tuple[str, Key]] = [
    ("select, first", lambda r: r["first"]["select"]),
    ("select, later", lambda r: r["later"]["select"]),
    ("ask + train, later", lambda r: r["later"]["ask"] + r["later"]["train"]),
    ("ledger, worst", lambda r: max(r["first"]["ledger"], r["worst"]["ledger"])),
]


def markdown(results: Sequence[dict[str, Any]], sizes: Sequence[int]) -> str:
    """A line for each selector: each column at all sizes, then growth and what is kept."""
    head = [
        "selector",
        *(name for name, _ in COLUMNS),
        "growth",
        "record, kB",
        "checkpoint, MB",
        "peak, GiB",
    ]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for selector in dict.fromkeys(r["selector"] for r in results):
        found = {r["clients"]: r for r in results if r["selector"] == selector}
        cells = [selector]
        cells += [" / ".join(_cell(found.get(size), key) for size in sizes) for _, key in COLUMNS]
        last = next(
            (found[size] for size in reversed(sizes) if "peak_gib" in found.get(size, {})), None
        )
        cells += [growth(found, sizes)]
        kept: list[Key] = [
            lambda r: r["later"]["record_bytes"] / 1e3,
            lambda r: r["checkpoint_bytes"] / 1e6,
            lambda r: r["peak_gib"],
        ]
        cells += ["-" if last is None else f"{key(last):.1f}" for key in kept]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def common(results: Sequence[dict[str, Any]], sizes: Sequence[int]) -> str:
    """What does not depend on the selector, at each size: the median over all of them."""
    rows: list[tuple[str, Key, float]] = [
        ("partition, s", lambda r: r["partition"], 1.0),
        ("set-up besides, s", lambda r: r["set_up"], 1.0),
        ("partition.npz, MB", lambda r: r["partition_bytes"], 1e-6),
    ]
    lines = [
        f"| | {' | '.join(f'N = {size:,}' for size in sizes)} |",
        f"|---|{'---|' * len(sizes)}",
    ]
    for name, key, unit in rows:
        found = [
            [key(r) for r in results if r["clients"] == size and "later" in r] for size in sizes
        ]
        lines.append(
            f"| {name} | {' | '.join(f'{unit * np.median(v):.2f}' if v else '-' for v in found)} |"
        )
    return "\n".join(lines)


def rounded(value: Any) -> Any:
    """With four digits behind the point."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def _cell(result: dict[str, Any] | None, key: Key) -> str:
    if result is None or "first" not in result:
        return "-" if result is None else "refused" if "refused" in result else "failed"
    value = key(result)
    return "< .001" if value < 1e-3 else f"{value:.3f}" if value < 1 else f"{value:.1f}"


def growth(found: dict[int, dict[str, Any]], sizes: Sequence[int]) -> str:
    """The exponent of N in the seconds of a whole later round, but for local training."""
    ran = [size for size in sizes if "later" in found.get(size, {})]
    if len(ran) < 2:
        return "-"
    small, large = (found[s]["later"]["round"] - found[s]["later"]["train"] for s in ran[-2:])
    return (
        f"N^{math.log(large / small) / math.log(ran[-1] / ran[-2]):.1f}"
        if large > 0.01
        else "< 10 ms"
    )


def warm_up(cache_dir: str) -> None:
    """Import what a run needs, and let libraries set up what they do once."""
    for selector in ("random", "pncs", "clustered2"):
        measure(selector, 20, cache_dir)


def prepare_once(num_clients: int, cache_dir: str) -> None:
    """Have the data of so many clients in this process, and so in those that are forked from it."""
    from fedsim.running import assembly

    assembly.prepare(config("random", num_clients, cache_dir))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = sorted(
        p.stem for p in (ROOT / "conf" / "selector").glob("*.yaml") if p.stem not in SAME
    )
    parser.add_argument("selectors", nargs="*", default=names)
    parser.add_argument("--clients", nargs="+", type=int, default=SIZES)
    parser.add_argument(
        "--json", type=Path, help="a file of results, to which those that it lacks are added"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print all results of the file as a table"
    )
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # read when torch is imported
        os.execve(
            sys.executable,
            [sys.executable, "-m", "scripts.benchmarks.clients", *sys.argv[1:]],
            {**os.environ, "OMP_NUM_THREADS": "1"},
        )
    from fedsim.config.compose import search_path

    results: list[dict[str, Any]] = (
        json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    )
    done = {(r["selector"], r["clients"]) for r in results}
    console = Console()
    with search_path(), tempfile.TemporaryDirectory() as cache_dir:
        missing = [
            (s, n) for n in sorted(options.clients) for s in options.selectors if (s, n) not in done
        ]
        if missing:
            warm_up(cache_dir)
        for selector, size in missing:
            prepare_once(size, cache_dir)
            results.append(rounded(measure_apart(selector, size, cache_dir)))
            console.print(json.dumps(results[-1]), highlight=False, soft_wrap=True)
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(
                    "[\n" + ",\n".join(json.dumps(r) for r in results) + "\n]\n"
                )
    if options.markdown or not options.json:
        print(markdown(sorted(results, key=lambda r: r["selector"]), sorted(options.clients)))
        print(f"\n{common(results, sorted(options.clients))}")


if __name__ == "__main__":
    main()
