"""Ranks: the processes that torchrun has started for one command.

Rank 0 does what the command says. The others compose the same jobs, build the same runs and compute
their parts of them; they print and write nothing.
"""

import ctypes
import hashlib
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

import fedsim
from fedsim.config.plan import Plan
from fedsim.core.errors import FedsimError, check, rule
from fedsim.distributed.backend import DividedBackend, Holdings
from fedsim.distributed.links import WORKING, Link, LostRankError, Message, Others
from fedsim.running.assembly import Experiment, build
from fedsim.running.process import CODES, STOP, World

T = TypeVar("T")
Facts = Mapping[str, Any]

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal that this process gets when its parent ends."""


def backend_name() -> str:
    """Return the backend of torch.distributed."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


class Ranks:
    """The other ranks of this command, as rank 0 directs them. Without torchrun there are none."""

    def __init__(self) -> None:
        self.others: Others | None = None

    def agree(self, plans: Sequence[Plan], launcher: Mapping[str, Any]) -> None:
        """Make the other ranks serve these jobs.

        Raises `FedsimError` if one of them has composed different jobs.
        """
        if self.others is not None:
            check_jobs(plans, launcher)
            self._ask_all(self.others, Message("jobs"), lambda: plans, jobs_facts)

    def build(self, plan: Plan, build: Callable[[Plan], Experiment]) -> Experiment:
        """Build a run on all ranks, which divide its training and evaluation among them."""
        if self.others is None:
            return build(plan)
        request = Message("build", {"job": plan.config_hash})
        experiment = self._ask_all(self.others, request, lambda: build(plan), experiment_facts)
        engine = experiment.simulation.components.engine
        self.others.link.device = engine.data.x.device
        engine.backend = DividedBackend(holdings(experiment), self.others)
        return experiment

    def end(self, code: int) -> int:
        """End the other ranks with this exit code and return it; 1 if one was lost in a run."""
        if self.others is None:
            return code
        if self.others.lost is not None:
            code = 1
        if self.others.in_step:
            for rank in range(1, self.others.size):
                with suppress(LostRankError):
                    self.others.link.send(rank, Message("end", {"code": code}))
        if dist.is_initialized():
            dist.destroy_process_group()
        return code

    def _ask_all(
        self,
        others: Others,
        request: Message,
        work: Callable[[], T],
        facts_of: Callable[[T], Facts],
    ) -> T:
        """Return the result of `work` on this rank.

        Raises `FedsimError` if another rank's answer differs from the facts of this result.
        """
        result, answers = others.ask(dict.fromkeys(range(1, others.size), request), work)
        for key, fact in facts_of(result).items():
            for rank, answer in answers.items():
                theirs = answer.content[key]
                if theirs != fact:
                    fault = f"rank {rank} has another {key}: {theirs!r}, not {fact!r}"
                    alike = "the same installation, command line, environment and data"
                    raise FedsimError(f"{fault}; all ranks need {alike}")
        return result


RANKS = Ranks()


def check_jobs(plans: Sequence[Plan], launcher: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for what several ranks cannot run."""
    target = str(launcher.get("_target_", "BasicLauncher")).rpartition(".")[2]
    fault = f"{target} runs jobs at the same time, and torchrun divides each among its processes"
    problems = [rule(target == "BasicLauncher", "hydra/launcher", ..., fault, "use one of the two")]
    for device in sorted({plan.settings.device for plan in plans}):
        fault = "is one GPU for all processes of torchrun; each needs its own"
        remedy = "use device=cuda: each process takes the GPU of its local rank"
        problems.append(rule(not device.startswith("cuda:"), "device", device, fault, remedy))
    check(*problems)


def jobs_facts(plans: Sequence[Plan]) -> Facts:
    """Return what must be the same on all ranks before any of them builds a run."""
    hashes = "".join(plan.config_hash for plan in plans)
    return {
        "list of jobs": hashlib.sha256(hashes.encode()).hexdigest()[:12],
        "fedsim": fedsim.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }


def experiment_facts(experiment: Experiment) -> Facts:
    """Return what must be the same on all ranks after they have built a run."""
    return {
        "engine": experiment.simulation.components.engine.description,
        "division of the data": experiment.division.hash,
        "data set": dict(experiment.data_source),
    }


def holdings(experiment: Experiment) -> Holdings:
    """Return what this rank has of the run: its backend and samples."""
    components = experiment.simulation.components
    server = components.server_data
    samples = {"clients": components.engine.data.x, "test": server.test.x}
    if server.validation is not None:
        samples["validation"] = server.validation.x
    if server.public is not None:
        samples["public"] = server.public
    return Holdings(components.engine.backend, samples)


def run_over_ranks(
    place: World, run: Callable[[], int], compose: Callable[[], Sequence[Plan]]
) -> int:
    """Run a command on this rank and return the exit code of its process.

    Rank 0 calls `run`, which returns the exit code; the others call `compose`, which returns the
    jobs. Raises `FedsimError` if the processes do not find each other.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        # End when torchrun is killed.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    backend = backend_name()
    try:
        dist.init_process_group(backend, timeout=WORKING, rank=place.rank, world_size=place.size)
    except (RuntimeError, ValueError) as error:
        fault = f"rank {place.rank} of {place.size} cannot join the others"
        raise FedsimError(f"{fault}: {error}") from error
    link = Link(place.size)
    if place.rank:
        return Worker(link, compose).serve(place.rank)
    RANKS.others = Others(link)
    code = 1
    try:
        code = run()
    finally:
        code = RANKS.end(code)
    return code


class Worker:
    """A rank that answers the messages of rank 0. `compose` returns the jobs of the command."""

    def __init__(self, link: Link, compose: Callable[[], Sequence[Plan]]) -> None:
        self._link = link
        self._compose = compose
        self._plans: Mapping[str, Plan] = {}
        self._holdings: Holdings | None = None

    def serve(self, rank: int) -> int:
        """Answer until rank 0 ends, and return the exit code that it sends.

        Rank 0 gets all signals, too. It ends after it has saved its round, so this rank only notes
        them.
        """
        STOP.defer_always()
        stderr = sys.stderr
        if os.environ.get("FEDSIM_DEBUG") != "1":
            sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
        try:
            while True:
                request = self._link.receive(0)
                if request.kind == "end":
                    return int(request.content["code"])
                self._link.send(0, self.answered(request))
        except LostRankError as error:
            if STOP.status is not None:
                return CODES[STOP.status]
            with suppress(OSError):
                stderr.write(f"fedsim: rank {rank}: {error}\n")
            return 1

    def answered(self, request: Message) -> Message:
        """Do what a message asks for, and return the answer or the error."""
        try:
            return Message("answer", self._answer(request.kind, request.content))
        except (Exception, SystemExit) as error:
            known = isinstance(error, FedsimError)
            trace = traceback.format_exc()
            return Message("error", {"text": str(error), "known": known, "traceback": trace})

    def _answer(self, kind: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
        if kind == "jobs":
            plans = self._compose()
            self._plans = {plan.config_hash: plan for plan in plans}
            return jobs_facts(plans)
        if kind == "build":
            self._holdings = None  # first, so that its memory is free
            experiment = build(self._plans[content["job"]])
            self._holdings = holdings(experiment)
            self._link.device = experiment.simulation.components.engine.data.x.device
            return experiment_facts(experiment)
        assert self._holdings is not None
        return {"result": self._holdings.compute(kind, content)}
