"""ResNet-20 for small images (He et al., 2016, section 4.2)."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.errors import check, rule
from fedsim.models.shapes import Shape, require_images

MakeNorm = Callable[[int], nn.Module]
"""A function from a number of channels to a normalisation layer."""
STAGES = ((16, 1), (32, 2), (64, 2))
"""Number of channels of each stage, and the stride of its first block."""


class ResNet20(nn.Module):
    """A convolution, three stages of three basic blocks, global pooling and a linear layer.

    `shortcut` is for blocks that change the shape: `pad` subsamples and adds zero channels (option
    A; 269,722 parameters for 3x32x32 inputs and 10 classes), `conv` is a 1x1 convolution with
    normalisation (272,474 parameters; FedCor's). `norm` is `batch`, whose running statistics are
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

        def make_norm(channels: int) -> nn.Module:
            if norm == "batch":
                return nn.BatchNorm2d(channels)
            return nn.GroupNorm(groups, channels)

        self.stem = nn.Conv2d(input_shape[0], 16, 3, padding=1, bias=False)
        self.norm = make_norm(16)
        blocks = []
        channels = 16
        for width, first_stride in STAGES:
            for stride in (first_stride, 1, 1):
                blocks.append(_Block(channels, width, stride, shortcut, make_norm))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.output = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [b, num_classes] for images [b, C, H, W]."""
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.output(x.mean((2, 3)))


class _Block(nn.Module):
    """Two 3x3 convolutions with normalisation, next to a shortcut."""

    def __init__(
        self, channels: int, width: int, stride: int, shortcut: str, make_norm: MakeNorm
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = make_norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = make_norm(width)
        self.stride = stride
        self.added_channels = width - channels
        self.project: nn.Module | None = None
        if shortcut == "conv" and (stride > 1 or self.added_channels):
            convolution = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.project = nn.Sequential(convolution, make_norm(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output [b, width, H / stride, W / stride]."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return torch.relu(y + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        """Return `x` in the shape of the block's output."""
        if self.project is not None:
            return self.project(x)
        if self.added_channels == 0:
            return x
        subsampled = x[:, :, :: self.stride, :: self.stride]
        half = self.added_channels // 2
        return F.pad(subsampled, (0, 0, 0, 0, half, half))
