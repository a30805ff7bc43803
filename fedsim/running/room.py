"""Is there room for the results? Asked before any work starts."""

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from fedsim.config.plan import Plan
from fedsim.errors import ConfigError, Problem
from fedsim.tracking.files import SUMMARY

BYTES_OF_RUN, BYTES_OF_ROUND, BYTES_OF_ID = 2_000_000, 1_000, 8
"""Roughly what a run's files need: division, config and summary; a line of metrics.jsonl; an id of a client in it."""


def require_room(plans: Iterable[Plan]) -> None:
    """Raise `ConfigError` unless the folders for results can be written and have room for the runs still to come.

    The need is estimated without models, whose size is not known yet.
    """
    needs: dict[Path, int] = {}
    for plan in plans:
        if not (plan.folder / SUMMARY).is_file() or plan.settings.overwrite:
            needs[plan.settings.output_dir] = needs.get(plan.settings.output_dir, 0) + _bytes_of(plan)
    problems = [problem for folder, need in needs.items() if (problem := room_problem("output_dir", folder, need))]
    if problems:
        raise ConfigError(problems)


def room_problem(key: str, folder: Path, need: int) -> Problem | None:
    """The problem of a `folder` to be made or written that has no room for `need` bytes, or None.

    It is tried out with a file without a name, of which nothing is left: permissions say little for the superuser and
    for network file systems.
    """
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    remedy = f"choose another folder with {key}, or make room there"
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0")
        free = shutil.disk_usage(existing).free
    except OSError as error:
        reason = error.strerror or str(error)
        return Problem(key, str(folder), f"cannot write in {existing} ({reason}); need {_megabytes(need)}", remedy)
    if free >= need:
        return None
    rule = f"no room in {existing}: need {_megabytes(need)}, free {_megabytes(free)}"
    return Problem(key, str(folder), rule, remedy)


def _bytes_of(plan: Plan) -> int:
    settings = plan.settings
    per_round = BYTES_OF_ROUND + BYTES_OF_ID * min(settings.cohort_size, settings.num_clients)
    return BYTES_OF_RUN + settings.num_rounds * per_round


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
