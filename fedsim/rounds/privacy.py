"""The epsilon of a private run, by how its selector draws cohorts (docs/privacy.md), computed with
dp-accounting.

In a round, the server adds normal noise of deviation z C to the sum of updates of at most C each.
The privacy loss of all rounds is composed of those of each (Koskela et al., "Computing Tight
Differential Privacy Guarantees Using FFT", 2020).
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from fedsim.clients.local_algorithms import LocalAlgorithm
from fedsim.clients.system import SimulatedClock
from fedsim.selectors.base import Sampling, Selector

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


def why_no_epsilon(
    selector: Selector, algorithm: LocalAlgorithm, clock: SimulatedClock | None
) -> str | None:
    """Return what keeps a run with clipped and noisy updates from having an epsilon, or None."""
    name = type(selector).__name__
    if selector.needs:
        return f"{name} uses {', '.join(sorted(selector.needs))}, which have no noise, to select"
    if selector.sampling is None:
        return f"{name} does not say that it draws clients with equal chances, whatever they hold"
    if type(algorithm).combine is not LocalAlgorithm.combine:
        return f"{type(algorithm).__name__} combines updates before they are clipped"
    if clock is not None and clock.devices.presence is not None:
        return "training times, and with them how much data clients hold, decide who is there in later rounds"
    if (
        clock is not None
        and clock.system.over_selection > 1
        and selector.sampling is Sampling.POISSON
    ):
        return "with system.over_selection, an update that arrives keeps another one from counting"
    return None


class Accountant:
    """Adds up the privacy loss of rounds, each with its sampling rate, at the noise multiplier z.

    ALL and POISSON: neighbouring sets of clients differ by one client more or less, which moves the
    sum by C (Zhu et al., "Optimal Accounting of Differential Privacy via Characteristic Function",
    2022, theorem 11). FIXED_SIZE: one client is exchanged for another. The sum moves by 2 C, which
    is half the noise multiplier (Balle et al., "Privacy Amplification by Subsampling", 2018,
    theorem 11; over several rounds, see docs/privacy.md).
    """

    def __init__(self, sampling: Sampling | None, noise_multiplier: float) -> None:
        self._multiplier = (
            noise_multiplier / 2 if sampling is Sampling.FIXED_SIZE else noise_multiplier
        )
        self._rates: list[float] = []
        self._sum: PrivacyLossDistribution | None = None

    def epsilon(self, rates: Sequence[float], delta: float) -> float:
        """Return the epsilon at `delta` of rounds with these sampling `rates`. What earlier calls
        have composed is used again if it is the beginning of these rounds."""
        if self._rates != rates[: len(self._rates)]:
            self._rates, self._sum = [], None
        for rate in rates[len(self._rates) :]:
            loss = _loss_of_round(rate, self._multiplier, _cell_width(rates[0], self._multiplier))
            self._sum = loss if self._sum is None else self._sum.compose(loss)
            self._rates.append(rate)
        return 0.0 if self._sum is None else float(self._sum.get_epsilon_for_delta(delta))


@cache
def _loss_of_round(rate: float, multiplier: float, width: float) -> "PrivacyLossDistribution":
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    return from_gaussian_mechanism(
        multiplier, sampling_prob=rate, value_discretization_interval=width
    )


def _cell_width(rate: float, multiplier: float) -> float:
    """Return the width of the cells into which losses are divided, which round epsilon up by less
    than 1 %: a 2000th of the loss at ten standard deviations, or a fifth of a usual one, rate /
    multiplier."""
    return min((10 + 0.5 / multiplier) / 2000, rate / 5) / multiplier
