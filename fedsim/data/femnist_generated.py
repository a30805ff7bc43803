"""Synthetic handwriting in the format of FEMNIST, for use without FEMNIST.

Results on it are not results on FEMNIST. A glyph is the shape of a character: a curve that Q
control points define and that is drawn at P points. Writers are the owners of images. Shapes: n
images, W writers, C classes.
"""

from typing import Annotated, NamedTuple

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

SIDE = 28
"""Height and width of an image in pixels."""
NUM_CONTROLS = 6
"""Control points of a glyph's curve (Q)."""
NUM_POINTS = 40
"""Points at which a curve is drawn (P)."""
CHUNK = 512
"""Images drawn at a time."""
MAX_GLYPHS = 10_000_000
"""Maximum number of writers times classes (480 MB of control points)."""
MAX_IMAGES = 10_000_000
"""Maximum number of images of a split, on average (8 GB)."""
GENERATOR_VERSION = 3
"""Increase this when a change of the code gives other tensors for the same parameters."""


class Handwriting(NamedTuple):
    """The handwriting of all writers in all classes."""

    glyphs: Floats32
    """Control points of each class in [-1, 1] [C, Q, 2]."""
    shifts: Floats32
    """Each writer's shifts of them [W, C, Q, 2]."""
    maps: Floats32
    """Linear maps for size and slant [W, 2, 2]."""
    positions: Floats32
    """Positions of the glyph in the image [W, 2]."""
    pen_widths: Floats32
    """Widths of the pen [W]."""


@parameters
class FemnistGenerated(ImageSet):
    """Synthetic characters, grey, 28x28 pixels, dark on light; owners are simulated writers.

    A class is a smooth curve along random control points. Each writer has its own glyphs (control
    points shifted by `style` / 2 times a standard normal number), slant, size, position and pen
    width. Each image shifts the control points by `noise` / 2 times a normal number, and adds as
    much noise to the ink. A writer has a log-normal number of samples, of `classes_per_writer`
    classes. The test set has equally many samples of each class, by random writers.
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
        """Yield a problem for each size that exceeds its maximum."""
        max_writers = MAX_GLYPHS // max(self.num_classes, 1)
        max_samples = MAX_IMAGES // max(self.num_writers, 1)
        remedy = "raise num_classes"
        yield at_most("num_writers", self.num_writers, max_writers)
        yield at_most("samples_per_writer", self.samples_per_writer, max_samples)
        yield at_most("classes_per_writer", self.classes_per_writer, self.num_classes, remedy)
        yield from super().problems()

    def form(self) -> tuple[tuple[int, ...], int]:
        """Return the shape of an image and the number of classes."""
        return (1, SIDE, SIDE), self.num_classes

    def load(self) -> LoadedData:
        """Return the data, generated or from the cache."""
        tensors = load_or_generate(self, "femnist_generated", GENERATOR_VERSION, self._build)
        identifying = dict(tensors)
        identifying.pop("test_owners", None)  # the fingerprint is older than these
        fingerprint = f"femnist_generated {digest(identifying)}"
        return LoadedData.of(tensors, self.num_classes, self.mean, self.std, fingerprint)

    def _build(self) -> dict[str, Tensor]:
        """Return images, labels and writers of both splits; training is ordered by writer."""
        rng = np.random.default_rng(self.seed)
        handwriting = self._handwriting(rng)
        train_y, train_owners = self._training_labels(rng)
        test_y = np.arange(self.test_samples) % self.num_classes
        test_owners = rng.integers(self.num_writers, size=self.test_samples)
        train_x = self._images(handwriting, train_y, train_owners, rng)
        test_x = self._images(handwriting, test_y, test_owners, rng)
        return {
            "train_x": torch.as_tensor(train_x),
            "train_y": torch.as_tensor(train_y),
            "train_owners": torch.as_tensor(train_owners),
            "test_x": torch.as_tensor(test_x),
            "test_y": torch.as_tensor(test_y),
            "test_owners": torch.as_tensor(test_owners),
        }

    def _training_labels(self, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Return the labels and the writers of the training images [n]."""
        normal = rng.standard_normal(self.num_writers)
        counts = log_normal_sizes(self.samples_per_writer, self.size_deviation, normal)
        classes_of_writers = []
        for _ in range(self.num_writers):
            shuffled = rng.permutation(self.num_classes)
            classes_of_writers.append(shuffled[: self.classes_per_writer])
        labels = []
        for classes, count in zip(classes_of_writers, counts, strict=True):
            labels.append(rng.choice(classes, count))
        writers = np.arange(self.num_writers, dtype=np.int64)
        return np.concatenate(labels).astype(np.int64), np.repeat(writers, counts)

    def _handwriting(self, rng: np.random.Generator) -> Handwriting:
        """Return random glyphs, and how each writer changes them."""
        num_writers, num_classes, style = self.num_writers, self.num_classes, self.style
        slants = style * rng.standard_normal(num_writers)
        sizes = exp(style / 2 * rng.standard_normal((num_writers, 2)))
        maps = np.zeros((num_writers, 2, 2))
        maps[:, 0, 0] = sizes[:, 0]
        maps[:, 1, 1] = sizes[:, 1]
        maps[:, 0, 1] = slants
        glyphs = rng.uniform(-1, 1, (num_classes, NUM_CONTROLS, 2))
        shifts = style / 2 * rng.standard_normal((num_writers, num_classes, NUM_CONTROLS, 2))
        positions = style / 4 * rng.standard_normal((num_writers, 2))
        pen_widths = 0.09 * exp(style * rng.standard_normal(num_writers))
        values = (glyphs, shifts, maps, positions, pen_widths)
        return Handwriting(*(value.astype(np.float32) for value in values))

    def _images(
        self, handwriting: Handwriting, labels: Ints, writers: Ints, rng: np.random.Generator
    ) -> NDArray[np.uint8]:
        """Return images [n, 1, 28, 28] of the characters `labels` [n], written by `writers` [n]."""
        basis = _spline_basis()
        noise = self.noise / 2
        pixels = np.empty((len(labels), SIDE * SIDE), np.uint8)
        for start in range(0, len(labels), CHUNK):
            rows = slice(start, start + CHUNK)
            y = labels[rows]
            w = writers[rows]
            controls = handwriting.glyphs[y] + handwriting.shifts[w, y]  # [n, Q, 2]
            controls += (noise * rng.standard_normal(controls.shape)).astype(np.float32)
            curves = (basis[:, :, None] * controls[:, None]).sum(2)  # [n, P, 2]
            curves = (handwriting.maps[w][:, None] * curves[:, :, None]).sum(3)
            curves += handwriting.positions[w][:, None]
            ink = _ink(curves, handwriting.pen_widths[w])
            grain = (noise * rng.standard_normal(ink.shape)).astype(np.float32)
            pixels[rows] = np.round(255 * (1 - np.clip(ink + grain, 0, 1)))
        return pixels.reshape(-1, 1, SIDE, SIDE)


def _spline_basis() -> Floats32:
    """Return the basis of uniform cubic B-splines [P, Q]: weights of the control points."""
    num_spans = NUM_CONTROLS - 3
    places = np.linspace(0, num_spans, NUM_POINTS, endpoint=False)
    first_control = places.astype(int)
    u = places % 1
    square, cube, left = u * u, u * u * u, 1 - u
    weights = [
        left * left * left / 6,
        (3 * cube - 6 * square + 4) / 6,
        (-3 * cube + 3 * square + 3 * u + 1) / 6,
        cube / 6,
    ]
    basis = np.zeros((NUM_POINTS, NUM_CONTROLS), np.float32)
    for offset, weight in enumerate(weights):
        basis[np.arange(NUM_POINTS), first_control + offset] = weight
    return basis


def _ink(curves: Floats32, pen_widths: Floats32) -> Floats32:
    """Return the ink of each pixel [n, 784] for curves [n, P, 2].

    It is a Gaussian function of the pixel's distance to the nearest point of the curve.
    """
    axis = np.linspace(-1.2, 1.2, SIDE, dtype=np.float32)
    across = (axis[None, None] - curves[:, :, :1]) ** 2  # [n, P, 28]
    down = (axis[None, None] - curves[:, :, 1:]) ** 2
    nearest = np.full((len(curves), SIDE, SIDE), np.inf, np.float32)  # squared distances
    for point in range(curves.shape[1]):
        np.minimum(nearest, down[:, point, :, None] + across[:, point, None], out=nearest)
    ink = exp(-nearest / (2 * pen_widths[:, None, None] ** 2))
    return ink.astype(np.float32).reshape(len(curves), -1)
