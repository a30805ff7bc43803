"""Which clients of one or several requests train in one chunk, and the models that they start from."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.engine.engine import Request
from fedsim.engine.schedule import ClientBatches, step_widths
from fedsim.types import Stack


@dataclass(frozen=True, eq=False)
class Piece:
    """A request, or a part of one, that is trained as a whole, with the batches of its clients."""

    request: Request
    batches: list[ClientBatches]

    @cached_property
    def company(self) -> tuple[Any, ...]:
        """Pieces that agree in it can train in one chunk without changing a bit of each other.

        Products of matrices of the same shapes are the same however many they are, from two on; those of other shapes
        may be summed in another order.
        """
        if len(self.batches) == 1:
            return (id(self),)
        return self.request.lr, step_widths(self.batches)


def chunks(pieces: list[Piece], size: int) -> list[list[Piece]]:
    """Pieces that can go together in chunks of at most `size` clients (or one larger piece)."""
    alike: dict[tuple[Any, ...], list[Piece]] = {}
    for piece in pieces:
        alike.setdefault(piece.company if len(pieces) > 1 else (), []).append(piece)
    found: list[list[Piece]] = []
    for group in alike.values():
        room = 0
        for piece in group:
            if room < len(piece.batches):
                found.append([])
                room = size
            found[-1].append(piece)
            room -= len(piece.batches)
    return found


def starting_models(requests: list[Request], order: NDArray[np.int64]) -> Stack:
    """The models of all clients in `order` [R, ...]; one model seen R times where there is one request."""
    if len(requests) == 1:
        (request,) = requests
        return {name: value.expand(len(order), *value.shape) for name, value in request.params.items()}
    rows = np.repeat(np.arange(len(requests)), [len(r.ids) for r in requests])[order]
    names = requests[0].params
    stacked = {name: torch.stack([r.params[name] for r in requests]) for name in names}
    return {name: value[torch.as_tensor(rows, device=value.device)] for name, value in stacked.items()}
