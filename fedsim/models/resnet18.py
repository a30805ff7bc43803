"""ResNet-18 for small images."""

from functools import partial
from typing import Literal

from torch import Tensor, nn

from fedsim.core.errors import check, rule
from fedsim.models.library import torchvision_models
from fedsim.models.shapes import Shape, require_images


class ResNet18(nn.Module):
    """torchvision's ResNet-18 (He et al. 2016) with the usual stem for images of 32x32 pixels.

    Its first convolution is 3x3 with stride 1, and no max pooling follows. 11,173,962 parameters
    for 3x32x32 inputs and 10 classes, with either norm. `norm` is `group` (Wu and He 2018) with
    `groups` groups, or `batch`, whose running statistics are averaged like parameters. Group norm
    does not depend on the other samples of a batch, and so not on the labels of a client (Hsieh et
    al. 2020, "The Non-IID Data Quagmire"). Two groups are those of Reddi et al. 2021 ("Adaptive
    Federated Optimization").
    """

    def __init__(
        self,
        input_shape: Shape,
        num_classes: int,
        *,
        norm: Literal["group", "batch"],
        groups: int,
    ) -> None:
        super().__init__()
        require_images(input_shape, "model=resnet18", 8)
        check(rule(groups >= 1 and 64 % groups == 0, "groups", groups, "must divide 64"))
        make_norm = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, groups)
        network = torchvision_models().resnet18(num_classes=num_classes, norm_layer=make_norm)
        network.conv1 = nn.Conv2d(input_shape[0], 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
        network.maxpool = nn.Identity()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [b, num_classes] for images [b, C, H, W]."""
        return self.network(x)
