"""Layers of a model, named by prefixes of the names of their parameters."""

from collections.abc import Sequence

from fedsim.errors import Problem, rule


def missing_layers(key: str, layers: Sequence[str] | None, trained: Sequence[str]) -> Problem | None:
    """The problem of the hyper-parameter `key` if one of `layers` (None: all) is no layer of the model, or None.

    `trained` are the names of the model's trained parameters; classifier.6 is the layer of classifier.6.weight.
    """
    missing = [layer for layer in layers or () if not any(n == layer or n.startswith(f"{layer}.") for n in trained)]
    known = dict.fromkeys(name.rpartition(".")[0] or name for name in trained)
    return rule(
        not missing,
        key,
        None if layers is None else list(layers),
        f"must name layers that the model trains, not {', '.join(missing)}",
        f"it has {', '.join(known)}; null and each take all of them",
    )
