"""Networks of the libraries torchvision and timm, and files with their weights."""

import io
import re
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.disk import user_path
from fedsim.core.errors import ConfigError, DataError, Problem, rule
from fedsim.data.cache import SourceFiles
from fedsim.data.fetch import require_files

WRAPPERS = ("state_dict", "model")
"""Keys under which training scripts save the state dict of a network, next to other state."""
AUXILIARY_CLASSIFIERS = ("aux1", "aux2", "AuxLogits")
"""Layers of GoogLeNet and Inception v3 for their training only. torchvision's files have them."""


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


def unknown_network(key: str, name: str, *, is_timm: bool) -> Problem | None:
    """Return the problem of `key` if a library has no classification network of this name."""
    if is_timm:
        kind = "model of timm (timm.list_models())"
        is_known = bool(timm_module().is_model(name))
    else:
        kind = "torchvision classification model"
        is_known = name in torchvision_models().list_models(module=torchvision_models())
    return rule(is_known, key, name, f"must be a {kind}, e.g. resnet18")


def unfit_size(network: nn.Module, name: str, size: int | None, error: Exception) -> Problem:
    """Return the problem of `input_size`: the network raised an `error` for images of this size."""
    text = f"images of this size cannot pass {name} ({str(error).splitlines()[0]})"
    _, _, fitting_size = timm_config(network).get("input_size", (3, 224, 224))
    return Problem("input_size", size, text, f"{fitting_size} fits this network")


def new_network(name: str, options: Mapping[str, Any], *, is_timm: bool) -> nn.Module:
    """Return a network of a library with random weights. The library receives the `options`."""

    def make() -> nn.Module:
        if is_timm:
            return timm_module().create_model(name, pretrained=False, **options)
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


def timm_module() -> Any:
    """Return the module timm. Raises `ConfigError` if it is not installed."""
    try:
        return import_module("timm")
    except ImportError as error:
        text = "needs the package timm; install fedsim with its extra 'timm'"
        problem = Problem("library", "timm", text, "library=torchvision needs no package")
        raise ConfigError([problem]) from error


def checked_file(weights: str, sha256: str | None) -> SourceFiles:
    """Read the file of weights, and return it with its checksum.

    Raises `DataError` if the file is absent, or its checksum differs from `sha256`.
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
    network: nn.Module, name: str, path: Path, content: bytes, classifier_layers: Sequence[str]
) -> None:
    """Load the `content` of the file `path` into the network `name`.

    The classifier keeps its weights, because those in the file may have been trained on other
    classes. Auxiliary classifiers that the network does not have are skipped. Raises `DataError` if
    the weights do not fit.
    """
    classifier_prefixes = tuple(f"{layer}." for layer in classifier_layers)
    absent = [layer for layer in AUXILIARY_CLASSIFIERS if getattr(network, layer, None) is None]
    skipped_prefixes = (*classifier_prefixes, *(f"{layer}." for layer in absent))
    state = OrderedDict[str, Tensor]()  # a dict would not take the attribute `_metadata`
    try:
        from_file = _state_dict(content, path.suffix)
        for key, value in from_file.items():
            if not key.startswith(skipped_prefixes):
                state[key] = value
        for key, value in network.state_dict().items():
            if key.startswith(classifier_prefixes):
                state[key] = value
        # A state dict that names no version of the network is taken for one of its present version.
        metadata = getattr(from_file, "_metadata", {"": {"version": network._version}})
        state._metadata = metadata  # type: ignore[attr-defined]
        network.load_state_dict(state)
    except Exception as error:  # torch raises many kinds for damaged or unsuitable files
        reason = " ".join(str(error).split())[:200]
        text = f"does not hold the weights of {name} ({reason})"
        raise DataError(f"model.weights={path}: {text}") from error


def _state_dict(content: bytes, suffix: str) -> Any:
    """Return the state dict in the content of a file whose name ends with `suffix`."""
    if suffix == ".safetensors":
        return load(content)
    state: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    for key in WRAPPERS:
        if isinstance(state.get(key), Mapping):
            return state[key]
    return state


def imagenet_file(name: str, data_dir: Path, sources: SourceFiles) -> Path:
    """Return the path of torchvision's file of weights, which is fetched if absent.

    Its name ends in the first digits of its checksum. Raises `DataError` if these do not match.
    """
    url = imagenet_url(name)
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


def imagenet_url(name: str) -> str:
    """Return the address of torchvision's default weights of a network."""
    return str(torchvision_models().get_model_weights(name).DEFAULT.url)
