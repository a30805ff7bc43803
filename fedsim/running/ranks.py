"""The processes (ranks) that torchrun has started for one command: rank 0 does what it says; others
compose the same jobs, build what rank 0 runs, and compute their parts of that; they print and write
nothing."""

import ctypes
import hashlib
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
from fedsim.distributed.links import WORKING, Link, LostRankError, Message, Others
from fedsim.running.assembly import Experiment, build
from fedsim.running.process import CODES, STOP, World

T = TypeVar("T")
Facts = Mapping[str, Any]

PR_SET_PDEATHSIG = 1  # of prctl


def backend_name() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


class Ranks:
    """The other ranks of this command, as rank 0 directs them. Without torchrun there are none."""

    def __init__(self) -> None:
        self.others: Others | None = None

    def agree(self, plans: Sequence[Plan], launcher: Mapping[str, Any]) -> None:
        """Let the other ranks serve these jobs. Raises `FedsimError` if one of them has composed
        others."""
        if self.others is not None:
            check_jobs(plans, launcher)
            self._ask_all(self.others, Message("jobs"), lambda: plans, identity_of)

    def build(self, plan: Plan, build: Callable[[Plan], Experiment]) -> Experiment:
        """The run of a plan, which all ranks build; its training and evaluation are divided among
        them."""
        if self.others is None:
            return build(plan)
        request = Message("build", {"job": plan.config_hash})
        experiment = self._ask_all(self.others, request, partial(build, plan), built)
        engine = experiment.simulation.components.engine
        self.others.link.device = engine.data.x.device
        engine.backend = DividedBackend(holdings(experiment), self.others)
        return experiment

    def end(self, code: int) -> int:
        """Let the other ranks end with this exit code, and return it; 1 where one of them was lost
        in mid-run."""
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

    def _ask_all(
        self, others: Others, request: Message, own: Callable[[], T], told: Callable[[T], Facts]
    ) -> T:
        """What `own` makes here. Raises `FedsimError` unless the answers of all ranks are what is
        `told` of it."""
        made, answers = others.ask(dict.fromkeys(range(1, others.size), request), own)
        for key, mine in told(made).items():
            for rank, answer in answers.items():
                if answer.content[key] != mine:
                    text = f"rank {rank} has another {key}: {answer.content[key]!r}, not {mine!r}"
                    remedy = (
                        "all ranks need the same installation, command line, environment and data"
                    )
                    raise FedsimError(f"{text}; {remedy}")
        return made


RANKS = Ranks()


def check_jobs(plans: Sequence[Plan], launcher: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for what does not go together with several ranks."""
    target = str(launcher.get("_target_", "BasicLauncher")).rpartition(".")[2]
    text = f"{target} places jobs side by side, and torchrun divides each among its processes"
    problems = [rule(target == "BasicLauncher", "hydra/launcher", ..., text, "use one of the two")]
    for device in sorted(
        {plan.settings.device for plan in plans if plan.settings.device.startswith("cuda:")}
    ):
        text = "is one GPU for all processes of torchrun; each needs its own"
        problems.append(
            Problem("device", device, text, "use device=cuda: each takes the GPU of its local rank")
        )
    check(*problems)


def identity_of(plans: Sequence[Plan]) -> Facts:
    """What must be the same on all ranks before any of them builds a run."""
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }
    jobs = hashlib.sha256("".join(plan.config_hash for plan in plans).encode()).hexdigest()[:12]
    return {"list of jobs": jobs, "fedsim": fedsim.__version__, **versions}


def built(experiment: Experiment) -> Facts:
    """What must be the same on all ranks of a run that they have built."""
    engine, source = experiment.simulation.components.engine, dict(experiment.data_source)
    return {
        "engine": engine.description,
        "division of the data": experiment.division.hash,
        "data set": source,
    }


def holdings(experiment: Experiment) -> Holdings:
    """What this rank has of the run."""
    parts, server = experiment.simulation.components, experiment.simulation.components.server_data
    validation = None if server.validation is None else server.validation.x
    samples = {
        "clients": parts.engine.data.x,
        "test": server.test.x,
        "validation": validation,
        "public": server.public,
    }
    return Holdings(parts.engine.backend, {name: x for name, x in samples.items() if x is not None})


def run_over_ranks(
    place: World, run: Callable[[], int], compose: Callable[[], Sequence[Plan]]
) -> int:
    """The exit code of this process. `run` does what the command line says and returns the exit
    code, at rank 0 alone; `compose` gives its jobs, at the others. Raises `FedsimError` where the
    processes do not find each other."""
    if (
        sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ
    ):  # end when torchrun is killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        dist.init_process_group(
            backend_name(), timeout=WORKING, rank=place.rank, world_size=place.size
        )
    except (RuntimeError, ValueError) as error:
        raise FedsimError(
            f"rank {place.rank} of {place.size} cannot join the others: {error}"
        ) from error
    if place.rank:
        return Worker(Link(place.size), compose).serve(place.rank)
    RANKS.others, code = Others(Link(place.size)), 1
    try:
        code = run()
    finally:
        code = RANKS.end(code)
    return code


class Worker:
    """Answers the messages of rank 0, one after another. `compose` gives the jobs of the
    command."""

    def __init__(self, link: Link, compose: Callable[[], Sequence[Plan]]) -> None:
        self._link, self._compose = link, compose
        self._plans: Sequence[Plan] = ()
        self._held: Holdings | None = None

    def serve(self, rank: int) -> int:
        """Until rank 0 says that all is done, with an exit code, or has ended. Signals are left to
        rank 0, which gets them, too, and ends when it has saved its round."""
        STOP.defer_always()
        told = sys.stderr
        if os.environ.get("FEDSIM_DEBUG") != "1":
            sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
        try:
            while (request := self._link.receive(0)).kind != "end":
                self._link.send(0, self.answered(request))
            return int(request.content["code"])
        except LostRankError as error:
            if STOP.status is not None:
                return CODES[STOP.status]
            with suppress(OSError):
                told.write(f"fedsim: rank {rank}: {error}\n")
            return 1

    def answered(self, request: Message) -> Message:
        """Do what the message says; the answer, or what was raised."""
        try:
            return Message("answer", self._answer(request.kind, request.content))
        except (Exception, SystemExit) as error:
            known, text = isinstance(error, FedsimError), str(error)
            return Message(
                "error", {"text": text, "known": known, "traceback": traceback.format_exc()}
            )

    def _answer(self, kind: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
        if kind == "jobs":
            self._plans = self._compose()
            return identity_of(self._plans)
        if kind == "build":
            self._held = None  # first, that its memory is free
            experiment = build(
                next(plan for plan in self._plans if plan.config_hash == content["job"])
            )
            self._held = holdings(experiment)
            self._link.device = experiment.simulation.components.engine.data.x.device
            return built(experiment)
        assert self._held is not None
        return {"result": self._held.compute(kind, content)}
