"""`overwrite=true` over several jobs: which of them it has replaced already. The same command goes on with the others.

A note in `.replacements/` names the results that were there when the first of these commands began. It holds for one
set of jobs, and is deleted when all of them have ended.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from fedsim.config.plan import Plan
from fedsim.core.disk import write_atomically
from fedsim.results.files import REPLACEMENTS
from fedsim.running.outcome import outcome_on_file


class Overwriting:
    """The jobs of a command that overwrite what is there, those of `plans` with `overwrite=true`.

    A job is replaced when its folder has another result than the one that was there when the overwriting began: in this
    command, or in an earlier one with the same jobs that ended before all of them had.
    """

    def __init__(self, plans: Sequence[Plan] = ()) -> None:
        self._plans = {plan.folder: plan for plan in plans if plan.settings.overwrite}
        self._before = {folder: result_of(plan) for folder, plan in self._plans.items()}
        self._began = time.time()
        self._note: Path | None = None
        self._goes_on = False
        if len(self._plans) > 1:
            name = hashlib.sha256("\n".join(sorted(map(str, self._plans))).encode()).hexdigest()[:12]
            self._note = min(self._plans).parent / REPLACEMENTS / f"overwrite-{name}.json"
            with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):  # an earlier command's, if any
                found = json.loads(self._note.read_text(encoding="utf-8"))
                self._before, self._began = {f: found["results"][str(f)] for f in self._plans}, float(found["began"])
                self._goes_on = True
        ended = [folder for folder, plan in self._plans.items() if self.has_ended(plan)] if self._goes_on else []
        self.replaced = frozenset(ended)
        """Folders of jobs that an earlier command has replaced."""

    def has_ended(self, plan: Plan) -> bool:
        """Whether nothing is left to do for a job: it is replaced, or finished where it is not to be."""
        if plan.settings.overwrite and plan.folder in self._before:
            return result_of(plan) not in (None, self._before[plan.folder])
        return outcome_on_file(plan).final and not plan.settings.overwrite

    def as_found(self, plan: Plan) -> Plan:
        """`plan`, without `overwrite=true` if it is replaced by now: its result is taken."""
        return taken(plan) if plan.settings.overwrite and self.has_ended(plan) else plan

    def after_wait(self, plan: Plan) -> Plan:
        """A plan that another process was running. Its result is taken where that process may have worked at the same
        overwriting, which had begun before this command; else it is replaced, too."""
        if not self._goes_on and plan.folder in self._before:
            self._before[plan.folder] = result_of(plan)
        return self.as_found(plan)

    @property
    def notice(self) -> str:
        """What is not run again though the command says `overwrite=true`, and how it would be; empty if nothing is."""
        if not self.replaced:
            return ""
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(self._began))
        done = f"{len(self.replaced)} of {len(self._plans)} jobs have been run again since and are not run once more"
        return f"going on with overwrite=true of {began}, which has not ended: {done} (delete {self._note} to run all)"

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Keep the note while jobs are run, and longer if the command ends before all of them have."""
        note = self._note
        if note is None:
            yield
            return
        made = [] if self._goes_on else [folder for folder in note.parents if not folder.exists()]
        if not self._goes_on:
            results = {str(folder): result for folder, result in self._before.items()}
            with suppress(OSError):  # without a note, the same command starts anew with all jobs
                note.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(note, json.dumps({"began": self._began, "results": results}).encode())
        try:
            yield
        finally:
            ended = [self.has_ended(plan) for plan in self._plans.values()]
            if all(ended) or not (self._goes_on or any(ended)):
                with suppress(OSError):  # of folders in which something else is
                    note.unlink(missing_ok=True)
                    for folder in dict.fromkeys([note.parent, *made]):
                        folder.rmdir()


def result_of(plan: Plan) -> str | None:
    """Tells the finished result in a job's folder from any other one; None if there is none."""
    found = outcome_on_file(plan)
    if not found.final:
        return None
    return f"{found.summary.get('started')} {found.summary.get('wall_seconds')!r}"


def taken(plan: Plan) -> Plan:
    """`plan` without `overwrite=true`: a finished result is taken as it is."""
    return replace(plan, settings=replace(plan.settings, overwrite=False))
