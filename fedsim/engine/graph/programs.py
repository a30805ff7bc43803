"""Which program takes the steps of a model."""

from enum import Enum
from typing import Literal

from fedsim.engine.backend import Workload
from fedsim.engine.graph.linear import LinearProgram
from fedsim.engine.graph.one_by_one import OneByOne, Passes
from fedsim.engine.graph.optimizers import FlatOptimizer
from fedsim.engine.graph.program import StepProgram
from fedsim.engine.graph.state import State
from fedsim.engine.graph.tables import Tables
from fedsim.engine.precision import Precision


class ProgramKind(Enum):
    """The programs; values are for the summary."""

    LINEAR = "linear layers"
    ONE_BY_ONE = "one client a stream"

    @property
    def least_rows(self) -> int:
        """Rows that are trained at least: torch multiplies one pair of matrices in another order of additions than
        several."""
        return 1 if self is ProgramKind.ONE_BY_ONE else 2


def choose_program(workload: Workload, precision: Precision, wanted: Literal["auto", "torch", "triton"]) -> ProgramKind:
    """What `engine.program` asks for. Raises `ConfigError` for `triton` where it cannot train the workload."""
    chain = workload.chain
    if chain is None or not chain.is_linear or precision == "bf16":
        return ProgramKind.ONE_BY_ONE
    return ProgramKind.LINEAR


def new_programs(
    kind: ProgramKind,
    workload: Workload,
    tables: Tables,
    state: State,
    optimizer: FlatOptimizer,
    passes: Passes | None,
) -> list[StepProgram]:
    """One program on these buffers, or one for each client; `passes` is for the latter."""
    if kind is ProgramKind.LINEAR:
        return [LinearProgram(workload, tables, state, optimizer)]
    assert passes is not None
    return [
        OneByOne(workload, tables.part(row), state.part(rows), optimizer.part(rows), passes)
        for row in range(len(state))
        for rows in [slice(row, row + 1)]
    ]
