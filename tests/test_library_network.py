"""Networks of torchvision and timm that are trained as a whole, and ResNet-18 for small images."""

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.rng import Streams
from fedsim.engine.data import ClientData
from fedsim.engine.model import buffer_names
from fedsim.engine.schedule import LocalWork
from fedsim.engine.training_copies import for_batched, for_sequential, reject_hidden_randomness
from tests.engines import batched, graph, reference
from tests.test_engine import OPTIMIZERS, assert_engines_equal
from tests.test_models import CIFAR, build

TORCHVISION = "mobilenet_v3_small"
TIMM = "test_efficientnet"
"""A network that timm has for tests. It has layers of batch norm with an activation."""


def clients(side: int) -> ClientData:
    """Return two clients with 6 and 4 random images [3, side, side]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, 3, side, side, generator=generator, dtype=torch.float64)
    positions = [np.arange(6), np.arange(6, 10)]
    return ClientData(x, torch.arange(10), positions, positions, 10)


@pytest.mark.parametrize("backend", [batched, graph])
@pytest.mark.parametrize(
    ("choice", "values", "side"),
    [
        pytest.param("resnet18", {}, 8, marks=pytest.mark.slow),
        pytest.param("resnet18", {"norm": "batch"}, 16, marks=pytest.mark.slow),
        pytest.param("torchvision", {"network": TORCHVISION}, 64, marks=pytest.mark.slow),
        ("torchvision", {"network": "squeezenet1_1"}, 32),
        ("timm", {"network": TIMM}, 64),
        ("timm", {"network": "test_vit", "input_size": 160}, 16),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's attention
def test_engines_agree(backend: Any, choice: str, values: dict[str, Any], side: int) -> None:
    """Batches have 6 and 4 samples, so that one of them is padded.

    The slow forms do the same with larger networks.
    """
    model = build(choice, (3, side, side), **values).double()
    task = (model, clients(side), LocalWork(1, None, 6), OPTIMIZERS["sgd"], Streams(3))
    assert_engines_equal(backend(*task), reference(*task), np.arange(2), tolerance=1e-7)


# --- ResNet-18 -----------------------------------------------------------------------------------


@torch.no_grad()
def test_resnet18_is_torchvisions_with_another_stem() -> None:
    model = build("resnet18", CIFAR, norm="batch")
    expected = torchvision.models.resnet18(num_classes=10)
    expected.conv1 = nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)
    expected.maxpool = nn.Identity()
    state = {name.removeprefix("network."): v for name, v in model.state_dict().items()}
    expected.load_state_dict(state)
    images = torch.randn(3, 3, 32, 32)
    for mode in (True, False):
        torch.testing.assert_close(model.train(mode)(images), expected.train(mode)(images))


@torch.no_grad()
def test_resnet18s_group_norm_has_the_given_number_of_groups() -> None:
    model: Any = build("resnet18", CIFAR, groups=4)
    assert buffer_names(model) == []
    x = torch.randn(2, 64, 5, 5)
    groups = x.view(2, 4, 16 * 25)
    variance, mean = torch.var_mean(groups, 2, correction=0, keepdim=True)
    expected = ((groups - mean) / torch.sqrt(variance + 1e-5)).view_as(x)
    torch.testing.assert_close(model.network.bn1(x), expected)


# --- libraries -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "network"),
    [
        ("torchvision", TORCHVISION),
        ("torchvision", "regnet_y_400mf"),
        ("torchvision", "googlenet"),
        ("timm", TIMM),
        ("timm", "test_vit"),
    ],
)
def test_a_network_is_the_librarys(choice: str, network: str) -> None:
    """In eval mode the outputs are those of the library's own network with the same weights."""
    size = 160 if network == "test_vit" else 32
    model: Any = build(choice, (3, size, size), 7, network=network).eval()
    if choice == "timm":
        timm = pytest.importorskip("timm")
        expected = timm.create_model(network, num_classes=7)
    else:
        options = {"aux_logits": False, "init_weights": False} if network == "googlenet" else {}
        expected = torchvision.models.get_model(network, weights=None, num_classes=7, **options)
    expected.load_state_dict(
        dict(zip(expected.state_dict(), model.network.state_dict().values(), strict=True))
    )
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected.eval()(images))


def test_training_keeps_activations_that_timm_has_in_its_batch_norm() -> None:
    """The training copies normalise as timm's network itself does in training mode."""
    timm = pytest.importorskip("timm")
    model: Any = build("timm", (3, 64, 64), 7, network=TIMM)
    expected = timm.create_model(TIMM, num_classes=7)
    values = model.network.state_dict().values()
    expected.load_state_dict(dict(zip(expected.state_dict(), values, strict=True)))
    images = torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        logits = expected.train()(images)
        for copied in (for_sequential(model), for_batched(model)):
            for name, buffer in copied.named_buffers():
                if name.endswith("mask"):
                    buffer.resize_(4).fill_(1)
            torch.testing.assert_close(copied(images), logits, rtol=1e-3, atol=1e-4)


class NormAndReLU(nn.BatchNorm2d):
    """A batch norm with an activation of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize("copied", [for_batched, for_sequential])
def test_a_batch_norm_with_a_forward_pass_of_its_own_is_rejected(copied: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), NormAndReLU(4))
    with pytest.raises(ConfigError, match=r"'1' \(NormAndReLU\) changes BatchNorm.*\n.*that layer"):
        copied(model)


class ScaledDropout(nn.Dropout):
    """A dropout that does something else besides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("copied", [for_batched, for_sequential])
def test_a_dropout_with_a_forward_pass_of_its_own_is_rejected(copied: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), ScaledDropout(0.5))
    with pytest.raises(ConfigError, match=r"'1' \(ScaledDropout\) changes Dropout.*\n.*that layer"):
        copied(model)


@torch.no_grad()
def test_grey_images_are_repeated_and_scaled() -> None:
    model: Any = build("torchvision", (1, 28, 28), network=TORCHVISION, input_size=64).eval()
    grey = torch.rand(2, 1, 28, 28)
    coloured = nn.functional.interpolate(
        grey.repeat(1, 3, 1, 1), (64, 64), mode="bilinear", antialias=True
    )
    torch.testing.assert_close(model(grey), model.network(coloured))


def test_stochastic_depth_is_off() -> None:
    model = build("torchvision", CIFAR, network="efficientnet_b0").train()
    layers = [x for x in model.modules() if isinstance(x, torchvision.ops.StochasticDepth)]
    assert [layer.p for layer in layers] == [0.0] * 16


def test_stochastic_depth_of_timm_is_off() -> None:
    """This network has stochastic depth by default, which training would reject."""
    timm = pytest.importorskip("timm")
    model = build("timm", (3, 64, 64), network="fasternet_t1")
    layers = [x for x in model.modules() if isinstance(x, timm.layers.DropPath)]
    assert [layer.drop_prob for layer in layers] == [0.0] * 12
    reject_hidden_randomness(model, torch.randn(2, 3, 64, 64))


def test_weights_of_a_file_replace_all_but_the_classifier(tmp_path: Path) -> None:
    trained = torchvision.models.resnet18(num_classes=1000)
    file = tmp_path / "weights.pth"
    torch.save(trained.state_dict(), file)
    model: Any = build("torchvision", CIFAR, network="resnet18", weights=str(file))
    for name, value in model.network.state_dict().items():
        if not name.startswith("fc."):
            assert torch.equal(value, trained.state_dict()[name])
    assert model.network.fc.weight.shape == (10, 512)
    random: Any = build("torchvision", CIFAR, network="resnet18")
    assert torch.equal(model.network.fc.weight, random.network.fc.weight)


@pytest.mark.parametrize(
    ("choice", "network", "side", "auxiliary"),
    [
        ("torchvision", "googlenet", 32, "aux1."),
        pytest.param("torchvision", "inception_v3", 75, "AuxLogits.", marks=pytest.mark.slow),
        pytest.param("timm", "inception_v3", 75, "AuxLogits.", marks=pytest.mark.slow),
    ],
)
def test_auxiliary_classifiers_of_a_file_are_not_read(
    tmp_path: Path, choice: str, network: str, side: int, auxiliary: str
) -> None:
    """torchvision's own files have them, and fedsim's networks do not."""
    trained = torchvision.models.get_model(network, weights=None, init_weights=False).state_dict()
    assert any(name.startswith(auxiliary) for name in trained)
    file = tmp_path / "weights.pth"
    torch.save(trained, file)
    model: Any = build(choice, (3, side, side), network=network, weights=str(file))
    for name, value in model.network.state_dict().items():
        name_in_file = name.replace(".bn.0.", ".bn.")  # fedsim splits timm's layers of batch norm
        if not name.startswith("fc."):
            assert torch.equal(value, trained[name_in_file])


def test_a_file_with_other_weights_or_another_checksum_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    torch.save(torchvision.models.resnet34().state_dict(), file)
    values = {"network": "resnet18", "weights": str(file)}
    with pytest.raises(DataError, match=rf"model\.weights={file}: does not hold .* of resnet18"):
        build("torchvision", CIFAR, **values)
    with pytest.raises(DataError, match=rf"model\.sha256={'0' * 64}: .* has "):
        build("torchvision", CIFAR, sha256="0" * 64, **values)


@pytest.mark.parametrize(
    ("choice", "values", "rule"),
    [
        ("torchvision", {"network": "resnet_18"}, "model.network='resnet_18': must be a torchvi"),
        ("timm", {"network": "resnet_18"}, "model.network='resnet_18': must be a model of timm"),
        ("torchvision", {"network": "alexnet"}, "input_size=None: images of this size cannot pass"),
        ("torchvision", {"sha256": "0" * 64}, "sha256='000"),
        ("torchvision", {"sha256": "x"}, "model.sha256='x': must be null or 64"),
    ],
    ids=str,
)
def test_unfit_values_are_rejected(choice: str, values: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(rule)):
        build(choice, CIFAR, **values)


@pytest.mark.parametrize("network", [TORCHVISION, "regnet_y_400mf"])
def test_a_network_can_be_checked_without_data(network: str) -> None:
    """fedsim checks a config on torch's device meta, where no weights are made."""
    with torch.device("meta"):
        model = build("torchvision", CIFAR, network=network)
    copy.deepcopy(model)
