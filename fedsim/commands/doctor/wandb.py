"""Weights & Biases: mode, key and runs that wait to be sent. Nothing of a key is read but that it is there."""

import netrc
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from fedsim.commands.doctor.finding import Finding, ok, warn
from fedsim.commands.sync import waiting
from fedsim.shell import command

HOST = "https://api.wandb.ai"


def state(*output_dirs: Path) -> Iterator[Finding]:
    """What tracker.wandb.mode=auto does, and which runs are not at the server."""
    mode, key = os.environ.get("WANDB_MODE", ""), _key()
    if mode in ("disabled", "offline"):
        yield ok(f"W&B {version('wandb')}: WANDB_MODE={mode}")
    elif key:
        yield ok(f"W&B {version('wandb')}: an API key is in {key}; runs are sent")
    else:
        places = "WANDB_API_KEY and netrc have no API key"
        yield ok(f"W&B {version('wandb')}: {places}: runs are logged offline (`wandb login` changes that)")
    found = waiting(output_dirs)
    if found:
        folders = list(map(str, output_dirs))
        text = f"W&B: {len(found)} run{'s' if len(found) > 1 else ''} below {', '.join(folders)} not sent"
        yield (
            warn(text, f"`{command('fedsim', 'sync', *folders)}`")
            if key
            else ok(f"{text}; with a key, `fedsim sync` sends them")
        )


def _key() -> str | None:
    """Where W&B finds a key, or None."""
    if os.environ.get("WANDB_API_KEY"):
        return "the environment"
    host = urlsplit(os.environ.get("WANDB_BASE_URL", HOST)).netloc
    path = next((p for p in _netrc_files() if p.is_file()), None)
    try:
        return str(path) if path is not None and netrc.netrc(path).authenticators(host) else None
    except (OSError, netrc.NetrcParseError):
        return None


def _netrc_files() -> list[Path]:
    chosen = os.environ.get("NETRC")
    return [Path(chosen).expanduser()] if chosen else [Path.home() / ".netrc", Path.home() / "_netrc"]
