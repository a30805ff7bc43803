"""What the host of a pretended CUDA device did: kernels launched, copies, and waits, each by the line that asked."""

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import fedsim

PACKAGE = f"{Path(fedsim.__file__).parent}/"

Line = tuple[str, str]
"""Where (`engine/engine.py:75`, of the innermost frame in fedsim), and what (an operation's name)."""

SEVERAL_KERNELS = {"convolution_backward": 2, "max_pool2d_with_indices_backward": 2, "topk": 2, "sort": 2, "argsort": 2}
"""Operations that CUDA runs as more than one kernel: lower bounds, without what cuDNN adds to change layouts."""


@dataclass
class Counts:
    """Counters of one pretended device.

    `launches`: kernels, copies within the device, and graphs, each of which the host starts by one call. `waits`: what
    makes the host wait until the device has caught up. `copied`: copies between host and device, which are waits too
    unless they are of pinned memory and not blocking. `captured` and `replayed`: kernels recorded into graphs, and run
    by graphs' replays; neither costs the host anything besides the one launch of a replay.
    """

    launches: Counter[Line] = field(default_factory=Counter)
    waits: Counter[Line] = field(default_factory=Counter)
    copied: Counter[Line] = field(default_factory=Counter)
    captured: Counter[Line] = field(default_factory=Counter)
    replayed: Counter[Line] = field(default_factory=Counter)

    def reset(self) -> None:
        for counter in vars(self).values():
            counter.clear()

    def totals(self) -> dict[str, int]:
        """The sum of each counter."""
        return {name: counter.total() for name, counter in vars(self).items()}

    def table(self, name: str, most: int = 60) -> str:
        """One counter, largest numbers first."""
        counter: Counter[Line] = getattr(self, name)
        return "\n".join(f"{n:7d}  {where:44s} {what}" for (where, what), n in counter.most_common(most))


def calling_line() -> str:
    """The innermost line of fedsim that is being executed, `?` if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            return f"{path.removeprefix(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
