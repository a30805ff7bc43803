"""What models share: a chain of layers; checks of shapes and sizes, which raise `ConfigError` with
the `model`."""

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fedsim.core.errors import ConfigError, Problem, rule
from fedsim.data.base import TokenShape

Shape = tuple[int, ...]
MAX_PARAMETERS = 2**28
"""Of one model: 1 GiB. The server and every client of a cohort hold one."""
MAX_INPUT_SIZE = 1024
"""Pixels per side of the images that a frozen network sees."""


class Chain(nn.Module):
    """A model whose only child is the sequence of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        (layers,) = self.children()
        output: Tensor = layers(x)
        return output


def require_images(
    input_shape: Shape, model: str, smallest: int, channels: tuple[int, ...] = ()
) -> None:
    """Inputs must be images [C, H, W] of at least `smallest` pixels per side; C one of `channels`,
    if any are given."""
    require_numbers(input_shape, model)
    if (
        len(input_shape) != 3
        or min(input_shape[1:]) < smallest
        or input_shape[0] not in (channels or input_shape)
    ):
        limit = f" with {' or '.join(map(str, channels))} channels" if channels else ""
        raise _misfit(
            input_shape, f"{model} needs images [C, H, W] of at least {smallest}x{smallest}{limit}"
        )


def require_numbers(input_shape: Shape, model: str) -> None:
    """Inputs must not be texts, whose ids of tokens are not numbers to compute with."""
    if isinstance(input_shape, TokenShape):
        raise _misfit(input_shape, f"{model} reads images or features")


def require_text(input_shape: Shape, model: str) -> TokenShape:
    """`input_shape`, which must be that of texts."""
    if isinstance(input_shape, TokenShape):
        return input_shape
    raise _misfit(input_shape, f"{model} reads texts, int64 ids of tokens")


def _misfit(input_shape: Shape, needs: str) -> ConfigError:
    is_text = isinstance(input_shape, TokenShape)
    shape = f"texts of {input_shape[0]} tokens" if is_text else "x".join(map(str, input_shape))
    remedy = "model=mlp and model=logistic fit images and features (dataset=digits), model=text_gru and model=text_mlp "
    remedy += "texts (dataset=text_generated)"
    return ConfigError([Problem("", ..., f"{needs}; the data set has {shape}", remedy)])


def too_many_parameters(key: str, value: Any, widths: Sequence[int]) -> Problem | None:
    """None if linear layers between `widths`, which are yet to be made, have at most
    `MAX_PARAMETERS`, else the problem of the key that sets them."""
    count = sum((a + 1) * b for a, b in itertools.pairwise(widths))
    text = f"makes {count} parameters of {' x '.join(map(str, widths))}; must make at most {MAX_PARAMETERS}"
    return rule(count <= MAX_PARAMETERS, key, value, text, "fewer or narrower layers")
