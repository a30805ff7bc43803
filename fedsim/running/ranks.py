"""Ranks: the processes that torchrun has started for one command, numbered from 0.

Rank 0 does what the command says. The others compose the same jobs, build the same runs and compute
their parts of them; they print and write nothing. `fedsim.commands.dispatch` calls `run_over_ranks`
on every rank. Rank 0 then directs the others through `RANKS`: `fedsim.jobs.prepare` calls `agree`,
and `fedsim.running.experiment` calls `build` for each run. The others answer in `Worker`.

Before ranks work together they compare facts: values by name that must be the same on all of them,
such as the hash of the jobs and the version of torch.
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
from fedsim.distributed.links import MAX_WAIT, Link, LostRankError, Message, Others
from fedsim.running.assembly import Experiment, build
from fedsim.running.process import STOP, STOP_CODES, World

T = TypeVar("T")
Facts = Mapping[str, Any]
"""Values by name that must be the same on all ranks."""

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal that this process gets when its parent ends."""


def backend_name() -> str:
    """Return the backend of torch.distributed: gloo on CPUs, and nccl between GPUs."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


class Ranks:
    """The other ranks of this command, as rank 0 directs them.

    `others` is None without torchrun, and on all ranks but 0.
    """

    def __init__(self) -> None:
        self.others: Others | None = None

    def agree(self, plans: Sequence[Plan], launcher: Mapping[str, Any]) -> None:
        """Make the other ranks compose their jobs, and check that they are these `plans`.

        Does nothing without other ranks. Raises `FedsimError` if a rank has different jobs or
        versions, and `ConfigError` for jobs that several ranks cannot run.
        """
        if self.others is not None:
            check_jobs(plans, launcher)
            self._ask_all(self.others, Message("jobs"), lambda: plans, jobs_facts)

    def build(self, job: str, build: Callable[[], Experiment]) -> Experiment:
        """Build a run on all ranks, which then divide its training and evaluation among them.

        `build` builds it on this rank. The others find its plan among their jobs by `job`, the hash
        of its config. Raises `FedsimError` if a rank has built something else.
        """
        if self.others is None:
            return build()
        request = Message("build", {"job": job})
        experiment = self._ask_all(self.others, request, build, experiment_facts)
        engine = experiment.simulation.components.engine
        self.others.link.device = engine.data.x.device
        engine.backend = DividedBackend(holdings(experiment), self.others)
        return experiment

    def end(self, code: int) -> int:
        """End the other ranks with the exit code `code`, and return it.

        If a rank was lost in a run, the code is 1 instead.
        """
        if self.others is None:
            return code
        if self.others.lost is not None:
            code = 1
        if self.others.in_step:  # otherwise they do not wait for a message
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
        """Send `request` to all other ranks, and meanwhile call `work` on this one.

        Returns the result of `work`. `facts_of` returns the facts of such a result. Raises
        `FedsimError` if those of another rank, which are its answer, are different.
        """
        result, answers = others.ask(dict.fromkeys(range(1, others.size), request), work)
        for key, fact in facts_of(result).items():
            for rank, answer in answers.items():
                fact_there = answer.content[key]
                if fact_there != fact:
                    fault = f"rank {rank} has another {key}: {fact_there!r}, not {fact!r}"
                    remedy = "the same installation, command line, environment and data"
                    raise FedsimError(f"{fault}; all ranks need {remedy}")
        return result


RANKS = Ranks()
"""The ranks of this process's command."""


def check_jobs(plans: Sequence[Plan], launcher: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for jobs that several ranks cannot run.

    `launcher` is the config's node `hydra.launcher`. `BasicLauncher` is Hydra's own, which runs
    jobs one after another.
    """
    target = str(launcher.get("_target_", "BasicLauncher")).rpartition(".")[2]
    fault = f"{target} runs jobs at the same time, and torchrun divides each among its processes"
    problems = [rule(target == "BasicLauncher", "hydra/launcher", ..., fault, "use one of the two")]
    for device in sorted({plan.settings.device for plan in plans}):
        fault = "is one GPU for all processes of torchrun; each needs its own"
        remedy = "use device=cuda: each process takes the GPU of its local rank"
        problems.append(rule(not device.startswith("cuda:"), "device", device, fault, remedy))
    check(*problems)


def jobs_facts(plans: Sequence[Plan]) -> Facts:
    """Return the facts that ranks compare before any of them builds a run."""
    hashes = "".join(plan.config_hash for plan in plans)
    return {
        "list of jobs": hashlib.sha256(hashes.encode()).hexdigest()[:12],
        "fedsim": fedsim.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }


def experiment_facts(experiment: Experiment) -> Facts:
    """Return the facts that ranks compare after they have built a run."""
    return {
        "engine": experiment.simulation.components.engine.description,
        "division of the data": experiment.division.hash,
        "data set": dict(experiment.data_source),
    }


def holdings(experiment: Experiment) -> Holdings:
    """Return what this rank computes its part of a run with: the backend and the samples."""
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
    """Run a command on this rank, which is `place`, and return the exit code of its process.

    Rank 0 calls `run`, which runs the command and returns the exit code. The others call `compose`,
    which returns the jobs of the command. Raises `FedsimError` if the processes do not find each
    other.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        # End when torchrun is killed.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    backend = backend_name()
    try:
        dist.init_process_group(backend, timeout=MAX_WAIT, rank=place.rank, world_size=place.size)
    except (RuntimeError, ValueError) as error:
        fault = f"rank {place.rank} of {place.size} cannot join the others"
        raise FedsimError(f"{fault}: {error}") from error
    link = Link(place.size)
    if place.rank:
        return Worker(link, compose).serve(place.rank)
    RANKS.others = Others(link)
    code = 1  # for the other ranks if `run` raises an error
    try:
        code = run()
    finally:
        code = RANKS.end(code)
    return code


class Worker:
    """A rank other than 0, which answers the messages of rank 0.

    The messages are `jobs`, `build` and `end` (`Ranks`), and those for computing a part of the run
    that was built last (`fedsim.distributed.backend.Holdings.compute`). `compose` returns the jobs
    of the command.
    """

    def __init__(self, link: Link, compose: Callable[[], Sequence[Plan]]) -> None:
        self._link = link
        self._compose = compose
        self._plans: Mapping[str, Plan] = {}
        self._holdings: Holdings | None = None

    def serve(self, rank: int) -> int:
        """Answer until rank 0 ends this rank, and return the exit code that it sends.

        Signals of a cluster reach all ranks. Rank 0 saves its round and then ends the others, so
        this rank only notes them.
        """
        STOP.defer_always()
        stderr = sys.stderr  # kept for the message below; everything else prints nowhere
        if os.environ.get("FEDSIM_DEBUG") != "1":
            sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
        try:
            while True:
                request = self._link.receive(0)
                if request.kind == "end":
                    return int(request.content["code"])
                self._link.send(0, self.answered(request))
        except LostRankError as error:
            # Rank 0 has ended without a message. After a signal, that is no error.
            if STOP.status is not None:
                return STOP_CODES[STOP.status]
            with suppress(OSError):
                stderr.write(f"fedsim: rank {rank}: {error}\n")
            return 1

    def answered(self, request: Message) -> Message:
        """Do what a message asks for, and return a message with the answer or the error.

        `known` tells rank 0 that the error is a `FedsimError`, whose text explains it.
        """
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
            self._holdings = None  # frees the memory of the run before
            experiment = build(self._plans[content["job"]])
            self._holdings = holdings(experiment)
            self._link.device = experiment.simulation.components.engine.data.x.device
            return experiment_facts(experiment)
        assert self._holdings is not None
        return {"result": self._holdings.compute(kind, content)}
