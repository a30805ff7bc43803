"""Frozen networks (backbones) of torchvision and timm as feature extractors, without their
classifier.

A head is a model that is trained on the features of a frozen network; models/heads.py has the heads
that a config can choose. data/features.py computes the features once and replaces the images by
them, so that a head never receives images in training. Shapes: b images, D features.
"""

import io
import json
import re
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Interval
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.disk import user_path
from fedsim.core.errors import ConfigError, DataError, Problem, check, rule
from fedsim.core.parameters import CountOrZero, parameters
from fedsim.data.cache import SourceFiles
from fedsim.data.fetch import require_files
from fedsim.models.shapes import MAX_INPUT_SIZE, Chain, Shape, require_images

InputSize = Annotated[int, Interval(ge=32, le=MAX_INPUT_SIZE)]
"""Height and width in pixels to which images are scaled."""
WRAPPERS = ("state_dict", "model")
"""Keys under which training scripts save the state dict of a network, next to other state."""
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each of three channels, for pixels in [0, 1]."""
IMAGENET: Normalisation = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The usual normalisation for networks that were trained on ImageNet."""


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


def in_three_channels(images: Tensor, input_size: int | None) -> Tensor:
    """Return `images` [b, 1 or 3, H, W] as [b, 3, `input_size`, `input_size`].

    A grey image is repeated. Scaling is bilinear and antialiased; None keeps the size.
    """
    if images.shape[1] == 1:
        images = images.expand(-1, 3, -1, -1)
    if input_size is None or images.shape[-2:] == (input_size, input_size):
        return images
    size = (input_size, input_size)
    return F.interpolate(images, size, mode="bilinear", antialias=True)


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
        self.sources = SourceFiles(Path())  # the files of weights that are read
        require_images(self.input_shape, f"model={self.choice}", 1, (1, 3))


@parameters
class LibraryHead(Head):
    """The base class of heads on the features of a network of torchvision or timm."""

    cut = ""
    """The layer of torchvision's network whose flattened input is the features; "" for timm, whose
    features enter the classifier."""
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

    @property
    def _is_timm(self) -> bool:
        """Whether the network is one of timm's; torchvision's always have a `cut`."""
        return not self.cut

    def backbone_key(self) -> str:
        """Return a text that identifies everything that the features depend on."""
        if self.weights == "random":
            source = f"random {self.backbone_seed} torch {torch.__version__.split('+')[0]}"
        elif self.weights == "imagenet":
            source = _url(self.backbone).rsplit("/", 1)[-1]
        else:
            source = self._checksum()
        if self._is_timm:
            facts = ["timm", self.backbone, source, self.input_size, str(_timm().__version__)]
        else:
            library_version = version("torchvision").split("+")[0]
            facts = [self.backbone, self.cut, source, self.input_size, library_version]
        return json.dumps(facts)

    def load_backbone(self, data_dir: Path) -> TruncatedNetwork:
        """Return the frozen network with its weights. Raises `DataError`."""
        # Libraries draw weights from torch's global generator; its state is restored afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.backbone_seed)
            network = _new_network(self.backbone, is_timm=self._is_timm).requires_grad_(False)
        config = timm_config(network)
        if self._is_timm:
            removed_layers = np.atleast_1d(config.get("classifier", ())).tolist()
        else:
            removed_layers = cut_off(network, self.cut)
        if self.weights != "random":
            self._load_weights(network, removed_layers, data_dir)
        normalisation = config.get("mean", IMAGENET[0]), config.get("std", IMAGENET[1])
        return TruncatedNetwork(network, self.input_size, normalisation)

    def _load_weights(
        self, network: nn.Module, removed_layers: Sequence[str], data_dir: Path
    ) -> None:
        """Load the file of weights into `network`. Raises `DataError` if they do not fit."""
        if self.weights == "imagenet":
            path = _imagenet_file(self.backbone, data_dir, self.sources)
        else:
            path = user_path(self.weights)
        load_weights(network, self.backbone, path, self.sources.read(path), removed_layers)

    def _checksum(self) -> str:
        """Return the checksum of the file of weights (see `checked_file`)."""
        self.sources = checked_file(self.weights, self.sha256)
        return self.sources.sha256


def checked_file(weights: str, sha256: str | None) -> SourceFiles:
    """Return the file of weights, which was read once.

    Raises `DataError` if it is absent, or its checksum differs from `sha256`.
    """
    path = user_path(weights)
    if not path.exists():
        raise DataError(
            f"model.weights={weights}: no such file; give imagenet, random, or a .pth or "
            ".safetensors file (imagenet only for a frozen network)"
        )
    sources = SourceFiles(Path())
    sources.read(path)
    if sha256 not in (None, sources.sha256):
        raise DataError(
            f"model.sha256={sha256}: {weights} has {sources.sha256}; it is damaged or another "
            "file: fetch it again, or correct the checksum"
        )
    return sources


def load_weights(
    network: nn.Module, name: str, path: Path, content: bytes, own_layers: Sequence[str]
) -> None:
    """Load the `content` of the file `path` into the network `name`, except for its `own_layers`.

    Raises `DataError` if the weights do not fit.
    """
    try:
        state = _parse(content, path.suffix, network._version, own_layers)
        for key, value in network.state_dict().items():
            if key.startswith(_prefixes(own_layers)):
                state[key] = value
        network.load_state_dict(state)
    except Exception as error:  # torch raises many kinds for damaged or unsuitable files
        reason = " ".join(str(error).split())[:200]
        text = f"does not hold the weights of {name} ({reason})"
        raise DataError(f"model.weights={path}: {text}") from error


def measure(name: str, input_size: int, *, is_timm: bool) -> tuple[str, int]:
    """Return the `cut` of a network, its last linear layer ("" for timm), and the features' number.

    The network passes a tensor without data, so nothing is computed. Raises `ConfigError` for
    `library` if timm is not installed, for `backbone` if there is no such model or layer, and for
    `input_size` if the network does not accept images of that size.
    """
    check(unknown_network("backbone", name, is_timm=is_timm))
    network = _network_without_data(name, is_timm=is_timm)
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


def unknown_network(key: str, name: str, *, is_timm: bool) -> Problem | None:
    """Return the problem of `key` if a library has no classification network of this name."""
    if is_timm:
        kind = "model of timm (timm.list_models())"
        is_known = bool(_timm().is_model(name))
    else:
        kind = "torchvision classification model"
        is_known = name in torchvision_models().list_models(module=torchvision_models())
    return rule(is_known, key, name, f"must be a {kind}, e.g. resnet18")


def unfit_size(network: nn.Module, name: str, size: int | None, error: Exception) -> Problem:
    """Return the problem of `input_size`: the network raised an `error` for images of this size."""
    text = f"images of this size cannot pass {name} ({str(error).splitlines()[0]})"
    _, _, fitting_size = timm_config(network).get("input_size", (3, 224, 224))
    return Problem("input_size", size, text, f"{fitting_size} fits this network")


def _network_without_data(name: str, *, is_timm: bool) -> nn.Module:
    """Return the network on PyTorch's device `meta`, where tensors have shapes only."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return _new_network(name, is_timm=is_timm).to("meta")


def _new_network(name: str, *, is_timm: bool) -> nn.Module:
    """Return a network of a library with random weights, as a frozen network."""
    options: dict[str, Any] = {}
    if is_timm:
        options = {"num_classes": 0}
    # the two networks that scale their inputs themselves, as their ImageNet weights require
    elif name in ("googlenet", "inception_v3"):
        options = {"init_weights": True, "transform_input": True}
    return new_network(name, options, is_timm=is_timm)


def new_network(name: str, options: Mapping[str, Any], *, is_timm: bool) -> nn.Module:
    """Return a network of a library with random weights. The library receives the `options`."""

    def make() -> nn.Module:
        if is_timm:
            return _timm().create_model(name, pretrained=False, **options)
        return torchvision_models().get_model(name, weights=None, **options)

    try:
        return make()
    except NotImplementedError:  # the RegNets compute their widths with tensors
        with torch.device("cpu"):
            return make()


def timm_config(network: nn.Module) -> dict[str, Any]:
    """Return timm's description of a network; an empty mapping for torchvision's networks."""
    return dict(getattr(network, "pretrained_cfg", None) or {})


def torchvision_models() -> Any:
    """Return torchvision's module of models.

    Importing it takes as long as PyTorch, so it is imported only when a network is made.
    """
    return import_module("torchvision.models")


def _timm() -> Any:
    """Return the module timm. Raises `ConfigError` if it is not installed."""
    try:
        return import_module("timm")
    except ImportError as error:
        text = "needs the package timm; install fedsim with its extra 'timm'"
        problem = Problem("library", "timm", text, "library=torchvision needs no package")
        raise ConfigError([problem]) from error


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


def _parse(
    content: bytes, suffix: str, version: int, removed_layers: Sequence[str]
) -> OrderedDict[str, Tensor]:
    """Return the state dict in a file's content, without the removed layers.

    The removed layers may have been trained on other classes. `version` is assumed for a state dict
    that names no version of its network.
    """
    if suffix == ".safetensors":
        state: Any = load(content)
    else:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        for key in WRAPPERS:
            if isinstance(state.get(key), Mapping):
                state = state[key]
                break
    prefixes = _prefixes(removed_layers)
    remaining = OrderedDict[str, Tensor]()  # a dict would not take the attribute `_metadata`
    for key, value in state.items():
        if not key.startswith(prefixes):
            remaining[key] = value
    metadata = getattr(state, "_metadata", {"": {"version": version}})
    remaining._metadata = metadata  # type: ignore[attr-defined]
    return remaining


def _prefixes(layers: Sequence[str]) -> tuple[str, ...]:
    """Return the beginnings of the names of the layers' tensors."""
    return tuple(f"{layer}." for layer in layers)


def _url(name: str) -> str:
    """Return the address of torchvision's default weights of a network."""
    return str(torchvision_models().get_model_weights(name).DEFAULT.url)


def _imagenet_file(name: str, data_dir: Path, sources: SourceFiles) -> Path:
    """Return the path of torchvision's file of weights, which is fetched if absent.

    Its name ends in the first digits of its checksum. Raises `DataError` if these do not match.
    """
    url = _url(name)
    path = data_dir / "weights" / url.rsplit("/", 1)[-1]
    digits = re.findall(r"-([0-9a-f]{8,})\.", path.name)[-1]

    def missing() -> list[str]:
        return [] if path.is_file() else [path.name]

    def fetch() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        has_terminal = sys.stderr.isatty()
        torch.hub.download_url_to_file(url, str(path), hash_prefix=digits, progress=has_terminal)

    require_files(path.parent, data_dir, missing, fetch)
    sources.read(path)
    if not sources.sums[path].startswith(digits):
        raise DataError(
            f"model.weights=imagenet: {path} is damaged: its SHA-256 does not begin with {digits}; "
            "delete it and fetch it again"
        )
    return path
