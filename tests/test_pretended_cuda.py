"""The pretended CUDA device: what it computes, refuses and counts."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.pretended_cuda import PretendedCard

REFUSED: dict[str, Callable[[Tensor], object]] = {
    "the host's matrix": lambda a: a @ torch.ones(4, 2),
    "numpy": lambda a: a.numpy(),
    "an array": np.asarray,
    "the host's generator": lambda a: torch.randn(3, device=a.device, generator=torch.Generator()),
    "two devices": lambda a: a.to("cuda:1") + a,
    "no such device": lambda a: a.to("cuda:2"),
    "index_select by the host's": lambda a: a.index_select(0, torch.tensor([0])),
}


@pytest.mark.parametrize("operation", REFUSED.values(), ids=REFUSED.keys())
def test_what_cuda_refuses_is_refused(operation: Callable[[Tensor], object]) -> None:
    with PretendedCard(devices=2):
        a = torch.ones(3, 4, device="cuda")
        with pytest.raises(RuntimeError):
            operation(a)


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda a: a.sum().item(),
    "bool": lambda a: bool((a > 0).all()),
    "list": lambda a: a.tolist(),
    "copy to the host": lambda a: a.cpu(),
    "copy to the device": lambda a: torch.as_tensor(np.ones(3), device=a.device),
    "mask": lambda a: a[a > 0],
    "nonzero": lambda a: a.nonzero(),
    "the host's index": lambda a: a[torch.tensor([0])],
    "synchronize": lambda a: torch.cuda.synchronize(a.device),
}


@pytest.mark.parametrize("operation", WAITS.values(), ids=WAITS.keys())
def test_what_makes_the_host_wait_is_counted_and_refused_in_a_graph(
    operation: Callable[[Tensor], object],
) -> None:
    with PretendedCard() as card:
        a = torch.ones(3, 4, device="cuda")
        operation(a)
        assert card.counts.waits.total() == 1
        for graph in (card.recording(), card.replay()):
            with graph, pytest.raises(RuntimeError, match="capturing"):
                operation(a)
        assert card.counts.waits.total() == 1


def test_launches_are_counted_views_are_not_and_a_replay_is_one() -> None:
    with PretendedCard() as card:
        a = torch.ones(3, 4, device="cuda")
        (a.view(12)[2:].t() + 1).mul_(2).clone()
        assert card.counts.totals() == {
            "launches": 4,
            "waits": 0,
            "copied": 0,
            "captured": 0,
            "replayed": 0,
        }
        card.counts.reset()
        for graph in (card.recording(), card.replay()):
            with graph:
                a.add_(1).mul_(2)
        assert card.counts.totals() == {
            "launches": 1,
            "waits": 0,
            "copied": 0,
            "captured": 2,
            "replayed": 2,
        }


def test_copies_of_pinned_memory_do_not_wait() -> None:
    with PretendedCard() as card:
        a, pinned = torch.ones(3, device="cuda"), torch.zeros(3, pin_memory=True)
        assert [
            pinned.is_pinned(),
            torch.zeros(3).pin_memory().is_pinned(),
            torch.zeros(3).is_pinned(),
        ] == [1, 1, 0]
        a.copy_(pinned, non_blocking=True)
        pinned.copy_(a + 1, non_blocking=True)
        assert pinned.tolist() == [1.0, 1.0, 1.0]
        assert (card.counts.copied.total(), card.counts.waits.total()) == (2, 0)
        torch.zeros(3).copy_(a)
        assert (card.counts.copied.total(), card.counts.waits.total()) == (3, 1)
