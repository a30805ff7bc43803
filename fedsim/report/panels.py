"""Panels: groups that are drawn and compared together. One panel per setting, with one line per method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsim.config.nested import flat
from fedsim.report.groups import Group, is_setting, show_labels, sort_key


@dataclass(frozen=True, eq=False)
class Panel:
    """The groups of one setting, by the labels that distinguish them."""

    title: str
    lines: Mapping[str, Group]

    def reference(self, selector: str) -> Group:
        """The group of the given selector, or the first group."""
        groups = list(self.lines.values())
        return next((g for g in groups if g.choices.get("selector") == selector), groups[0])

    def reference_of(self, group: Group, choice: str) -> Group | None:
        """The group of selector `choice`, or the line of that name, to compare `group` with; None if there is none.

        Of several, as where learning rates are varied, too, it is the one that is most like `group` in what labels
        the two.
        """
        found = [other for name, other in self.lines.items() if choice in (name, other.choices.get("selector"))]
        return max(found, key=lambda other: _num_shared(group, other), default=None)

    @property
    def besides_partition(self) -> str:
        """What distinguishes its setting from others but for the division of the data, as text."""
        labels = next(iter(self.lines.values())).labels
        names = [k for k in labels if is_setting(k) and k.partition(".")[0] not in DIVISION]
        return show_labels({k: labels[k] for k in names})

    def name_of(self, group: Group) -> str:
        return next(name for name, other in self.lines.items() if other is group)


def _num_shared(group: Group, other: Group) -> int:
    """The number of labels of either, besides selectors and their parts, in which two groups are alike.

    A group that differs from no other by a value has no label of it, and yet the value.
    """
    labels = {key for key in (*group.labels, *other.labels) if key.partition(".")[0].partition("/")[0] != "selector"}
    ours, theirs = ({key: _label(one, key) for key in labels} for one in (group, other))
    return sum(ours[key] == theirs[key] for key in labels)


def _label(group: Group, key: str) -> str | None:
    """Its label, or what it would be: a choice in a config group, or a value."""
    if key in group.labels or key in group.choices:
        return group.labels.get(key, group.choices.get(key))
    found = dict(flat(group.runs[0].config)).get(key)
    return None if found is None else str(found)


DIVISION = ("cell", "partition")
"""Config groups among those of a setting that say how the data are divided among clients."""


def make_panels(groups: Sequence[Group]) -> list[Panel]:
    """Panels sorted by setting. If groups differ only by setting, they are the lines of a single panel."""
    if all(is_setting(name) for group in groups for name in group.labels):
        return [Panel("", {group.name: group for group in groups})]
    panels: dict[str, dict[str, Group]] = {}
    for group in groups:
        title = show_labels({k: v for k, v in group.labels.items() if is_setting(k)})
        line = show_labels({k: v for k, v in group.labels.items() if not is_setting(k)})
        panels.setdefault(title, {})[line] = group
    return [Panel(title, panels[title]) for title in sorted(panels, key=sort_key)]


def drawn_panels(panels: Sequence[Panel]) -> list[Panel]:
    """The panels with those of their lines that have finished runs; panels without any are left out."""
    found = [Panel(panel.title, {name: g for name, g in panel.lines.items() if g.complete}) for panel in panels]
    return [panel for panel in found if panel.lines]
