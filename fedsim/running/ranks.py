"""The processes (ranks) of one command that torchrun has started: joined, agreed on the jobs, and given their parts.

Rank 0 runs the program. The others build the same runs and answer its questions (`fedsim.running.rank_worker`).
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

import fedsim
from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError, FedsimError, Problem
from fedsim.distributed.backend import DividedBackend, Holdings
from fedsim.distributed.links import JOINING, WORKING, Link, LostRankError, Message, Others
from fedsim.results.files import NEWEST, replacement_of
from fedsim.running.assembly import Experiment
from fedsim.running.checkpoint import unpack
from fedsim.running.process import World, local_size

T = TypeVar("T")

NAMES = {"engine": "engine", "partition": "division of the data", "data": "data set"}
"""What all ranks must have built alike, as messages call it."""


def joined(place: World) -> Link:
    """The connections of this process, when all ranks are there. Raises `FedsimError` if they are not.

    CPU tensors go by gloo, those of a GPU by NCCL.
    """
    try:
        dist.init_process_group(backend_name(), timeout=JOINING, rank=place.rank, world_size=place.size)
    except (RuntimeError, ValueError) as error:
        raise FedsimError(f"rank {place.rank} of {place.size} cannot join the others: {error}") from error
    older = dist.distributed_c10d._set_pg_timeout
    getattr(dist, "set_timeout", older)(WORKING)  # after which NCCL ends the process, whatever a single wait is told
    return Link(place.size)


def backend_name() -> str:
    """The backend of torch.distributed."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


class Ranks:
    """The other ranks of this command, as rank 0 directs them. Without torchrun there are none.

    `plans`: the jobs of the command, which all ranks have composed.
    """

    def __init__(self) -> None:
        self.others: Others | None = None
        self.plans: Sequence[Plan] = ()

    @property
    def description(self) -> Mapping[str, Any]:
        """How many processes there are, and what connects them, for the summary; nothing if there is one."""
        return {} if self.others is None else {"processes": {"count": self.others.size, "backend": backend_name()}}

    def agree(self, plans: Sequence[Plan], launcher: Mapping[str, Any]) -> None:
        """Let the other ranks serve these jobs. Raises `FedsimError` if one of them has composed others."""
        if self.others is None:
            return
        check_jobs(plans, launcher)
        self.plans = plans
        self._ask_all(Message("jobs", identity_of(plans)), lambda: None)

    def build(self, plan: Plan, build: Callable[[Plan], Experiment]) -> Experiment:
        """The run of a plan, which all ranks build; its training and evaluation are divided among them."""
        if self.others is None:
            return build(plan)
        number = next(i for i, known in enumerate(self.plans) if known.folder == plan.folder)
        experiment, answers = self._ask_all(Message("build", {"job": number}), partial(build, plan))
        mine = built(experiment)
        for rank, answer in answers.items():
            for key, name in NAMES.items():
                if answer.content[key] != mine[key]:
                    text = f"rank {rank} has another {name}: {answer.content[key]!r}, not {mine[key]!r}"
                    raise FedsimError(f"{text}; all ranks need the same installation and the same data")
        engine = experiment.simulation.components.engine
        self.others.link.device = engine.data.x.device
        explained = partial(explained_by_checkpoint, [replacement_of(plan.folder), plan.folder])
        engine.backend = DividedBackend(holdings(experiment), self.others, explained)
        return experiment

    def end(self, code: int) -> int:
        """Let the other ranks end with this exit code, and return it; 1 where one of them was lost in mid-run."""
        if self.others is None:
            return code
        code = code if self.others.lost is None else 1
        if self.others.in_step:
            for rank in range(1, self.others.size):
                with suppress(LostRankError):
                    self.others.link.send(rank, Message("end", {"code": code}))
        if dist.is_initialized():
            dist.destroy_process_group()
        return code

    def _ask_all(self, request: Message, own: Callable[[], T]) -> tuple[T, dict[int, Message]]:
        assert self.others is not None
        return self.others.ask(dict.fromkeys(range(1, self.others.size), request), own)


RANKS = Ranks()


def check_jobs(plans: Sequence[Plan], launcher: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for what does not go together with several ranks."""
    problems = []
    target = str(launcher.get("_target_", "")).rpartition(".")[2]
    if target and target != "BasicLauncher":
        rule = f"{target} places jobs side by side, and torchrun divides each among its processes"
        problems.append(Problem("hydra/launcher", ..., rule, "use one of the two"))
    for device in sorted({plan.settings.device for plan in plans if plan.settings.device.startswith("cuda")}):
        if ":" in device:
            rule = "is one GPU for all processes of torchrun; each needs its own"
            problems.append(Problem("device", device, rule, "use device=cuda: each takes the GPU of its local rank"))
        elif local_size() > torch.cuda.device_count():
            rule = f"needs a GPU for each of {local_size()} processes; torch sees {torch.cuda.device_count()}"
            problems.append(Problem("device", device, rule, "lower --nproc-per-node"))
    if problems:
        raise ConfigError(problems)


def identity_of(plans: Sequence[Plan]) -> dict[str, Any]:
    """What must be the same on all ranks before any of them builds a run."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
    return {"jobs": [plan.config_hash for plan in plans], "fedsim": fedsim.__version__, **versions}


def built(experiment: Experiment) -> dict[str, Any]:
    """What must be the same on all ranks of a run that they have built."""
    engine, source = experiment.simulation.components.engine, dict(experiment.data_source)
    return {"engine": engine.description, "partition": experiment.division.hash, "data": source}


def holdings(experiment: Experiment) -> Holdings:
    """What this rank has of the run."""
    parts, server = experiment.simulation.components, experiment.simulation.components.server_data
    samples = {"clients": parts.engine.data.x, "test": server.test.x}
    if server.validation is not None:
        samples["validation"] = server.validation.x
    if server.public is not None:
        samples["public"] = server.public
    return Holdings(parts.engine.backend, samples)


def explained_by_checkpoint(folders: Sequence[Path], error: LostRankError) -> FedsimError:
    """The same error, with what the run goes on from: the checkpoint in the first of `folders` that has one."""
    for folder in folders:
        with suppress(Exception):
            state = dict(unpack((folder / NEWEST).read_bytes())[0]["content"]["dict"])["state"]
            number = dict(state["dict"])["round"]
            return FedsimError(f"{error}; the checkpoint after round {number} stays: the same command goes on from it")
    return FedsimError(f"{error}; there is no checkpoint yet: the same command starts anew")
