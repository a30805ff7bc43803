"""The speed race: rounds a second of fedsim, other frameworks and hand-written loops on the same two workloads.

    uv run python scripts/benchmark.py install                    # every peer, in an environment of its own
    uv run python scripts/benchmark.py install jax pfl            # some of them
    uv run python scripts/benchmark.py run --quick                # W1, a second or two each: a look, no measurement
    uv run python scripts/benchmark.py run --json outputs/benchmark/results.json
    uv run python scripts/benchmark.py run --device cuda          # fedsim and the loop by hand on a GPU: not tried yet
    uv run python scripts/benchmark.py checkpoints                # what checkpoints cost (scripts/checkpoint_cost.py)
    uv run python scripts/benchmark.py run --workload W2 --peers loop jax --repeats 5 --seconds 30
    uv run python scripts/benchmark.py run --fedsim engine=sequential --fedsim engine=batched engine.precision=bf16

A round is all of it: selection, local training of the selected, aggregation, and the test accuracy as often as the
workload says. Everybody does the same arithmetic on the same arrays, which fedsim divides at seed 0 and which are
written to outputs/benchmark/data once; each peer draws its own clients and batches. FEDSIM_DATA says where the data
sets are (Fashion-MNIST; CIFAR-10 as torchvision or parquet files).

Each case is a process of its own; all peers take turns within a repeat, and every other repeat goes the other way
round. Rounds a second are the median of the repeats, with the slowest and fastest. Warm-up rounds do not count.
"start-up" is the time from the start of the process to the end of the first round, imports, data and compilation
included. The ceiling is the best rate of a large matrix product in the same run, in float32, or in bfloat16 for a
variant of fedsim in that precision; its share is of the operations counted in scripts/peers/workloads.py.

Every --fedsim is a variant with options of its own beside the plain one. Measure on an idle machine: torch's threads
wait by spinning, and a peer can be fifty times slower where something else wants its cores. The load at the start is in
the JSON.
"""

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from scripts.checkpoint_cost import compare, within_limit
from scripts.checkpoint_cost import table_of as checkpoint_table
from scripts.peers.stopwatch import RESULT, STARTED
from scripts.peers.workloads import WORKLOADS, Workload, is_written

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "outputs" / "benchmark"
DATA = FOLDER / "data"
COMMAND = "uv run python scripts/benchmark.py"
QUICK = {"workload": ["W1"], "repeats": 1, "seconds": 1.0}
QUIET = {
    "JAX_PLATFORMS": "cpu",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""The environment that keeps every peer to itself."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

Result = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """A script of scripts/peers. `environment`: whose packages it needs (None: the project's own). `cuda`: whether it
    can run on a GPU."""

    script: str
    environment: str | None = None
    package: str = "torch"
    framework: bool = False
    processes: int = 1
    cuda: bool = False

    @property
    def python(self) -> Path:
        return Path(sys.executable) if self.environment is None else python_of(self.environment)


PEERS = {
    "fedsim": Peer("run_fedsim", package="fedsim-selection", cuda=True),
    "loop": Peer("run_loop", cuda=True),
    "jax": Peer("run_jax", "jax", "jax"),
    "pfl": Peer("run_pfl", "pfl", "pfl", framework=True),
    "pfl2": Peer("run_pfl", "pfl", "pfl", framework=True, processes=2),
    "fedjax": Peer("run_fedjax", "fedjax", "fedjax", framework=True),
    "flower": Peer("run_flower", "flower", "flwr", framework=True),
    "fedlab": Peer("run_fedlab", "fedlab", "fedlab", framework=True),
}
TITLES = {"loop": "PyTorch by hand", "jax": "JAX by hand", "pfl2": "pfl, 2 processes"}
CEILING = Peer("run_ceiling")
REQUIREMENTS = {
    "jax": ("jax==0.10.2",),
    "pfl": ("pfl[pytorch]==0.6.0", "torch=={torch}"),
    "fedjax": ("fedjax==0.0.17", "dm-haiku==0.0.17", "jax==0.10.2"),
    "flower": ("flwr[simulation]==1.41.0", "torch=={torch}"),
    "fedlab": ("fedlab==1.3.0", "torch=={torch}"),
}
"""What goes into each environment; torch in the version that fedsim runs with here."""


@dataclass(frozen=True)
class Entry:
    """A line of the table."""

    peer: str
    words: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return " ".join([TITLES.get(self.peer, self.peer), *self.words])

    @property
    def precision(self) -> str:
        return "bf16" if "engine.precision=bf16" in self.words else "float32"


@dataclass(frozen=True)
class Summary:
    """The repeats of one entry. `error` is that of any repeat; `rates` are rounds a second."""

    entry: Entry
    rates: tuple[float, ...]
    startup: float | None
    accuracy: tuple[int, float] | None
    version: str
    error: str | None

    @property
    def rate(self) -> float | None:
        return statistics.median(self.rates) if self.rates else None


# ---------------------------------------------------------------------------------------------------- installation


def python_of(environment: str) -> Path:
    return FOLDER / f"env-{environment}" / "bin" / "python"


def requirements_of(environment: str) -> list[str]:
    torch = version("torch").split("+")[0]
    return [requirement.format(torch=torch) for requirement in REQUIREMENTS[environment]]


def install(peers: Sequence[str]) -> int:
    """Make the environments of `peers`. The number of those that failed."""
    environments = dict.fromkeys(e for name in peers if (e := PEERS[name].environment) is not None)
    return sum(not _install_one(environment) for environment in environments)


def _install_one(environment: str) -> bool:
    requirements, target = requirements_of(environment), python_of(environment)
    print(f"{environment}: {' '.join(requirements)}", flush=True)
    commands = (
        ["uv", "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(target.parents[1])],
        ["uv", "pip", "install", "--quiet", "--python", str(target), *requirements],
    )
    for command in commands:  # elsewhere, because uv would apply this project's pins here
        if subprocess.run(command, cwd=tempfile.gettempdir(), check=False).returncode:
            print(f"{environment}: failed", flush=True)
            return False
    return True


# ---------------------------------------------------------------------------------------------------------- running


def measure(entry: Entry | None, workload: Workload, options: argparse.Namespace) -> Result:
    """One case in a process of its own (no entry: the ceiling). `error` where it failed or is not installed."""
    peer, words = (CEILING, ()) if entry is None else (PEERS[entry.peer], entry.words)
    if not peer.python.is_file():
        return {"error": f"not installed: {COMMAND} install {peer.environment}"}
    case = [workload.name, "--data", str(DATA), "--seconds", str(options.seconds), "--threads", str(options.threads)]
    command = [*launcher(peer), *case, "--device", options.device, "--words", *words]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = _run(command, options, out, err)
        out.seek(0)
        err.seek(0)
        return result_of(code, out.read(), err.read())


def launcher(peer: Peer) -> list[str]:
    module = ["-m", f"scripts.peers.{peer.script}"]
    if peer.processes > 1:
        module = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={peer.processes}", *module]
    return [str(peer.python), *module]


def _run(command: list[str], options: argparse.Namespace, out: Any, err: Any) -> int | None:
    """The exit code; None where it took too long. Ends all that the command has started."""
    environment = {**os.environ, **QUIET, "OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": str(ROOT)}
    environment |= NO_GPU if options.device == "cpu" else {}
    environment[STARTED] = repr(time.time())
    process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(options.timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def result_of(code: int | None, out: str, err: str) -> Result:
    """What a process reported, or why it did not."""
    reported = [line.removeprefix(RESULT) for line in out.splitlines() if line.startswith(RESULT)]
    if code == 0 and reported:
        return json.loads(reported[-1])  # type: ignore[no-any-return]
    return {"error": "took too long" if code is None else last_error(err) or f"ended with exit code {code}"}


def last_error(err: str) -> str:
    """The last line that names an exception, or the last one, without paths of this machine."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(\[\w+\]: )?[\w.]*(Error|Exception)\b", line)]
    text = (named or lines or [""])[-1]
    return re.sub(r"(?<![\w.])(/[\w.+-]+)+/", "", text)[:200]


def prepare(workload: Workload) -> None:
    """Write the arrays of `workload` unless they are there."""
    if is_written(DATA, workload):
        return
    print(f"{workload.name}: writing the arrays", flush=True)
    command = [sys.executable, "-m", "scripts.peers.write_data", workload.name, str(DATA)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{workload.name}: the arrays could not be written: {(done.stderr.strip().splitlines() or [''])[-1]}")


def keep_to(threads: int) -> None:
    """This process and all it starts on so many cores (JAX has no other way to be told)."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def entries_of(peers: Sequence[str], variants: Sequence[Sequence[str]]) -> list[Entry]:
    """The lines: every peer, and after plain fedsim its variants."""
    entries = []
    for peer in peers:
        entries.append(Entry(peer))
        if peer == "fedsim":
            entries += [Entry(peer, tuple(words)) for words in variants if words]
    return list(dict.fromkeys(entries))


def race(
    entries: list[Entry], workload: Workload, options: argparse.Namespace, console: Console
) -> tuple[dict[Entry, list[Result]], list[Result]]:
    """The results of all repeats by entry, and those of the ceiling. Who has failed is not tried again."""
    results: dict[Entry, list[Result]] = {entry: [] for entry in entries}
    ceilings = []
    for repeat in range(options.repeats):
        ceilings.append(measure(None, workload, options))
        for entry in entries if repeat % 2 == 0 else reversed(entries):
            if any("error" in earlier for earlier in results[entry]):
                continue
            result = measure(entry, workload, options)
            results[entry].append(result)
            told = result.get("error") or f"{result['rounds_per_second']:.4g} rounds/s"
            console.print(f"{workload.name} {repeat + 1}/{options.repeats} {entry.label}: {told}", highlight=False)
    return results, ceilings


# ---------------------------------------------------------------------------------------------------------- reporting


def summarise(entry: Entry, results: Sequence[Result]) -> Summary:
    good = [r for r in results if "error" not in r]
    errors = [r["error"] for r in results if "error" in r]
    return Summary(
        entry,
        rates=tuple(r["rounds_per_second"] for r in good),
        startup=statistics.median(r["startup_seconds"] for r in good) if good else None,
        accuracy=tuple(good[0]["accuracies"][-1]) if good and good[0]["accuracies"] else None,
        version=good[0]["versions"].get(PEERS[entry.peer].package, "") if good else "",
        error=errors[0] if errors else None,
    )


def ceiling_of(results: Sequence[Result]) -> dict[str, float]:
    """The best rate seen, by precision; empty where none was measured."""
    rates = [r["flops"] for r in results if "flops" in r]
    return {name: max(rate[name] for rate in rates) for name in rates[0]} if rates else {}


COLUMNS = (
    "peer",
    "version",
    "rounds/s",
    "range",
    "/ framework",
    "/ JAX",
    "of ceiling",
    "start-up s",
    "accuracy @ round",
)
"""`/ framework`: times the fastest framework's rate."""


def table_of(summaries: Sequence[Summary], workload: Workload, ceiling: Mapping[str, float]) -> Table:
    rates = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in ceiling.items())
    table = Table(
        title=f"{workload.name}: {workload.title}",
        caption=f"{workload.round_flops / 1e9:.3g} GFLOP a round; matrix products: {rates or 'not measured'}",
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "peer" else "right")
    framework = max((s.rate for s in summaries if PEERS[s.entry.peer].framework and s.rate), default=None)
    by_hand = next((s.rate for s in summaries if s.entry.peer == "jax"), None)
    for summary in summaries:
        table.add_row(*cells_of(summary, workload, framework, by_hand, ceiling))
    return table


def cells_of(
    summary: Summary,
    workload: Workload,
    framework: float | None,
    by_hand: float | None,
    ceiling: Mapping[str, float],
) -> list[str]:
    rate = summary.rate
    if rate is None:
        return [f"{summary.entry.label}: {summary.error or 'not run'}"]
    label = f"{summary.entry.label} ({summary.error})" if summary.error else summary.entry.label
    peak = ceiling.get(summary.entry.precision)
    return [
        label,
        summary.version,
        f"{rate:.4g}",
        f"{min(summary.rates):.4g} - {max(summary.rates):.4g}",
        _ratio(rate, framework),
        _ratio(rate, by_hand),
        f"{rate * workload.round_flops / peak:.0%}" if peak else "-",
        f"{summary.startup:.1f}",
        f"{summary.accuracy[1]:.3f} @ {summary.accuracy[0]}" if summary.accuracy else "-",
    ]


def _ratio(rate: float, other: float | None) -> str:
    return f"{rate / other:.2f}" if other else "-"


def as_record(entry: Entry, workload: Workload, results: Sequence[Result]) -> dict[str, Any]:
    """An entry's part of the JSON: its summary, and every repeat as it was reported."""
    summary = summarise(entry, results)
    return {
        "workload": workload.name,
        "peer": entry.peer,
        "options": list(entry.words),
        "label": entry.label,
        "rounds_per_second": summary.rate,
        "slowest": min(summary.rates, default=None),
        "fastest": max(summary.rates, default=None),
        "startup_seconds": summary.startup,
        "error": summary.error,
        "repeats": list(results),
    }


def machine() -> dict[str, Any]:
    """What a rate depends on, and nothing that tells whose machine it is."""
    return {
        "cpu": cpu_model(Path("/proc/cpuinfo")),
        "cores": os.cpu_count(),
        "system": f"{platform.system()}-{platform.machine()}",
        "python": platform.python_version(),
    }


def cpu_model(info: Path) -> str:
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


# ------------------------------------------------------------------------------------------------------- command line


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    own = [name for name, peer in PEERS.items() if peer.environment]
    installing = commands.add_parser("install", help="make the peers' environments")
    installing.add_argument("peers", nargs="*", metavar="peer", help=f"of {', '.join(own)} (all)")
    saving = commands.add_parser("checkpoints", help="what checkpoints cost at the default interval")
    saving.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="W1 W2 (both)")
    saving.add_argument("--rounds", type=int, default=None, help="of each run (500 of W1, 30 of W2)")
    saving.add_argument("--repeats", type=int, default=3)
    running = commands.add_parser("run", help="measure")
    running.add_argument("--workload", nargs="+", choices=WORKLOADS, default=None, help="W1 W2 (both)")
    running.add_argument("--peers", nargs="+", choices=PEERS, default=None, help="whom to measure (all)")
    running.add_argument("--fedsim", nargs="+", action="append", default=[], metavar="key=value", help="a variant")
    running.add_argument("--repeats", type=int, default=None, help="3")
    running.add_argument("--seconds", type=float, default=None, help="least time that is measured of each case (20)")
    running.add_argument("--threads", type=int, default=2)
    running.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: fedsim and the loop alone")
    running.add_argument("--timeout", type=float, default=600, help="seconds after which a case is ended")
    running.add_argument("--json", type=Path)
    running.add_argument("--markdown", action="store_true")
    running.add_argument("--quick", action="store_true", help="W1, one repeat, a second each, unless said otherwise")
    options = parser.parse_args(argv)
    if options.command == "install":
        if unknown := [name for name in options.peers if name not in own]:
            parser.error(f"no environment of its own: {', '.join(unknown)} (choose from {', '.join(own)})")
        options.peers = options.peers or own
    elif options.command == "run":
        defaults = QUICK if options.quick else {"workload": list(WORKLOADS), "repeats": 3, "seconds": 20.0}
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
    if options.command == "checkpoints":
        costs = compare(options.workload, options.rounds, options.repeats)
        Console().print(checkpoint_table(costs))
        sys.exit(0 if within_limit(costs) else 1)
    plain = options.markdown or not sys.stdout.isatty()
    found = run(options, Console(width=160 if plain else None))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
