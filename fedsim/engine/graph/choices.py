"""The fastest of several ways to compute something on a GPU, timed once and remembered.

Choices are kept in a file for each type of card and version of torch and cuDNN. The ways add in
different orders, so that last digits differ. A run that is resumed on the same machine must choose
as before to get the same bits. It does, unless the file could not be written.
"""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import platformdirs
import torch

from fedsim.core.disk import write_atomically


def fastest(device: torch.device, key: str, timers: Mapping[str, Callable[[], float]]) -> str:
    """Return the name of the fastest way to compute what `key` describes.

    `timers` measure the ways. They are called if the card has no choice yet, or one that is no
    longer among them.
    """
    path = _choices_path(device)
    known = _choices(path)
    if known.get(key) not in timers:
        measured = {name: measure() for name, measure in timers.items()}
        known[key] = min(measured, key=lambda name: measured[name])
        _remember(path, known)
    return known[key]


@functools.cache
def _choices_path(device: torch.device) -> Path:
    """Return the file of choices for a card and the versions of torch and cuDNN."""
    card = torch.cuda.get_device_name(device).replace(" ", "_")
    versions = f"torch{torch.__version__}-cudnn{torch.backends.cudnn.version()}"
    return platformdirs.user_cache_path("fedsim") / "choices" / f"{card}-{versions}.json"


@functools.cache
def _choices(path: Path) -> dict[str, str]:
    """Return the remembered choices, which the caller may add to."""
    try:
        choices = json.loads(path.read_text())
    except (OSError, ValueError):  # none yet, or damaged
        return {}
    return choices if isinstance(choices, dict) else {}


def _remember(path: Path, choices: dict[str, str]) -> None:
    """Write the choices, if the folder can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(choices, indent=1).encode())
    except OSError:
        return  # This process keeps its choices. Another one may choose otherwise.
