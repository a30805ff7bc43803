"""Overwriting the results of several jobs (`overwrite=true`) by a command that may be killed.

The same command then resumes: jobs that it has overwritten already are not run once more, although
their results are there and the command says `overwrite=true`. These are the jobs whose summaries
are newer than the beginning of the overwriting. While jobs run, a note in the folder
`.replacements` holds the time of this beginning. Its name is a hash of the jobs' folders, so that
only a command with the same jobs finds it. The note is deleted when all jobs have ended.
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

    `since` is when the overwriting began [s since 1970]. A task of another process passes it, and
    otherwise the note of an earlier command may hold it. Without both, the overwriting begins now.
    `replaced` are the folders whose results an earlier command has overwritten.
    """

    def __init__(self, plans: Sequence[Plan] = (), since: float | None = None) -> None:
        self._plans = {plan.folder: plan for plan in plans if plan.settings.overwrite}
        self._note = _note_of(list(self._plans))
        self.replaced: set[Path] = set()
        noted = self._read_note() if since is None else None
        if since is not None:
            self.since = since
        elif noted is not None:
            self.since = noted
            for folder, plan in self._plans.items():
                if self.has_ended(plan):
                    self.replaced.add(folder)
        else:
            # The clock of a file server may be ahead of this one. The overwriting begins after the
            # latest summary, so that no old result counts as replaced.
            self.since = max([time.time(), *map(_time_of_summary, self._plans)])

    def _read_note(self) -> float | None:
        """Return the time in the note; None if there is none, or it cannot be read."""
        if len(self._plans) < 2:
            return None
        try:
            return float(content_of(self._note))
        except (DamagedError, ValueError):
            return None

    def has_ended(self, plan: Plan) -> bool:
        """Return whether nothing is left to do for a job: it is replaced, or done."""
        if not outcome_on_file(plan).final:
            return False
        return not plan.settings.overwrite or _time_of_summary(plan.folder) > self.since

    def leave_out(self, plan: Plan) -> None:
        """Do not keep the note for a job that will not be run (a race has stopped its method)."""
        self._plans.pop(plan.folder, None)

    def without_replaced(self, plan: Plan) -> Plan:
        """Return `plan`, with `overwrite=false` if its results are replaced by now."""
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
            num_ended = sum(map(self.has_ended, self._plans.values()))
            if num_ended in (0, len(self._plans)):
                # Also delete the folders that were created for the note, if they are empty.
                with suppress(OSError):
                    self._note.unlink(missing_ok=True)
                    for folder in dict.fromkeys([self._note.parent, *new_folders]):
                        folder.rmdir()


def _note_of(folders: Sequence[Path]) -> Path:
    """Return the file of the note on jobs with these folders."""
    texts = sorted(map(str, folders))
    name = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
    first = min(folders, default=Path())  # any order of the jobs gives the same note
    return first.parent / REPLACEMENTS / f"overwrite-{name}"


def _time_of_summary(folder: Path) -> float:
    """Return when the summary in a run's folder was written; 0 without one."""
    try:
        return (folder / SUMMARY).stat().st_mtime
    except OSError:
        return 0.0
