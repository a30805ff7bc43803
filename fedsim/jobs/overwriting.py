"""`overwrite=true` over several jobs: which of them are replaced already. The same command goes on
with the others.

A job is replaced when its summary was written after the overwriting began: in this command, or in
an earlier one with the same jobs that was killed before all of them had ended. It leaves a note in
`.replacements/` of when it began, which is deleted when all jobs have ended.
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
    """The jobs of a command that overwrite what is there, those of `plans` with `overwrite=true`.

    `since`: when the overwriting began (seconds since 1970); None for now, or when the earlier
    command's did. `replaced`: folders of jobs that the earlier command has replaced.
    """

    def __init__(self, plans: Sequence[Plan] = (), since: float | None = None) -> None:
        self._plans = {plan.folder: plan for plan in plans if plan.settings.overwrite}
        self.since = max([time.time(), *map(_written, self._plans)]) if since is None else since
        self.replaced: frozenset[Path] = frozenset()
        name = hashlib.sha256("\n".join(sorted(map(str, self._plans))).encode()).hexdigest()[:12]
        self._note = min(self._plans, default=Path()).parent / REPLACEMENTS / f"overwrite-{name}"
        if since is None and len(self._plans) > 1:
            with suppress(DamagedError, ValueError):
                self.since = float(content_of(self._note))
                self.replaced = frozenset(
                    folder for folder, plan in self._plans.items() if self.has_ended(plan)
                )

    def has_ended(self, plan: Plan) -> bool:
        """Whether nothing is left to do for a job: it is replaced, or finished where it is not to
        be."""
        final = outcome_on_file(plan).final
        return final and (not plan.settings.overwrite or _written(plan.folder) > self.since)

    def forget(self, plan: Plan) -> None:
        """A job that is not to be run: the others are all that have to end."""
        self._plans.pop(plan.folder, None)

    def as_found(self, plan: Plan) -> Plan:
        """`plan`, without `overwrite=true` if it is replaced by now: its result is taken."""
        if not (plan.settings.overwrite and self.has_ended(plan)):
            return plan
        return replace(plan, settings=replace(plan.settings, overwrite=False))

    @property
    def notice(self) -> str:
        """What is not run again though the command says `overwrite=true`, and how it would be;
        empty if nothing is."""
        if not self.replaced:
            return ""
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since))
        done = f"{len(self.replaced)} of {len(self._plans)} jobs have been run again since and are not run once more"
        return f"going on with overwrite=true of {began}, which has not ended: {done} (delete {self._note} to run all)"

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Keep the note while jobs are run, and longer where the command ends before all of them
        have."""
        made = [folder for folder in self._note.parents if not folder.exists()]
        with suppress(OSError):  # without a note, the same command starts anew with all jobs
            if len(self._plans) > 1:
                self._note.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._note, repr(self.since).encode(), alone=False)
        try:
            yield
        finally:
            ended = [self.has_ended(plan) for plan in self._plans.values()]
            if all(ended) or not any(ended):
                with suppress(OSError):  # of folders in which something else is
                    self._note.unlink(missing_ok=True)
                    for folder in dict.fromkeys([self._note.parent, *made]):
                        folder.rmdir()


def _written(folder: Path) -> float:
    """When the summary in a run's folder was written; 0 where there is none."""
    try:
        return (folder / SUMMARY).stat().st_mtime
    except OSError:
        return 0.0
