"""The pretended CUDA device rejects what CUDA rejects, and counts launches, copies and waits."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.pretended_cuda import PretendedCard

Operation = Callable[[Tensor], object]
REJECTED: dict[str, Operation] = {
    "the host's matrix": lambda a: a @ torch.ones(4, 2),
    "numpy": lambda a: a.numpy(),
    "the host's generator": lambda a: torch.randn(3, device=a.device, generator=torch.Generator()),
    "index_select by the host's": lambda a: a.index_select(0, torch.tensor([0])),
}
WAITING: dict[str, Operation] = {
    "item": lambda a: a.sum().item(),
    "copy to the host": lambda a: a.cpu(),
    "copy to the device": lambda a: torch.as_tensor(np.ones(3), device=a.device),
    "mask": lambda a: a[a > 0],
    "the host's index": lambda a: a[torch.tensor([0])],
    "synchronize": lambda a: torch.cuda.synchronize(a.device),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_cuda_rejects_is_rejected(name: str) -> None:
    with PretendedCard():
        matrix = torch.ones(3, 4, device="cuda")
        with pytest.raises((RuntimeError, TypeError)):
            REJECTED[name](matrix)


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_counted_and_rejected_in_a_graph(name: str) -> None:
    with PretendedCard() as card:
        matrix = torch.ones(3, 4, device="cuda")
        WAITING[name](matrix)
        assert card.counts.waits.total() == 1
        with card.capture(), pytest.raises(RuntimeError, match="capturing"):
            WAITING[name](matrix)
        assert card.counts.waits.total() == 1


def test_launches_are_counted_but_not_views_and_a_replay_is_one() -> None:
    with PretendedCard() as card:
        matrix = torch.ones(3, 4, device="cuda")
        (matrix.view(12)[2:].t() + 1).mul_(2).clone()
        assert card.counts.launches.total() == 4  # fill, add, mul and copy
        card.counts.reset()
        with card.replay():
            matrix.add_(1).mul_(2)
        assert dict(card.counts.launches) == {"graph replay": 1}
        assert card.counts.in_graphs.total() == 2


def test_non_blocking_copies_of_pinned_memory_do_not_wait() -> None:
    with PretendedCard() as card:
        on_card, pinned = torch.ones(3, device="cuda"), torch.zeros(3, pin_memory=True)
        assert torch.zeros(3).pin_memory().is_pinned()
        assert not torch.zeros(3).is_pinned()
        on_card.copy_(pinned, non_blocking=True)
        pinned.copy_(on_card + 1, non_blocking=True)
        assert pinned.tolist() == [1.0, 1.0, 1.0]
        assert (card.counts.copied.total(), card.counts.waits.total()) == (2, 0)
        torch.zeros(3).copy_(on_card)
        assert (card.counts.copied.total(), card.counts.waits.total()) == (3, 1)
