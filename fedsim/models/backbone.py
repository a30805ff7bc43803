"""Frozen torchvision networks as feature extractors: the input of one of their layers, for images of any size."""

import json
from pathlib import Path
from typing import Any

import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.data.cache import file_sha256
from fedsim.data.features import Extractor
from fedsim.errors import DataError, check, rule

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class _ReachedError(Exception):
    """The features have been computed; the rest of the network is not needed."""


class TorchvisionExtractor(Extractor):
    """What enters layer `cut` of torchvision's model `name` in eval mode.

    Grey images are repeated to three channels; all are scaled to `input_size` (bilinear) and normalised by ImageNet's
    constants. `weights`: `imagenet` (torchvision's default ones, downloaded to <data_dir>/weights where there is a
    network), `random` (seeded by `seed`, the same for every run), or a .pth or .safetensors file.
    """

    def __init__(self, name: str, cut: str, weights: str, seed: int, input_size: int, data_dir: Path) -> None:
        super().__init__()
        self.input_size = input_size
        self.network, source = load_network(name, weights, seed, data_dir)
        self.network.requires_grad_(False)
        self.features: Tensor | None = None
        self.network.get_submodule(cut).register_forward_pre_hook(self._stop)
        facts = [name, cut, source, input_size, torchvision.__version__.split("+")[0]]
        self.fingerprint = json.dumps(facts)

    def forward(self, images: Tensor) -> Tensor:
        x = images.float().div(255)
        if x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        if x.shape[-2:] != (self.input_size, self.input_size):
            x = F.interpolate(x, (self.input_size, self.input_size), mode="bilinear", antialias=True)
        x = (x - x.new_tensor(IMAGENET_MEAN).view(1, 3, 1, 1)) / x.new_tensor(IMAGENET_STD).view(1, 3, 1, 1)
        try:
            self.network(x)
        except _ReachedError:
            assert self.features is not None
            return self.features
        raise AssertionError("the layer to cut at was not reached")

    def _stop(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.features = inputs[0].flatten(1)
        raise _ReachedError


def last_linear(name: str) -> tuple[str, int]:
    """Path and input width of the last linear layer of torchvision's model `name`; `ConfigError` if it has none."""
    names = torchvision.models.list_models(module=torchvision.models)
    check(rule(name in names, "backbone", name, "must be a torchvision classification model, e.g. resnet18"))
    with torch.device("meta"):
        network = _new_network(name)
    linear = [(path, m.in_features) for path, m in network.named_modules() if isinstance(m, nn.Linear)]
    check(rule(bool(linear), "backbone", name, "must have a linear last layer"))
    return linear[-1]


def load_network(name: str, weights: str, seed: int, data_dir: Path) -> tuple[nn.Module, str]:
    """The network and a text that identifies its weights. Raises `DataError` if they are not to be had."""
    if weights == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _new_network(name), f"random {seed} torch {torch.__version__.split('+')[0]}"
    network = _new_network(name)
    if weights == "imagenet":
        url = torchvision.models.get_model_weights(name).DEFAULT.url
        network.load_state_dict(_download(url, data_dir / "weights"))
        return network, url.rsplit("/", 1)[-1]
    path = Path(weights)
    if not path.is_file():
        raise DataError(f"model.weights={weights}: no such file; give imagenet, random, or a .pth or .safetensors file")
    network.load_state_dict(_read_weights(path))
    return network, file_sha256(path)


def _new_network(name: str) -> nn.Module:
    options: dict[str, Any] = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    network: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    return network


def _read_weights(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _download(url: str, folder: Path) -> dict[str, Tensor]:
    name = url.rsplit("/", 1)[-1]
    try:
        state: dict[str, Tensor] = torch.hub.load_state_dict_from_url(
            url, str(folder), map_location="cpu", check_hash=True, weights_only=True, progress=False
        )
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"model.weights=imagenet: {name} could not be downloaded ({error}); put torchvision's file of this name "
            f"into {folder}, or use model.weights=random"
        ) from error
    return state
