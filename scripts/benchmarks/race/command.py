"""The speed race: rounds a second of fedsim, other frameworks and hand-written loops on the same
two workloads.

    uv run python scripts/benchmark.py install                    # every peer, in an environment of
    its own uv run python scripts/benchmark.py install jax pfl            # some of them uv run
    python scripts/benchmark.py run --quick                # W1, a second or two each: a look, no
    measurement uv run python scripts/benchmark.py run --json outputs/benchmark/results.json uv run
    python scripts/benchmark.py run --device cuda          # fedsim and the loop by hand on a GPU:
    not tried yet uv run python scripts/benchmark.py run --workload W2 --peers loop jax --repeats 5
    --seconds 30 uv run python scripts/benchmark.py run --fedsim engine=sequential --fedsim
    engine=batched engine.precision=bf16

A round is all of it: selection, local training of the selected, aggregation, and the test accuracy
as often as the workload says. Everybody does the same arithmetic on the same arrays, which fedsim
divides at seed 0 and which are written to outputs/benchmark/data once; each peer draws its own
clients and batches. FEDSIM_DATA says where the data sets are (Fashion-MNIST; CIFAR-10 as
torchvision or parquet files).

Each case is a process of its own; all peers take turns within a repeat, and every other repeat goes
the other way round. Rounds a second are the median of the repeats, with the slowest and fastest.
Warm-up rounds do not count. "start-up" is the time from the start of the process to the end of the
first round, imports, data and compilation included. The ceiling is the best rate of a large matrix
product in the same run, in float32, or in bfloat16 for a variant of fedsim in that precision; its
share is of the operations counted in scripts/benchmarks/peers/workloads.py.

Every --fedsim is a variant with options of its own beside the plain one. Measure on an idle
machine: torch's threads wait by spinning, and a peer can be fifty times slower where something else
wants its cores. The load at the start is in the JSON.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from scripts.benchmarks.peers.workloads import WORKLOADS
from scripts.benchmarks.race.entries import (
    PEERS,
    install,
)
from scripts.benchmarks.race.measuring import entries_of, keep_to, prepare, race
from scripts.benchmarks.race.tables import as_record, ceiling_of, machine, summarise, table_of

QUICK = {"workload": ["W1"], "repeats": 1, "seconds": 1.0}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmark.py", description=(__doc__ or "").splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    own = [name for name, peer in PEERS.items() if peer.environment]
    installing = commands.add_parser("install", help="make the peers' environments")
    installing.add_argument("peers", nargs="*", metavar="peer", help=f"of {', '.join(own)} (all)")
    running = commands.add_parser("run", help="measure")
    running.add_argument(
        "--workload", nargs="+", choices=WORKLOADS, default=None, help="W1 W2 (both)"
    )
    running.add_argument(
        "--peers", nargs="+", choices=PEERS, default=None, help="whom to measure (all)"
    )
    running.add_argument(
        "--fedsim", nargs="+", action="append", default=[], metavar="key=value", help="a variant"
    )
    running.add_argument("--repeats", type=int, default=None, help="3")
    running.add_argument(
        "--seconds", type=float, default=None, help="least time that is measured of each case (20)"
    )
    running.add_argument("--threads", type=int, default=2)
    running.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: fedsim and the loop alone"
    )
    running.add_argument(
        "--timeout", type=float, default=600, help="seconds after which a case is ended"
    )
    running.add_argument("--json", type=Path)
    running.add_argument("--markdown", action="store_true")
    running.add_argument(
        "--quick", action="store_true", help="W1, one repeat, a second each, unless said otherwise"
    )
    options = parser.parse_args(argv)
    if options.command == "install":
        if unknown := [name for name in options.peers if name not in own]:
            parser.error(
                f"no environment of its own: {', '.join(unknown)} (choose from {', '.join(own)})"
            )
        options.peers = options.peers or own
    elif options.command == "run":
        defaults = (
            QUICK if options.quick else {"workload": list(WORKLOADS), "repeats": 3, "seconds": 20.0}
        )
        able = [name for name, peer in PEERS.items() if peer.cuda or options.device == "cpu"]
        options.peers = options.peers or able
        if unable := [name for name in options.peers if name not in able]:
            parser.error(f"not on a GPU: {', '.join(unable)} (choose from {', '.join(able)})")
        for name, value in defaults.items():
            if getattr(options, name) is None:
                setattr(options, name, value)
    return options


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure, print a table for each workload, and return all that was found."""
    keep_to(options.threads)
    entries = entries_of(options.peers, options.fedsim)
    found: dict[str, Any] = {
        "machine": machine(),
        "threads": options.threads,
        "device": options.device,
        "seconds": options.seconds,
        "load_average": round(os.getloadavg()[0], 2),
        "workloads": {},
        "results": [],
    }
    tables: list[Table] = []
    for workload in (WORKLOADS[name] for name in options.workload):
        prepare(workload)
        results, ceilings = race(entries, workload, options, console)
        ceiling = ceiling_of(ceilings)
        tables.append(table_of([summarise(e, results[e]) for e in entries], workload, ceiling))
        found["workloads"][workload.name] = {
            "title": workload.title,
            "flops_a_round": workload.round_flops,
            "ceiling_flops": ceiling,
        }
        found["results"] += [as_record(entry, workload, results[entry]) for entry in entries]
    for table in tables:
        if options.markdown:
            table.box, table.title_style, table.caption_style = box.MARKDOWN, "", ""
        console.print(table)
    return found


def main() -> None:
    options = parse()
    if options.command == "install":
        sys.exit(1 if install(options.peers) else 0)
    plain = options.markdown or not sys.stdout.isatty()
    found = run(options, Console(width=160 if plain else None))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
