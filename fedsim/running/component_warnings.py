"""Warnings about the components of a run: combinations and states that a user may not expect.

`fedsim.running.experiment` shows them before the first round, during the rounds and at the end.
"""

from functools import cache

from fedsim.clients.context import Signal
from fedsim.rounds.aggregators import weighting_warning
from fedsim.rounds.loop import Components, Simulation
from fedsim.running.exits import warn


def component_warnings(simulation: Simulation) -> list[str]:
    """Return the warnings of a run's components, which trackers show before the first round."""
    components = simulation.components
    model_bytes = sum(value.nbytes for value in simulation.params.values())
    num_clients = components.population.num_clients
    warnings = [
        components.selector.warning,
        components.aggregator.warning,
        weighting_warning(components.selector, components.aggregator),
        components.local_algorithm.warning(num_clients, model_bytes),
        components.engine.warning,
        _holdout_warning(components),
    ]
    return [warning for warning in warnings if warning]


def _holdout_warning(components: Components) -> str | None:
    """Return a line if some clients have no samples for the losses that the selector asks for."""
    if not components.selector.needs & {Signal.LOSSES, Signal.ACCURACIES}:
        return None
    data = components.engine.data
    num_clients = len(data.train)
    num_silent = 0
    for trained_on, evaluated_on in zip(data.train, data.evaluate, strict=True):
        num_silent += len(trained_on) > 0 and len(evaluated_on) == 0
    if not num_silent:
        return None
    return (
        f"{num_silent} of {num_clients} clients hold out no sample, so they have no loss to report "
        f"(local.evaluate_on=holdout): {type(components.selector).__name__} selects them less or "
        "never; raise local.holdout_fraction, or take local.evaluate_on=train"
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
