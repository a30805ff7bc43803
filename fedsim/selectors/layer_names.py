"""The layers of a model, by the names of its parameters."""

from collections.abc import Sequence

from fedsim.selectors.base import Problem, rule


def layer_of(name: str) -> str:
    """Return the layer of the parameter `name`: `conv1` for `conv1.weight`.

    A parameter without a dot in its name is its own layer.
    """
    return name.rpartition(".")[0] or name


def missing_layers(
    key: str, layers: Sequence[str] | None, trained: Sequence[str]
) -> Problem | None:
    """Return a problem of the hyper-parameter `key` if one of its `layers` is not trained.

    `trained` are the names of the model's trained parameters. `layers` None means all layers, which
    is never a problem.
    """
    missing = [
        layer
        for layer in layers or ()
        if not any(f"{name}.".startswith(f"{layer}.") for name in trained)
    ]
    text = f"must name layers that the model trains, not {', '.join(missing)}"
    known = dict.fromkeys(layer_of(name) for name in trained)
    remedy = f"it has {', '.join(known)}; null and each use all of them"
    return rule(not missing, key, layers and list(layers), text, remedy)
