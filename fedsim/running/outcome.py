"""How runs end, as it is returned and as it is on file; and what they leave: final model and summary, or on a full disk
as much as there is room for."""

import io
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.config.plan import Plan
from fedsim.core.errors import DivergedError, FedsimError
from fedsim.core.record import KEY, LASTS, TOTALS, Record, mean_of_last
from fedsim.core.types import Params
from fedsim.results.files import (
    CLIENTS,
    ERROR,
    FINAL,
    METRICS,
    MODEL,
    OutputError,
    RunFolder,
    is_whole_model,
    json_ready,
    read_summary,
    replacement_of,
    save_model,
)
from fedsim.rounds.client_accuracy import aggregates
from fedsim.rounds.loop import Simulation


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `done`, `diverged`, `failed`, `interrupted`, `preempted`; `skipped` if an earlier run did so.

    `cause`: the exception that has ended it, in this process; `refusal`: what has kept it from its first round. Such a
    job may end as `data` or `config`, too, and as `held` if another process has it.
    """

    status: str
    summary: Mapping[str, Any]
    skipped: bool = False
    cause: BaseException | None = None
    refusal: FedsimError | None = None

    @property
    def final(self) -> bool:
        """The same command does not run it again."""
        return self.status in FINAL


def outcome_on_file(plan: Plan) -> Outcome:
    """What the run's folder says of it."""
    return outcome_in(plan.folder)


def outcome_in(folder: Path) -> Outcome:
    """What `folder` says of the run in it; `failed` where there is no summary, or one of an end whose files are not
    whole, which are then named in `error`."""
    summary = read_summary(folder)
    if summary is None:
        return Outcome("failed", {})
    lost = None
    if summary["status"] in FINAL:
        metrics, rounds = folder / METRICS, summary.get("rounds")
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if lines != rounds:
            lost = f"{METRICS} has {lines} of {rounds} rounds"
        elif not is_whole_model(folder / MODEL):
            lost = f"{MODEL} is missing or cut short"
    return Outcome(summary["status"], summary) if lost is None else Outcome("failed", {**summary, "error": lost})


def worked_in(plan: Plan) -> Path:
    """Where a run that has not ended leaves its files: in its folder, or beside a finished result that it is to
    replace."""
    beside = plan.settings.overwrite and outcome_on_file(plan).final
    return replacement_of(plan.folder) if beside else plan.folder


Ending = tuple[str, str | None, BaseException | None]
"""The status of a run, its reason in words, and the exception that has ended it."""


def ended_by(reason: BaseException, folder: RunFolder) -> Ending:
    """The end of a run whose rounds, or what follows on them, have raised `reason`.

    The traceback of what is no `FedsimError` is kept in the run's folder.
    """
    if isinstance(reason, DivergedError):
        return "diverged", str(reason), reason
    if isinstance(reason, KeyboardInterrupt):
        return "interrupted", "Ctrl-C", reason
    if isinstance(reason, OutputError):
        tell(f"fedsim: {reason}\n")
    if isinstance(reason, FedsimError):
        return "failed", str(reason), reason
    _keep_traceback(lambda text: folder.write_text(ERROR, text), reason)
    return "failed", _in_words(reason), reason


def failed_before_rounds(
    plan: Plan, place: Path, error: BaseException, lock: AbstractContextManager[None] | None = None
) -> Outcome:
    """Leave the traceback of what a user's class has raised before any round in `place`, the folder of the run.

    `lock`: that of the run's folder, to be held meanwhile; None if it is held already.
    """

    def write(text: str) -> None:
        with lock or nullcontext():
            RunFolder(place).write_error(plan.config, text)

    kept = _keep_traceback(write, error)
    where = f"    see {place / ERROR}\n" if kept else ""
    tell(f"fedsim: {plan.folder} failed before any round was run: {_in_words(error)}\n{where}")
    return Outcome("failed", {"error": _in_words(error)}, cause=error)


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _keep_traceback(write: Callable[[str], None], error: BaseException) -> bool:
    """Whether `write` could write the traceback of `error` to a file; where it could not, it is on stderr."""
    text = "".join(traceback.format_exception(error))
    try:
        write(text)
    except OutputError as full:
        tell(f"{text}fedsim: {full}\n")
        return False
    return True


def tell(text: str) -> None:
    """Write to stderr, which may be a file on the same disk."""
    with suppress(OSError):
        sys.stderr.write(text)


def totals_of(records: Sequence[Record], initial_accuracy: float) -> dict[str, Any]:
    """The part of a summary that follows from the records of all rounds."""
    evaluated = [r.test_accuracy for r in records if r.test_accuracy is not None]
    last = records[-1] if records else None
    simulated: dict[str, Any] = {}
    if last is not None and last.late is not None:
        late = sum(len(record.late or ()) for record in records)
        simulated = {"simulated_seconds": last.simulated_time, "late_updates": late}
    return {
        "rounds": len(records),
        "initial_accuracy": initial_accuracy,
        "smoothed_accuracy": mean_of_last([r.test_accuracy for r in records]),
        "final_accuracy": evaluated[-1] if evaluated else None,
        "best_accuracy": max(evaluated, default=None),
        "mean_participation_ratio": float(np.mean([r.participation_ratio for r in records])) if records else None,
        **{name: getattr(last, name) if last else 0.0 for name in LASTS},
        **simulated,
        "totals": {name: sum(getattr(r, name) for r in records) for name in TOTALS},
    }


Arrays = Mapping[str, NDArray[Any]]


def of_clients(simulation: Simulation) -> tuple[dict[str, Any], Arrays | None]:
    """What the summary has of the final model's accuracy on each client, and the arrays of clients.npz (all [N]):
    `accuracy`, nan where there is none; `samples`, on how many it rests; `selected`, whether the client ever was.

    Nothing where it is not measured.
    """
    measure = simulation.components.client_accuracy
    accuracies = None if measure is None else simulation.measure()[1]
    if accuracies is None or measure is None:
        return {}, None
    selected = simulation.covered
    counts = {"clients": int(np.isfinite(accuracies).sum()), "clients_never_selected": int((~selected).sum())}
    arrays = {"accuracy": accuracies, "samples": measure.samples, "selected": selected}
    return {KEY: {**aggregates(accuracies, selected), **counts}}, arrays


def keep(
    folder: RunFolder,
    delete_checkpoints: Callable[[], None],
    summary: Mapping[str, Any],
    params: Params,
    clients: Arrays | None = None,
) -> Mapping[str, Any]:
    """Write the summary of a run, and before it the final model `params` of one that has an end, and the arrays of
    `clients`, if any.

    The checkpoints of a run that has an end are deleted then. If anything cannot be written, they stay, a run that has
    an end counts as failed, and the summary says so where there is room for it. Returns the summary as it should be.
    """
    final = summary["status"] in FINAL
    try:
        folder.sync_records()
        if final:
            save_model(folder, MODEL, params)
            if clients is not None:
                file = io.BytesIO()
                np.savez_compressed(file, allow_pickle=False, **clients)
                folder.write_bytes(CLIENTS, file.getvalue())
        folder.write_summary(summary)
    except OutputError as error:
        tell(f"fedsim: {error}\n")
        if read_summary(folder.path) != json_ready(summary):  # else it is there, though perhaps not on the disk yet
            reason = "; ".join(filter(None, (summary["error"], str(error))))
            summary = {**summary, "status": "failed" if final else summary["status"], "error": reason}
            rewrite_summary(folder, summary)
            return summary
    if final:
        delete_checkpoints()
    return summary


def rewrite_summary(folder: RunFolder, summary: Mapping[str, Any]) -> None:
    """Write a summary that is not worth a run: on a full disk one line says that it is not there."""
    try:
        folder.write_summary(summary)
    except OutputError as error:
        tell(f"fedsim: {error}\n")
