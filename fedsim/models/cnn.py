"""The convolutional networks of FedCor and GPFL for CIFAR-10, of GPFL's Fig. 7 for FEMNIST, and
LeNet."""

from torch import nn

from fedsim.core.errors import between, check
from fedsim.models.shapes import Chain, Shape, require_images


class CNN(Chain):
    """Three convolutions and two linear layers, without padding.

    122,570 parameters for 3x32x32 inputs and 10 classes. Pooling before ReLU is the same function
    as after it, with less work.
    """

    def __init__(self, input_shape: Shape, num_classes: int) -> None:
        super().__init__()
        require_images(input_shape, "model=cnn", 18)
        channels, *sides = input_shape
        # a convolution takes 2 pixels from each side's length, and pooling halves it
        height, width = (((side - 2) // 2 - 2) // 2 - 2 for side in sides)
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * height * width, 64),
            nn.ReLU(),
            nn.Linear(64, num_classes),
        )


class FemnistCNN(Chain):
    """Two convolutions and two linear layers, without padding.

    Dropout has probability `dropout` / 2 before the first linear layer and `dropout` before the
    last one (0.25 and 0.5 in the source). 1,199,882 parameters for 1x28x28 inputs and 10 classes.
    """

    def __init__(self, input_shape: Shape, num_classes: int, *, dropout: float) -> None:
        super().__init__()
        require_images(input_shape, "model=femnist_cnn", 6)
        check(between("dropout", dropout, 0, 1, open_high=True))
        channels, *sides = input_shape
        height, width = ((side - 4) // 2 for side in sides)
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(dropout / 2),
            nn.Flatten(),
            nn.Linear(64 * height * width, 128),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(128, num_classes),
        )


class LeNet(Chain):
    """Two convolutions and three linear layers, without padding, as in BlazeFL's benchmark.

    62,006 parameters for 3x32x32 inputs and 10 classes. Pooling before ReLU is the same function as
    after it, with less work.
    """

    def __init__(self, input_shape: Shape, num_classes: int) -> None:
        super().__init__()
        require_images(input_shape, "model=lenet", 16)
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
