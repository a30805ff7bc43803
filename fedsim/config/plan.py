"""The plan of a run: its checked config and the name of its folder.

`outline` checks names, types and ranges without PyTorch. `fedsim.config.parts` checks the
components. Each of them reports the mistakes of all config groups at once.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from fedsim.config.build import instantiate
from fedsim.config.declared import parameter_problems
from fedsim.config.settings import (
    CheckpointSettings,
    LocalSettings,
    RunSettings,
    settings_from,
    with_one_amount_of_work,
)
from fedsim.core.configs import IRRELEVANT_KEYS, canonical
from fedsim.core.errors import ProblemCollector, check
from fedsim.core.record import FINAL_WINDOW
from fedsim.partitions.server_split import ServerSplit
from fedsim.tracking.base import Tracker

GPU_FILES = ("nvidia", "nvgpu", "nvhost", "nvmap", "kfd", "dxg")
"""Beginnings of the names that a GPU for torch has in Linux's /dev."""


@dataclass(frozen=True, repr=False)
class Plan:
    """The checked description of one run.

    `config` is the config that the run's config.yaml will hold, and `choices` the choice made in
    each config group. `settings` to `checkpoint` are parts of it, checked and typed. `folder` is
    the run's folder, which follows from the config:
    <output_dir>/<name>/<dataset>-<partition>-<model>-<selector>-s<seed>-<hash>.
    `swept` names a job by the values that the command sweeps over (`gpfl alpha=0.5 s1`); it is
    empty for the only job of a command.
    """

    config: Mapping[str, Any]
    choices: Mapping[str, str]
    settings: RunSettings
    local: LocalSettings
    server: ServerSplit
    checkpoint: CheckpointSettings
    config_hash: str
    folder: Path
    swept: str = ""

    def __repr__(self) -> str:
        return f"<Plan {self.folder}>"

    @property
    def data_dir(self) -> Path:
        """The folder of data sets: the config's, or a folder in the user's cache."""
        return self.settings.data_dir or platformdirs.user_cache_path("fedsim") / "data"

    @property
    def data_source(self) -> str:
        """A text that is equal for runs with the same data set and the same `data_dir`."""
        source = [self.config["dataset"], str(self.data_dir)]
        return json.dumps(source, sort_keys=True, default=str)

    @property
    def cache_dir(self) -> Path:
        """The folder of decoded tensors: the config's, or a folder in the user's cache."""
        return self.settings.cache_dir or platformdirs.user_cache_path("fedsim") / "decoded"


def outline(config: Mapping[str, Any], choices: Mapping[str, str]) -> Plan:
    """Return the plan of `config` (plain containers, resolved) without building its components.

    Raises `ConfigError` with all mistakes in names, types and ranges that show without PyTorch, and
    with all mistakes of trackers, which are light enough to be built here.
    """
    config = with_one_amount_of_work(config)
    if config.get("device") == "auto" and _sees_gpu():
        config["device"] = "cuda"  # is recorded and hashed, to tell a GPU's result from a CPU's
    if config.get("final_window") == FINAL_WINDOW:
        config["final_window"] = None  # means the same, and so gives the same folder
    dataset = config.get("dataset")
    if isinstance(dataset, Mapping):
        config["dataset"] = _with_plain_path(dataset)

    collector = ProblemCollector()

    def settings_at(key: str, cls: type) -> Any:
        return collector.run(settings_from, config.get(key) or {}, cls, key)

    local = settings_at("local", LocalSettings)
    server = settings_at("server", ServerSplit)
    checkpoint = settings_at("checkpoint", CheckpointSettings)
    settings: Any = collector.run(settings_from, config, RunSettings, "")
    collector.add(*parameter_problems(config))
    trackers = config.get("tracker")
    if isinstance(trackers, Mapping):
        for name, node in trackers.items():
            collector.run_user_code(instantiate, node, Tracker, f"tracker.{name}")
    check(*collector.problems)

    config_hash = hash_config(config)
    groups = ("dataset", "partition", "model", "selector")
    names = [Path(choices.get(group, "custom")).name for group in groups]
    folder_name = "-".join([*names, f"s{settings.seed}", config_hash[:8]])
    folder = settings.output_dir / settings.name / folder_name
    return Plan(config, choices, settings, local, server, checkpoint, config_hash, folder)


def _with_plain_path(dataset: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config of a data set in which `path` has one spelling: `insects` for `./insects/`.

    Addresses with `://` stay as they are, and so do parts `..`, which may follow a link.
    """
    path = dataset.get("path")
    if not isinstance(path, str) or not path or "://" in path:
        return dataset
    return dict(dataset, path=str(Path(path)))


def _sees_gpu() -> bool:
    """Return whether torch sees a GPU. On a machine without one, torch is not imported for this."""
    if "torch" not in sys.modules and sys.platform in ("linux", "darwin"):
        if not any(path.name.startswith(GPU_FILES) for path in Path("/dev").iterdir()):
            return False
    import torch

    return torch.cuda.is_available()


def hash_config(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all values that can change a result
    (`fedsim.core.configs.canonical`)."""
    relevant = {key: value for key, value in config.items() if key not in IRRELEVANT_KEYS}
    text = json.dumps(canonical(relevant), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
