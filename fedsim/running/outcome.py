"""How runs end, as it is returned and as it is on file; and what they leave: final model and summary, or on a full disk
as much as there is room for."""

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.config.plan import Plan
from fedsim.core.errors import FedsimError
from fedsim.core.record import KEY, LASTS, TOTALS, Record, mean_of_last
from fedsim.core.types import Params
from fedsim.results.files import (
    CLIENTS,
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


def totals_of(records: Sequence[Record], initial_accuracy: float) -> dict[str, Any]:
    """The part of a summary that follows from the records of all rounds."""
    evaluated = [r.test_accuracy for r in records if r.test_accuracy is not None]
    return {
        "rounds": len(records),
        "initial_accuracy": initial_accuracy,
        "smoothed_accuracy": mean_of_last([r.test_accuracy for r in records]),
        "final_accuracy": evaluated[-1] if evaluated else None,
        "best_accuracy": max(evaluated, default=None),
        "mean_participation_ratio": float(np.mean([r.participation_ratio for r in records])) if records else None,
        **{name: getattr(records[-1], name) if records else 0.0 for name in LASTS},
        **_simulated(records),
        "totals": {name: sum(getattr(r, name) for r in records) for name in TOTALS},
    }


def _simulated(records: Sequence[Record]) -> dict[str, Any]:
    """Totals of the simulated clock; nothing without one."""
    if not records or records[-1].late is None:
        return {}
    late = sum(len(record.late or ()) for record in records)
    return {"simulated_seconds": records[-1].simulated_time, "late_updates": late}


Arrays = Mapping[str, NDArray[Any]]


def of_clients(simulation: Simulation) -> tuple[dict[str, Any], Arrays | None]:
    """What the summary has of the final model's accuracy on each client, and the arrays of clients.npz (all [N]):
    `accuracy`, nan where there is none; `samples`, on how many it rests; `selected`, whether the client ever was.

    Nothing where it is not measured.
    """
    accuracies, measure = simulation.client_accuracies(), simulation.components.client_accuracy
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
                folder.write_bytes(CLIENTS, _npz(clients))
        folder.write_summary(summary)
    except OutputError as error:
        tell_unwritten(error)
        if read_summary(folder.path) != json_ready(summary):  # else it is there, though perhaps not on the disk yet
            reason = "; ".join(filter(None, (summary["error"], str(error))))
            summary = {**summary, "status": "failed" if final else summary["status"], "error": reason}
            rewrite_summary(folder, summary)
            return summary
    if final:
        delete_checkpoints()
    return summary


def _npz(arrays: Arrays) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    return file.getvalue()


def rewrite_summary(folder: RunFolder, summary: Mapping[str, Any]) -> None:
    """Write a summary that is not worth a run: on a full disk one line says that it is not there."""
    try:
        folder.write_summary(summary)
    except OutputError as error:
        tell_unwritten(error)


def keep_traceback(write: Callable[[str], None], text: str) -> bool:
    """Whether `write` could write the traceback `text` to a file; where it could not, the text is on stderr."""
    try:
        write(text)
    except OutputError as error:
        with suppress(OSError):
            sys.stderr.write(text)
        tell_unwritten(error)
        return False
    return True


def tell_unwritten(error: OutputError) -> None:
    """Say on stderr what could not be written."""
    with suppress(OSError):  # stderr may be a file on the same disk
        sys.stderr.write(f"fedsim: {error}\n")


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
    """What the run's folder says of it; `failed` where there is no summary."""
    return outcome_in(plan.folder)


def worked_in(plan: Plan) -> Path:
    """Where a run that has not ended leaves its files: in its folder, or beside a finished result that it is to
    replace."""
    beside = plan.settings.overwrite and outcome_on_file(plan).final
    return replacement_of(plan.folder) if beside else plan.folder


def outcome_in(folder: Path) -> Outcome:
    """What `folder` says of the run in it; `failed` where there is no summary, or one of an end whose files are not
    whole, which are then named in `error`."""
    summary = read_summary(folder)
    if summary is None:
        return Outcome("failed", {})
    if summary["status"] in FINAL and (lost := _lost(folder, summary)):
        return Outcome("failed", {**summary, "error": lost})
    return Outcome(summary["status"], summary)


def _lost(folder: Path, summary: Mapping[str, Any]) -> str | None:
    """What is missing of the files of a run that has an end, or None."""
    try:
        lines = (folder / METRICS).read_bytes().count(b"\n")
    except FileNotFoundError:
        lines = 0
    if lines != summary.get("rounds"):
        return f"{METRICS} has {lines} of {summary.get('rounds')} rounds"
    return None if is_whole_model(folder / MODEL) else f"{MODEL} is missing or cut short"
