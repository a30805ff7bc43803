"""The tracker for Weights & Biases (W&B).

A separate process (`wandb_mirror`) communicates with W&B, so that W&B can neither stop nor delay nor change a run. This
module does not import W&B.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fedsim.errors import check, positive, rule
from fedsim.tracking.base import RunInfo, Tracker
from fedsim.tracking.files import json_ready
from fedsim.tracking.mirror_process import MirrorProcess
from fedsim.tracking.wandb_mode import configured_mode, resolve_mode

MAX_SECONDS = 20.0


class WandbTracker(Tracker):
    """Makes one W&B run of each run: group = the run's name, job_type = its selector, step = `round`.

    `mode: auto` is online if an API key is found (WANDB_API_KEY, netrc, W&B's settings), else offline, with records in
    the run's folder that `wandb sync` can send; WANDB_MODE and `wandb offline` take precedence over `auto`. The run
    waits for W&B only at its end, for at most `timeout` seconds; failures are then reported and counted.
    """

    def __init__(
        self,
        *,
        mode: Literal["auto", "online", "offline", "disabled"],
        project: str,
        entity: str | None,
        tags: list[str],
        timeout: float,
    ) -> None:
        check(
            rule(bool(project), "project", project, "must not be empty"),
            positive("timeout", timeout),
            rule(timeout <= MAX_SECONDS, "timeout", timeout, f"must be at most {MAX_SECONDS:g} seconds"),
        )
        self.mode = resolve_mode(mode)
        self.project, self.entity, self.tags, self.timeout = project, entity, tags, timeout
        self._no_key = mode == "auto" and self.mode == "offline" and configured_mode() is None
        self._process: MirrorProcess | None = None
        self._notice: str | None = None
        self._degraded = 0

    @property
    def notice(self) -> str | None:
        return self._notice

    @property
    def num_degraded(self) -> int:
        return self._degraded

    def start(self, info: RunInfo) -> None:
        if self.mode == "disabled":
            return
        self._folder = info.results
        if self._no_key:
            self._notice = (
                f"W&B: no API key, so this run is logged offline in {info.results}/wandb "
                "('wandb login' turns it on, tracker.wandb.mode=disabled off)"
            )
        self._process = MirrorProcess()
        self._process.send(
            {"start": start_message(info, self.mode, self.project, self.entity, self.tags, self.timeout)}
        )

    def log(self, record: Mapping[str, Any]) -> None:
        if self._process is not None:
            self._process.send({"log": scalars(record)})

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._process is None:
            return
        self._process.send({"finish": json_ready(summary)})
        report = self._process.finish(self.timeout)
        self._process = None
        if report != "done":
            self._degraded += 1
            self._notice = f"W&B: {report}; nothing is lost: {resend_command(self._folder)}"


def resend_command(folder: Path) -> str:
    """The command that sends a run to W&B from its files."""
    return f"python -m fedsim.tracking.wandb_mirror {folder}"


def start_message(
    info: RunInfo, mode: str, project: str, entity: str | None, tags: list[str], timeout: float
) -> dict[str, Any]:
    """The message from which the mirror process begins a W&B run."""
    return {
        "mode": mode,
        "project": project,
        "entity": entity,
        "group": info.name,
        "job_type": info.choices.get("selector", "custom"),
        "name": info.run_id,
        "tags": [*tags, *(info.choices[g] for g in ("dataset", "partition", "model") if g in info.choices)],
        "config": json_ready({**info.config, "choices": dict(info.choices)}),
        "folder": os.fspath(info.folder.absolute()),
        "timeout": timeout,
    }


def scalars(record: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers in a record; values that were not measured (None) are left out."""
    return {k: v for k, v in json_ready(record).items() if isinstance(v, int | float)}
