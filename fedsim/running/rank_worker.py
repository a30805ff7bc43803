"""A command whose processes torchrun has started: rank 0 does what it says, the others serve rank 0.

They print and write nothing, build what rank 0 runs, and compute their parts of that.
"""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from fedsim.config.plan import Plan
from fedsim.core.errors import FedsimError
from fedsim.distributed.backend import Holdings
from fedsim.distributed.links import Link, LostRankError, Message, Others, error_message
from fedsim.running.assembly import build
from fedsim.running.process import CODES, STOP, World
from fedsim.running.ranks import RANKS, built, holdings, identity_of, joined

PR_SET_PDEATHSIG = 1
"""Linux' number of the option of prctl."""


def run_over_ranks(place: World, run: Callable[[], int], compose: Callable[[], Sequence[Plan]]) -> int:
    """The exit code of this process. `run` does what the command line says and returns the exit code, at rank 0 alone;
    `compose` gives its jobs, at the others. Raises `FedsimError` where the processes do not find each other.
    """
    end_with_torchrun()
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


def end_with_torchrun() -> None:
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
