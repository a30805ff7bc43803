"""Which program takes the steps of a model."""

from enum import Enum
from typing import Literal

from fedsim.engine.backend import Workload
from fedsim.engine.graph import triton_chain
from fedsim.engine.graph.linear import LinearProgram
from fedsim.engine.graph.one_by_one import OneByOne, Passes
from fedsim.engine.graph.optimizers import FlatOptimizer
from fedsim.engine.graph.program import StepProgram
from fedsim.engine.graph.state import State
from fedsim.engine.graph.tables import Tables
from fedsim.engine.precision import Precision
from fedsim.errors import check, rule


class ProgramKind(Enum):
    """The programs; values are for the summary."""

    TRITON = "Triton kernels"
    LINEAR = "linear layers"
    ONE_BY_ONE = "one client a stream"

    @property
    def least_rows(self) -> int:
        """Rows that are trained at least: torch multiplies one pair of matrices in another order of additions than
        several."""
        return 2 if self is ProgramKind.LINEAR else 1


def choose_program(workload: Workload, precision: Precision, wanted: Literal["auto", "torch", "triton"]) -> ProgramKind:
    """What takes the steps where `engine.program` is `wanted`. Raises `ConfigError` for `triton` where it cannot."""
    problem = "engine.precision is bf16" if precision == "bf16" else triton_chain.unfit(workload)
    check(
        rule(wanted != "triton" or problem is None, "program", wanted, f"Triton: {problem}", "program=auto falls back")
    )
    if wanted != "torch" and problem is None:
        return ProgramKind.TRITON
    chain = workload.chain
    linear = chain is not None and chain.is_linear and precision != "bf16"
    return ProgramKind.LINEAR if linear else ProgramKind.ONE_BY_ONE


def new_programs(
    kind: ProgramKind,
    workload: Workload,
    tables: Tables,
    state: State,
    optimizer: FlatOptimizer,
    passes: Passes | None,
    precision: Precision,
) -> list[StepProgram]:
    """One program on these buffers, or one for each client; `passes` is for the latter."""
    if kind is ProgramKind.TRITON:
        products: triton_chain.Products = "tf32" if precision == "tf32" else "tf32x3"
        return [triton_chain.TritonChain(workload, tables, state, optimizer, products=products)]
    if kind is ProgramKind.LINEAR:
        return [LinearProgram(workload, tables, state, optimizer)]
    assert passes is not None
    return [
        OneByOne(workload, tables.part(row), state.part(rows), optimizer.part(rows), passes)
        for row in range(len(state))
        for rows in [slice(row, row + 1)]
    ]
