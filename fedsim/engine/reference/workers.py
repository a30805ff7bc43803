"""A pool of threads that train clients side by side on a CPU, each on one core."""

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

Resource = TypeVar("Resource")
Job = TypeVar("Job")
Result = TypeVar("Result")


class WorkerPool(Generic[Resource]):
    """Python threads with one torch thread each; every job gets one of the `resources` (a copy of the model) to itself.

    torch's operations release the global interpreter lock, so the threads do run in parallel. Jobs that would leave a
    thread without work at the end are done one by one by the caller's thread, with all of torch's threads.
    """

    def __init__(self, resources: Sequence[Resource]) -> None:
        self.resources = resources
        self._free: queue.SimpleQueue[Resource] = queue.SimpleQueue()
        for resource in resources:
            self._free.put(resource)
        self._pool = ThreadPoolExecutor(len(resources), initializer=torch.set_num_threads, initargs=(1,))

    def map(self, work: Callable[[Resource, Job], Result], jobs: Sequence[Job]) -> list[Result]:
        """`work(resource, job)` of every job, in order."""
        count = len(self.resources)
        parallel = len(jobs) - len(jobs) % count if count > 1 else 0
        results = list(self._pool.map(lambda job: self._with_a_resource(work, job), jobs[:parallel]))
        return results + [work(self.resources[0], job) for job in jobs[parallel:]]

    def _with_a_resource(self, work: Callable[[Resource, Job], Result], job: Job) -> Result:
        resource = self._free.get()
        try:
            return work(resource, job)
        finally:
            self._free.put(resource)
