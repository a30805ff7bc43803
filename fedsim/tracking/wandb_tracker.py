"""The tracker for Weights & Biases (W&B).

A separate process (`wandb_mirror`) communicates with W&B, so that W&B can neither stop nor delay nor change a run. This
module does not import W&B.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedsim.errors import check, positive, rule
from fedsim.shell import command
from fedsim.tracking.base import RunInfo, Tracker
from fedsim.tracking.files import json_ready
from fedsim.tracking.mirror_process import NO_ANSWER, MirrorProcess

MAX_SECONDS = 20.0
NO_KEY, NOT_ONLINE = "no API key", "could not go online"
"""How reports of the mirror process begin whose run is offline for that reason."""
LATER = "later"
"""The mode of a run that is sent when it has ended: as `auto`, but never without any record."""
TARGET = "fedsim.tracking.wandb_tracker.WandbTracker"
RETRY_SECONDS = 3600.0
"""A server that did not answer is left alone for so long."""
LEAST_SECONDS = 2.0
"""What the end of a run may always wait: its record may be offline, and has to be closed."""


@dataclass
class Server:
    """What the runs of this process have found out about W&B's server, so that a sweep waits for a dead one once.

    `failed`: when it last did not answer (`time.monotonic()`), None if it did since. `waited`: seconds in which ends
    of runs have waited for it in vain. `told`: kinds of notices that have been given; each is given once a process.
    """

    failed: float | None = None
    waited: float = 0.0
    told: set[str] = field(default_factory=set)

    @property
    def is_dead(self) -> bool:
        """Whether it did not answer lately; runs that begin now are logged offline at once."""
        return self.failed is not None and time.monotonic() - self.failed < RETRY_SECONDS

    def limit(self, seconds: float) -> float:
        """How long to wait for it at the end of a run; less than `seconds` if others have waited in vain."""
        return max(seconds - self.waited, min(seconds, LEAST_SECONDS)) if self.is_dead else seconds

    def note(self, report: str, seconds: float) -> None:
        """Take account of a `report` of the mirror process, for which a run waited so long."""
        if report == "done":
            self.failed, self.waited = None, 0.0
        elif report.startswith((NOT_ONLINE, NO_ANSWER)):
            self.waited = seconds + (self.waited if self.is_dead else 0.0)
            self.failed = time.monotonic()


SERVER = Server()


class WandbTracker(Tracker):
    """Makes one W&B run of each run: group = the run's name, job_type = its selector, step = `round`.

    `mode: auto` is what W&B itself would do by its settings (environment, netrc, files): online with an API key; but
    offline without one, with records in the run's folder that `wandb sync` can send. The run waits for W&B only at its
    end, for at most `timeout` seconds; failures are then reported and counted. Once the server has not answered, later
    runs of the process are logged offline at once.
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
        self.mode = "disabled" if mode == "auto" and os.environ.get("WANDB_MODE") == "disabled" else mode
        self.project, self.entity, self.tags, self.timeout = project, entity, tags, timeout
        self._server_is_dead = False
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
        self._server_is_dead = self.mode != "offline" and SERVER.is_dead
        mode = "offline" if self._server_is_dead else self.mode
        self._process = MirrorProcess()
        self._process.send({"start": start_message(info, mode, self.project, self.entity, self.tags, self.timeout)})

    def log(self, record: Mapping[str, Any]) -> None:
        if self._process is not None:
            self._process.send({"log": scalars(record)})

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._process is None:
            return
        self._process.send({"finish": json_ready(summary)})
        needs_server = self.mode != "offline" and not self._server_is_dead
        began = time.monotonic()
        report = self._process.finish(SERVER.limit(self.timeout) if needs_server else self.timeout)
        self._process = None
        if needs_server:
            SERVER.note(report, time.monotonic() - began)
        elif report == "done" and self._server_is_dead:
            report = "the server did not answer an earlier run, so this one is logged offline"
        self._degraded += report != "done" and not report.startswith(NO_KEY)
        kind = report.partition(" (")[0]
        if report == "done" or kind in SERVER.told:
            return
        SERVER.told.add(kind)
        if report.startswith(NO_KEY):
            self._notice = (
                f"W&B: {NO_KEY}, so runs are logged offline, in the folder wandb of each"
                "\n     (`wandb login` sends them online; tracker.wandb.mode=disabled: without W&B)"
            )
        else:
            sends = f"{command('fedsim', 'sync', str(self._folder))} sends it"
            later = "told once, summary.json says which later runs it holds for"
            self._notice = f"W&B: {report}; nothing is lost: {sends}; {later}"


def mirrors_in(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The nodes of this tracker in a run's config, by name; those that are disabled come last."""
    nodes = config.get("tracker")
    found = {
        name: node
        for name, node in (nodes.items() if isinstance(nodes, Mapping) else ())
        if isinstance(node, Mapping) and node.get("_target_") == TARGET
    }
    return dict(sorted(found.items(), key=lambda item: item[1].get("mode") == "disabled"))


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
