"""Warnings about the components of a run: combinations and states that a user may not expect.

`fedsim.running.experiment` shows them before the first round, during the rounds and at the end.
"""

from functools import cache

from fedsim.clients.context import Signal
from fedsim.core.types import sizes_of
from fedsim.rounds.aggregators import weighting_warning
from fedsim.rounds.loop import Components, Simulation
from fedsim.running.exits import warn


def component_warnings(simulation: Simulation) -> list[str]:
    """Return the warnings of a run's components, which trackers show before the first round."""
    components = simulation.components
    model_bytes = sum(value.nbytes for value in simulation.params.values())
    warnings = [
        components.selector.warning,
        components.aggregator.warning,
        weighting_warning(components.selector, components.aggregator),
        components.local_algorithm.warning(components.population.num_clients, model_bytes),
        components.engine.warning,
        _holdout_warning(components),
    ]
    return [warning for warning in warnings if warning]


def _holdout_warning(components: Components) -> str | None:
    """Return a line if some clients have no samples for the losses that the selector asks for."""
    if not components.selector.needs & {Signal.LOSSES, Signal.ACCURACIES}:
        return None
    data = components.engine.data
    is_silent = (sizes_of(data.train) > 0) & (sizes_of(data.evaluate) == 0)
    if not is_silent.any():
        return None
    return (
        f"{is_silent.sum()} of {len(is_silent)} clients hold out no sample, so they have no loss "
        f"to report (local.evaluate_on=holdout): {type(components.selector).__name__} selects them "
        "less or never; raise local.holdout_fraction, or take local.evaluate_on=train"
    )


def ignored_weights_warning(components: Components) -> str:
    """Return the warning of a run whose aggregator ignores the selector's weights."""
    selector = type(components.selector).__name__
    aggregator = type(components.aggregator).__name__
    return (
        f"{selector} gives its clients weights, but {aggregator} ignores them: this is not "
        "the published method; with aggregator=by_size they count"
    )


@cache
def print_unsaved(names: str) -> None:
    """Print, once in a process, which attributes of a user's class no checkpoint holds."""
    warn(
        f"fedsim: {names}: changed during the run and not in `state`. If a later round reads such "
        "an attribute, a run that was killed and resumed differs from an undisturbed one; add it "
        "to `state`\n"
    )
