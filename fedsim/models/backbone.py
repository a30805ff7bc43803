"""Frozen networks as feature extractors, cut off before their classifier.

Weights are random, torchvision's of ImageNet, or from a file, of which nothing is ever executed.
"""

import json
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
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
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each of three channels, for pixels in [0, 1]."""
IMAGENET: Normalisation = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


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


def frozen(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The network that `make` returns, its random weights a function of `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make().requires_grad_(False)


def random_identity(seed: int) -> str:
    """A text that identifies random weights."""
    return f"random {seed} torch {torch.__version__.split('+')[0]}"


def fill(network: nn.Module, name: str, weights: str, path: Path, without: Sequence[str]) -> None:
    """Fill the network `name` with the file that `weights` stands for; of some layers, which it lacks, nothing is read.

    The file may have been trained on other classes. Raises `DataError` if it does not hold the weights of `name`.
    """
    try:
        network.load_state_dict(_read(path, network._version, without))
    except Exception as error:  # torch raises many kinds of errors for damaged or unsuitable files
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"model.weights={weights}: {path} does not hold the weights of {name} ({reason})") from error


def _read(path: Path, version: int, without: Sequence[str]) -> Mapping[str, Tensor]:
    """A state dict; one that names no version of its network is taken for one of `version`."""
    if path.suffix == ".safetensors":
        state: Any = load_file(path)
    else:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        state = next((loaded[key] for key in WRAPPERS if isinstance(loaded.get(key), Mapping)), loaded)
    prefixes = tuple(f"{layer}." for layer in without)
    found = OrderedDict((key, value) for key, value in state.items() if not key.startswith(prefixes))
    found._metadata = getattr(state, "_metadata", {"": {"version": version}})  # type: ignore[attr-defined]
    return found


def _new_network(name: str) -> nn.Module:
    """torchvision's model `name`, initialised from torch's generator, with the input transform of its weights."""
    inception = name in ("googlenet", "inception_v3")
    options: dict[str, Any] = {"init_weights": True, "transform_input": True} if inception else {}
    return torchvision.models.get_model(name, weights=None, **options)


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


def _url(name: str) -> str:
    return torchvision.models.get_model_weights(name).DEFAULT.url


def _imagenet_file(name: str, data_dir: Path) -> Path:
    """The path of torchvision's file, downloaded if absent; its name ends in the first digits of its checksum."""
    url = _url(name)
    path = data_dir / "weights" / url.rsplit("/", 1)[-1]
    digits = re.findall(r"-([0-9a-f]{8,})\.", path.name)[-1]

    def fetch() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), hash_prefix=digits, progress=sys.stderr.isatty())

    try:
        require_files(path.parent, data_dir, lambda: [] if path.is_file() else [path.name], fetch)
    except DataError as error:
        raise DataError(f"model.weights=imagenet: {error}. model.weights=random needs no file") from error
    if (actual := file_sha256(path)[: len(digits)]) != digits:
        raise DataError(
            f"model.weights=imagenet: {path} is damaged: expected SHA-256 {digits}..., found {actual}...; delete it "
            "and fetch it again"
        )
    return path


@dataclass(frozen=True)
class TorchvisionExtractor(Extractor):
    """Features: the flattened input of layer `cut` of torchvision's model `name`.

    `weights`: `random` (a function of `seed` alone), `imagenet` (torchvision's default weights in <data_dir>/weights,
    downloaded if absent), or the path of a .pth or .safetensors file, with the checksum `sha256` if that is given.
    """

    name: str
    cut: str
    weights: str
    seed: int
    input_size: int
    data_dir: Path
    sha256: str | None = None

    @property
    def fingerprint(self) -> str:
        if self.weights == "random":
            source = random_identity(self.seed)
        elif self.weights == "imagenet":
            source = _url(self.name).rsplit("/", 1)[-1]
        else:
            source = WeightsFile(self.weights, self.sha256).sha256
        return json.dumps([self.name, self.cut, source, self.input_size, torchvision.__version__.split("+")[0]])

    def load(self) -> "TruncatedNetwork":
        network = frozen(lambda: _new_network(self.name), self.seed)
        left_out = cut_off(network, self.cut)
        if self.weights != "random":
            is_own = self.weights == "imagenet"
            path = _imagenet_file(self.name, self.data_dir) if is_own else WeightsFile(self.weights).path
            fill(network, self.name, self.weights, path, left_out)
        return TruncatedNetwork(network, self.input_size)


class TruncatedNetwork(nn.Module):
    """Maps images [b, C, H, W] to the flattened output [b, D] of `network`, which lacks its classifier.

    Grey images are repeated to three channels. Images are scaled to `input_size` (bilinear, antialiased) and normalised
    by `normalisation`, which is ImageNet's for all torchvision networks, whatever their weights.
    """

    def __init__(self, network: nn.Module, input_size: int, normalisation: Normalisation = IMAGENET) -> None:
        super().__init__()
        self.network, self.input_size, self.normalisation = network, input_size, normalisation

    def forward(self, images: Tensor) -> Tensor:
        x = images.float().div(255)
        if x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        if x.shape[-2:] != (self.input_size, self.input_size):
            x = F.interpolate(x, (self.input_size, self.input_size), mode="bilinear", antialias=True)
        mean, std = (x.new_tensor(values).view(1, 3, 1, 1) for values in self.normalisation)
        return self.network((x - mean) / std).flatten(1)


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
    cut_off(network, path)
    trial_width(TruncatedNetwork(network, input_size), name, "224 fits every torchvision network")
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
                return _new_network(name)
        except NotImplementedError:  # the RegNets compute their widths with tensors
            return _new_network(name).to("meta")
