"""Launchers without a file in conf/: Hydra's own, those of its installed plugins, and those that an extra would add."""

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedsim.commands.catalogue.code import described
from fedsim.config.choice_files import ChoiceFile

GROUP = "hydra/launcher"
IDEAS = {
    "basic": "Hydra's own: the jobs one after another, in this process.",
    "joblib": "The jobs of a sweep in several processes of this machine, by joblib.",
    "submitit_local": "The jobs of a sweep as tasks of submitit on this machine: docs/clusters.md.",
    "submitit_slurm": "The jobs of a sweep as tasks of Slurm, by submitit: docs/clusters.md.",
}


def of_hydra() -> dict[str, ChoiceFile]:
    """The launchers that Hydra and its plugins register, each as if it had a file."""
    return {name: _as_file(name, node) for name, node in _registered().items()}


def with_extra(known: Collection[str]) -> dict[str, str]:
    """The launchers that are not installed, and the extra of this package that each comes with."""
    from fedsim.config.suggestions import LAUNCHERS

    return {
        name: extra
        for name, extra in sorted(LAUNCHERS.items())
        if name not in known or (name == "ray" and not _is_importable(name))  # whose file is in conf/
    }


def _registered() -> Mapping[str, Any]:
    """What is registered with Hydra as choices of the group, by name."""
    from hydra.core.config_store import ConfigStore

    from fedsim.config.plugins import plugins

    plugins()
    found = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    return {name.removesuffix(".yaml"): entry.node for name, entry in found.items()}


def _is_importable(name: str) -> bool:
    return find_spec(name) is not None


def _as_file(name: str, node: Any) -> ChoiceFile:
    from omegaconf import OmegaConf

    content: Any = OmegaConf.to_container(OmegaConf.create(OmegaConf.structured(node)), resolve=False)
    values = {str(key): value for key, value in content.items() if key != "defaults"}
    text = f"# {IDEAS.get(name) or _idea(str(values.get('_target_')))}\n"
    return ChoiceFile(GROUP, name, Path(), text, GROUP.replace("/", "."), values, {}, (None,))


def _idea(target: str) -> str:
    """The first line of its class's docstring, if that can be found."""
    code = described(target)
    parts = [part for part in target.split(".")[:-1] if part != "hydra_plugins"]
    return code.summary if code is not None and code.summary else f"By Hydra's plugin {parts[0] if parts else target}."
