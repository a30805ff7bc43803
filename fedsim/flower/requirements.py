"""The requirements of a run on nodes of Flower: its config must suit it, and nodes must answer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedsim.clients.context import Signal
from fedsim.clients.local_algorithms import LocalAlgorithm
from fedsim.clients.server import ServerData
from fedsim.config.build import instantiate
from fedsim.config.plan import Plan
from fedsim.core.errors import Problem, rule
from fedsim.core.types import Population
from fedsim.flower.messages import ANSWERS
from fedsim.flower.secagg import MAX_CLIENTS
from fedsim.rounds.aggregators import Aggregator
from fedsim.rounds.availability import Availability
from fedsim.selectors.base import Selector

Facts = Mapping[str, Any]
"""The facts that the node of a client tells about itself (`fedsim.flower.client`)."""


def selector_of(plan: Plan) -> Selector:
    """Return the selector of a run before it is known how many samples clients have."""
    num_clients, cohort_size = plan.settings.num_clients, plan.settings.cohort_size
    population = Population(np.ones(num_clients, np.int64), cohort_size, num_rounds=1)
    return instantiate(plan.settings.selector, Selector, "selector", population)


def simulated_only(plan: Plan) -> Iterator[Problem | None]:
    """Yield a problem for each setting that only the simulator can follow."""
    settings = plan.settings
    values = {
        "clients": settings.clients,
        "client_accuracy": settings.client_accuracy,
        "test_on": settings.test_on,
        "init_seed": "per_client" if settings.init_seed == "per_client" else None,
        "local.holdout_fraction": plan.local.holdout_fraction,
        "dataset.augment": plan.config["dataset"].get("augment"),
    }
    availability = instantiate(settings.availability, Availability, "availability")
    if availability.needs_labels:
        values["availability"] = plan.choices["availability"]
    for key, value in values.items():
        yield rule(not value, key, value, "only the simulator can do that", "leave it out")


def unfit_for_sums(plan: Plan, *, has_test_samples: bool) -> Iterator[Problem | None]:
    """Yield a problem for each choice that does not work with SecAgg+, by which the server gets one
    sum a round.

    `has_test_samples` says whether the server itself has samples to test on.
    """
    settings, choices = plan.settings, plan.choices
    aggregator = instantiate(settings.aggregator, Aggregator, "aggregator", frozenset())
    algorithm = LocalAlgorithm()
    if settings.local_algorithm is not None:
        algorithm = instantiate(settings.local_algorithm, LocalAlgorithm, "local_algorithm")

    def fits(is_met: bool, key: str, value: Any, reason: str, remedy: str = "") -> Problem | None:
        text = f"does not work with SecAgg+ (secure_aggregation=true): {reason}"
        return rule(is_met, key, value, text, remedy)

    yield fits(
        Signal.TRAINING not in selector_of(plan).needs,
        "selector",
        choices["selector"],
        "it asks clients to train before the selection",
    )
    yield fits(
        aggregator.is_mean,
        "aggregator",
        choices["aggregator"],
        "clients would have to clip updates",
    )
    yield fits(
        type(algorithm).combine is LocalAlgorithm.combine,
        "local_algorithm",
        choices.get("local_algorithm"),
        "it combines single updates",
    )
    reason = "the sum has no update that the server could count as late"
    yield fits(settings.system is None, "system", choices.get("system"), reason)
    yield fits(not plan.local.drop_out, "local.drop_out", plan.local.drop_out, reason)
    yield fits(
        settings.num_clients <= MAX_CLIENTS,
        "num_clients",
        settings.num_clients,
        f"the sum of more than {MAX_CLIENTS} clients may overflow",
    )
    yield fits(
        settings.cohort_size >= 2,
        "cohort_size",
        settings.cohort_size,
        "the sum over one client is its update",
    )
    yield fits(
        has_test_samples,
        "server",
        None,
        "the clients would send single losses to evaluate the model",
        "give the server test samples: ServerData(test)",
    )


def unanswered(
    plan: Plan, server: ServerData | None, facts: Sequence[Facts]
) -> Iterator[Problem | None]:
    """Yield a problem for each signal of the run that a client or the server does not give.

    Without samples at the server, the clients also have to evaluate the model.
    """
    needs = selector_of(plan).needs
    if server is None:
        needs |= {Signal.LOSSES, Signal.ACCURACIES}
    choice = plan.choices["selector"]
    for signal, cost in ANSWERS.items():
        silent = [fact["client"] for fact in facts if signal not in fact["answers"]]
        fault = f"needs '{signal}', which the client apps of {silent} do not answer"
        remedy = f"client_app(..., answers=[..., '{signal}']): it takes {cost}"
        yield rule(signal not in needs or not silent, "selector", choice, fault, remedy)
    for signal in (Signal.TEST, Signal.VALIDATION, Signal.PUBLIC):
        is_met = signal not in needs or getattr(server, signal, None) is not None
        fault = f"needs '{signal}', of which the server has no samples"
        yield rule(is_met, "selector", choice, fault, f"ServerData({signal}=...)")


def unfit_nodes(plan: Plan, frozen: str, facts: Sequence[Facts]) -> Iterator[Problem | None]:
    """Yield the problems of what the nodes of all clients say about themselves.

    `frozen` is the digest of the frozen tensors of the server's model (`digest_of_frozen`).
    """
    empty = [fact["client"] for fact in facts if not fact["samples"]]
    fault = f"the nodes of the clients {empty} have no samples"
    num_clients = plan.settings.num_clients
    yield rule(not empty, "num_clients", num_clients, fault, "give each node samples")
    secure = bool(plan.settings.secure_aggregation)
    masked = [fact["client"] for fact in facts if fact["only_masked"]]
    fault = f"must be true: the client apps of {masked} send masked updates only"
    yield rule(secure or not masked, "secure_aggregation", secure, fault)
    others = [fact["client"] for fact in facts if fact["frozen"] != frozen]
    fault = f"has other frozen tensors than the models of the clients {others}"
    remedy = "make_model must return a model with the weights of the server's"
    yield rule(not others, "model", plan.choices["model"], fault, remedy)
