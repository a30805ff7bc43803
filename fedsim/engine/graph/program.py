"""What takes the local steps of the clients in static buffers."""

from abc import ABC, abstractmethod

from fedsim.engine.backend import Workload
from fedsim.engine.graph.optimizers import FlatOptimizer
from fedsim.engine.graph.state import State
from fedsim.engine.graph.tables import StepTables


class StepProgram(ABC):
    """Local steps of R clients, by `tables` and on `state`, on the device where these are; `optimizer` has the update
    and its state, which is zero before the first step.

    `step` is recorded once and replayed many times, so it may not make the host wait, not depend in Python on the
    content of a tensor or on a learning rate, and allocate no tensor that it needs in a later step.
    """

    two_forms = False
    """Whether steps whose batches are full are taken in another way (see `step`)."""

    def __init__(self, workload: Workload, tables: StepTables, state: State, optimizer: FlatOptimizer) -> None:
        self.workload, self.tables, self.state, self.optimizer = workload, tables, state, optimizer

    @property
    @abstractmethod
    def launches(self) -> int:
        """About how many kernels a step is; for how many steps go into a recording."""

    @abstractmethod
    def step(self, *, full: bool) -> None:
        """The step `tables.step`, which is not advanced: for the rows with a count > 0, updates `state.flat` and
        `state.statistics` in place and writes the samples' losses before the step into `tables.losses`.

        Nothing of other rows changes, whatever is in them; losses where there is no sample may be anything. `full`:
        all rows have a count of B; only passed to programs with `two_forms`.
        """
