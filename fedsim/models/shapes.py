"""Checks of input shapes that several models share."""

from fedsim.errors import check, rule

Shape = tuple[int, ...]


def require_images(input_shape: Shape, model: str, smallest: int) -> None:
    """Raise `ConfigError` unless inputs are images [C, H, W] of at least `smallest` pixels a side."""
    fits = len(input_shape) == 3 and min(input_shape[1:]) >= smallest
    shape = "x".join(map(str, input_shape))
    check(
        rule(
            fits,
            "",
            shape,
            f"{model} needs images [C, H, W] of at least {smallest}x{smallest}; the data set has {shape}",
            "model=mlp and model=logistic fit every data set",
        )
    )
