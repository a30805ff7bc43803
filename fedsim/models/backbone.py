"""Weights of frozen networks: random, torchvision's of ImageNet, or from a file, of which nothing is ever executed.

Frozen networks as feature extractors, and those of torchvision: their output is the input of one of their layers.
"""

import json
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.errors import ConfigError, DataError, Problem, check, rule
from fedsim.data.cache import file_sha256
from fedsim.data.features import Extractor
from fedsim.data.fetch import require_files

WRAPPERS = ("state_dict", "model")
"""Keys under which training scripts save the state dict of a network, beside that of an optimiser and the like."""


@dataclass(frozen=True)
class WeightsFile:
    """A user's .pth or .safetensors file: the path as it was given, and the SHA-256 that it must have, if any."""

    given: str
    expected: str | None = None

    @property
    def path(self) -> Path:
        """Raises `DataError` where there is no such file."""
        path = Path(self.given).expanduser()
        if not path.is_file():
            remedy = "give imagenet, random, or a .pth or .safetensors file"
            raise DataError(f"model.weights={self.given}: no such file; {remedy}")
        return path

    @property
    def sha256(self) -> str:
        """Of its content. Raises `DataError` where that is not the expected one."""
        found = file_sha256(self.path)
        if self.expected is not None and found != self.expected:
            reason = "it is damaged or another file: fetch it again, or correct the checksum"
            raise DataError(f"model.sha256={self.expected}: {self.path} has {found}; {reason}")
        return found

    def read(self, version: int) -> Mapping[str, Tensor]:
        """The state dict in it; one that names no version of its network is taken for one of `version`."""
        return _read(self.path, version)

    @contextmanager
    def explained(self, name: str) -> Iterator[None]:
        """Errors of reading it and of filling the network `name` with it become a `DataError`."""
        with _explained(f"model.weights={self.given}: {self.path}", name):
            yield


def weights_identity(name: str, weights: str, seed: int, sha256: str | None = None) -> str:
    """A text that identifies the values of the weights. Reads a user's file, but builds and downloads nothing."""
    if weights == "random":
        return random_identity(seed)
    return _url(name).rsplit("/", 1)[-1] if weights == "imagenet" else WeightsFile(weights, sha256).sha256


def random_identity(seed: int) -> str:
    """A text that identifies random weights."""
    return f"random {seed} torch {torch.__version__.split('+')[0]}"


def load_network(
    name: str, weights: str, seed: int, data_dir: Path, cut: str | None = None, sha256: str | None = None
) -> nn.Module:
    """torchvision's model `name` with frozen parameters.

    `weights`: `random` (a function of `seed` alone), `imagenet` (torchvision's default weights in <data_dir>/weights,
    downloaded if absent), or the path of a .pth or .safetensors file, with the checksum `sha256` if that is given. A
    user's file may have been trained on other classes: of its layer `cut`, whose output is not used, nothing is read.
    Raises `DataError` if the weights cannot be read or are not those of `name`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = new_network(name)
    network.requires_grad_(False)
    if weights == "random":
        return network
    if weights == "imagenet":
        path = _imagenet_file(name, data_dir)
        with _explained(f"model.weights={weights}: {path}", name):
            network.load_state_dict(_read(path, version=network._version))
        return network
    file = WeightsFile(weights, sha256)
    with file.explained(name):
        given = state_without(file.read(version=network._version), () if cut is None else (cut,))
        kept = {key: value for key, value in network.state_dict().items() if cut and key.startswith(f"{cut}.")}
        given.update(kept)
        network.load_state_dict(given)
    return network


@contextmanager
def _explained(source: str, name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch raises many kinds of errors for damaged or unsuitable files
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{source} does not hold the weights of {name} ({reason})") from error


def state_without(state: Mapping[str, Tensor], layers: Sequence[str]) -> "OrderedDict[str, Tensor]":
    """A copy of a state dict, with the versions of its layers, without the tensors of some `layers`."""
    prefixes = tuple(f"{layer}." for layer in layers)
    found = OrderedDict((key, value) for key, value in state.items() if not (prefixes and key.startswith(prefixes)))
    if hasattr(state, "_metadata"):
        found._metadata = state._metadata  # type: ignore[attr-defined]
    return found


def new_network(name: str) -> nn.Module:
    """torchvision's model `name`, initialised from torch's generator, with the input transform of its weights."""
    options_of_inception: dict[str, Any] = {"init_weights": True, "transform_input": True}
    options = options_of_inception if name in ("googlenet", "inception_v3") else {}
    network: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    return network


def _url(name: str) -> str:
    url: str = torchvision.models.get_model_weights(name).DEFAULT.url
    return url


def _imagenet_file(name: str, data_dir: Path) -> Path:
    """The path of torchvision's file, downloaded if absent; its name ends in the first digits of its checksum."""
    url = _url(name)
    path = data_dir / "weights" / url.rsplit("/", 1)[-1]
    digits = re.findall(r"-([0-9a-f]{8,})\.", path.name)[-1]
    try:
        require_files(
            path.parent, data_dir, lambda: [] if path.is_file() else [path.name], lambda: _download(url, path, digits)
        )
    except DataError as error:
        raise DataError(f"model.weights=imagenet: {error}. model.weights=random needs no file") from error
    actual = file_sha256(path)[: len(digits)]
    if actual != digits:
        raise DataError(
            f"model.weights=imagenet: {path} is damaged: expected SHA-256 {digits}..., found {actual}...; delete it "
            "and fetch it again"
        )
    return path


def _download(url: str, path: Path, digits: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.hub.download_url_to_file(url, str(path), hash_prefix=digits, progress=sys.stderr.isatty())


def _read(path: Path, version: int) -> Mapping[str, Tensor]:
    if path.suffix == ".safetensors":
        return _of_version(load_file(path), version)
    loaded: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    state = next((loaded[key] for key in WRAPPERS if isinstance(loaded.get(key), Mapping)), loaded)
    return state if hasattr(state, "_metadata") else _of_version(state, version)


def _of_version(state: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
    """A state dict that names no version of its network, as one of `version`."""
    found = OrderedDict(state)
    found._metadata = {"": {"version": version}}  # type: ignore[attr-defined]
    return found


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation of each channel, for pixels in [0, 1]."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class TorchvisionExtractor(Extractor):
    """Features: the input of layer `cut` of torchvision's model `name`; `weights`, `seed` and `sha256` as in
    `load_network`."""

    name: str
    cut: str
    weights: str
    seed: int
    input_size: int
    data_dir: Path
    sha256: str | None = None

    @property
    def fingerprint(self) -> str:
        source = weights_identity(self.name, self.weights, self.seed, self.sha256)
        return json.dumps([self.name, self.cut, source, self.input_size, torchvision.__version__.split("+")[0]])

    def load(self) -> "TruncatedNetwork":
        network = load_network(self.name, self.weights, self.seed, self.data_dir, self.cut, self.sha256)
        return TruncatedNetwork(network, self.cut, self.input_size)


class TruncatedNetwork(nn.Module):
    """`network` up to its layer `cut`: maps images [b, C, H, W] to the flattened input of that layer, [b, D]; without
    a `cut`, to its flattened output.

    Grey images are repeated to three channels. Images are scaled to `input_size` (bilinear, antialiased) and normalised
    by `normalisation`, which is ImageNet's for all torchvision networks, whatever their weights.
    """

    def __init__(
        self, network: nn.Module, cut: str | None, input_size: int, normalisation: Normalisation = IMAGENET
    ) -> None:
        super().__init__()
        self.network, self.input_size, self.normalisation = network, input_size, normalisation
        self.whole = cut is None
        if cut is not None:
            self.network.get_submodule(cut).register_forward_pre_hook(_capture_input)

    def forward(self, images: Tensor) -> Tensor:
        x = images.float().div(255)
        if x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        if x.shape[-2:] != (self.input_size, self.input_size):
            x = F.interpolate(x, (self.input_size, self.input_size), mode="bilinear", antialias=True)
        mean, std = (
            x.new_tensor(values).view(1, 3, 1, 1) for values in (self.normalisation.mean, self.normalisation.std)
        )
        x = (x - mean) / std
        if self.whole:
            output: Tensor = self.network(x)
            return output.flatten(1)
        try:
            self.network(x)
        except _ReachedError as reached:
            return reached.features
        raise AssertionError("the layer to cut at was not reached")


class _ReachedError(Exception):
    """Raised when the layer `cut` is reached, to skip the rest of the network; carries the features."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features = features


def _capture_input(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    raise _ReachedError(inputs[0].flatten(1))


def last_linear(name: str, input_size: int) -> tuple[str, int]:
    """Path and number of inputs of the last linear layer of torchvision's model `name`, without computing anything.

    Raises `ConfigError` for `backbone` if there is no such model or layer, and for `input_size` if the network does not
    accept images of that size.
    """
    names = torchvision.models.list_models(module=torchvision.models)
    check(rule(name in names, "backbone", name, "must be a torchvision classification model, e.g. resnet18"))
    network = _meta_network(name)
    linear = [(path, m.in_features) for path, m in network.named_modules() if isinstance(m, nn.Linear)]
    check(rule(bool(linear), "backbone", name, "must have a linear last layer, e.g. resnet18"))
    path, width = linear[-1]
    trial_width(TruncatedNetwork(network, path, input_size), name, "224 fits every torchvision network")
    return path, width


@torch.no_grad()
def trial_width(network: TruncatedNetwork, name: str, remedy: str) -> int:
    """Number of features of a `network` on torch's meta device. Raises `ConfigError` for `input_size` where images of
    that size cannot pass."""
    size = network.input_size
    try:
        return int(network.eval()(torch.empty(1, 3, size, size, device="meta")).shape[1])
    except Exception as error:  # networks raise many kinds of errors
        text = f"images of this size cannot pass {name} ({str(error).splitlines()[0]})"
        raise ConfigError([Problem("input_size", size, text, remedy)]) from error


def _meta_network(name: str) -> nn.Module:
    """The network on torch's meta device: shapes without values."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return new_network(name)
        except NotImplementedError:  # the RegNets compute their widths with tensors
            return new_network(name).to("meta")
