"""Incidents: rounds in which something went wrong that does not stop a run.

`fedsim.running.experiment` passes every record to `Incidents.see`. summary.json counts the
incidents of every kind; the first incident of a kind is printed.
"""

from collections.abc import Callable

from fedsim.core.record import Record
from fedsim.core.types import Population

TEXTS = {
    "dropped_updates": "updates that hold a nan or infinity are left out of the average",
    "nonfinite_reports": "clients report losses that are nan or infinity",
    "rounds_with_too_few_clients": "fewer clients than cohort_size are available; all of them "
    "take part",
    "rounds_without_clients": "no client takes part; the model stays as it is, or a private "
    "aggregator adds its noise",
    "empty_clients": "clients hold no training samples and never take part",
}
"""What happened, in words, by the kind of incident (the keys in summary.json)."""


class Incidents:
    """The incidents of a run, counted by kind in `counts`.

    An `adaptive` selector chooses itself how many clients take part. With such a selector, a round
    with few clients is no incident. `show` prints a line.
    """

    def __init__(self, population: Population, adaptive: bool, show: Callable[[str], None]) -> None:
        num_with_samples = int((population.sizes > 0).sum())
        self._min_selected = 1 if adaptive else min(population.cohort_size, num_with_samples)
        self._show = show
        self.counts = dict.fromkeys(TEXTS, 0)
        self._add("before round 1", "empty_clients", population.num_clients - num_with_samples)

    def see(self, record: Record, *, silent: bool = False) -> None:
        """Count the incidents of a round. Print none if `silent`: an earlier process did."""
        num_selected = len(record.selected)
        when = "" if silent else f"round {record.round}"
        self._add(when, "dropped_updates", record.dropped_updates)
        self._add(when, "nonfinite_reports", record.nonfinite_reports)
        too_few = 0 < num_selected < self._min_selected
        self._add(when, "rounds_with_too_few_clients", int(too_few))
        self._add(when, "rounds_without_clients", int(num_selected == 0))

    def _add(self, when: str, kind: str, count: int) -> None:
        """Add to the count of a kind, and print the first incident unless `when` is empty."""
        if count and when and not self.counts[kind]:
            self._show(f"{when}: {TEXTS[kind]} (counted in summary.json as incidents.{kind})")
        self.counts[kind] += count
