"""`overwrite=true` over several jobs: the same command resumes with the jobs that are not replaced.

A job is replaced if its summary was written after the overwriting began: in this command, or in an
earlier one with the same jobs that was killed before all of them had ended. While jobs run, a note
in `.replacements/` says when the overwriting began. It is deleted when all jobs have ended.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from fedsim.config.plan import Plan
from fedsim.core.disk import write_atomically
from fedsim.results.files import REPLACEMENTS
from fedsim.results.reading import SUMMARY, DamagedError, content_of
from fedsim.running.outcome import outcome_on_file


class Overwriting:
    """The jobs of a command that overwrite earlier results: the `plans` with `overwrite=true`.

    `since` is when the overwriting began [s since 1970]. If it is None, that is now, or when an
    earlier command's overwriting began. `replaced` are the folders that the earlier command has
    replaced.
    """

    def __init__(self, plans: Sequence[Plan] = (), since: float | None = None) -> None:
        self._plans = {plan.folder: plan for plan in plans if plan.settings.overwrite}
        self.replaced: set[Path] = set()
        folders = sorted(map(str, self._plans))
        name = hashlib.sha256("\n".join(folders).encode()).hexdigest()[:12]
        parent = min(self._plans, default=Path()).parent
        self._note = parent / REPLACEMENTS / f"overwrite-{name}"
        if since is not None:
            self.since = since
            return
        # A summary may be younger than this clock says, on another machine's file system.
        self.since = max([time.time(), *map(_written, self._plans)])
        if len(self._plans) > 1:
            with suppress(DamagedError, ValueError):
                self.since = float(content_of(self._note))
                self.replaced = {f for f, plan in self._plans.items() if self.has_ended(plan)}

    def has_ended(self, plan: Plan) -> bool:
        """Return whether nothing is left to do for a job: it is replaced, or done."""
        if not outcome_on_file(plan).final:
            return False
        return not plan.settings.overwrite or _written(plan.folder) > self.since

    def forget(self, plan: Plan) -> None:
        """Do not wait for a job that is not run."""
        self._plans.pop(plan.folder, None)

    def as_found(self, plan: Plan) -> Plan:
        """Return `plan`, without `overwrite=true` if it is replaced by now."""
        if plan.settings.overwrite and self.has_ended(plan):
            return replace(plan, settings=replace(plan.settings, overwrite=False))
        return plan

    @property
    def notice(self) -> str:
        """Which jobs are not run again in spite of `overwrite=true`; empty if there are none."""
        if not self.replaced:
            return ""
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since))
        done = f"{len(self.replaced)} of {len(self._plans)} jobs are replaced already"
        remedy = f"delete {self._note} to run all"
        return f"resuming with overwrite=true of {began}, which has not ended: {done} ({remedy})"

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Keep the note while jobs run, and longer if the command ends before all have ended."""
        new_folders = [folder for folder in self._note.parents if not folder.exists()]
        if len(self._plans) > 1:
            # Without a note, the same command starts anew with all jobs.
            with suppress(OSError):
                self._note.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._note, repr(self.since).encode(), alone=False)
        try:
            yield
        finally:
            ended = list(map(self.has_ended, self._plans.values()))
            if all(ended) or not any(ended):
                with suppress(OSError):  # other things are in a folder
                    self._note.unlink(missing_ok=True)
                    for folder in dict.fromkeys([self._note.parent, *new_folders]):
                        folder.rmdir()


def _written(folder: Path) -> float:
    """Return when the summary in a run's folder was written; 0 without one."""
    try:
        return (folder / SUMMARY).stat().st_mtime
    except OSError:
        return 0.0
