"""How a run begins at Weights & Biases, or goes on there; for the process that communicates with W&B.

A run keeps its W&B id in its folder: what a later process sends of it goes to the same run of W&B. A run that is begun
anew has a new id.
"""

import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsim.tracking.files import WANDB_ID
from fedsim.tracking.wandb_tracker import LATER, NO_KEY, NOT_ONLINE

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
"""Settings with which W&B records only the run: no terminal output, code, machine or repository."""
DISABLED = "W&B's settings say disabled; `wandb enabled` changes that"
"""The report of a run that was to be sent later, and that W&B by its own settings would neither send nor record."""
DELETED = "previously created and deleted"
"""What W&B's server says of a run whose owner has deleted it: its id is not given again."""


def begin_run(start: dict[str, Any]) -> tuple[Any, str]:
    """The W&B run of a run's folder, offline if it cannot be online, and `done` or the reason of that.

    Its record takes the place of what an earlier process has left in the folder. In the modes `auto` and `LATER`, W&B
    decides by its own settings.
    """
    shutil.rmtree(Path(start["folder"]) / "wandb", ignore_errors=True)
    kept = _kept_id(start)
    by_settings = start["mode"] in ("auto", LATER)
    report = "done"
    try:
        run = _go_on_or_begin(start, None if by_settings else start["mode"], kept)
    except Exception as error:
        if start["mode"] == "offline":
            raise
        report = _reason(error, by_settings)
        # W&B does not give the id again that has just failed, so that a kept one stays for when the run is sent.
        run = _begin(start, "offline") if kept is None else _init(start, "offline", _new_id())
    if start["mode"] == LATER and run.disabled:
        run, report = _go_on_or_begin(start, "offline", kept), DISABLED
    run.define_metric("round")
    run.define_metric("*", step_metric="round")
    return run, report


def _go_on_or_begin(start: dict[str, Any], mode: Any, kept: str | None) -> Any:
    """The run of W&B with the id `kept`, or one with a new id if there is none, or if that run was deleted."""
    import wandb

    if kept is not None:
        try:
            return _init(start, mode, kept, resume="allow")
        except wandb.errors.CommError as error:
            if DELETED not in str(error):
                raise
    return _begin(start, mode)


def _begin(start: dict[str, Any], mode: Any) -> Any:
    wandb_id = _new_id()
    with suppress(OSError):  # a full disk; the run is sent all the same
        _place(start).write_text(f"{wandb_id}\n", encoding="utf-8")
    return _init(start, mode, wandb_id)


def _init(start: dict[str, Any], mode: Any, wandb_id: str, resume: Any = None) -> Any:
    import wandb

    known = wandb.Settings.model_fields
    quiet = {k: v for k, v in QUIET.items() if k in known}
    options = {k: start[k] for k in ("project", "entity", "group", "job_type", "name", "tags", "config")}
    settings = wandb.Settings(init_timeout=0.6 * start["timeout"], **quiet)
    return wandb.init(
        mode=mode, dir=start["folder"], id=wandb_id, resume=resume, reinit="create_new", settings=settings, **options
    )


def _place(start: dict[str, Any]) -> Path:
    return Path(start["folder"]) / WANDB_ID


def _kept_id(start: dict[str, Any]) -> str | None:
    try:
        return _place(start).read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def _new_id() -> str:
    return secrets.token_hex(6)


def _reason(error: Exception, by_settings: bool) -> str:
    import wandb

    absent = by_settings and isinstance(error, wandb.errors.UsageError) and "configured" in str(error)
    return NO_KEY if absent else f"{NOT_ONLINE} ({one_line(error)}), so it is logged offline"


def one_line(error: Exception) -> str:
    """The class of an error, and the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
