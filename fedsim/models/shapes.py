"""Checks of shapes and sizes that several models share."""

import itertools
from collections.abc import Sequence
from typing import Any

from fedsim.core.errors import ConfigError, Problem, check, rule
from fedsim.data.base import TokenShape

Shape = tuple[int, ...]
MAX_PARAMETERS = 2**28
"""Of one model: 1 GiB. The server and every client of a cohort hold one."""
MAX_INPUT_SIZE = 1024
"""Pixels per side of the images that a frozen network sees."""


def require_images(input_shape: Shape, model: str, smallest: int, channels: tuple[int, ...] = ()) -> None:
    """Raise `ConfigError` unless inputs are images [C, H, W] of at least `smallest` pixels per side.

    C must be one of `channels`, if any are given. `model` is named in the error.
    """
    require_numbers(input_shape, model)
    fits = len(input_shape) == 3 and min(input_shape[1:]) >= smallest and input_shape[0] in (channels or input_shape)
    shape = _shown(input_shape)
    limit = f" with {' or '.join(map(str, channels))} channels" if channels else ""
    check(
        rule(
            fits,
            "",
            ...,
            f"{model} needs images [C, H, W] of at least {smallest}x{smallest}{limit}; the data set has {shape}",
            "model=mlp and model=logistic fit every data set of images or features",
        )
    )


def require_numbers(input_shape: Shape, model: str) -> None:
    """Raise `ConfigError` where inputs are texts, whose ids of tokens are not numbers to compute with."""
    if isinstance(input_shape, TokenShape):
        text = f"{model} reads images or features; the data set has texts of {input_shape[0]} tokens"
        remedy = "model=text_gru and model=text_mlp read texts; dataset=digits, say, has images"
        raise ConfigError([Problem("", ..., text, remedy)])


def require_text(input_shape: Shape, model: str) -> TokenShape:
    """`input_shape` where inputs are texts; else raises `ConfigError`."""
    if not isinstance(input_shape, TokenShape):
        text = f"{model} reads texts, int64 ids of tokens; the data set has {_shown(input_shape)}"
        remedy = "dataset=text_generated has texts; model=mlp and model=logistic fit images and features"
        raise ConfigError([Problem("", ..., text, remedy)])
    return input_shape


def _shown(input_shape: Shape) -> str:
    return "x".join(map(str, input_shape))


def too_many_parameters(key: str, value: Any, widths: Sequence[int]) -> Problem | None:
    """None if linear layers between `widths` have at most `MAX_PARAMETERS`, else the problem of the key that sets them.

    To be checked before the layers are made.
    """
    count = sum((a + 1) * b for a, b in itertools.pairwise(widths))
    return rule(
        count <= MAX_PARAMETERS,
        key,
        value,
        f"makes {count} parameters of {' x '.join(map(str, widths))}; must make at most {MAX_PARAMETERS}",
        "fewer or narrower layers",
    )
