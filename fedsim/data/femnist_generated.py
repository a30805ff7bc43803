"""Synthetic handwriting in the format of FEMNIST, for use without FEMNIST. Results on it are not
results on FEMNIST."""

from typing import Annotated

import numpy as np
import torch
from annotated_types import Interval
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.arrays import Floats32, Ints
from fedsim.core.errors import at_most
from fedsim.core.exact import exp
from fedsim.core.parameters import Count, CountOrZero, Positive, Problems, Share, parameters
from fedsim.data.base import ImageSet, LoadedData, log_normal_sizes
from fedsim.data.cache import digest, load_or_generate

SIDE, NUM_CONTROLS, NUM_POINTS = 28, 6, 40
"""Pixels per side; control points of a glyph's curve, and points at which the curve is drawn."""
CHUNK = 512
"""Images drawn per batch."""
MAX_GLYPHS = MAX_IMAGES = 10_000_000
"""Writers times classes (480 MB of control points); on average, in either split (8 GB)."""
GENERATOR_VERSION = 3
"""To be increased whenever a change of the code gives other tensors for the same parameters."""


@parameters
class FemnistGenerated(ImageSet):
    """Synthetic characters, grey, 28x28 pixels, dark on light; owners are simulated writers.

    A class is a smooth curve along random control points. Each writer has its own glyphs (control
    points shifted by `style` / 2 times a standard normal number), slant, size, position and pen
    width; each image shifts the control points by `noise` / 2 times a normal number and adds as
    much noise to the ink. A writer has a log-normal number of samples, of `classes_per_writer`
    classes; the test set has equally many of each class, by random writers.
    """

    num_classes: Annotated[int, Interval(ge=2, le=100_000)]
    num_writers: Count
    samples_per_writer: Positive
    size_deviation: Annotated[float, Interval(ge=0, le=3)]
    classes_per_writer: Count
    test_samples: Annotated[int, Interval(ge=1, le=MAX_IMAGES)]
    style: Annotated[float, Interval(ge=0, le=10)]
    noise: Share
    seed: CountOrZero

    def problems(self) -> Problems:
        yield at_most("num_writers", self.num_writers, MAX_GLYPHS // max(self.num_classes, 1))
        yield at_most(
            "samples_per_writer", self.samples_per_writer, MAX_IMAGES // max(self.num_writers, 1)
        )
        yield at_most(
            "classes_per_writer", self.classes_per_writer, self.num_classes, "raise num_classes"
        )
        yield from super().problems()

    def form(self) -> tuple[tuple[int, ...], int]:
        return (1, SIDE, SIDE), self.num_classes

    def load(self) -> LoadedData:
        tensors = load_or_generate(self, "femnist_generated", GENERATOR_VERSION, self._build)
        told = {name: tensor for name, tensor in tensors.items() if name != "test_owners"}
        fingerprint = f"femnist_generated {digest(told)}"
        return LoadedData.of(tensors, self.num_classes, self.mean, self.std, fingerprint)

    def _build(self) -> dict[str, Tensor]:
        """Training images, labels and writers, ordered by writer, and test images, labels and
        writers."""
        rng = np.random.default_rng(self.seed)
        handwriting = self._handwriting(rng)
        y, owners = self._training_labels(rng)
        test_y = np.arange(self.test_samples) % self.num_classes
        test_writers = rng.integers(self.num_writers, size=self.test_samples)
        made = {
            "train_x": self._images(handwriting, y, owners, rng),
            "train_y": y,
            "train_owners": owners,
        }
        made |= {"test_x": self._images(handwriting, test_y, test_writers, rng)}
        made |= {"test_y": test_y, "test_owners": test_writers}
        return {name: torch.as_tensor(values) for name, values in made.items()}

    def _training_labels(self, rng: np.random.Generator) -> tuple[Ints, Ints]:
        normal = rng.standard_normal(self.num_writers)
        counts = log_normal_sizes(self.samples_per_writer, self.size_deviation, normal)
        known_classes = [
            rng.permutation(self.num_classes)[: self.classes_per_writer] for _ in counts
        ]
        labels = np.concatenate(
            [rng.choice(own, count) for own, count in zip(known_classes, counts, strict=True)]
        )
        return labels.astype(np.int64), np.repeat(
            np.arange(self.num_writers, dtype=np.int64), counts
        )

    def _handwriting(self, rng: np.random.Generator) -> list[Floats32]:
        """How W writers write C classes: control points of each class in [-1, 1] [C, P, 2], each
        writer's shifts of them [W, C, P, 2], linear maps (size and slant) [W, 2, 2], positions [W,
        2] and pen widths [W]."""
        w, c, style = self.num_writers, self.num_classes, self.style
        slants, sizes = style * rng.standard_normal(w), exp(style / 2 * rng.standard_normal((w, 2)))
        maps = np.zeros((w, 2, 2))
        maps[:, 0, 0], maps[:, 1, 1], maps[:, 0, 1] = sizes[:, 0], sizes[:, 1], slants
        values = [
            rng.uniform(-1, 1, (c, NUM_CONTROLS, 2)),
            style / 2 * rng.standard_normal((w, c, NUM_CONTROLS, 2)),
            maps,
            style / 4 * rng.standard_normal((w, 2)),
            0.09 * exp(style * rng.standard_normal(w)),
        ]
        return [value.astype(np.float32) for value in values]

    def _images(
        self,
        handwriting: list[Floats32],
        labels: Ints,
        writers: Ints,
        rng: np.random.Generator,
    ) -> NDArray[np.uint8]:
        """Images, uint8 [n, 1, 28, 28], of the characters `labels` [n] written by `writers` [n]."""
        basis, noise = _spline_basis(), self.noise / 2
        points, shifts, maps, places, widths = handwriting
        pixels = np.empty((len(labels), SIDE * SIDE), np.uint8)
        for start in range(0, len(labels), CHUNK):
            rows = slice(start, start + CHUNK)
            y, w = labels[rows], writers[rows]
            controls = points[y] + shifts[w, y]
            controls = controls + (noise * rng.standard_normal(controls.shape)).astype(np.float32)
            curve = (basis[:, :, None] * controls[:, None]).sum(2)  # [n, P, 2]
            curve = (maps[w][:, None] * curve[:, :, None]).sum(3)
            ink = _ink(curve + places[w][:, None], widths[w])
            grain = (noise * rng.standard_normal(ink.shape)).astype(np.float32)
            pixels[rows] = np.round(255 * (1 - np.clip(ink + grain, 0, 1)))
        return pixels.reshape(-1, 1, SIDE, SIDE)


def _spline_basis() -> Floats32:
    """The basis of uniform cubic B-splines [NUM_POINTS, NUM_CONTROLS]: weights of control points
    per curve point."""
    spans = NUM_CONTROLS - 3
    place = np.linspace(0, spans, NUM_POINTS, endpoint=False)
    first, u = place.astype(int), place % 1
    square, cube, left = u * u, u * u * u, 1 - u
    weights = (
        np.stack(
            [
                left * left * left,
                3 * cube - 6 * square + 4,
                -3 * cube + 3 * square + 3 * u + 1,
                cube,
            ],
            1,
        )
        / 6
    )
    basis = np.zeros((NUM_POINTS, NUM_CONTROLS), np.float32)
    for offset in range(4):
        basis[np.arange(NUM_POINTS), first + offset] = weights[:, offset]
    return basis


def _ink(curve: Floats32, widths: Floats32) -> Floats32:
    """Ink of each pixel [n, 784]: a Gaussian of its distance to the nearest point of `curve` [n, P,
    2]."""
    axis = np.linspace(-1.2, 1.2, SIDE, dtype=np.float32)
    across = (axis[None, None] - curve[:, :, :1]) ** 2  # [n, P, 28]
    down = (axis[None, None] - curve[:, :, 1:]) ** 2
    nearest = np.full((len(curve), SIDE, SIDE), np.inf, np.float32)
    for point in range(curve.shape[1]):
        np.minimum(nearest, down[:, point, :, None] + across[:, point, None], out=nearest)
    return (
        exp(-nearest / (2 * widths[:, None, None] ** 2)).astype(np.float32).reshape(len(curve), -1)
    )
