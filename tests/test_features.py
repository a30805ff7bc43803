"""Frozen networks as feature extractors, and the heads that are trained on their features.

A stand-in replaces timm. Networks of timm itself are tested if it is installed.
"""

import hashlib
import pickle
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from fedsim.core.errors import ConfigError, DataError
from fedsim.data import features
from fedsim.data.base import LoadedData, Samples
from fedsim.data.features import extract
from fedsim.models import backbone as backbones
from fedsim.models import heads
from fedsim.models import library as library_module
from fedsim.models.backbone import LibraryHead
from tests.dataset_toys import Hostile
from tests.test_models import CIFAR, build

TINY = "mnasnet0_5"
CPU = torch.device("cpu")


def images(channels: int = 3, side: int = 32) -> torch.Tensor:
    """Return six random images."""
    generator = torch.Generator().manual_seed(0)
    shape = (6, channels, side, side)
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8)


def image_set() -> LoadedData:
    """Return the six images as training set, and two of them as test set."""
    x = images()
    train = Samples(x, torch.arange(6))
    test = Samples(x[:2], torch.arange(2))
    return LoadedData(train, test, 6, (0.5,) * 3, (0.5,) * 3, "images")


def head(**values: Any) -> Any:
    """Build a head on a small random network of torchvision, for images of 32x32 pixels."""
    values = {"backbone": TINY, "weights": "random", "input_size": 32} | values
    return build("frozen_features", CIFAR, 6, **values)


def timm_head(**values: Any) -> Any:
    return head(**{"library": "timm", "backbone": "tiny"} | values)


def network(seed: int) -> nn.Module:
    """Return the network TINY, whose weights depend on a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: nn.Module = torchvision.models.get_model(TINY, weights=None)
    return model.eval()


def load_backbone(data_dir: Path, **values: Any) -> Any:
    return head(**values).load_backbone(data_dir).eval()


def extract_features(model: Any, folder: Path) -> LoadedData:
    return extract(image_set(), model, folder, folder / "cache", CPU)


def save(folder: Path, state: Any, suffix: str = "pth") -> Path:
    """Save weights to the file `w` with this suffix and return its path."""
    file = folder / f"w.{suffix}"
    if suffix == "safetensors":
        save_file(state, file)
    else:
        torch.save(state, file)
    return file


def normalised(
    x: torch.Tensor, size: int, mean: Sequence[float], std: Sequence[float]
) -> torch.Tensor:
    """Return images as a network expects them: scaled, and normalised for each channel."""
    scaled = F.interpolate(x.float() / 255, (size, size), mode="bilinear", antialias=True)
    means = torch.tensor(mean).view(3, 1, 1)
    deviations = torch.tensor(std).view(3, 1, 1)
    return (scaled - means) / deviations


# --- features ------------------------------------------------------------------------------------


@torch.no_grad()
def test_features_are_the_inputs_of_the_last_linear_layer(tmp_path: Path) -> None:
    whole = network(3)
    x = normalised(images(), 32, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    last_layer = whole.get_submodule(head().cut)
    outputs = last_layer(load_backbone(tmp_path, backbone_seed=3)(images()))
    torch.testing.assert_close(outputs, whole(x))


@torch.no_grad()
def test_grey_images_get_three_equal_channels(tmp_path: Path) -> None:
    backbone = load_backbone(tmp_path, input_size=64)
    grey = images(channels=1, side=28)
    assert backbone(grey).shape == (6, 1280)
    assert torch.equal(backbone(grey), backbone(grey.repeat(1, 3, 1, 1)))


def test_features_replace_the_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = extract_features(head(), tmp_path)
    assert "features of train images on cpu" in capsys.readouterr().err
    assert (data.mean, data.std, data.input_shape) == (None, None, (1280,))
    assert data.train.x.dtype == torch.float32
    monkeypatch.setattr(features, "BATCH_SIZE", 4)
    in_batches = extract_features(head(), tmp_path / "in batches")
    torch.testing.assert_close(in_batches.train.x, data.train.x)


def test_features_differ_by_backbone_and_size(tmp_path: Path) -> None:
    fingerprints = set()
    tensors = set()
    for values in ({}, {"backbone_seed": 1}, {"input_size": 40}, {"backbone": "mnasnet0_75"}):
        data = extract_features(head(**values), tmp_path)
        fingerprints.add(data.fingerprint)
        tensors.add(tuple(data.train.tensor.flatten().tolist()))
    assert len(fingerprints) == len(tensors) == 4


def test_features_are_computed_once_for_all_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = extract_features(head(), tmp_path)
    capsys.readouterr()
    monkeypatch.setattr(LibraryHead, "load_backbone", None)
    again = extract_features(head(hidden=5), tmp_path)
    assert capsys.readouterr() == ("", "")
    assert again.fingerprint == data.fingerprint
    assert torch.equal(again.train.tensor, data.train.tensor)
    assert torch.equal(again.test.tensor, data.test.tensor)


def test_features_are_computed_again_for_other_code_of_the_users_classes(tmp_path: Path) -> None:
    """After an edit such a data set may return other images with the same fingerprint."""
    data = image_set()
    model = head()
    fingerprints = []
    for code in (None, "a", "b"):
        fingerprints.append(extract(data, model, tmp_path, tmp_path, CPU, code).fingerprint)
    assert len(set(fingerprints)) == 3
    key = f"{data.fingerprint} {model.backbone_key()}"
    assert fingerprints[0] == hashlib.sha256(key.encode()).hexdigest()


def test_images_of_another_type_are_rejected(tmp_path: Path) -> None:
    samples = Samples(images() / 255, torch.arange(6))
    data = LoadedData(samples, samples, 6, None, None, "scaled")
    rule = r"needs images of type uint8; the data set has torch\.float32"
    with pytest.raises(DataError, match=rule):
        extract(data, head(), tmp_path, tmp_path, CPU)


NETWORKS = {"torchvision": TINY, "timm": "tiny"}


@pytest.fixture(params=NETWORKS)
def library(request: pytest.FixtureRequest, stand_in: None) -> dict[str, str]:
    """The values of a head on a network of each library."""
    return {"library": request.param, "backbone": NETWORKS[request.param]}


def test_random_weights_depend_on_the_backbone_seed_only(
    tmp_path: Path, library: dict[str, str]
) -> None:
    weights = []
    for backbone_seed, global_seed in ((5, 1), (5, 2), (6, 2)):
        torch.manual_seed(global_seed)
        state = torch.random.get_rng_state()
        backbone = load_backbone(tmp_path, **library, backbone_seed=backbone_seed)
        assert torch.equal(torch.random.get_rng_state(), state)
        weights.append(nn.utils.parameters_to_vector(backbone.parameters()))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_the_key_of_features_differs_by_weights_and_size(
    tmp_path: Path, library: dict[str, str]
) -> None:
    state = load_backbone(tmp_path, **library).network.state_dict()
    file = str(save(tmp_path, state))
    keys = set()
    for values in ({}, {"backbone_seed": 1}, {"input_size": 40}, {"weights": file}):
        keys.add(head(**library, **values).backbone_key())
    save(tmp_path, {name: tensor + 1 for name, tensor in state.items()})
    keys.add(head(**library, weights=file).backbone_key())
    assert len(keys) == 5


# --- weights of ImageNet -------------------------------------------------------------------------


@pytest.fixture
def imagenet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A server with the weights of network(5); the mock is called for each download.

    The name of the file has the first 8 digits of its checksum.
    """
    content = save(tmp_path, network(5).state_dict()).read_bytes()
    digits = hashlib.sha256(content).hexdigest()[:8]
    server = Mock(side_effect=lambda url, path, **_: Path(path).write_bytes(content), digits=digits)
    url = "http://localhost/{}-{}.pth"
    for module in (backbones, library_module):
        monkeypatch.setattr(module, "imagenet_url", lambda name: url.format(name, digits))
    monkeypatch.setattr(torch.hub, "download_url_to_file", server)
    return server


def test_imagenet_weights_are_fetched_once(tmp_path: Path, imagenet: Mock) -> None:
    expected = load_backbone(tmp_path, backbone_seed=5)(images())
    for _ in range(2):
        assert torch.equal(load_backbone(tmp_path, weights="imagenet")(images()), expected)
    imagenet.assert_called_once()
    assert imagenet.call_args.args[0] == f"http://localhost/{TINY}-{imagenet.digits}.pth"
    assert head(weights="imagenet").backbone_key() != head(backbone_seed=5).backbone_key()


def test_damaged_imagenet_weights_are_named(tmp_path: Path, imagenet: Mock) -> None:
    load_backbone(tmp_path, weights="imagenet")
    file = tmp_path / "weights" / f"{TINY}-{imagenet.digits}.pth"
    file.write_text("<html>try again later</html>")
    rule = rf"{file} is damaged: its SHA-256 does not begin with {imagenet.digits}"
    with pytest.raises(DataError, match=rule):
        load_backbone(tmp_path, weights="imagenet")


def test_without_network_missing_weights_are_named_with_their_folder(
    tmp_path: Path, imagenet: Mock
) -> None:
    imagenet.side_effect = OSError("no network")
    rule = rf"no mnasnet0_5-.*\.pth in {tmp_path / 'weights'}.*no network"
    with pytest.raises(DataError, match=rule):
        extract_features(head(weights="imagenet"), tmp_path)


# --- files of weights ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "wrapper"), [("pth", None), ("pth", "state_dict"), ("safetensors", None)]
)
def test_a_file_may_hold_weights_that_were_trained_on_other_classes(
    tmp_path: Path, suffix: str, wrapper: str | None
) -> None:
    state: Any = network(5).state_dict()
    state["classifier.1.weight"] = torch.zeros(3, 1280)
    state["classifier.1.bias"] = torch.zeros(3)
    if wrapper is not None:
        state = {wrapper: state, "epoch": 3}
    file = str(save(tmp_path, state, suffix))
    expected = load_backbone(tmp_path, backbone_seed=5)(images())
    assert torch.equal(load_backbone(tmp_path, weights=file)(images()), expected)


@pytest.mark.parametrize("fault", ["html", "truncated", "foreign weights", "a list"])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_damaged_or_foreign_file_is_rejected(
    tmp_path: Path, library: dict[str, str], fault: str, suffix: str
) -> None:
    file = save(tmp_path, network(5).state_dict(), suffix)
    if fault == "html":
        file.write_bytes(b"<html>not found</html>")
    elif fault == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    elif fault == "foreign weights":
        save(tmp_path, {"weight": torch.zeros(2)}, suffix)
    else:
        torch.save([torch.zeros(2)], file)
    rule = rf"model\.weights={file}: .*does not hold .*{library['backbone']}"
    with pytest.raises(DataError, match=rule):
        extract_features(head(**library, weights=str(file)), tmp_path)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    file = tmp_path / "w.pth"
    marker = tmp_path / "marker"
    file.write_bytes(pickle.dumps(Hostile(marker), protocol=2))
    with pytest.raises(DataError, match=rf"does not hold .*{TINY}"):
        extract_features(head(weights=str(file)), tmp_path)
    assert not marker.exists()
    pickle.loads(file.read_bytes())
    assert marker.exists(), "the file does no harm anyway"


def test_a_file_without_one_of_the_layers_is_rejected(tmp_path: Path) -> None:
    state = network(5).state_dict()
    del state["layers.0.weight"]
    rule = rf"does not hold the weights of {TINY} .*layers\.0\.weight"
    with pytest.raises(DataError, match=rule):
        load_backbone(tmp_path, weights=str(save(tmp_path, state)))


def test_an_absent_file_is_rejected(tmp_path: Path) -> None:
    rule = r"model\.weights=nowhere\.pth: no such file; give imagenet, random, or"
    with pytest.raises(DataError, match=rule):
        extract_features(head(weights="nowhere.pth"), tmp_path)


def test_the_checksum_of_a_file_is_compared_before_it_is_read(
    library: dict[str, str], tmp_path: Path
) -> None:
    states = {TINY: network(5), "tiny": TinyNet(1000)}
    file = save(tmp_path, states[library["backbone"]].state_dict())
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    extract_features(head(**library, weights=str(file), sha256=sha256), tmp_path)
    file.write_bytes(b"unreadable")
    rule = r"model\.sha256=.* has [0-9a-f]{64}; it is damaged or another file"
    with pytest.raises(DataError, match=rule):
        extract_features(head(**library, weights=str(file), sha256=sha256), tmp_path)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"library": None, "backbone": TINY, "sha256": "12"}, "sha256='12': must be null or 64"),
        (
            {"library": None, "backbone": TINY, "sha256": "0" * 64},
            "is for a file that model.weights names",
        ),
        (
            {"weights": "imagenet"},
            "weights='imagenet': is for library=torchvision; files of timm are not fetched",
        ),
        ({"library": "keras"}, "model.library='keras': must be one of torchvision, timm or null"),
        ({"backbone": "resnet19"}, "backbone='resnet19': must be a model of timm"),
    ],
)
def test_values_that_do_not_fit_the_library_are_rejected(values: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(rule)):
        timm_head(**values)


# --- timm ----------------------------------------------------------------------------------------

MEAN = (0.1, 0.2, 0.3)
STD = (0.5, 0.6, 0.7)


class TinyNet(nn.Module):
    """A network as timm makes them: a stem, a mean over pixels, and a classifier `head.fc`.

    `num_classes=0` omits the classifier.
    """

    pretrained_cfg: dict[str, Any] = {  # noqa: RUF012
        "classifier": "head.fc",
        "input_size": (3, 48, 48),
        "mean": MEAN,
        "std": STD,
    }

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 16)
        self.head = nn.Sequential()
        self.head.add_module("fc", nn.Linear(5, num_classes) if num_classes else nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.stem(x).mean((2, 3)))
        return output


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace timm by a module that has the network `tiny` only."""

    def create_model(name: str, *, pretrained: bool, num_classes: int) -> nn.Module:
        assert not pretrained
        return TinyNet(num_classes)

    timm = Mock(__version__="0", is_model="tiny".__eq__, create_model=create_model)
    monkeypatch.setitem(sys.modules, "timm", timm)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    rule = r"model\.library='timm': needs the package timm; .*extra 'timm'"
    with pytest.raises(ConfigError, match=rule):
        timm_head()


def test_a_missing_package_of_efficientnet_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "version", Mock(side_effect=PackageNotFoundError))
    model: Any = build("efficientnet_head", CIFAR)
    with pytest.raises(DataError, match="extra 'features'"):
        model.backbone_key()


@pytest.mark.usefixtures("stand_in")
@torch.no_grad()
def test_timms_features_are_the_inputs_of_the_classifier(tmp_path: Path) -> None:
    whole = TinyNet(1000)
    file = save(tmp_path, whole.state_dict())
    model = timm_head(weights=str(file), input_size=40)
    assert model.head.in_features == 5
    expected = whole.stem(normalised(images(), 40, MEAN, STD)).mean((2, 3))
    torch.testing.assert_close(extract_features(model, tmp_path).train.x, expected)


@pytest.mark.usefixtures("stand_in")
def test_a_size_that_a_network_of_timm_cannot_take_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TinyNet, "forward", lambda model, x: model.stem(x[..., :8, :8]))
    rule = r"input_size=32: images of this size cannot pass tiny .*\n.*48 fits"
    with pytest.raises(ConfigError, match=rule):
        timm_head()


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "efficientnet_lite0"])
@torch.no_grad()
def test_features_of_networks_of_timm(name: str, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    whole = timm.create_model(name, pretrained=False, num_classes=7).eval()
    config = whole.pretrained_cfg
    file = save(tmp_path, whole.state_dict(), "safetensors")
    model = timm_head(backbone=name, weights=str(file), input_size=64)
    classifier = whole.get_submodule(config["classifier"])
    assert model.head.in_features == classifier.in_features
    inputs: list[torch.Tensor] = []
    classifier.register_forward_pre_hook(lambda layer, args: inputs.append(args[0]))
    whole(normalised(images(), 64, config["mean"], config["std"]))
    backbone = model.load_backbone(tmp_path).eval()
    torch.testing.assert_close(backbone(images()), inputs[0].flatten(1))


# --- VGG16 and EfficientNet-Lite0 ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "shapes"),
    [
        ("one", {"6": (10, 4096)}),
        ("two", {"3": (4096, 4096), "6": (10, 4096)}),
    ],
)
def test_the_layers_of_the_head_are_those_of_vgg16(
    layers: str, shapes: dict[str, tuple[int, int]]
) -> None:
    """VGG16's last two layers map 4096 features to 4096 and to the classes, here 10."""
    model: Any = build("vgg16_head", CIFAR, weights="random", layers=layers)
    first = next(iter(shapes))
    assert (model.backbone, model.cut) == ("vgg16", f"classifier.{first}")
    for name, shape in shapes.items():
        assert model.classifier.get_submodule(name).weight.shape == shape
    linear = [layer for layer in model.classifier if isinstance(layer, nn.Linear)]
    assert len(linear) == len(shapes)


@torch.no_grad()
def test_efficientnets_features_are_the_inputs_of_its_last_layer(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    model: Any = build("efficientnet_head", CIFAR, input_size=64)
    backbone = model.load_backbone(tmp_path).eval()
    scaled = F.interpolate(images().float(), (64, 64), mode="bilinear", antialias=True)
    expected = backbone.network.extract_features((scaled - 127) / 128).mean((2, 3))
    torch.testing.assert_close(backbone(images()), expected)
    assert expected.shape == (6, model.classifier[-1].in_features)
    assert not any(parameter.requires_grad for parameter in backbone.network.parameters())
    larger: Any = build("efficientnet_head", CIFAR)
    assert model.backbone_key() != larger.backbone_key()
