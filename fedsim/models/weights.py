"""Weights of torchvision's networks: random, ImageNet's, or from a file."""

import re
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn

from fedsim.data.cache import file_sha256
from fedsim.data.fetch import require_files
from fedsim.errors import DataError


def weights_identity(name: str, weights: str, seed: int) -> str:
    """A text that identifies the values of the weights. Reads a user's file, but builds and downloads nothing."""
    if weights == "random":
        return f"random {seed} torch {torch.__version__.split('+')[0]}"
    return _url(name).rsplit("/", 1)[-1] if weights == "imagenet" else file_sha256(_user_file(weights))


def load_network(name: str, weights: str, seed: int, data_dir: Path) -> nn.Module:
    """torchvision's model `name` with frozen parameters.

    `weights`: `random` (a function of `seed` alone), `imagenet` (torchvision's default weights in <data_dir>/weights,
    downloaded if absent), or the path of a .pth or .safetensors file. Raises `DataError` if the weights cannot be read
    or are not those of `name`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = new_network(name)
    network.requires_grad_(False)
    if weights == "random":
        return network
    path = _imagenet_file(name, data_dir) if weights == "imagenet" else _user_file(weights)
    try:
        network.load_state_dict(_read(path, version=network._version))
    except Exception as error:  # torch raises many kinds of errors for damaged or unsuitable files
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"model.weights={weights}: {path} does not hold the weights of {name} ({reason})") from error
    return network


def new_network(name: str) -> nn.Module:
    """torchvision's model `name`, initialised from torch's generator, with the input transform of its weights."""
    options_of_inception: dict[str, Any] = {"init_weights": True, "transform_input": True}
    options = options_of_inception if name in ("googlenet", "inception_v3") else {}
    network: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    return network


def _url(name: str) -> str:
    url: str = torchvision.models.get_model_weights(name).DEFAULT.url
    return url


def _user_file(weights: str) -> Path:
    path = Path(weights).expanduser()
    if not path.is_file():
        raise DataError(f"model.weights={weights}: no such file; give imagenet, random, or a .pth or .safetensors file")
    return path


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
    """The state dict in `path`. A .safetensors file has no version of the network; the current `version` is assumed."""
    if path.suffix == ".safetensors":
        state = OrderedDict(load_file(path))
        state._metadata = {"": {"version": version}}  # type: ignore[attr-defined]
        return state
    loaded: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return loaded
