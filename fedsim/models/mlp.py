"""Models for images and features: multilayer perceptrons and logistic regression."""

import math
from itertools import pairwise

from torch import Tensor, nn

from fedsim.core.errors import between, check, rule
from fedsim.models.shapes import Chain, Shape, require_numbers, too_many_parameters


class MLP(Chain):
    """Hidden layers of Linear, Dropout, ReLU (in the order of FedCor's code), and a linear layer.

    Widths 784-64-30-10 have 52,500 parameters, 784-64-10 have 50,890.
    """

    def __init__(
        self, input_shape: Shape, num_classes: int, *, hidden: list[int], dropout: float
    ) -> None:
        super().__init__()
        require_numbers(input_shape, "model=mlp")
        widths = [math.prod(input_shape), *hidden]
        all_positive = all(width >= 1 for width in hidden)
        check(
            rule(all_positive, "hidden", hidden, "must be a list of widths >= 1"),
            too_many_parameters("hidden", hidden, [*widths, num_classes]),
            between("dropout", dropout, 0, 1, open_high=True),
        )
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.Dropout(dropout), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))


class Logistic(nn.Module):
    """One linear layer on the flattened sample."""

    def __init__(self, input_shape: Shape, num_classes: int) -> None:
        super().__init__()
        require_numbers(input_shape, "model=logistic")
        self.linear = nn.Linear(math.prod(input_shape), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [b, num_classes] for b samples [b, ...]."""
        return self.linear(x.flatten(1))
