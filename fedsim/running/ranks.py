"""The processes (ranks) that torchrun has started for one command: rank 0 does what it says, the others serve rank 0.

Those agree on the jobs, build what rank 0 runs, and compute their parts of that; they print and write nothing.
"""

import ctypes
import os
import platform
import signal
import sys
import traceback
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
from fedsim.core.errors import FedsimError, Problem, check, rule
from fedsim.distributed.backend import DividedBackend, Holdings
from fedsim.distributed.links import JOINING, WORKING, Link, LostRankError, Message, Others, error_message
from fedsim.results.files import NEWEST, replacement_of
from fedsim.running.assembly import Experiment, build
from fedsim.running.process import CODES, STOP, World

T = TypeVar("T")

NAMES = {"engine": "engine", "partition": "division of the data", "data": "data set"}
"""What all ranks must have built alike, as messages call it."""
PR_SET_PDEATHSIG = 1
"""Linux' number of the option of prctl."""


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
        if self.others is not None:
            check_jobs(plans, launcher)
            self.plans = plans
            self._ask_all(Message("jobs", identity_of(plans)), lambda: None)

    def build(self, plan: Plan, build: Callable[[Plan], Experiment]) -> Experiment:
        """The run of a plan, which all ranks build; its training and evaluation are divided among them."""
        if self.others is None:
            return build(plan)
        number = [known.folder for known in self.plans].index(plan.folder)
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
    target = str(launcher.get("_target_", "BasicLauncher")).rpartition(".")[2]
    text = f"{target} places jobs side by side, and torchrun divides each among its processes"
    problems = [rule(target == "BasicLauncher", "hydra/launcher", ..., text, "use one of the two")]
    for device in sorted({plan.settings.device for plan in plans if plan.settings.device.startswith("cuda")}):
        if ":" in device:
            text = "is one GPU for all processes of torchrun; each needs its own"
            problems.append(Problem("device", device, text, "use device=cuda: each takes the GPU of its local rank"))
        elif (count := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) > torch.cuda.device_count():
            text = f"needs a GPU for each of {count} processes; torch sees {torch.cuda.device_count()}"
            problems.append(Problem("device", device, text, "lower --nproc-per-node"))
    check(*problems)


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
    """The same error, with what the run goes on from: a checkpoint in one of `folders`, if there is one."""
    saved = any((folder / NEWEST).exists() for folder in folders)
    how = "goes on from the last checkpoint" if saved else "starts anew: there is no checkpoint yet"
    return FedsimError(f"{error}; the same command {how}")


def run_over_ranks(place: World, run: Callable[[], int], compose: Callable[[], Sequence[Plan]]) -> int:
    """The exit code of this process. `run` does what the command line says and returns the exit code, at rank 0 alone;
    `compose` gives its jobs, at the others. Raises `FedsimError` where the processes do not find each other.
    """
    _end_with_torchrun()
    link = joined(place)
    if place.rank:
        return _serve(place, link, compose)
    RANKS.others = Others(link)
    code = 1
    try:
        code = run()
    finally:
        code = RANKS.end(code)
    return code


def _end_with_torchrun() -> None:
    """Have this process sent SIGTERM when torchrun is killed, on Linux: it would run on with nobody to see to it."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is not None and "TORCHELASTIC_RUN_ID" in os.environ:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _serve(place: World, link: Link, compose: Callable[[], Sequence[Plan]]) -> int:
    """Signals are left to rank 0, which gets them, too, and ends when it has saved its round."""
    STOP.defer_always()
    told = sys.stderr
    if os.environ.get("FEDSIM_DEBUG") != "1":
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        return Worker(link, compose).serve()
    except LostRankError as error:
        if STOP.status is not None:
            return CODES[STOP.status]
        with suppress(OSError):
            told.write(f"fedsim: rank {place.rank}: {error}; the same command goes on from the last checkpoint\n")
        return 1


class Worker:
    """Answers the messages of rank 0, one after another. `compose` gives the jobs of the command."""

    def __init__(self, link: Link, compose: Callable[[], Sequence[Plan]]) -> None:
        self._link, self._compose = link, compose
        self._plans: Sequence[Plan] = ()
        self._held: Holdings | None = None

    def serve(self) -> int:
        """Until rank 0 says that all is done; the exit code that it gives. Raises `LostRankError` if it has ended."""
        while True:
            request = self._link.receive(0)
            if request.kind == "end":
                return int(request.content["code"])
            self._link.send(0, self.answered(request))

    def answered(self, request: Message) -> Message:
        """Do what the message says; the answer, or what was raised."""
        try:
            return self._answer(request)
        except (Exception, SystemExit) as error:
            return error_message(error, traceback.format_exc())

    def _answer(self, request: Message) -> Message:
        if request.kind == "jobs":
            self._plans = self._compose()
            for key, mine in identity_of(self._plans).items():
                if mine != request.content[key]:
                    name = "other jobs" if key == "jobs" else f"{key} {mine}, not {request.content[key]}"
                    text = f"has {name}; all ranks need the same installation, command line and environment"
                    raise FedsimError(text)
            return Message("agreed")
        if request.kind == "build":
            self._held = None  # first, that its memory is free
            experiment = build(self._plans[request.content["job"]])
            self._held = holdings(experiment)
            self._link.device = experiment.simulation.components.engine.data.x.device
            return Message("built", built(experiment))
        assert self._held is not None
        return Message("answer", {"found": self._held.compute(request.kind, request.content)})
