"""`overwrite=true` over several jobs: the same command resumes with the jobs that are not replaced.

A job is replaced if its summary was written after the overwriting began. The overwriting began in
this command, or in an earlier one with the same jobs that was killed before all of them had ended.
While jobs run, a note in `.replacements/` says when it began. The note's name is a hash of the
jobs' folders. It is deleted when all jobs have ended.

`fedsim.jobs.prepare` creates the `Overwriting` of a command, and `fedsim.jobs.cli` keeps the note.
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

    `since` is when the overwriting began [s since 1970]. A task of another process passes it.
    Without it, the note of an earlier command says when it began, or it begins now. `replaced` are
    the folders that the earlier command has replaced.
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
        # The clock of a file server may be ahead of this one. The overwriting begins after the
        # latest summary, so that no old result counts as replaced.
        self.since = max([time.time(), *map(_written, self._plans)])
        if len(self._plans) > 1:
            with suppress(DamagedError, ValueError):
                self.since = float(content_of(self._note))
                for folder, plan in self._plans.items():
                    if self.has_ended(plan):
                        self.replaced.add(folder)

    def has_ended(self, plan: Plan) -> bool:
        """Return whether nothing is left to do for a job: it is replaced, or done."""
        if not outcome_on_file(plan).final:
            return False
        return not plan.settings.overwrite or _written(plan.folder) > self.since

    def forget(self, plan: Plan) -> None:
        """Delete the note without waiting for a job that is not run (`fedsim race` calls this)."""
        self._plans.pop(plan.folder, None)

    def as_found(self, plan: Plan) -> Plan:
        """Return `plan`, without `overwrite=true` if it is replaced by now."""
        if plan.settings.overwrite and self.has_ended(plan):
            return replace(plan, settings=replace(plan.settings, overwrite=False))
        return plan

    @property
    def notice(self) -> str:
        """A line on jobs that are not run again in spite of `overwrite=true`; empty without any."""
        if not self.replaced:
            return ""
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since))
        jobs = f"{len(self.replaced)} of {len(self._plans)} jobs are replaced already"
        remedy = f"delete {self._note} to run all"
        return f"resuming with overwrite=true of {began}, which has not ended: {jobs} ({remedy})"

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Write the note before jobs run within this context, and delete it after all have ended.

        If only some have ended, the note stays for the same command. If none has, the command has
        done nothing that it could resume with.
        """
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
                # Also delete the folders that were created for the note, if they are empty.
                with suppress(OSError):
                    self._note.unlink(missing_ok=True)
                    for folder in dict.fromkeys([self._note.parent, *new_folders]):
                        folder.rmdir()


def _written(folder: Path) -> float:
    """Return when the summary in a run's folder was written; 0 without one."""
    try:
        return (folder / SUMMARY).stat().st_mtime
    except OSError:
        return 0.0
