"""FedCor's and GPFL's convolutional network for CIFAR-10."""

from torch import Tensor, nn

from fedsim.models.shapes import Shape, require_images


class CNN(nn.Module):
    """conv3x3 32, pool2, ReLU; conv3x3 64, pool2, ReLU; conv3x3 64, ReLU; linear 64, ReLU; linear C. No padding.

    122,570 parameters for 3x32x32 inputs and 10 classes. Pooling comes before ReLU, which is the same function with a
    quarter of the work for ReLU.
    """

    def __init__(self, input_shape: Shape, num_classes: int) -> None:
        super().__init__()
        require_images(input_shape, "model=cnn", 18)
        height, width = (((side - 2) // 2 - 2) // 2 - 2 for side in input_shape[1:])
        self.layers = nn.Sequential(
            nn.Conv2d(input_shape[0], 32, 3),
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

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output
