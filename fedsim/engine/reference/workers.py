"""Several clients side by side on a CPU, each on one core."""

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

Tool = TypeVar("Tool")
Job = TypeVar("Job")
Result = TypeVar("Result")


class Crew(Generic[Tool]):
    """Python threads of one torch thread each, that take jobs with a tool of their own (a copy of the model).

    torch's operations let go of Python's lock, so the threads do run side by side. Jobs that would leave a thread
    without work at the end are done one by one by the caller's thread, with all of torch's threads.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = tools
        self._free: queue.SimpleQueue[Tool] = queue.SimpleQueue()
        for tool in tools:
            self._free.put(tool)
        self._pool = ThreadPoolExecutor(len(tools), initializer=torch.set_num_threads, initargs=(1,))

    def map(self, work: Callable[[Tool, Job], Result], jobs: Sequence[Job]) -> list[Result]:
        """`work(tool, job)` of every job, in order."""
        shared = len(jobs) - len(jobs) % len(self.tools) if len(self.tools) > 1 else 0
        results = list(self._pool.map(lambda job: self._with_a_tool(work, job), jobs[:shared]))
        return results + [work(self.tools[0], job) for job in jobs[shared:]]

    def _with_a_tool(self, work: Callable[[Tool, Job], Result], job: Job) -> Result:
        tool = self._free.get()
        try:
            return work(tool, job)
        finally:
            self._free.put(tool)
