"""The process that communicates with Weights & Biases (W&B).

`fedsim.tracking.wandb_tracker` starts it for a run, and `fedsim sync` for each run that is sent
later.
"""

import json
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsim.core.disk import remove_folder, write_atomically
from fedsim.core.errors import check
from fedsim.core.record import LAST_FIELDS
from fedsim.results.files import WANDB, WANDB_ID
from fedsim.results.reading import FINISHED, read_config, read_metrics, read_summary
from fedsim.tracking.base import RunInfo
from fedsim.tracking.metrics import SELECTIONS, RoundMetrics
from fedsim.tracking.wandb_messages import (
    AXES,
    log_message,
    mirrors_in,
    name_problems,
    start_message,
)
from fedsim.tracking.wandb_tracker import DONE, LATER, MAX_SECONDS, NO_KEY, NOT_ONLINE

STDIN = 0
STDOUT = 1
"""File descriptors of standard input and output."""
INIT_SHARE = 0.6
"""The share of the tracker's timeout that `wandb.init` may take."""
SUMMARY_KEYS = (
    "status",
    "final_accuracy",
    "last_accuracy",
    "best_accuracy",
    "mean_participation_ratio",
    "revision",
    "totals",
    *LAST_FIELDS,
)
"""Keys of summary.json that W&B's summary of the run has."""
QUIET = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "save_code": False,
    "x_save_requirements": False,
}
"""Settings with which W&B records only the run: no terminal output, code, machine or repository."""


def main() -> None:
    """Mirror a run to W&B, and print the report (`wandb_tracker.DONE` or the failure).

    With the arguments `--pipe <temporary folder>`, it mirrors the messages on standard input, one
    JSON object a line, while the run goes on. With `<folder of a run> <JSON object>`, it mirrors a
    finished run (`replay`).
    """
    is_piped = sys.argv[1] == "--pipe"
    temporary = sys.argv[2] if is_piped else tempfile.mkdtemp(prefix="fedsim-wandb-")
    # 1. Only the report goes to standard output: W&B and its service get the null device instead.
    #    Their temporary files go to a folder that is deleted.
    output = os.fdopen(os.dup(STDOUT), "w")
    null_device = os.open(os.devnull, os.O_RDWR)
    os.dup2(null_device, STDOUT)
    os.environ["TMPDIR"] = temporary
    tempfile.tempdir = temporary
    # 2. Send the messages.
    try:
        if is_piped:
            _exit_after_parent(MAX_SECONDS)
            messages: Iterable[dict[str, Any]] = map(json.loads, sys.stdin)
        else:
            os.dup2(null_device, STDIN)  # W&B would ask a terminal for a key
            messages = replay(Path(sys.argv[1]), json.loads(sys.argv[2]))
        report = mirror(messages)
    except Exception as error:  # W&B raises many kinds of errors
        report = one_line(error)
    # 3. Report. The run's process may have ended, and W&B's own exit handlers may hang.
    with suppress(OSError):
        print(report, file=output, flush=True)
    shutil.rmtree(temporary, ignore_errors=True)
    os._exit(0 if report == DONE else 1)


def _exit_after_parent(seconds: float) -> None:
    """Exit this process `seconds` after its parent has ended.

    The parent kills this process if it hangs. A parent that has ended cannot do so any more.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def mirror(messages: Iterable[dict[str, Any]]) -> str:
    """Start a W&B run, log to it and finish it, as `messages` say.

    Without a message `finish` the run is marked as crashed. W&B ignores rounds (steps) that an
    earlier process has sent. Returns the report: `DONE`, or why the run is only offline.
    """
    run: Any = None
    report = DONE
    for message in messages:
        if "start" in message:
            run, report = begin_run(message["start"])
        elif "log" in message:
            values = message["log"]
            if "selections" in message:
                values[SELECTIONS] = _histogram(*message["selections"])
            run.log(values, step=values["round"], commit=True)
        elif "finish" in message:
            summary = message["finish"]
            run.summary.update({key: summary.get(key) for key in SUMMARY_KEYS})
            run.finish(exit_code=0 if summary.get("status") in FINISHED else 1)
            run = None
    if run is not None:
        run.finish(exit_code=1)
    return report


def _histogram(counts: list[int], edges: list[float]) -> Any:
    """Return W&B's histogram of the clients that were selected, in bins between `edges`."""
    import wandb

    return wandb.Histogram(np_histogram=(counts, edges))


def replay(folder: Path, changed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages that the tracker of a finished run would have sent, from its files.

    `changed` replaces values of the tracker's node in the run's config. Raises `ConfigError` for
    names that W&B does not accept.
    """
    config = read_config(folder)
    summary = read_summary(folder) or {"status": "unfinished"}
    num_rounds = config.get("num_rounds", 0)
    choices = summary.get("choices", {})
    info = RunInfo(
        name=config["name"],
        folder=folder,
        config=config,
        choices=choices,
        seed=config["seed"],
        num_rounds=num_rounds,
        swept=summary.get("swept", ""),
    )
    recorded_nodes = list(mirrors_in(config).values())
    recorded_node = recorded_nodes[0] if recorded_nodes else {}
    node = dict(recorded_node)
    node.update(changed)
    check(*name_problems(node, "tracker.wandb."))
    yield {"start": start_message(info, node, LATER, MAX_SECONDS)}
    metrics = RoundMetrics(info)
    for record in read_metrics(folder):
        yield log_message(metrics, record)
    yield {"finish": summary}


def begin_run(start: dict[str, Any]) -> tuple[Any, str]:
    """Start the W&B run of a run's folder, offline if it cannot be online.

    `start` is the message of `start_message`. In the modes `auto` and `LATER`, W&B decides by its
    own settings. Returns the W&B run and the report: `DONE`, or why the run is offline.
    """
    folder = Path(start["folder"])
    remove_folder(folder / WANDB)
    saved_id = _read_id(folder / WANDB_ID)
    mode = start["mode"]
    by_settings = mode in ("auto", LATER)
    report = DONE
    try:
        run = _begin_with_id(start, None if by_settings else mode, saved_id)
    except Exception as error:
        if mode == "offline":
            raise
        if by_settings and _is_without_key(error):
            report = NO_KEY
        else:
            report = f"{NOT_ONLINE} ({one_line(error)}), so it is logged offline"
        if saved_id is None:
            run = _begin_with_id(start, "offline", None)
        else:
            # W&B does not accept `saved_id` a second time in this process. The folder keeps it, so
            # that `fedsim sync` can use it.
            run = _init_wandb(start, "offline", _new_id())
    if mode == LATER and run.disabled:
        run = _begin_with_id(start, "offline", saved_id)
        report = "W&B's settings say disabled; `wandb enabled` changes that"
    run.define_metric("round")
    run.define_metric("*", step_metric="round")
    for name, axis in AXES.items():
        run.define_metric(name, step_metric=axis)
    return run, report


def _is_without_key(error: Exception) -> bool:
    """Return whether W&B raised `error` because it has no API key.

    W&B has no error class for this, so the error is known by its message.
    """
    return type(error).__name__ == "UsageError" and "configured" in str(error)


def _new_id() -> str:
    """Return a random W&B id: 12 hexadecimal digits."""
    return secrets.token_hex(6)


def _read_id(file: Path) -> str | None:
    """Return the W&B id that an earlier process has saved. A link is not followed."""
    with suppress(OSError, ValueError):
        if not file.is_symlink():
            return file.read_text(encoding="utf-8").strip() or None
    return None


def _begin_with_id(start: dict[str, Any], mode: str | None, saved_id: str | None) -> Any:
    """Return the W&B run with the saved id, which is resumed, or one with a new id.

    The id is new if none is saved, or if the run with this id was deleted at W&B. A new id is saved
    in the run's folder.
    """
    import wandb

    if saved_id is not None:
        try:
            return _init_wandb(start, mode, saved_id, resume="allow")
        except wandb.errors.CommError as error:
            if "previously created and deleted" not in str(error):
                raise
    new_id = _new_id()
    with suppress(OSError):  # on a full disk the run is sent all the same
        write_atomically(Path(start["folder"]) / WANDB_ID, f"{new_id}\n".encode())
    return _init_wandb(start, mode, new_id)


def _init_wandb(start: dict[str, Any], mode: Any, wandb_id: str, resume: Any = None) -> Any:
    """Return the run of `wandb.init` with the values of the message `start`."""
    import wandb

    known_settings = wandb.Settings.model_fields  # versions of W&B differ in them
    quiet: dict[str, Any] = {key: value for key, value in QUIET.items() if key in known_settings}
    return wandb.init(
        project=start["project"],
        entity=start["entity"],
        group=start["group"],
        job_type=start["job_type"],
        name=start["name"],
        tags=start["tags"],
        config=start["config"],
        mode=mode,
        dir=start["folder"],
        id=wandb_id,
        resume=resume,
        reinit="create_new",
        settings=wandb.Settings(init_timeout=INIT_SHARE * start["timeout"], **quiet),
    )


def one_line(error: Exception) -> str:
    """Return the first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
