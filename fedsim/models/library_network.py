"""Networks of torchvision and timm that clients train as a whole.

models/heads.py has frozen ones, of which clients train a head only.
"""

import copy
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.core.disk import user_path
from fedsim.core.errors import ConfigError, between, check, rule
from fedsim.data.cache import sha256_problem
from fedsim.models.library import (
    checked_file,
    in_three_channels,
    load_weights,
    new_network,
    timm_config,
    unfit_size,
    unknown_network,
)
from fedsim.models.shapes import MAX_INPUT_SIZE, Shape, require_images


class LibraryNetwork(nn.Module):
    """The classification network `network` of a `library`, with an output for each class.

    Grey images are repeated to three channels. `weights` are `random`, or a .pth or .safetensors
    file, of which everything but its classifiers is used; `sha256` is the checksum that it must
    have. Nothing is downloaded. `input_size` are the pixels per side to which images are scaled;
    None keeps their size. Stochastic depth is off, because it draws from torch's global generator.
    """

    def __init__(
        self,
        input_shape: Shape,
        num_classes: int,
        *,
        library: Literal["torchvision", "timm"],
        network: str,
        weights: str,
        sha256: str | None,
        input_size: int | None,
    ) -> None:
        super().__init__()
        is_timm = library == "timm"
        is_file = weights != "random"
        require_images(input_shape, f"model={library}", 1, (1, 3))
        size_problems = []
        if input_size is not None:
            size_problems.append(between("input_size", input_size, 32, MAX_INPUT_SIZE))
        check(
            unknown_network("network", network, is_timm=is_timm),
            sha256_problem(sha256),
            *size_problems,
            rule(is_file or sha256 is None, "sha256", sha256, "is for a file of weights"),
        )
        self.input_size = input_size
        options: dict[str, Any] = {"num_classes": num_classes}
        if network in ("googlenet", "inception_v3") and not is_timm:
            options |= {"init_weights": True, "aux_logits": False}  # they have other outputs, too
        self.network = new_network(network, options, is_timm=is_timm)
        if is_file:
            self._load_weights(network, weights, sha256)
        _prepare_for_engines(self.network)
        self._require_fitting_images(input_shape, network)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [b, num_classes] for images [b, 1 or 3, H, W]."""
        return self.network(in_three_channels(x, self.input_size))

    def _load_weights(self, name: str, weights: str, sha256: str | None) -> None:
        """Load a file into all layers but the classifier. Raises `DataError`."""
        path = user_path(weights)
        content = checked_file(weights, sha256).read(path)
        if next(self.network.parameters()).is_meta:
            return  # fedsim checks a config with a model without data
        last_parameter = list(dict(self.network.named_parameters()))[-1]
        last_layer = last_parameter.rpartition(".")[0]
        classifier = timm_config(self.network).get("classifier", last_layer)
        load_weights(self.network, name, path, content, np.atleast_1d(classifier).tolist())

    def _require_fitting_images(self, input_shape: Shape, name: str) -> None:
        """Raise `ConfigError` if images [C, H, W] cannot pass. Tensors without data are used."""
        without_data = copy.deepcopy(self).to("meta").eval()
        try:
            with torch.no_grad():
                without_data(torch.empty(2, *input_shape, device="meta"))
        except Exception as error:  # networks raise many kinds of errors
            problem = unfit_size(self.network, name, self.input_size, error)
            raise ConfigError([problem]) from error


def _prepare_for_engines(network: nn.Module) -> None:
    """Replace what the engines cannot train, in place.

    Stochastic depth is switched off. timm's layers of batch norm with an activation become two
    layers, because the engines have batch norm of their own.
    """
    for path, layer in list(network.named_modules()):
        kind = type(layer).__name__
        if kind == "StochasticDepth":  # torchvision's stochastic depth
            layer.p = 0.0
        elif kind == "DropPath":  # timm's stochastic depth
            layer.drop_prob = 0.0
        elif kind == "BatchNormAct2d" and isinstance(layer, nn.BatchNorm2d):
            norm = nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum, layer.affine)
            norm.load_state_dict(layer.state_dict())
            parent, _, name = path.rpartition(".")
            drop_and_activation = layer.children()
            layers = nn.Sequential(norm, *drop_and_activation)
            setattr(network.get_submodule(parent), name, layers)
