"""The epsilon of a private run, computed with dp-accounting (docs/privacy.md).

`DPFedAvg` in rounds/robust.py uses it. In a round, the server adds normal noise to the sum of
updates, whose length is at most C. The standard deviation of the noise is z C, with z the noise
multiplier. The privacy loss of the round follows from z and from how the selector draws cohorts
(`Selector.sampling`). The loss of the run is composed of the losses of its rounds (Koskela et al.,
"Computing Tight Differential Privacy Guarantees Using FFT", 2020).
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from fedsim.clients.local_algorithms import LocalAlgorithm
from fedsim.clients.system import SimulatedClock
from fedsim.rounds.availability import Availability
from fedsim.selectors.base import Sampling, Selector

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


def why_no_epsilon(
    selector: Selector,
    algorithm: LocalAlgorithm,
    clock: SimulatedClock | None,
    availability: Availability,
) -> str | None:
    """Return why a run with clipped and noisy updates has no epsilon, or None if it has one.

    Epsilon covers the models that the server publishes. It does not hold if values without noise
    enter these, or decide who takes part.
    """
    name = type(selector).__name__
    if selector.needs:
        return f"{name} uses {', '.join(sorted(selector.needs))}, which have no noise, to select"
    if selector.sampling is None:
        return f"{name} does not say that it draws clients with equal chances, whatever they hold"
    if type(algorithm).combine is not LocalAlgorithm.combine:
        return f"{type(algorithm).__name__} combines updates before they are clipped"
    if availability.depends_on_data:
        return f"{type(availability).__name__} lets clients be reached by what data they hold"
    if clock is None:
        return None
    if clock.devices.presence is not None:
        return (
            "training times, and with them how much data clients hold, decide who is there in "
            "later rounds"
        )
    if clock.system.over_selection > 1 and selector.sampling is not Sampling.FIXED_SIZE:
        return "with system.over_selection, an update that arrives keeps another one from counting"
    return None


class Accountant:
    """Adds up the privacy loss of rounds, each with its sampling rate, at the noise multiplier z.

    Epsilon compares two neighbouring sets of clients. With `Sampling.ALL` and `POISSON` they differ
    by one additional client, which moves the sum of updates by at most C. With `FIXED_SIZE` one
    client is exchanged for another. The sum then moves by at most 2 C, which has the same effect as
    half the noise multiplier. The losses are those of Zhu et al., "Optimal Accounting of
    Differential Privacy via Characteristic Function", 2022, theorem 11.
    """

    def __init__(self, sampling: Sampling | None, noise_multiplier: float) -> None:
        self._is_exchange = sampling is Sampling.FIXED_SIZE
        self._multiplier = noise_multiplier / 2 if self._is_exchange else noise_multiplier
        self._rates: list[float] = []
        """The sampling rates of the rounds in `_composed`."""
        self._composed: PrivacyLossDistribution | None = None
        """The privacy loss of these rounds together; None: there are none."""

    def epsilon(self, rates: Sequence[float], delta: float) -> float:
        """Return the epsilon at `delta` of rounds with these sampling `rates`.

        If these rounds begin with those of the last call, only the new ones are composed.
        """
        if self._rates != rates[: len(self._rates)]:
            self._rates = []
            self._composed = None
        for rate in rates[len(self._rates) :]:
            # the first round's rate for all: only losses with equal cells can be composed
            width = _cell_width(rates[0], self._multiplier)
            loss_of_round = _loss_of_exchange if self._is_exchange else _loss_of_round
            loss = loss_of_round(rate, self._multiplier, width)
            self._composed = loss if self._composed is None else self._composed.compose(loss)
            self._rates.append(rate)
        if self._composed is None:
            return 0.0
        return float(self._composed.get_epsilon_for_delta(delta))


@cache  # the rounds of a run have few different rates
def _loss_of_round(rate: float, multiplier: float, width: float) -> "PrivacyLossDistribution":
    """Return the privacy loss of one round with the sampling rate `rate`, in cells of `width`."""
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    return from_gaussian_mechanism(
        multiplier, sampling_prob=rate, value_discretization_interval=width
    )


@cache
def _loss_of_exchange(rate: float, multiplier: float, width: float) -> "PrivacyLossDistribution":
    """Return the privacy loss of one round in which one client is exchanged for another.

    It dominates the loss of any inputs (Zhu et al. 2022, theorem 11). A loss above 0 has the
    probability that it has if a client is removed, a loss below 0 that if one is added, and the
    remaining probability is at 0.
    """
    from dp_accounting.pld.pld_pmf import DensePLDPmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    # the three private attributes have no public counterparts
    of_poisson = _loss_of_round(rate, multiplier, width)
    removed, added = of_poisson._pmf_remove.to_dense_pmf(), of_poisson._pmf_add.to_dense_pmf()
    removed_cells = removed._lower_loss + np.arange(len(removed._probs))
    added_cells = added._lower_loss + np.arange(len(added._probs))
    above, below = removed_cells > 0, added_cells < 0
    lowest = min(int(added_cells[0]), 0)
    highest = max(int(removed_cells[-1]), 0)
    probabilities = np.zeros(highest - lowest + 1)
    probabilities[removed_cells[above] - lowest] = removed._probs[above]
    probabilities[added_cells[below] - lowest] = added._probs[below]
    infinite = removed._infinity_mass
    probabilities[-lowest] = max(1 - infinite - probabilities.sum(), 0.0)
    return PrivacyLossDistribution(DensePLDPmf(width, lowest, probabilities, infinite, True))


def _cell_width(rate: float, multiplier: float) -> float:
    """Return the width of the cells into which dp-accounting divides the values of a loss.

    It is a 2000th of the loss at ten standard deviations, or a fifth of a usual loss,
    rate / multiplier, if that is less. These cells round epsilon up by less than 1 %.
    """
    return min((10 + 0.5 / multiplier) / 2000, rate / 5) / multiplier
