"""A check of input shapes that several models share."""

from fedsim.errors import check, rule

Shape = tuple[int, ...]


def require_images(input_shape: Shape, model: str, smallest: int, channels: tuple[int, ...] = ()) -> None:
    """Raise `ConfigError` unless inputs are images [C, H, W] of at least `smallest` pixels per side.

    C must be one of `channels`, if any are given. `model` is named in the error.
    """
    fits = len(input_shape) == 3 and min(input_shape[1:]) >= smallest and input_shape[0] in (channels or input_shape)
    shape = "x".join(map(str, input_shape))
    limit = f" with {' or '.join(map(str, channels))} channels" if channels else ""
    check(
        rule(
            fits,
            "",
            shape,
            f"{model} needs images [C, H, W] of at least {smallest}x{smallest}{limit}; the data set has {shape}",
            "model=mlp and model=logistic fit every data set",
        )
    )
