"""Which program takes the steps of a model."""

from collections.abc import Sequence
from enum import Enum
from typing import Literal

import torch

from fedsim.engine.backend import Workload
from fedsim.engine.graph.linear import LinearProgram
from fedsim.engine.graph.one_by_one import OneByOne
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


def new_program(
    kind: ProgramKind,
    workload: Workload,
    tables: Tables,
    state: State,
    optimizer: FlatOptimizer,
    precision: Precision,
    layout: torch.memory_format,
    streams: Sequence[torch.cuda.Stream],
) -> StepProgram:
    """A program on these buffers; `precision`, `layout` and `streams` are for those that take clients one by one."""
    if kind is ProgramKind.LINEAR:
        return LinearProgram(workload, tables, state, optimizer)
    return OneByOne(workload, tables, state, optimizer, precision=precision, layout=layout, streams=streams)
