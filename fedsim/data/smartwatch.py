"""Recordings of exercises by a smartwatch, from the package seglearn on PyPI; owners are persons.

Ten persons did seven exercises with each arm (Burns et al. 2018, arXiv 1802.01489). A recording has
50 steps a second of six channels: acceleration ax, ay, az and rotation wx, wy, wz, in units that
the package does not state. Shapes: n windows, L steps of a recording.
"""

import io
import pickle
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Interval
from numpy.typing import NDArray

from fedsim.core.arrays import Floats
from fedsim.core.errors import DataError, Problem
from fedsim.core.parameters import Problems, parameters
from fedsim.data.base import Dataset, LoadedData, describe_loaded
from fedsim.data.cache import SourceFiles, digest, require_sha256, sha256_problem
from fedsim.data.packages import Package

PACKAGE = Package("seglearn", "seglearn==1.2.5", "smartwatch")
FILE = Path("data", "watch_dataset.npy")
EXERCISES = ("PEN", "ABD", "FEL", "IR", "ER", "TRAP", "ROW")
"""Names of the classes, as the file abbreviates them."""
NUM_CHANNELS = 6
WINDOW = 100
"""Steps of a window: 2 seconds."""
STRIDE = 50
"""Steps from the beginning of one window to that of the next."""
TRAIN_SHARE = 0.8
"""Share of each recording, from its beginning, that is for training."""
PICKLED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # as which Python 2's protocol stores bytes
}
"""Functions that the file may call when it is unpickled; they only make arrays and bytes."""


@parameters
class Smartwatch(Dataset):
    """Windows [6, 100] of seven exercises, standardised per channel by the training windows.

    Windows of a recording begin at its steps 0, 50, 100 and so on. Windows that end in the first
    80 % of a recording are training samples, windows that begin after it are test samples, and
    those across are dropped. Mean and standard deviation are computed over the training windows of
    all persons, as a server could from sums that each client sends.
    """

    clients: Literal["person", "wrist"]
    """The owner of a window: a person (10), or one wrist of a person (20)."""
    held_out: Annotated[int, Interval(ge=0, le=10)]
    """The person, 1 to 10, whose windows are the test set; all others are for training. 0: the
    recordings are split in time."""
    sha256: str | None
    """The checksum that the file must have; None accepts any."""

    def problems(self) -> Problems:
        yield sha256_problem(self.sha256)

    def source_problem(self) -> Problem | None:
        """Return the problem of a package that is not installed."""
        return PACKAGE.problem()

    def form(self) -> tuple[tuple[int, ...], int]:
        """Return the shape of a window and the number of exercises."""
        return (NUM_CHANNELS, WINDOW), len(EXERCISES)

    def describe(self) -> list[str]:
        """Return lines about the data, which are read for it."""
        return describe_loaded(self.load())

    def load(self) -> LoadedData:
        """Return the windows. Raises `DataError` for another file than the package's."""
        folder = PACKAGE.folder()
        sources = SourceFiles(folder)
        content = sources.read(folder / FILE)
        require_sha256(self.sha256, sources.sha256, str(folder / FILE))
        parts: dict[str, list[NDArray[Any]]] = {}
        for person, side, label, steps in read_recordings(content, str(folder / FILE)):
            # 1. The windows, and which of them are for training and for testing
            starts = np.arange(0, len(steps) - WINDOW + 1, STRIDE)
            windows = steps[starts[:, None] + np.arange(WINDOW)].transpose(0, 2, 1)
            end_of_training = TRAIN_SHARE * len(steps)
            is_train = starts + WINDOW <= end_of_training
            is_test = starts >= end_of_training
            owner = person - 1 if self.clients == "person" else 2 * (person - 1) + side
            test_owner = owner
            if self.held_out:
                is_test = np.full(len(starts), person == self.held_out)
                is_train = ~is_test
                test_owner = -1
            # 2. Their samples, labels and owners
            for split, chosen, number in (
                ("train", is_train, owner),
                ("test", is_test, test_owner),
            ):
                x = windows[chosen]
                parts.setdefault(f"{split}_x", []).append(x.astype(np.float32))
                parts.setdefault(f"{split}_y", []).append(np.full(len(x), label))
                parts.setdefault(f"{split}_owners", []).append(np.full(len(x), number))
        tensors = {name: torch.as_tensor(np.concatenate(part)) for name, part in parts.items()}
        # 3. Standardised channels
        std, mean = torch.std_mean(tensors["train_x"], (0, 2), keepdim=True)
        for name in ("train_x", "test_x"):
            tensors[name] = (tensors[name] - mean) / std
        fingerprint = f"smartwatch {digest(tensors)}"
        return LoadedData.of(
            tensors, len(EXERCISES), None, None, fingerprint, sha256=sources.sha256
        )


class _ArraysOnly(pickle.Unpickler):
    """An unpickler of arrays and plain containers; it runs no code that a file names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PICKLED:
            raise pickle.UnpicklingError(f"it calls {module}.{name}")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_recordings(content: bytes, name: str) -> list[tuple[int, int, int, Floats]]:
    """Return the recordings in a file: person (1 to 10), side (0 left, 1 right), class and steps
    [L, 6].

    They are in this order. Raises `DataError` with `name` for a file that does not hold exactly
    this.
    """
    file = io.BytesIO(content)
    try:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        table = _ArraysOnly(file).load().item()
        recordings = []
        columns = [table[key] for key in ("subject", "side", "y", "X")]
        for person, side, label, steps in zip(*columns, strict=True):
            if steps.shape[1:] != (NUM_CHANNELS,) or not np.isfinite(steps).all():
                raise ValueError(f"a recording must be finite numbers [L, {NUM_CHANNELS}]")
            recordings.append((int(person), int(side), int(label), steps))
    except Exception as error:  # unpickling raises errors of many kinds
        reason = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{name} holds no recordings ({reason}); install the package again"
        ) from error
    return sorted(recordings, key=itemgetter(0, 1, 2))
