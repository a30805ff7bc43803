"""Where the tensors of a model lie in one flat buffer, a row a client."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.types import Params, Stack

ALIGNMENT = 32
"""Every tensor starts at a multiple of so many elements: 128 bytes in float32, what vectorised loads ask for."""


@dataclass(frozen=True)
class Slot:
    """A tensor's place: `size` elements from `first` on. `channels_last`: its second axis varies fastest."""

    name: str
    shape: tuple[int, ...]
    first: int
    channels_last: bool

    @property
    def size(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def padding(self) -> int:
        """Unused elements behind it."""
        return -self.size % ALIGNMENT

    def of(self, flat: Tensor) -> Tensor:
        """Its part of `flat` [R, P], as [R, *shape]; shares memory."""
        part = flat[:, self.first : self.first + self.size]
        if not self.channels_last:
            return part.view(len(flat), *self.shape)
        outputs, inputs, height, width = self.shape
        return part.view(len(flat), outputs, height, width, inputs).permute(0, 1, 4, 2, 3)

    @property
    def columns(self) -> Tensor:
        """Where its elements lie, in the order that they have in a contiguous tensor [size]."""
        return self.of(torch.arange(self.first + self.size).unsqueeze(0)).reshape(-1)

    def flattened(self, value: Tensor) -> Tensor:
        """The elements of `value` [*shape] in the order in which they lie here, [size]."""
        return (value.permute(0, 2, 3, 1) if self.channels_last else value).reshape(-1)


class Layout:
    """The order of tensors shaped as those of `model` in a row of `width` elements of the kind of `like`."""

    def __init__(self, model: Params, like: Tensor, *, channels_last: bool) -> None:
        self.slots: list[Slot] = []
        self.width = 0
        for name, value in model.items():
            self.slots.append(Slot(name, tuple(value.shape), self.width, channels_last and value.dim() == 4))
            self.width += self.slots[-1].size + self.slots[-1].padding
        self._zeros = like.new_zeros(ALIGNMENT)

    def views(self, flat: Tensor) -> Stack:
        """The tensors in `flat` [R, width], each [R, ...], by name; share memory."""
        return {slot.name: slot.of(flat) for slot in self.slots}

    def parts(self, model: Params) -> list[Tensor]:
        """What makes up a row that holds `model`, in order."""
        parts: list[Tensor] = []
        for slot in self.slots:
            parts.append(slot.flattened(model[slot.name]))
            if slot.padding:
                parts.append(self._zeros[: slot.padding])
        return parts

    def rows(self, models: Sequence[Params]) -> Tensor:
        """A new buffer [len(models), width] that holds the models, zeros in between."""
        if not self.slots:
            return self._zeros.new_empty(len(models), 0)
        return torch.cat([part for model in models for part in self.parts(model)]).view(len(models), self.width)
