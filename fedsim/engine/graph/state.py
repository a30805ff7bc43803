"""The models of R clients while they train: static buffers, so that recorded steps find them where they were."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from fedsim.engine.graph.layout import Layout
from fedsim.engine.model.parameters import trained_names, traveling
from fedsim.types import Params, Stack


class State:
    """`flat` [R, P] holds the parameters that are trained, `statistics` [R, Q] the other tensors that travel (running
    statistics of BatchNorm); `views` and `statistics_views` are the same by name. `grads` [R, P] is for gradients,
    zero between the tensors.

    `channels_last`: four-dimensional parameters lie with their second axis last.
    """

    def __init__(
        self, layout: Layout, statistics_layout: Layout, flat: Tensor, grads: Tensor, statistics: Tensor
    ) -> None:
        self.layout, self.statistics_layout = layout, statistics_layout
        self.flat, self.grads, self.statistics = flat, grads, statistics
        self.views, self.grad_views = layout.views(flat), layout.views(grads)
        self.statistics_views = statistics_layout.views(statistics)

    @classmethod
    def of(cls, model: nn.Module, rows: int, like: Tensor, *, channels_last: bool = False) -> "State":
        """New buffers for so many models, all zero, of the kind of `like`."""
        tensors, trained = traveling(model), trained_names(model)
        rest = {name: value for name, value in tensors.items() if name not in set(trained)}
        layout = Layout({name: tensors[name] for name in trained}, like, channels_last=channels_last)
        statistics = Layout(rest, like, channels_last=False)
        widths = (layout.width, layout.width, statistics.width)
        return cls(layout, statistics, *(like.new_zeros(rows, width) for width in widths))

    @cached_property
    def _columns(self) -> Tensor:
        """Where the elements of all tensors lie in a row of `flat` and one of `statistics` behind it."""
        statistics = [slot.columns + self.layout.width for slot in self.statistics_layout.slots]
        return torch.cat([slot.columns for slot in self.layout.slots] + statistics).to(self.flat.device)

    @cached_property
    def _trained(self) -> int:
        return sum(slot.size for slot in self.layout.slots)

    def part(self, rows: slice) -> "State":
        """Those rows; shares memory."""
        return State(self.layout, self.statistics_layout, self.flat[rows], self.grads[rows], self.statistics[rows])

    def __len__(self) -> int:
        return len(self.flat)

    @torch.no_grad()
    def load(self, models: Sequence[Params], owner: Tensor) -> None:
        """Start row r from `models[owner[r]]`; `owner` [R] is on the device."""
        self._start = self._spread(self.layout.rows(models), owner)
        self._statistics_start = self._spread(self.statistics_layout.rows(models), owner)
        self.flat.copy_(self._start)
        self.statistics.copy_(self._statistics_start)

    def _spread(self, rows: Tensor, owner: Tensor) -> Tensor:
        return rows if len(rows) == 1 else rows.index_select(0, owner)

    @torch.no_grad()
    def changes(self, count: int) -> Tensor:
        """What the first `count` models have changed by since `load`, as rows that `named` takes, in new memory."""
        changed = self.flat[:count] - self._start[:count]
        if self.statistics_layout.slots:
            moved = self.statistics[:count] - self._statistics_start[:count]
            changed = torch.cat([changed, moved], dim=1)
        return changed.index_select(1, self._columns)

    @torch.no_grad()
    def packed(self, flat: Tensor) -> Tensor:
        """Rows that lie as those of `flat`, as `named` takes them, in new memory."""
        return flat.index_select(1, self._columns[: self._trained])

    def named(self, rows: Tensor) -> Stack:
        """Tensors by name, parameters first, from rows in which they lie one behind the other; share memory."""
        slots = [*self.layout.slots, *self.statistics_layout.slots]
        stack: Stack = {}
        first = 0
        for slot in slots:
            if first < rows.shape[1]:
                stack[slot.name] = rows[:, first : first + slot.size].view(len(rows), *slot.shape)
            first += slot.size
        return stack
