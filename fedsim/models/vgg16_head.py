"""The last layers of VGG16, trained on its frozen features."""

from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from fedsim.data.features import Extractor
from fedsim.errors import at_least, at_most, between, check
from fedsim.models.backbone import TorchvisionExtractor
from fedsim.models.shapes import MAX_INPUT_SIZE, Shape, require_images


class VGG16Head(nn.Module):
    """The last one or two linear layers of VGG16, everything before them frozen (PNCS, section VI).

    `layers: one` is classifier.6 (40,970 parameters for 10 classes); `two` is classifier.3 and classifier.6 (16,822,282
    parameters) with ReLU and dropout between them. Names are torchvision's. At `input_size` 32 the last feature map has
    a single cell, which the network's adaptive pooling repeats. `weights` and `backbone_seed` are those of
    `load_network`.
    """

    def __init__(
        self,
        input_shape: Shape,
        num_classes: int,
        *,
        layers: Literal["one", "two"],
        dropout: float,
        weights: str,
        backbone_seed: int,
        input_size: int,
    ) -> None:
        super().__init__()
        require_images(input_shape, "model=vgg16_head", 1, (1, 3))
        check(
            at_least("input_size", input_size, 32),
            at_most("input_size", input_size, MAX_INPUT_SIZE),
            between("dropout", dropout, 0, 1, open_high=True),
            at_least("backbone_seed", backbone_seed, 0),
        )
        trained: dict[str, nn.Module] = {"6": nn.Linear(4096, num_classes)}
        if layers == "two":
            trained = {"3": nn.Linear(4096, 4096), "4": nn.ReLU(), "5": nn.Dropout(dropout), **trained}
        self.classifier = nn.Sequential()
        for name, layer in trained.items():
            self.classifier.add_module(name, layer)
        self._cut = f"classifier.{next(iter(trained))}"
        self._weights, self._seed, self._input_size = weights, backbone_seed, input_size

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.classifier(x)
        return output

    def extractor(self, data_dir: Path) -> Extractor:
        return TorchvisionExtractor("vgg16", self._cut, self._weights, self._seed, self._input_size, data_dir)
