"""One run, checked before any work, and the name of its folder.

Names, types and ranges are checked here, without PyTorch, and parts by `fedsim.config.parts`, each
time all mistakes of every group at once.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from fedsim.config.build import Gathered, instantiate
from fedsim.config.declared import mistakes
from fedsim.config.settings import (
    CheckpointSettings,
    LocalSettings,
    Settings,
    built,
    with_one_amount_of_work,
)
from fedsim.core.configs import IRRELEVANT_KEYS, canonical
from fedsim.core.errors import check
from fedsim.partitions.server_split import ServerSplit
from fedsim.tracking.base import Tracker

OWN = {"local": LocalSettings, "server": ServerSplit, "checkpoint": CheckpointSettings}
GPU_FILES = ("nvidia", "nvgpu", "nvhost", "nvmap", "kfd", "dxg")
"""Beginnings of the names in /dev of what Linux has of a GPU that torch can use."""


@dataclass(frozen=True)
class Plan:
    """One run, checked. `config` is what its config.yaml will hold; `folder` is a function of it:
    outputs/<name>/<dataset>-<partition>-<model>-<selector>-s<seed>-<hash>."""

    config: Mapping[str, Any]
    choices: Mapping[str, str]
    settings: Settings
    local: LocalSettings
    server: ServerSplit
    checkpoint: CheckpointSettings
    config_hash: str
    folder: Path

    @property
    def data_dir(self) -> Path:
        return self.settings.data_dir or platformdirs.user_cache_path("fedsim") / "data"

    @property
    def cache_dir(self) -> Path:
        return self.settings.cache_dir or platformdirs.user_cache_path("fedsim") / "decoded"


def outline(config: Mapping[str, Any], choices: Mapping[str, str]) -> Plan:
    """The plan of `config` (plain containers, resolved), whose parts are not built. Raises
    `ConfigError` with all mistakes in names, types and ranges that show without PyTorch, and with
    those of trackers."""
    config = with_one_amount_of_work(config)
    if config.get("device") == "auto" and _sees_gpu():
        config["device"] = (
            "cuda"  # in the record and in its hash: a CPU's result is not taken for a GPU's
        )
    found = Gathered()
    own: Any = [found.run(built, config.get(key) or {}, cls, key) for key, cls in OWN.items()]
    settings: Any = found.run(built, config, Settings, "")
    found.add(*mistakes(config))
    trackers = config.get("tracker")
    for name, node in trackers.items() if isinstance(trackers, Mapping) else ():
        found.run_users(instantiate, node, Tracker, f"tracker.{name}")
    check(*found.problems)
    local, server, checkpoint = own
    config_hash = hash_config(config)
    readable = [
        Path(choices.get(g, "custom")).name for g in ("dataset", "partition", "model", "selector")
    ]
    folder = (
        settings.output_dir
        / settings.name
        / "-".join([*readable, f"s{settings.seed}", config_hash[:8]])
    )
    return Plan(config, choices, settings, local, server, checkpoint, config_hash, folder)


def _sees_gpu() -> bool:
    """Whether torch sees a GPU; it is not imported to learn that there is none."""
    if "torch" not in sys.modules and sys.platform in ("linux", "darwin"):
        if not any(path.name.startswith(GPU_FILES) for path in Path("/dev").iterdir()):
            return False
    import torch

    return torch.cuda.is_available()


def hash_config(config: Mapping[str, Any]) -> str:
    """SHA-256 over every value that can change a result (`fedsim.core.configs.by_meaning`)."""
    relevant = canonical({k: v for k, v in config.items() if k not in IRRELEVANT_KEYS})
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()
