"""A head trained on the frozen features of any torchvision classification network."""

from pathlib import Path

from torch import Tensor, nn

from fedsim.data.features import Extractor
from fedsim.errors import at_least, at_most, check, rule
from fedsim.models.backbone import TorchvisionExtractor, last_linear
from fedsim.models.shapes import MAX_INPUT_SIZE, Shape, require_images, too_many_parameters


class FrozenFeatures(nn.Module):
    """A head in place of the last linear layer of the frozen torchvision network `backbone`.

    It is one linear layer, or two with `hidden` units and ReLU between them. `weights` and `backbone_seed` are those of
    `load_network`; images are scaled to `input_size` x `input_size` pixels.
    """

    def __init__(
        self,
        input_shape: Shape,
        num_classes: int,
        *,
        backbone: str,
        hidden: int | None,
        weights: str,
        backbone_seed: int,
        input_size: int,
    ) -> None:
        super().__init__()
        require_images(input_shape, "model=frozen_features", 1, (1, 3))
        check(
            at_least("input_size", input_size, 32),
            at_most("input_size", input_size, MAX_INPUT_SIZE),
            rule(hidden is None or hidden >= 1, "hidden", hidden, "must be null or >= 1"),
            at_least("backbone_seed", backbone_seed, 0),
        )
        self._cut, width = last_linear(backbone, input_size)
        check(too_many_parameters("hidden", hidden, [width, *([] if hidden is None else [hidden]), num_classes]))
        self._backbone, self._weights, self._seed, self._input_size = backbone, weights, backbone_seed, input_size
        self.head: nn.Module = nn.Linear(width, num_classes)
        if hidden is not None:
            self.head = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x)
        return output

    def extractor(self, data_dir: Path) -> Extractor:
        return TorchvisionExtractor(self._backbone, self._cut, self._weights, self._seed, self._input_size, data_dir)
