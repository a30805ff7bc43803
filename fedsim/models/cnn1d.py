"""A convolutional network for sequences of measurements, such as those of a sensor."""

from torch import nn

from fedsim.models.shapes import Chain, Shape, misfit, require_numbers

MIN_LENGTH = 32
"""Three convolutions of 5 steps and two poolings leave one of these steps."""


class CNN1D(Chain):
    """Three convolutions over time without padding, the mean over time, and a linear layer.

    32,295 parameters for 6 channels and 7 classes. Pooling before ReLU is the same function as
    after it, with less work. Shapes: C channels, L steps.
    """

    def __init__(self, input_shape: Shape, num_classes: int) -> None:
        super().__init__()
        require_numbers(input_shape, "model=cnn1d")
        if len(input_shape) != 2 or input_shape[1] < MIN_LENGTH:
            need = f"model=cnn1d needs sequences [C, L] of at least {MIN_LENGTH} steps"
            raise misfit(input_shape, need)
        self.layers = nn.Sequential(
            nn.Conv1d(input_shape[0], 32, 5),
            nn.MaxPool1d(2),
            nn.ReLU(),
            nn.Conv1d(32, 64, 5),
            nn.MaxPool1d(2),
            nn.ReLU(),
            nn.Conv1d(64, 64, 5),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(64, num_classes),
        )
