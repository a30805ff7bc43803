"""The parts that models share: a chain of layers, and checks of shapes and sizes.

The constructors of models call the checks, which raise `ConfigError`. `model` is the model's name
in messages, such as `model=cnn`. Shapes: C channels, H and W pixels of height and width.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from fedsim.core.errors import ConfigError, Problem, rule
from fedsim.data.base import TokenShape

Shape = tuple[int, ...]
MAX_PARAMETERS = 2**28
"""Maximum number of parameters of a model: 1 GiB. The server and every client of a cohort hold one
model."""
MAX_INPUT_SIZE = 1024
"""Maximum height and width in pixels of the images that a frozen network receives."""


class Chain(nn.Module):
    """A model whose only child is the sequence of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last layer."""
        (layers,) = self.children()
        output: Tensor = layers(x)
        return output


def require_images(
    input_shape: Shape, model: str, min_side: int, channels: tuple[int, ...] = ()
) -> None:
    """Raise `ConfigError` unless samples are images [C, H, W] of at least `min_side` x `min_side`
    pixels.

    C must be one of `channels`, if any are given.
    """
    require_numbers(input_shape, model)
    is_image = len(input_shape) == 3 and min(input_shape[1:]) >= min_side
    if is_image and (not channels or input_shape[0] in channels):
        return
    need = f"{model} needs images [C, H, W] of at least {min_side}x{min_side}"
    if channels:
        need += f" with {' or '.join(map(str, channels))} channels"
    raise misfit(input_shape, need)


def require_numbers(input_shape: Shape, model: str) -> None:
    """Raise `ConfigError` if samples are texts, whose token ids are not numbers to compute with."""
    if isinstance(input_shape, TokenShape):
        raise misfit(input_shape, f"{model} reads images or features")


def require_text(input_shape: Shape, model: str) -> TokenShape:
    """Return the shape of texts. Raises `ConfigError` if samples are something else."""
    if isinstance(input_shape, TokenShape):
        return input_shape
    raise misfit(input_shape, f"{model} reads texts, int64 ids of tokens")


def misfit(input_shape: Shape, need: str) -> ConfigError:
    """Return the error of a model that `need`s other samples than the data set has."""
    if isinstance(input_shape, TokenShape):
        shape = f"texts of {input_shape[0]} tokens"
        fitting = "text_mlp, text_gru and text_transformer"
    else:
        shape = "x".join(map(str, input_shape))
        is_series = len(input_shape) == 2
        fitting = "cnn1d (32 steps or more), mlp and logistic" if is_series else "mlp and logistic"
    remedy = (
        f"of the models, {fitting} fit these data; of the data sets, digits has images, smartwatch "
        "series, shakespeare and text_generated texts"
    )
    return ConfigError([Problem("", ..., f"{need}; the data set has {shape}", remedy)])


def too_many_parameters(key: str, value: Any, widths: Sequence[int]) -> Problem | None:
    """Return the problem of `key` if linear layers between `widths` exceed `MAX_PARAMETERS`.

    `widths` are the numbers of inputs and outputs of consecutive layers, which need not exist yet.
    """
    count = sum((inputs + 1) * outputs for inputs, outputs in pairwise(widths))
    text = (
        f"makes {count} parameters of {' x '.join(map(str, widths))}; must make at most "
        f"{MAX_PARAMETERS}"
    )
    return rule(count <= MAX_PARAMETERS, key, value, text, "fewer or narrower layers")
