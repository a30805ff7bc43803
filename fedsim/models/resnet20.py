"""ResNet-20 for small images (He et al., 2016, section 4.2)."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.errors import check, rule
from fedsim.models.shapes import Shape, require_images

Norm = Callable[[int], nn.Module]


class ResNet20(nn.Module):
    """conv3x3 16; three stages of three basic blocks (16, 32, 64 channels; strides 1, 2, 2); global
    pooling; linear C.

    `shortcut` is used where the shape changes: `pad` subsamples and adds zero channels (option A;
    269,722 parameters for 3x32x32 inputs and 10 classes), `conv` is a 1x1 convolution with
    normalisation (272,474 parameters; FedCor's). `norm`: `batch`, whose running statistics are
    averaged like parameters, or `group` with `groups` groups.
    """

    def __init__(
        self,
        input_shape: Shape,
        num_classes: int,
        *,
        shortcut: Literal["pad", "conv"],
        norm: Literal["batch", "group"],
        groups: int,
    ) -> None:
        super().__init__()
        require_images(input_shape, "model=resnet20", 4)
        check(rule(groups >= 1 and 16 % groups == 0, "groups", groups, "must divide 16"))
        make_norm: Norm = (
            nn.BatchNorm2d if norm == "batch" else lambda channels: nn.GroupNorm(groups, channels)
        )
        self.stem = nn.Conv2d(input_shape[0], 16, 3, padding=1, bias=False)
        self.norm = make_norm(16)
        blocks, channels = [], 16
        for width, first_stride in ((16, 1), (32, 2), (64, 2)):
            for stride in (first_stride, 1, 1):
                blocks.append(_Block(channels, width, stride, shortcut, make_norm))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.output = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.output(x.mean((2, 3)))


class _Block(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, shortcut: str, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = norm(width)
        self.stride, self.extra = stride, width - channels
        self.project: nn.Module | None = None
        if shortcut == "conv" and (stride > 1 or self.extra):
            self.project = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), norm(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.project is not None:
            return self.project(x)
        if self.extra == 0:
            return x
        return F.pad(
            x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra // 2, self.extra // 2)
        )
