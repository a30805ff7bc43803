"""The groups of runs that a preset's numbers and claims are about, and whether they may be judged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsim.report.groups import Group, has_made
from fedsim.report.named_measures import is_known
from fedsim.report.protocol import Protocol, show_deviations


@dataclass(frozen=True)
class Unjudged:
    """The reason why a number or a claim is not judged."""

    reason: str


@dataclass(frozen=True)
class Cases:
    """The groups of one preset and size, and checks whether they may be judged."""

    groups: Sequence[Group]
    protocol: Protocol | None

    @property
    def full_size(self) -> bool:
        return self.protocol is None or self.protocol.scale == "full"

    def find(self, wanted: Mapping[str, str]) -> Group | None:
        """The group that made these choices; of several, the one that deviates least from the preset."""
        return next(iter(self._nearest(wanted)), None)

    def _nearest(self, wanted: Mapping[str, str]) -> list[Group]:
        """The groups that made these choices and deviate least from the preset."""
        deviations = {group: len(self.deviations(group)) for group in self.groups if _matches(group, wanted)}
        least = min(deviations.values(), default=0)
        return [group for group, num in deviations.items() if num == least]

    def deviations(self, group: Group) -> list[str]:
        return [] if self.protocol is None else self.protocol.deviations(group)

    def _objection(self, group: Group, measure: str) -> str | None:
        """The reason why a measure of a group may not be judged, or None."""
        if deviations := self.deviations(group):
            return f"{group.name} is not as the preset: {show_deviations(deviations)}"
        if not group.complete:
            return f"{group.name} has no finished run"
        unknown = [run for run in group.complete if not is_known(run, measure)]
        return f"the summary does not hold {measure}" if unknown else None

    def usable(self, wanted: Mapping[str, str], measure: str) -> Group | Unjudged:
        """The group that made these choices, or the reason why it cannot be judged."""
        nearest, shown = self._nearest(wanted), ", ".join(f"{key}={value}" for key, value in wanted.items())
        if not nearest:
            return Unjudged(f"no runs of {shown}")
        if len(nearest) > 1:
            return Unjudged(f"several runs are of {shown}: {', '.join(group.name for group in nearest)}")
        (group,) = nearest
        reason = self._objection(group, measure)
        return group if reason is None else Unjudged(reason)

    def remark(self, group: Group) -> str:
        return "; ".join([] if self.protocol is None else self.protocol.remarks(group))


def _matches(group: Group, wanted: Mapping[str, str]) -> bool:
    return has_made(group.runs[0].config, {**group.choices, **group.labels}, wanted)
