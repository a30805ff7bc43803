"""Cases of the speed race, each measured in a process of its own."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from scripts.benchmarks.peers.stopwatch import RESULT, STARTED
from scripts.benchmarks.peers.workloads import Workload, is_written
from scripts.benchmarks.race.entries import (
    CEILING,
    DATA,
    PEERS,
    ROOT,
    Entry,
    Peer,
)

COMMAND = "uv run python scripts/benchmark.py"
QUIET = {
    "JAX_PLATFORMS": "cpu",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""The environment that keeps every peer to itself."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
Result = dict[str, Any]


def measure(entry: Entry | None, workload: Workload, options: argparse.Namespace) -> Result:
    """One case in a process of its own (no entry: the ceiling). `error` where it failed or is not
    installed."""
    peer, words = (CEILING, ()) if entry is None else (PEERS[entry.peer], entry.words)
    if not peer.python.is_file():
        return {"error": f"not installed: {COMMAND} install {peer.environment}"}
    case = [
        workload.name,
        "--data",
        str(DATA),
        "--seconds",
        str(options.seconds),
        "--threads",
        str(options.threads),
    ]
    command = [*launcher(peer), *case, "--device", options.device, "--words", *words]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = _run(command, options, out, err)
        out.seek(0)
        err.seek(0)
        return result_of(code, out.read(), err.read())


def launcher(peer: Peer) -> list[str]:
    module = ["-m", f"scripts.benchmarks.peers.{peer.script}"]
    if peer.processes > 1:
        module = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={peer.processes}",
            *module,
        ]
    return [str(peer.python), *module]


def _run(command: list[str], options: argparse.Namespace, out: Any, err: Any) -> int | None:
    """The exit code; None where it took too long. Ends all that the command has started."""
    environment = {
        **os.environ,
        **QUIET,
        "OMP_NUM_THREADS": str(options.threads),
        "PYTHONPATH": str(ROOT),
    }
    environment |= NO_GPU if options.device == "cpu" else {}
    environment[STARTED] = repr(time.time())
    process = subprocess.Popen(
        command, stdout=out, stderr=err, env=environment, cwd=ROOT, start_new_session=True
    )
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
    return {
        "error": "took too long"
        if code is None
        else last_error(err) or f"ended with exit code {code}"
    }


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
    command = [
        sys.executable,
        "-m",
        "scripts.benchmarks.peers.write_data",
        workload.name,
        str(DATA),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(
            f"{workload.name}: the arrays could not be written: {(done.stderr.strip().splitlines() or [''])[-1]}"
        )


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
    """The results of all repeats by entry, and those of the ceiling. Who has failed is not tried
    again."""
    results: dict[Entry, list[Result]] = {entry: [] for entry in entries}
    ceilings = []
    for repeat in range(options.repeats):
        console.print(
            f"{workload.name} {repeat + 1}/{options.repeats} ceiling: measuring", highlight=False
        )
        ceilings.append(measure(None, workload, options))
        for entry in entries if repeat % 2 == 0 else reversed(entries):
            if any("error" in earlier for earlier in results[entry]):
                continue
            result = measure(entry, workload, options)
            results[entry].append(result)
            told = result.get("error") or f"{result['rounds_per_second']:.4g} rounds/s"
            console.print(
                f"{workload.name} {repeat + 1}/{options.repeats} {entry.label}: {told}",
                highlight=False,
            )
    return results, ceilings
