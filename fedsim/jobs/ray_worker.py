"""What a task of Ray runs.

Ray imports this module in the task's process before the environment is set: it needs the standard library alone.
"""

import os
from collections.abc import Sequence

from fedsim.jobs.task_worker import Job, Place, Report, enter, run_jobs


def run_task(place: Place, jobs: Sequence[Job]) -> list[Report]:
    """Run `jobs` and report each.

    Asked to end, it finishes and saves the round, and reports that. A process that was asked to end during an earlier
    task ends here: Ray runs this task in another one.
    """
    enter(place)
    from fedsim.running.signals import CODES, STOP

    STOP.defer_always()
    if STOP.status is not None:
        os._exit(CODES[STOP.status])
    return run_jobs(jobs)
