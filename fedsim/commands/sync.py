"""`fedsim sync`: sends runs to Weights & Biases that were logged offline, or whose mirror failed.

The process that sends them is the one that mirrors runs (`fedsim.tracking.wandb_mirror`), apart
from the folder.
"""

import json
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fedsim.commands.dispatch import MistakeError, wrap
from fedsim.core.disk import write_atomically
from fedsim.core.errors import ConfigError, FedsimError, check
from fedsim.results.files import REPLACEMENTS, is_free, owned
from fedsim.results.reading import CONFIG, SUMMARY, DamagedError, read_config, read_summary
from fedsim.running.process import STOP
from fedsim.tracking.wandb_tracker import (
    NO_KEY,
    kill_with_children,
    mirrors_in,
    name_problems,
    start_process,
)

WANDB, SENT = "wandb", "sent.txt"
"""W&B's folder in that of a run, and what is left in it when a run has been sent again."""
UNSENT = "wandb.unsent"
"""In a run's folder while it is sent: W&B's record of it is made anew then, and may be gone if that
is interrupted."""
OFFLINE = f"{WANDB}/offline-run-*"
"""W&B's records of a run that it has not been sent."""
CHANGED = {
    "project": "a project of W&B",
    "entity": "a user or team of W&B",
    "tags": "tags with commas between them",
}
"""Keys of the tracker that the command can change, and what they are."""
HANG = 300.0
"""Seconds after which the process that sends a run is given up."""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="*", type=Path, help="folders of runs, or folders above them (outputs)"
    )
    parser.add_argument("--again", action="store_true", help="also runs that are there already")
    for key, about in CHANGED.items():
        parser.add_argument(
            f"--{key}", help=f"{about}, in place of what the runs were recorded with"
        )
    parser.add_argument(
        "--dry-run", action="store_true", help="only name the runs that would be sent"
    )


def run(options: Namespace) -> int:
    """Send what waits, or (`again`) all runs that have ended; 0 if all of it could be sent, 1 if
    not, 2 without a key or a folder."""
    folders = options.folder or [Path("outputs")]
    if missing := [str(folder) for folder in options.folder if not folder.is_dir()]:
        raise MistakeError(
            f"{', '.join(missing)}: no such folder; give that of a run, or one above it"
        )
    changed = {
        key: value for key, value in vars(options).items() if key in CHANGED and value is not None
    }
    check(*name_problems(changed, "--"))
    found = ended(folders) if options.again else waiting(folders)
    state = "that ended" if options.again else "to be sent"
    print(
        wrap(
            f"{len(found)} run{'s' * (len(found) != 1)} below {', '.join(map(str, folders))} {state}"
        )
    )
    if options.dry_run:
        print("".join(f"  {folder}\n" for folder in found), end="")
        return 0
    sent = 0
    with STOP.working():  # a signal also ends the process that sends them
        for folder, reason in send(found, changed):
            sent += reason == "done"
            told = (
                f"  sent      {folder}"
                if reason == "done"
                else f"  not sent  {folder}\n{wrap(reason, 12)}"
            )
            print(told, flush=True)
    if found:
        print(f"{sent} of {len(found)} sent")
    return int(sent < len(found))


def waiting(folders: Iterable[Path]) -> list[Path]:
    """Folders of runs below `folders` that have ended and are not on W&B's server, though they were
    to be."""
    found = [folder for folder in ended(folders) if not (folder / WANDB / SENT).exists()]
    return [f for f in found if any(f.glob(OFFLINE)) or (f / UNSENT).exists() or _mirror_failed(f)]


def ended(folders: Iterable[Path]) -> list[Path]:
    """Folders of runs below `folders` that have ended, and that no process is running again."""
    places = (place.parent for folder in folders for place in sorted(folder.rglob(SUMMARY)))
    runs = (
        place for place in places if REPLACEMENTS not in place.parts and (place / CONFIG).is_file()
    )
    return [place for place in dict.fromkeys(runs) if is_free(place)]


def _mirror_failed(folder: Path) -> bool:
    """Whether W&B's tracker is among the trackers that could not do all of their work."""
    try:
        degraded = (read_summary(folder) or {}).get("trackers") or {}
        mirrors = mirrors_in(read_config(folder))
        return any(
            name in degraded and node.get("mode") != "disabled" for name, node in mirrors.items()
        )
    except (DamagedError, AttributeError, TypeError):  # files that are not as a run leaves them
        return False


def send(folders: Sequence[Path], changed: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """Send runs one after another; yields each with `done` or the reason why it is not there.
    `changed`: values that their trackers are given.

    A run that is sent is locked, so that no process runs it at the same time. Raises `MistakeError`
    if there is no key.
    """
    for folder in folders:
        try:
            with owned(folder):
                write_atomically(folder / UNSENT, b"fedsim sync sends this run to W&B\n")
                report = _send(folder.absolute(), changed)
        except MistakeError:
            raise
        except (FedsimError, OSError) as error:
            report = str(error)
        yield folder, report


def _send(folder: Path, changed: Mapping[str, str]) -> str:
    words = str(folder), json.dumps(changed)
    process = start_process(
        *words, stdin=subprocess.DEVNULL, without=["WANDB_MODE"]
    )  # it would keep it offline
    try:
        report = process.communicate(timeout=HANG)[0].strip()
    except subprocess.TimeoutExpired:
        report = ""
    finally:
        kill_with_children(process)
    if report.startswith(NO_KEY):
        raise MistakeError(
            "W&B has no API key; `wandb login`, or the variable WANDB_API_KEY, gives it one"
        )
    if report.startswith(ConfigError.__name__):
        return f"{report}; --project, --entity or --tags changes it"
    if report != "done":
        return report or f"its process has ended, or said nothing for {HANG:.0f} s"
    if any(folder.glob(OFFLINE)):
        return "W&B's settings say offline; `wandb online` changes that"
    with suppress(OSError):
        write_atomically(folder / WANDB / SENT, b"sent by fedsim sync\n")
        (folder / UNSENT).unlink()
    return "done"
