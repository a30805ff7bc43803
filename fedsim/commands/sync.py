"""`fedsim sync`: sends runs to Weights & Biases that were logged offline, or whose mirror failed.

The process that sends them is the one that mirrors runs (`fedsim.tracking.wandb_mirror`), apart from the folder.
"""

import os
import queue
import subprocess
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import yaml

from fedsim.commands.dispatch import wrap
from fedsim.core.errors import FedsimError
from fedsim.results.files import CONFIG, REPLACEMENTS, SUMMARY, is_free, owned, read_summary
from fedsim.running.process import STOP
from fedsim.tracking.wandb_tracker import COMMAND, NO_KEY, NOT_INHERITED, kill_with_children, mirrors_in

WANDB, SENT = "wandb", "sent.txt"
"""W&B's folder in that of a run, and what is left in it when a run has been sent again."""
UNSENT = "wandb.unsent"
"""In a run's folder while it is sent: W&B's record of it is made anew then, and may be gone if that is interrupted."""
OFFLINE = "offline-run-*"
"""W&B's records of a run that it has not been sent."""
AT_ONCE = 100
"""Runs that one process sends: the lock of each is an open file."""
HANG = 300.0
"""Seconds without a word after which the process that sends runs is given up."""
REMEDY = "`wandb login`, or the variable WANDB_API_KEY, gives W&B a key"


class NoKeyError(FedsimError):
    """W&B finds no API key."""

    exit_code = 2


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", nargs="*", type=Path, help="folders of runs, or folders above them (outputs)")
    parser.add_argument("--again", action="store_true", help="also runs that are there already")
    parser.add_argument("--dry-run", action="store_true", help="only name the runs that would be sent")


def run(options: Namespace) -> int:
    """Send what waits, or (`again`) all runs that have ended; 0 if all of it could be sent, 1 if not, 2 without a key
    or a folder."""
    folders = options.folder or [Path("outputs")]
    missing = [folder for folder in options.folder if not folder.is_dir()]
    if missing:
        raise NoFolderError(f"{', '.join(map(str, missing))}: no such folder; give that of a run, or one above it")
    found = ended(folders) if options.again else waiting(folders)
    where, state = ", ".join(map(str, folders)), "has ended" if options.again else "waits for W&B"
    if not found:
        print(wrap(f"no run below {where} {state}"))
        return 0
    if len(found) > 1:
        state = "have ended" if options.again else "wait for W&B"
    print(wrap(f"{_number(found)} below {where} {state}"))
    if options.dry_run:
        print("\n".join(f"  {folder}" for folder in found))
        return 0
    with STOP.working():  # a signal also ends the process that sends them
        sent = sum(_tell(folder, reason) for folder, reason in send(found))
    print(f"{sent} of {len(found)} sent")
    return int(sent < len(found))


class NoFolderError(FedsimError):
    """A folder that there is not."""

    exit_code = 2


def waiting(folders: Iterable[Path]) -> list[Path]:
    """Folders of runs below `folders` that have ended and are not on W&B's server, though they were to be."""
    return [folder for folder in ended(folders) if _waits(folder)]


def ended(folders: Iterable[Path]) -> list[Path]:
    """Folders of runs below `folders` that have ended, and that no process is running again."""
    places = (place.parent for folder in folders for place in sorted(folder.rglob(SUMMARY)))
    runs = (place for place in places if REPLACEMENTS not in place.parts and (place / CONFIG).is_file())
    return [place for place in dict.fromkeys(runs) if is_free(place)]


def _waits(folder: Path) -> bool:
    unsent = _is_offline(folder) or (folder / UNSENT).exists() or _mirror_failed(folder)
    return unsent and not (folder / WANDB / SENT).exists()


def _mirror_failed(folder: Path) -> bool:
    """Whether W&B's tracker is among the trackers that could not do all of their work."""
    degraded = (read_summary(folder) or {}).get("trackers")
    if not isinstance(degraded, dict) or not degraded:
        return False
    try:
        config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False
    mirrors = mirrors_in(config) if isinstance(config, dict) else {}
    return any(mirrors[name].get("mode") != "disabled" for name in degraded if name in mirrors)


def _is_offline(folder: Path) -> bool:
    return any((folder / WANDB).glob(OFFLINE))


def send(folders: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Send runs one after another; yields each with `done` or the reason why it is not there.

    Runs that are sent are locked, so that no process runs them at the same time. Raises `NoKeyError` if there is no
    key, which the first run finds out alone.
    """
    for start, end in ((0, 1), *((n, n + AT_ONCE) for n in range(1, len(folders), AT_ONCE))):
        with ExitStack() as locks:
            refused = {folder: _claim(folder, locks) for folder in folders[start:end]}
            yield from ((folder, reason) for folder, reason in refused.items() if reason)
            if claimed := [folder for folder, reason in refused.items() if not reason]:
                yield from _send(claimed)


def _claim(folder: Path, locks: ExitStack) -> str:
    """Lock a run's folder and note that it is sent; returns why that cannot be, or an empty string."""
    try:
        locks.enter_context(owned(folder))
        (folder / UNSENT).write_text("fedsim sync sends this run to W&B\n", encoding="utf-8")
    except FedsimError as error:
        return str(error)
    except OSError as error:
        return f"its folder cannot be written ({error.strerror or error})"
    return ""


def _send(folders: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    unset = (*NOT_INHERITED, "WANDB_MODE")  # which would keep it offline
    environment = {k: v for k, v in os.environ.items() if k not in unset} | {"WANDB_ERROR_REPORTING": "false"}
    absolute = [folder.absolute() for folder in folders]
    process = subprocess.Popen(
        [*COMMAND, *map(str, absolute)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        reports = _lines(process)
        for folder, place in zip(folders, absolute, strict=True):
            line = next(reports, f"its process has ended, or said nothing for {HANG:.0f} s")
            report = line.removeprefix(f"{place}: ")
            if report.startswith(NO_KEY):
                raise NoKeyError(f"W&B has no API key; {REMEDY}")
            yield folder, _confirmed(place) if report == "done" else report
    finally:
        kill_with_children(process)


def _confirmed(folder: Path) -> str:
    """`done`, which is noted, unless W&B has by its own settings kept the run offline."""
    if _is_offline(folder):
        return "W&B's settings say offline; `wandb online` changes that"
    text = time.strftime("sent again by fedsim sync, %Y-%m-%dT%H:%M:%SZ\n", time.gmtime())
    with suppress(OSError):
        (folder / WANDB / SENT).write_text(text, encoding="utf-8")
        (folder / UNSENT).unlink()
    return "done"


def _lines(process: "subprocess.Popen[str]") -> Iterator[str]:
    """What a process prints, until it has printed nothing for `HANG` seconds."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.put(line.strip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=HANG)
        except queue.Empty:
            return
        if line is None:
            return
        yield line


def _tell(folder: Path, reason: str) -> bool:
    done = reason == "done"
    print(f"  sent      {folder}" if done else f"  not sent  {folder}\n{wrap(reason, 12)}", flush=True)
    return done


def _number(folders: Sequence[Path]) -> str:
    return f"{len(folders)} run{'s' if len(folders) > 1 else ''}"
