"""Measure the cases of the speed race, each in a process of its own."""

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
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from scripts.benchmarks.peers.stopwatch import STARTED
from scripts.benchmarks.peers.workloads import Workload, folder_of
from scripts.benchmarks.processes import ROOT, result_in
from scripts.benchmarks.race.entries import CEILING, DATA, Entry

COMMAND = "uv run python scripts/benchmark.py"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Environment variables that keep every peer from calling home."""
Result = dict[str, Any]


def measure(entry: Entry | None, workload: Workload, options: argparse.Namespace) -> Result:
    """Measure one case, or the ceiling if there is no entry.

    The result has an `error` if the case failed, is not installed, or would begin too late.
    """
    peer = CEILING if entry is None else entry.peer
    words = peer.words if entry is None else (*peer.words, *entry.words)
    if not peer.can_train(workload):
        return {"error": f"does not train {workload.name}"}
    if peer.python is None:
        return {"error": f"not installed: {COMMAND} install {peer.environment}"}
    if time.monotonic() > options.deadline:
        return {"error": f"skipped: --budget {options.budget:g} s is spent"}
    numbers = ["--seconds", str(options.seconds), "--threads", str(options.threads)]
    place = ["--data", str(DATA), "--device", options.device, "--precision", options.precision]
    size = ["--tiny"] if options.tiny else []
    command = [*peer.command, workload.name, *place, *numbers, *size, "--words", *words]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        exit_code = _run(command, options, output, errors)
        output.seek(0)
        errors.seek(0)
        result = result_in(output.read())
        if exit_code is None:
            return {"error": "took too long"}
        if exit_code or result is None:
            return {"error": last_error(errors.read()) or f"exit code {exit_code}"}
        return result


def _run(
    command: list[str], options: argparse.Namespace, output: IO[str], errors: IO[str]
) -> int | None:
    """Return the exit code, or None after the time limit. Ends all that the command started."""
    environment = os.environ | QUIET
    environment["OMP_NUM_THREADS"] = str(options.threads)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *paths_of_packages()])
    environment[STARTED] = repr(time.time())
    environment["JAX_PLATFORMS"] = options.device
    if options.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.Popen(
        command, stdout=output, stderr=errors, env=environment, cwd=ROOT, start_new_session=True
    )
    try:
        return process.wait(options.timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def paths_of_packages() -> list[str]:
    """Return the folders in the user's PYTHONPATH, where packages may be."""
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def last_error(errors: str) -> str:
    """Return the last line that names an exception, or the last line, without paths."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    exception = re.compile(r"(\[\w+\]: )?[\w.]*(Error|Exception)\b")
    named = [line for line in lines if exception.match(line)]
    text = (named or lines or [""])[-1]
    return re.sub(r"(?<![\w.])(/[\w.+-]+)+/", "", text)[:200]


def prepare(workloads: Sequence[Workload], processes: int) -> None:
    """Write the arrays of workloads unless they are there, in several processes at a time."""
    missing = [workload for workload in workloads if not folder_of(DATA, workload).is_dir()]

    def write(workload: Workload) -> int:
        print(f"{workload.name}: writing the arrays", flush=True)
        module = "scripts.benchmarks.peers.write_data"
        command = [sys.executable, "-m", module, workload.name, str(DATA)]
        return subprocess.run(command, cwd=ROOT, check=False).returncode

    with ThreadPoolExecutor(processes) as pool:
        exit_codes = list(pool.map(write, missing))
    for workload, exit_code in zip(missing, exit_codes, strict=True):
        if exit_code:
            sys.exit(f"{workload.name}: the arrays could not be written")


def race(
    entries: Sequence[Entry], workload: Workload, options: argparse.Namespace
) -> tuple[dict[Entry, list[Result]], list[Result]]:
    """Return the results of each entry, and those of the ceiling, with one for each repeat.

    All take turns, and every other repeat runs in reverse. An entry that failed is not tried again.
    """
    results: dict[Entry, list[Result]] = {entry: [] for entry in entries}
    ceilings = []
    for repeat in range(options.repeats):
        if options.ceiling:
            ceilings.append(measure(None, workload, options))
        for entry in entries if repeat % 2 == 0 else reversed(entries):
            if any("error" in result for result in results[entry]):
                continue
            begin = time.monotonic()
            result = measure(entry, workload, options)
            results[entry].append(result)
            rate = result.get("error") or f"{result['rounds_per_second']:.4g} rounds/s"
            print(
                f"{workload.name} {repeat + 1}/{options.repeats} {entry.label}: {rate}", flush=True
            )
            if options.rows:
                seconds = round(time.monotonic() - begin, 1)
                write_row(options, workload, entry, result | {"process_seconds": seconds})
    return results, ceilings


def write_row(
    options: argparse.Namespace, workload: Workload, entry: Entry, result: Result
) -> None:
    """Append a case to the file of rows."""
    case = {"workload": workload.name, "peer": entry.label}
    place = {"device": options.device, "precision": options.precision, "tiny": options.tiny}
    with options.rows.open("a", encoding="utf-8") as file:
        file.write(json.dumps(case | place | result) + "\n")
