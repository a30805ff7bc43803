"""`fedsim sync`: send runs to Weights & Biases that were logged offline, or whose mirror failed.

The process that sends them is the one that mirrors runs (`fedsim.tracking.wandb_mirror`). It works
outside of the run's folder.
"""

import json
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fedsim.commands.dispatch import MistakeError
from fedsim.commands.layout import wrap
from fedsim.core.disk import write_atomically
from fedsim.core.errors import ConfigError, FedsimError, check
from fedsim.results.files import REPLACEMENTS, WANDB, is_free, owned
from fedsim.results.reading import CONFIG, SUMMARY, DamagedError, read_config, read_summary
from fedsim.running.process import STOP
from fedsim.tracking.wandb_messages import mirrors_in, name_problems
from fedsim.tracking.wandb_tracker import NO_KEY, kill_with_children, start_process

SENT = "sent.txt"
"""The file in W&B's folder of a run that has been sent."""
UNSENT = "wandb.unsent"
"""The file in a run's folder while the run is sent. W&B's record of the run is made anew then, and
may be missing if sending is interrupted."""
OFFLINE = f"{WANDB}/offline-run-*"
"""W&B's records of a run that it has not been sent."""
CHANGEABLE = {
    "project": "a project of W&B",
    "entity": "a user or team of W&B",
    "tags": "tags with commas between them",
}
"""Keys of the tracker that the command can change, and what they are."""
MAX_SECONDS = 300.0
"""The time after which the process that sends a run is given up."""


def arguments(parser: ArgumentParser) -> None:
    folder_help = "folders of runs, or folders above them (outputs)"
    parser.add_argument("folder", nargs="*", type=Path, help=folder_help)
    parser.add_argument("--again", action="store_true", help="also runs that are there already")
    for key, about in CHANGEABLE.items():
        parser.add_argument(f"--{key}", help=f"{about}, in place of the recorded value")
    dry_help = "only name the runs that would be sent"
    parser.add_argument("--dry-run", action="store_true", help=dry_help)


def run(options: Namespace) -> int:
    """Send the runs that wait, or (`again`) all runs that have ended.

    Returns 0 if all could be sent, 1 if not. Raises `MistakeError` (exit code 2) if a folder or the
    API key is missing.
    """
    folders = options.folder or [Path("outputs")]
    missing = [str(folder) for folder in options.folder if not folder.is_dir()]
    if missing:
        text = "no such folder; give that of a run, or one above it"
        raise MistakeError(f"{', '.join(missing)}: {text}")
    values = {key: getattr(options, key) for key in CHANGEABLE}
    changed = {key: value for key, value in values.items() if value is not None}
    check(*name_problems(changed, "--"))
    runs = ended(folders) if options.again else waiting(folders)
    state = "that ended" if options.again else "to be sent"
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    print(wrap(f"{count} below {', '.join(map(str, folders))} {state}"))
    if options.dry_run:
        for folder in runs:
            print(f"  {folder}")
        return 0
    num_sent = 0
    with STOP.working():  # a signal also ends the process that sends them
        for folder, reason in send(runs, changed):
            if reason == "done":
                num_sent += 1
                print(f"  sent      {folder}", flush=True)
            else:
                print(f"  not sent  {folder}\n{wrap(reason, 12)}", flush=True)
    if runs:
        print(f"{num_sent} of {len(runs)} sent")
    return int(num_sent < len(runs))


def waiting(folders: Iterable[Path]) -> list[Path]:
    """Return the folders of ended runs that should be on W&B's server and are not."""
    runs = []
    for folder in ended(folders):
        if (folder / WANDB / SENT).exists():
            continue
        if any(folder.glob(OFFLINE)) or (folder / UNSENT).exists() or _mirror_failed(folder):
            runs.append(folder)
    return runs


def ended(folders: Iterable[Path]) -> list[Path]:
    """Return the folders of runs below `folders` that have ended and that no process runs again."""
    runs: dict[Path, None] = {}
    for folder in folders:
        for summary in sorted(folder.rglob(SUMMARY)):
            place = summary.parent
            if REPLACEMENTS not in place.parts and (place / CONFIG).is_file() and is_free(place):
                runs[place] = None
    return list(runs)


def _mirror_failed(folder: Path) -> bool:
    """Return whether W&B's tracker is among those that could not do all of their work."""
    try:
        failed = (read_summary(folder) or {}).get("trackers") or {}
        for name, node in mirrors_in(read_config(folder)).items():
            if name in failed and node.get("mode") != "disabled":
                return True
    except (DamagedError, AttributeError, TypeError):  # the files are not as a run leaves them
        pass
    return False


def send(folders: Sequence[Path], changed: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """Send runs one after another, and yield each with `done` or the reason why it was not sent.

    `changed` are values for their trackers. A run is locked while it is sent, so that no process
    runs it at the same time. Raises `MistakeError` if there is no API key.
    """
    for folder in folders:
        try:
            with owned(folder):
                write_atomically(folder / UNSENT, b"fedsim sync sends this run to W&B\n")
                reason = _send(folder.absolute(), changed)
        except MistakeError:
            raise
        except (FedsimError, OSError) as error:
            reason = str(error)
        yield folder, reason


def _send(folder: Path, changed: Mapping[str, str]) -> str:
    """Send one run, and return `done` or the reason why it was not sent. See `send`."""
    process = start_process(
        str(folder),
        json.dumps(changed),
        stdin=subprocess.DEVNULL,
        without=["WANDB_MODE"],  # which would keep it offline
    )
    try:
        report = process.communicate(timeout=MAX_SECONDS)[0].strip()
    except subprocess.TimeoutExpired:
        report = ""
    finally:
        kill_with_children(process)
    if not report:
        return f"its process has ended, or said nothing for {MAX_SECONDS:.0f} s"
    if report.startswith(NO_KEY):
        remedy = "`wandb login`, or the variable WANDB_API_KEY, gives it one"
        raise MistakeError(f"W&B has no API key; {remedy}")
    if report.startswith(ConfigError.__name__):
        return f"{report}; --project, --entity or --tags changes it"
    if report != "done":
        return report
    if any(folder.glob(OFFLINE)):
        return "W&B's settings say offline; `wandb online` changes that"
    with suppress(OSError):
        write_atomically(folder / WANDB / SENT, b"sent by fedsim sync\n")
        (folder / UNSENT).unlink()
    return "done"
