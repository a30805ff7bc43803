"""Which groups are drawn and compared together: one panel for each setting, one line in it for each method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsim.report.groups import Group, rank, show_labels


@dataclass(frozen=True, eq=False)
class Panel:
    """Groups of one setting by what tells them apart."""

    title: str
    lines: Mapping[str, Group]

    def reference(self, selector: str) -> Group:
        """The group of that selector, or the first."""
        groups = list(self.lines.values())
        return next((g for g in groups if g.choices.get("selector") == selector), groups[0])

    def name_of(self, group: Group) -> str:
        return next(name for name, one in self.lines.items() if one is group)


SETTING = ("cell", "dataset", "partition", "model")
"""Config groups whose choices and values make a setting; all others make lines."""


def panels_of(groups: Sequence[Group]) -> list[Panel]:
    """Groups by setting, in the order in which they come; where only settings differ, they are the lines."""
    if all(_is_setting(name) for group in groups for name in group.labels):
        return [Panel("", {group.name: group for group in groups})]
    panels: dict[str, dict[str, Group]] = {}
    for group in groups:
        title = show_labels({k: v for k, v in group.labels.items() if _is_setting(k)})
        line = show_labels({k: v for k, v in group.labels.items() if not _is_setting(k)})
        panels.setdefault(title, {})[line] = group
    return [Panel(title, panels[title]) for title in sorted(panels, key=rank)]


def _is_setting(name: str) -> bool:
    return name.partition(".")[0] in SETTING
