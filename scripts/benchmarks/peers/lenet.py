"""LeNet as BlazeFL has it, a model that fedsim takes by its `model._target_`."""

from torch import nn

from fedsim.models.shapes import Chain, Shape, require_images


class LeNet(Chain):
    """Two convolutions and three linear layers, without padding.

    62,006 parameters for 3x32x32 inputs and 10 classes. Pooling before ReLU is the same function as
    after it, with less work.
    """

    def __init__(self, input_shape: Shape, num_classes: int) -> None:
        super().__init__()
        require_images(input_shape, "LeNet", 16)
        channels, *sides = input_shape
        height, width = (((side - 4) // 2 - 4) // 2 for side in sides)
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 6, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(6, 16, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * height * width, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, num_classes),
        )
