"""Frozen networks of torchvision and timm as feature extractors, cut off before their
classifier."""

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
WRAPPERS = ("state_dict", "model")
"""Keys under which training scripts save the state dict of a network, beside that of an optimiser
and the like."""
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each of three channels, for pixels in [0, 1]."""
IMAGENET: Normalisation = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class TruncatedNetwork(nn.Module):
    """Maps images [b, C, H, W] to the flattened output [b, D] of `network`, which lacks its
    classifier.

    Grey images are repeated to three channels. Images are scaled to `input_size` (bilinear,
    antialiased) and normalised by `normalisation`, which is ImageNet's for all torchvision
    networks, whatever their weights.
    """

    def __init__(
        self, network: nn.Module, input_size: int, normalisation: Normalisation = IMAGENET
    ) -> None:
        super().__init__()
        self.network, self.input_size, self.normalisation = network, input_size, normalisation

    def forward(self, images: Tensor) -> Tensor:
        x = images.float().div(255)
        if x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        if x.shape[-2:] != (self.input_size, self.input_size):
            x = F.interpolate(
                x, (self.input_size, self.input_size), mode="bilinear", antialias=True
            )
        mean, std = (x.new_tensor(values).view(1, 3, 1, 1) for values in self.normalisation)
        return self.network((x - mean) / std).flatten(1)


@dataclass(eq=False, repr=False)
class Head(Chain):
    """Layers that are trained on the features of a frozen network, which is given images [1 or 3,
    H, W]."""

    choice = ""
    input_shape: Shape
    num_classes: int

    def __post_init__(self) -> None:
        nn.Module.__init__(self)
        self.sources = SourceFiles(Path())
        require_images(self.input_shape, f"model={self.choice}", 1, (1, 3))


@parameters
class LibraryHead(Head):
    """Features: the flattened input of layer `cut` of torchvision's model `backbone`; or, with
    `cut` "", what enters the classifier of timm's model.

    `weights`: `random` (a function of `backbone_seed` alone), `imagenet` (torchvision's default
    weights in <data_dir>/weights, downloaded if absent), or the path of a .pth or .safetensors
    file, of which nothing is executed, with the checksum `sha256` if that is given. Nothing is
    fetched for timm. Images are scaled to `input_size` x `input_size` pixels.
    """

    cut = ""
    backbone: str
    weights: str
    backbone_seed: CountOrZero
    input_size: InputSize
    sha256: str | None = None

    def backbone_key(self) -> str:
        if self.weights == "random":
            source = f"random {self.backbone_seed} torch {torch.__version__.split('+')[0]}"
        else:
            source = (
                _url(self.backbone).rsplit("/", 1)[-1]
                if self.weights == "imagenet"
                else self._checksum()
            )
        if self.cut:
            return json.dumps(
                [
                    self.backbone,
                    self.cut,
                    source,
                    self.input_size,
                    version("torchvision").split("+")[0],
                ]
            )
        return json.dumps(
            ["timm", self.backbone, source, self.input_size, str(_timm().__version__)]
        )

    def load_backbone(self, data_dir: Path) -> TruncatedNetwork:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.backbone_seed)
            network = _new_network(self.backbone, is_timm=not self.cut).requires_grad_(False)
        config = _config(network)
        classifier = config.get("classifier", ())
        left_out = cut_off(network, self.cut) if self.cut else np.atleast_1d(classifier).tolist()
        if self.weights != "random":
            is_file = self.weights != "imagenet"
            path = (
                user_path(self.weights)
                if is_file
                else _imagenet_file(self.backbone, data_dir, self.sources)
            )
            content = self.sources.read(path)
            try:
                network.load_state_dict(_parse(content, path.suffix, network._version, left_out))
            except (
                Exception
            ) as error:  # torch raises many kinds of errors for damaged or unsuitable files
                reason = f"does not hold the weights of {self.backbone} ({' '.join(str(error).split())[:200]})"
                raise DataError(f"model.weights={self.weights}: {path} {reason}") from error
        normalisation = config.get("mean", IMAGENET[0]), config.get("std", IMAGENET[1])
        return TruncatedNetwork(network, self.input_size, normalisation)

    def _checksum(self) -> str:
        """Return that of the file of weights. Raises `DataError` if it is absent, or is not the
        `sha256`."""
        path = user_path(self.weights)
        if not path.exists():
            remedy = "give imagenet, random, or a .pth or .safetensors file"
            raise DataError(f"model.weights={self.weights}: no such file; {remedy}")
        self.sources = SourceFiles(Path())
        self.sources.read(path)
        checksum = self.sources.sums[path]
        if self.sha256 not in (None, checksum):
            reason = "it is damaged or another file: fetch it again, or correct the checksum"
            raise DataError(f"model.sha256={self.sha256}: {self.weights} has {checksum}; {reason}")
        return checksum


def measure(name: str, input_size: int, *, is_timm: bool) -> tuple[str, int]:
    """The `cut` of a `LibraryHead`, before the last linear layer, and its number of features.
    Nothing is computed.

    Raises `ConfigError` for `library` where timm is not installed, for `backbone` if there is no
    such model or layer, and for `input_size` if the network does not accept images of that size.
    """
    known = (
        _timm().is_model(name)
        if is_timm
        else name in _torchvision().list_models(module=_torchvision())
    )
    kind = "model of timm (timm.list_models())" if is_timm else "torchvision classification model"
    check(rule(bool(known), "backbone", name, f"must be a {kind}, e.g. resnet18"))
    network, cut = _meta_network(name, is_timm), ""
    if not is_timm:
        linear = [path for path, layer in network.named_modules() if isinstance(layer, nn.Linear)]
        check(rule(bool(linear), "backbone", name, "must have a linear last layer, e.g. resnet18"))
        cut = linear[-1]
        cut_off(network, cut)
    try:
        with torch.no_grad():
            images = torch.empty(1, 3, input_size, input_size, device="meta")
            return cut, int(TruncatedNetwork(network, input_size).eval()(images).shape[1])
    except Exception as error:  # networks raise many kinds of errors
        text = f"images of this size cannot pass {name} ({str(error).splitlines()[0]})"
        remedy = f"{_config(network).get('input_size', (3, 224, 224))[-1]} fits this network"
        raise ConfigError([Problem("input_size", input_size, text, remedy)]) from error


def _meta_network(name: str, is_timm: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return _new_network(name, is_timm)
        except NotImplementedError:  # the RegNets compute their widths with tensors
            return _new_network(name, is_timm).to("meta")


def _new_network(name: str, is_timm: bool) -> nn.Module:
    if is_timm:
        return _timm().create_model(name, pretrained=False, num_classes=0)
    inception = name in ("googlenet", "inception_v3")
    options: dict[str, Any] = {"init_weights": True, "transform_input": True} if inception else {}
    return _torchvision().get_model(name, weights=None, **options)


def _config(network: nn.Module) -> dict[str, Any]:
    return dict(getattr(network, "pretrained_cfg", None) or {})


def _torchvision() -> Any:
    """Its models. Imported where a network of it is made, and not for features that are cached: it
    takes as long as PyTorch."""
    return import_module("torchvision.models")


def _timm() -> Any:
    try:
        return import_module("timm")
    except ImportError as error:
        text = "needs the package timm; install fedsim with its extra 'timm'"
        raise ConfigError(
            [Problem("library", "timm", text, "library=torchvision needs no package")]
        ) from error


def cut_off(network: nn.Module, cut: str) -> list[str]:
    """Let `network` end before its layer `cut`; returns the names of the layers that are left out.

    In a sequence all layers behind `cut` are left out, too; elsewhere `cut` is the last layer.
    """
    path, _, name = cut.rpartition(".")
    parent = network.get_submodule(path)
    children = [child for child, _ in parent.named_children()]
    left_out = children[children.index(name) :] if isinstance(parent, nn.Sequential) else [name]
    for child in left_out:
        setattr(parent, child, nn.Identity())
    return [f"{path}.{child}" if path else child for child in left_out]


def _parse(
    content: bytes, suffix: str, version: int, without: Sequence[str]
) -> Mapping[str, Tensor]:
    """The state dict in a file's content, in which nothing is read of the layers `without`: it may
    have been trained on other classes. One that names no version of its network is taken for one of
    `version`."""
    if suffix == ".safetensors":
        state: Any = load(content)
    else:
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        state = next(
            (loaded[key] for key in WRAPPERS if isinstance(loaded.get(key), Mapping)), loaded
        )
    prefixes = tuple(f"{layer}." for layer in without)
    found = OrderedDict(
        (key, value) for key, value in state.items() if not key.startswith(prefixes)
    )
    found._metadata = getattr(state, "_metadata", {"": {"version": version}})  # type: ignore[attr-defined]
    return found


def _url(name: str) -> str:
    return str(_torchvision().get_model_weights(name).DEFAULT.url)


def _imagenet_file(name: str, data_dir: Path, sources: SourceFiles) -> Path:
    """The path of torchvision's file, fetched if absent; its name ends in the first digits of its
    checksum."""
    url = _url(name)
    path = data_dir / "weights" / url.rsplit("/", 1)[-1]
    digits = re.findall(r"-([0-9a-f]{8,})\.", path.name)[-1]

    def fetch() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(
            url, str(path), hash_prefix=digits, progress=sys.stderr.isatty()
        )

    require_files(path.parent, data_dir, lambda: [] if path.is_file() else [path.name], fetch)
    sources.read(path)
    if not sources.sums[path].startswith(digits):
        told = f"is damaged: its SHA-256 does not begin with {digits}"
        raise DataError(f"model.weights=imagenet: {path} {told}; delete it and fetch it again")
    return path
