"""The models of R clients while they train: static buffers, so that recorded steps find them where they were."""

from collections.abc import Sequence

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
    def changes(self, count: int) -> tuple[Tensor, Tensor]:
        """What the models of the first `count` rows have changed by since `load`: parameters [count, P] and statistics
        [count, Q], in new memory."""
        return self.flat[:count] - self._start[:count], self.statistics[:count] - self._statistics_start[:count]

    def named(self, parameters: Tensor, statistics: Tensor) -> Stack:
        """All tensors that travel by name, from rows laid out as `flat` and `statistics`; share memory."""
        return self.layout.views(parameters) | self.statistics_layout.views(statistics)
