"""A convolutional network for sequences of measurements, such as those of a sensor."""

from torch import Tensor, nn

from fedsim.core.errors import ConfigError, Problem
from fedsim.models.shapes import Shape, require_numbers

MIN_LENGTH = 32
"""Three convolutions of 5 steps and two poolings leave one of these steps."""


class CNN1D(nn.Module):
    """Three convolutions over time without padding, the mean over time, and a linear layer.

    32,295 parameters for 6 channels and 7 classes. Pooling before ReLU is the same function as
    after it, with less work. Shapes: b samples, C channels, L steps.
    """

    def __init__(self, input_shape: Shape, num_classes: int) -> None:
        super().__init__()
        require_numbers(input_shape, "model=cnn1d")
        if len(input_shape) != 2 or input_shape[1] < MIN_LENGTH:
            shape = "x".join(map(str, input_shape))
            text = (
                f"model=cnn1d needs sequences [C, L], L >= {MIN_LENGTH}; the data set has {shape}"
            )
            raise ConfigError([Problem("", ..., text, "dataset=smartwatch has such; or model=mlp")])
        self.layers = nn.Sequential(
            nn.Conv1d(input_shape[0], 32, 5),
            nn.MaxPool1d(2),
            nn.ReLU(),
            nn.Conv1d(32, 64, 5),
            nn.MaxPool1d(2),
            nn.ReLU(),
            nn.Conv1d(64, 64, 5),
            nn.ReLU(),
        )
        self.output = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [b, num_classes] for sequences [b, C, L]."""
        return self.output(self.layers(x).mean(2))
