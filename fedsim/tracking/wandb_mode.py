"""The mode of W&B, determined from its settings as W&B would, without importing it (which takes a second)."""

import configparser
import netrc
import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

MODES = ("online", "offline", "disabled")

DEFAULT_HOSTS = ("api.forge.coreweave.com", "api.wandb.ai")
"""W&B's own server by its names of today and before; a key may be kept for either."""


def resolve_mode(mode: str) -> str:
    """`online`, `offline` or `disabled`. `auto`: the mode configured in W&B, else online if there is an API key."""
    if mode != "auto":
        return mode
    return configured_mode() or ("online" if has_key() else "offline")


def configured_mode() -> str | None:
    """The mode set by WANDB_MODE or `wandb offline`, or None."""
    mode = os.environ.get("WANDB_MODE") or user_settings().get("mode")
    return mode if mode in MODES else None


def has_key() -> bool:
    """Whether W&B would find credentials. They are not stored."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = user_settings()
    if settings.get("api_key"):
        return True
    url = os.environ.get("WANDB_BASE_URL") or settings.get("base_url")
    hosts = DEFAULT_HOSTS if url is None or urlsplit(url).netloc in DEFAULT_HOSTS else (urlsplit(url).netloc,)
    with suppress(OSError, ValueError, netrc.NetrcParseError):
        found = netrc.netrc(str(_netrc_path()))
        return any(found.authenticators(host) for host in hosts)
    return False


def user_settings() -> dict[str, str]:
    """W&B's settings: the user's file, overridden by that of the working folder; invalid files are ignored."""
    settings: dict[str, str] = {}
    home = os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb"
    for folder in (Path(home), Path("wandb")):
        parser = configparser.ConfigParser(interpolation=None)
        with suppress(OSError, ValueError, configparser.Error):
            parser.read(folder / "settings")
            settings |= dict(parser.items("default"))
    return settings


def _netrc_path() -> Path:
    named = os.environ.get("NETRC")
    if named:
        return Path(named).expanduser()
    return next((p for p in (Path.home() / ".netrc", Path.home() / "_netrc") if p.exists()), Path.home() / ".netrc")
