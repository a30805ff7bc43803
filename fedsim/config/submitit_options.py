"""hydra/launcher=submitit_local and submitit_slurm: the choices of Hydra's plugin, with parameters of ours.

The plugin's own launchers stop at the first job that fails, requeue none, and run one job a process. Its parameters
stay as they are; the jobs are launched by `fedsim.jobs.submitit_launcher`.
"""

from dataclasses import field, make_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

LAUNCHERS = {
    "submitit_local": "fedsim.jobs.submitit_launcher.LocalJobs",
    "submitit_slurm": "fedsim.jobs.submitit_launcher.SlurmJobs",
}
"""Their classes."""
JOB_NAME = "fedsim"
"""Of the jobs in Slurm's queue."""
NUM_TIMEOUTS = 100
"""Time limits that a task may reach before it is given up."""
OWN: dict[str, dict[str, int | None]] = {
    "submitit_local": {"jobs_per_task": 1, "max_in_flight": None},
    "submitit_slurm": {"jobs_per_task": 1, "max_num_timeout": NUM_TIMEOUTS},
}
"""Parameters that are added or have another default; their types are checked when the launcher is built."""


def register() -> None:
    """Put our choices in the place of the plugin's, where it is installed. To be called after plugins are imported."""
    store = ConfigStore.instance()
    launchers = store.repo.get("hydra", {}).get("launcher", {})
    for name, target in LAUNCHERS.items():
        entry = launchers.get(f"{name}.yaml")
        if entry is None or entry.node.get("_target_") == target:
            continue
        parameters = {"_target_": target, "name": JOB_NAME, **OWN[name]}
        fields = [(key, Any, field(default=default)) for key, default in parameters.items()]
        plugins_own: Any = OmegaConf.get_type(entry.node)
        node = make_dataclass(f"{plugins_own.__name__}OfFedsim", fields, bases=(plugins_own,))
        store.store(group="hydra/launcher", name=name, node=node(), provider="fedsim")
