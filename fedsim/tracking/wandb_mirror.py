"""The process that talks to W&B: reads a run as JSON lines from a tracker, or from a finished run's folder.

`python -m fedsim.tracking.wandb_mirror <folder> ...` sends runs again from their files.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import yaml

from fedsim.tracking.base import RunInfo
from fedsim.tracking.files import CONFIG, read_metrics, read_summary
from fedsim.tracking.wandb_tracker import MAX_SECONDS, numbers, resolve_mode, start_of_run

QUIET = {
    "console": "off",
    "silent": True,
    "save_code": False,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""W&B records the run alone: no terminal output, code, machine or repository."""

SUMMARY_KEYS = ("status", "final_accuracy", "best_accuracy", "wall_seconds", "mean_participation_ratio", "coverage")


def main() -> None:
    """Mirror standard input, or the folders named on the command line; say `done` or what went wrong."""
    folders = [Path(a) for a in sys.argv[1:]]
    try:
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            if not folders:
                mirror(json.loads(line) for line in sys.stdin)
            for folder in folders:
                mirror(replay(folder))
        report = "done"
    except Exception as error:  # whatever W&B raises
        report = f"{type(error).__name__}: {error}".splitlines()[0]
    print(report, flush=True)  # noqa: T201
    os._exit(report != "done")  # W&B's own exit handlers may hang


def mirror(messages: Iterable[dict[str, Any]]) -> None:
    """Begin a run, log to it and finish it as the messages say. A run whose messages break off counts as crashed."""
    run: Any = None
    for message in messages:
        if "start" in message:
            run = begin(message["start"])
        elif "log" in message:
            run.log(message["log"])
        elif "finish" in message:
            summary = message["finish"]
            run.summary.update({k: summary.get(k) for k in SUMMARY_KEYS} | {"totals": summary.get("totals")})
            run.finish(exit_code=0 if summary.get("status") == "done" else 1)
            run = None
    if run is not None:
        run.finish(exit_code=1)


def begin(start: dict[str, Any]) -> Any:
    """A new W&B run; offline where going online fails."""
    import wandb

    known = wandb.Settings.model_fields
    quiet = {k: v for k, v in QUIET.items() if k in known}
    options = {k: start[k] for k in ("project", "entity", "group", "job_type", "name", "tags", "config")}

    def init(mode: Any) -> Any:
        settings = wandb.Settings(init_timeout=0.6 * start["timeout"], **quiet)
        return wandb.init(mode=mode, dir=start["folder"], reinit="create_new", settings=settings, **options)

    try:
        run = init(start["mode"])
    except Exception:
        if start["mode"] == "offline":
            raise
        run = init("offline")
    run.define_metric("round")
    run.define_metric("*", step_metric="round")
    return run


def replay(folder: Path) -> Iterator[dict[str, Any]]:
    """The messages that a run's tracker would have sent."""
    config = yaml.safe_load((folder / CONFIG).read_text())
    summary = read_summary(folder) or {"status": "unfinished", "choices": {}}
    info = RunInfo(config["name"], folder, config, summary["choices"], config["seed"], config["num_rounds"])
    yield {"start": start_of_run(info, resolve_mode("auto"), "fedsim", None, [], MAX_SECONDS)}
    for record in read_metrics(folder):
        yield {"log": numbers(record)}
    yield {"finish": summary}


if __name__ == "__main__":
    main()
