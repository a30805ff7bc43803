"""The launcher of fedsim's own that a config chooses, with its parameters checked."""

from collections.abc import Mapping
from typing import Any

from fedsim.config.build import instantiate
from fedsim.jobs.ray_launcher import RayJobs
from fedsim.jobs.submitit_launcher import LocalJobs, SlurmJobs, SubmititJobs, launcher_of
from fedsim.running.interleaving import Lanes


def own_launcher(node: Mapping[str, Any]) -> Lanes | RayJobs | SubmititJobs | None:
    """What the config's node `hydra.launcher` describes; None for launchers of Hydra's. Raises `ConfigError`."""
    target = node.get("_target_")
    for cls in (LocalJobs, SlurmJobs):
        if target == _path(cls):
            return launcher_of(node, cls)
    if target == _path(RayJobs):
        return instantiate(node, RayJobs, "hydra.launcher")
    return instantiate(node, Lanes, "hydra.launcher") if target == _path(Lanes) else None


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
