"""The fastest of several ways to compute something on a GPU, timed once and remembered.

Choices are kept in a file for each type of card and version of torch and cuDNN. The ways add in
different orders, so that last digits differ. A run that is resumed on the same machine must choose
as before to get the same bits. It does, unless the file could not be written.
"""

import functools
import json
from collections.abc import Callable, Container, Mapping
from pathlib import Path

import platformdirs
import torch
from filelock import FileLock

from fedsim.core.disk import write_atomically


def fastest(device: torch.device, key: str, timers: Mapping[str, Callable[[], float]]) -> str:
    """Return the name of the fastest way to compute what `key` describes.

    `timers` measure the ways. They are called if the card has no choice yet, or one that is no
    longer among them.
    """
    path = _choices_path(device)
    chosen_here = _choices_of_process(path)
    if chosen_here.get(key) not in timers:
        choices = _read(path)
        if choices.get(key) in timers:
            chosen_here[key] = choices[key]
        else:
            measured = {name: measure() for name, measure in timers.items()}
            choice = min(measured, key=lambda name: measured[name])
            chosen_here[key] = _remember(path, key, choice, timers)
    return chosen_here[key]


@functools.cache
def _choices_path(device: torch.device) -> Path:
    """Return the file of choices for a card and the versions of torch and cuDNN."""
    card = torch.cuda.get_device_name(device).replace(" ", "_")
    versions = f"torch{torch.__version__}-cudnn{torch.backends.cudnn.version()}"
    return platformdirs.user_cache_path("fedsim") / "choices" / f"{card}-{versions}.json"


@functools.cache
def _choices_of_process(path: Path) -> dict[str, str]:
    """Return the choices that this process has made or read, to which the caller adds its own."""
    return {}


def _read(path: Path) -> dict[str, str]:
    """Return the choices in the file, or none if it is absent or damaged."""
    try:
        choices = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(choices, dict):
        return {}
    return {key: choice for key, choice in choices.items() if isinstance(choice, str)}


def _remember(path: Path, key: str, choice: str, ways: Container[str]) -> str:
    """Add a choice to the file, if it can be written, and return the choice that holds.

    Another process may have chosen since the file was last read; then its choice holds.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            choices = _read(path)
            if choices.get(key) not in ways:
                choices[key] = choice
                write_atomically(path, json.dumps(choices, indent=1).encode())
            return choices[key]
    except (OSError, NotImplementedError):  # The second: a file system without locks.
        return choice  # This process keeps its choice. Another one may choose otherwise.
