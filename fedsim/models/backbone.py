"""Frozen networks (backbones) of torchvision and timm as feature extractors, without their
classifier.

A head is a model that is trained on the features of a frozen network; models/heads.py has the heads
that a config can choose. data/features.py computes the features once and replaces the images by
them, so that a head never receives images in training. Shapes: b images, D features.
"""

import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor, nn

from fedsim.core.disk import user_path
from fedsim.core.errors import ConfigError, check, rule
from fedsim.core.parameters import CountOrZero, parameters
from fedsim.data.cache import SourceFiles
from fedsim.models.library import (
    checked_file,
    imagenet_file,
    imagenet_url,
    in_three_channels,
    load_weights,
    new_network,
    timm_config,
    timm_module,
    unfit_size,
    unknown_network,
)
from fedsim.models.shapes import MAX_INPUT_SIZE, Chain, Shape, require_images

InputSize = Annotated[int, Interval(ge=32, le=MAX_INPUT_SIZE)]
"""Height and width in pixels to which images are scaled."""
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each of three channels, for pixels in [0, 1]."""
IMAGENET: Normalisation = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The usual normalisation for networks that were trained on ImageNet."""
SCALING_NETWORKS = ("googlenet", "inception_v3")
"""Networks of torchvision that scale their inputs themselves, as their ImageNet weights require."""


class TruncatedNetwork(nn.Module):
    """A network without its classifier: it maps uint8 images [b, C, H, W] to features [b, D].

    Grey images are repeated to three channels. Images are scaled to `input_size` (bilinear,
    antialiased) and normalised by `normalisation`, which is ImageNet's for all networks of
    torchvision, whatever their weights.
    """

    def __init__(
        self, network: nn.Module, input_size: int, normalisation: Normalisation = IMAGENET
    ) -> None:
        super().__init__()
        self.network = network
        self.input_size = input_size
        self.normalisation = normalisation

    def forward(self, images: Tensor) -> Tensor:
        """Return the features [b, D] of `images` [b, C, H, W]."""
        x = in_three_channels(images.float().div(255), self.input_size)
        mean, std = (x.new_tensor(values).view(1, 3, 1, 1) for values in self.normalisation)
        return self.network((x - mean) / std).flatten(1)


@dataclass(eq=False, repr=False)
class Head(Chain):
    """The base class of heads: layers that are trained on the features of a frozen network.

    The frozen network receives images [1 or 3, H, W].
    """

    choice = ""
    """The name of the model in conf/model/, for messages."""
    input_shape: Shape
    num_classes: int

    def __post_init__(self) -> None:
        nn.Module.__init__(self)
        self.sources = SourceFiles(Path())  # the file of weights, once it was read
        require_images(self.input_shape, f"model={self.choice}", 1, (1, 3))


@parameters
class LibraryHead(Head):
    """The base class of heads on the features of a network of torchvision or timm."""

    is_timm = False
    """True if the network is one of timm's, which can be made without their classifiers."""
    cut = ""
    """The layer of a network of torchvision whose flattened input is the features."""
    backbone: str
    """The name of the network in its library."""
    weights: str
    """`random`, `imagenet` (torchvision's default weights, in <data_dir>/weights, downloaded if
    absent), or the path of a .pth or .safetensors file; nothing in a file is executed. Nothing is
    fetched for timm."""
    backbone_seed: CountOrZero
    """The seed of random weights."""
    input_size: InputSize
    sha256: str | None = None
    """The checksum that the file of weights must have; None accepts any."""

    def backbone_key(self) -> str:
        """Return a text that identifies everything that the features depend on.

        A file of weights is read for its checksum. Raises `DataError` as `checked_file`.
        """
        if self.weights == "random":
            source = f"random {self.backbone_seed} torch {torch.__version__.split('+')[0]}"
        elif self.weights == "imagenet":
            source = imagenet_url(self.backbone).rsplit("/", 1)[-1]
        else:
            self.sources = checked_file(self.weights, self.sha256)
            source = self.sources.sha256
        if self.is_timm:
            network = ["timm", self.backbone]
            library_version = str(timm_module().__version__)
        else:
            network = [self.backbone, self.cut]
            library_version = version("torchvision").split("+")[0]
        return json.dumps([*network, source, self.input_size, library_version])

    def load_backbone(self, data_dir: Path) -> TruncatedNetwork:
        """Return the frozen network with its weights.

        Raises `DataError` if the weights do not fit, or if their file has changed since
        `backbone_key`.
        """
        # Libraries draw weights from torch's global generator; its state is restored afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.backbone_seed)
            network = _new_network(self.backbone, is_timm=self.is_timm).requires_grad_(False)
        config = timm_config(network)
        if self.is_timm:
            classifier_layers = np.atleast_1d(config.get("classifier", ())).tolist()
        else:
            classifier_layers = cut_off(network, self.cut)
        if self.weights != "random":
            if self.weights == "imagenet":
                path = imagenet_file(self.backbone, data_dir, self.sources)
            else:
                path = user_path(self.weights)
            content = self.sources.read(path)
            load_weights(network, self.backbone, path, content, classifier_layers)
        normalisation = config.get("mean", IMAGENET[0]), config.get("std", IMAGENET[1])
        return TruncatedNetwork(network, self.input_size, normalisation)


def measure(name: str, input_size: int, *, is_timm: bool) -> tuple[str, int]:
    """Return the `cut` of a network of a library, and the number of its features.

    The cut is the last linear layer; it is "" for timm. Images without data pass the network, so
    that nothing is computed. Raises `ConfigError` for
    `library` if timm is not installed, for `backbone` if there is no such model or layer, and for
    `input_size` if the network does not accept images of that size.
    """
    check(unknown_network("backbone", name, is_timm=is_timm))
    with torch.random.fork_rng(devices=[]), torch.device("meta"):  # tensors have shapes only
        network = _new_network(name, is_timm=is_timm).to("meta")
    cut = ""
    if not is_timm:
        linear = [path for path, layer in network.named_modules() if isinstance(layer, nn.Linear)]
        check(rule(bool(linear), "backbone", name, "must have a linear last layer, e.g. resnet18"))
        cut = linear[-1]
        cut_off(network, cut)
    try:
        with torch.no_grad():
            images = torch.empty(1, 3, input_size, input_size, device="meta")
            features = TruncatedNetwork(network, input_size).eval()(images)
    except Exception as error:  # networks raise many kinds of errors
        raise ConfigError([unfit_size(network, name, input_size, error)]) from error
    return cut, int(features.shape[1])


def _new_network(name: str, *, is_timm: bool) -> nn.Module:
    """Return a network of a library with random weights, as a frozen network."""
    options: dict[str, Any] = {}
    if is_timm:
        options = {"num_classes": 0}
    elif name in SCALING_NETWORKS:
        options = {"init_weights": True, "transform_input": True}
    return new_network(name, options, is_timm=is_timm)


def cut_off(network: nn.Module, cut: str) -> list[str]:
    """Make `network` end before its layer `cut`, and return the names of the removed layers.

    In a sequence all layers after `cut` are removed, too; elsewhere `cut` must be the last layer.
    """
    path, _, name = cut.rpartition(".")
    parent = network.get_submodule(path)
    removed = [name]
    if isinstance(parent, nn.Sequential):
        children = [child for child, _ in parent.named_children()]
        removed = children[children.index(name) :]
    for child in removed:
        setattr(parent, child, nn.Identity())
    return [f"{path}.{child}" if path else child for child in removed]
