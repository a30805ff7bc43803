"""The process that communicates with W&B: `fedsim.tracking.wandb_tracker` starts it for a run,
`fedsim sync` for each that is sent later."""

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsim.core.errors import check
from fedsim.core.record import LAST_FIELDS
from fedsim.results.reading import read_config, read_metrics, read_summary
from fedsim.tracking.base import RunInfo
from fedsim.tracking.wandb_tracker import (
    LATER,
    MAX_SECONDS,
    begin_run,
    mirrors_in,
    name_problems,
    one_line,
    scalars,
    start_message,
)

ACCURACIES = ("smoothed_accuracy", "last_accuracy", "best_accuracy")
SUMMARY_KEYS = (
    "status",
    *ACCURACIES,
    "mean_participation_ratio",
    "revision",
    "totals",
    *LAST_FIELDS,
)


def main() -> None:
    """Mirror standard input (`--pipe <temporary folder>`) or the folder in argv; print `done` or
    the failure."""
    arguments = sys.argv[1:]
    output, nowhere = os.fdopen(os.dup(1), "w"), os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)  # what W&B and its service write goes nowhere
    piped = arguments[0] == "--pipe"
    temporary = arguments[1] if piped else tempfile.mkdtemp(prefix="fedsim-wandb-")
    os.environ["TMPDIR"] = tempfile.tempdir = temporary  # W&B's temporary files are deleted with it
    if piped:
        _exit_after_parent(MAX_SECONDS)
    else:
        os.dup2(nowhere, 0)  # W&B would ask a terminal for a key
    try:
        report = mirror(
            map(json.loads, sys.stdin)
            if piped
            else replay(Path(arguments[0]), json.loads(arguments[1]))
        )
    except Exception as error:  # W&B raises many kinds of errors
        report = one_line(error)
    with suppress(OSError):  # the run's process may have ended
        print(report, file=output, flush=True)
    shutil.rmtree(temporary, ignore_errors=True)
    os._exit(int(report != "done"))  # W&B's own exit handlers may hang


def _exit_after_parent(seconds: float) -> None:
    """Exit `seconds` after the parent process has ended, which cannot end this one any more."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def mirror(messages: Iterable[dict[str, Any]]) -> str:
    """Begin a W&B run, log to it and finish it, as `messages` say; without `finish` it is marked as
    crashed. Returns `done`, or why the run is only offline. W&B leaves out rounds (steps) that it
    has of an earlier process."""
    run: Any = None
    report = "done"
    for message in messages:
        if "start" in message:
            run, report = begin_run(message["start"])
        elif "log" in message:
            run.log(message["log"], step=message["log"].get("round"), commit=True)
        elif "finish" in message:
            summary = message["finish"]
            run.summary.update({k: summary.get(k) for k in SUMMARY_KEYS})
            run.finish(exit_code=0 if summary.get("status") == "done" else 1)
            run = None
    if run is not None:
        run.finish(exit_code=1)
    return report


def replay(folder: Path, changed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The messages that the tracker of a finished run would have sent, from the files in its
    folder. `changed`: values that its node is given. Raises `ConfigError` for names that W&B does
    not take."""
    config = read_config(folder)
    summary = read_summary(folder) or {"status": "unfinished"}
    rounds = config.get("num_rounds", 0)
    info = RunInfo(
        config["name"], folder, config, summary.get("choices", {}), config["seed"], rounds
    )
    node = {**next(iter(mirrors_in(config).values()), {}), **changed}
    check(*name_problems(node, "tracker.wandb."))
    yield {"start": start_message(info, node, LATER, MAX_SECONDS)}
    for record in read_metrics(folder):
        yield {"log": scalars(record)}
    yield {"finish": summary}
