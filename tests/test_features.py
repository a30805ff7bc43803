"""Frozen networks as feature extractors, and the heads trained on them. A stand-in has the calls of
timm, whose own networks are tested where it is installed."""

import hashlib
import pickle
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from fedsim.models.backbone import LibraryHead
from tests.test_models import build

TINY = "mnasnet0_5"
CPU = torch.device("cpu")


def images(channels: int = 3, side: int = 32) -> LoadedData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (6, channels, side, side), generator=generator, dtype=torch.uint8)
    samples = Samples(x, torch.arange(6))
    return LoadedData(
        samples, Samples(x[:2], torch.arange(2)), 6, (0.5,) * channels, (0.5,) * channels, "images"
    )


def head(**values: Any) -> Any:
    given = {"backbone": TINY, "weights": "random", "input_size": 32, **values}
    return build("frozen_features", (3, 32, 32), 6, **given)


def timm_head(**values: Any) -> Any:
    return head(**{"library": "timm", "backbone": "tiny", **values})


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        found: nn.Module = torchvision.models.get_model(TINY, weights=None)
    return found


def backbone(folder: Path, **values: Any) -> Any:
    return head(**values).load_backbone(folder).eval()


def run(model: Any, folder: Path) -> LoadedData:
    return extract(images(), model, folder, folder / "cache", CPU)


def saved(folder: Path, state: Any, suffix: str = "pth") -> Path:
    file = folder / f"w.{suffix}"
    save_file(state, file) if suffix == "safetensors" else torch.save(state, file)
    return file


def normalised(
    x: torch.Tensor, size: int, mean: Sequence[float], std: Sequence[float]
) -> torch.Tensor:
    scaled = F.interpolate(x.float() / 255, (size, size), mode="bilinear", antialias=True)
    means, deviations = (torch.tensor(values).view(1, 3, 1, 1) for values in (mean, std))
    return (scaled - means) / deviations


@torch.no_grad()
def test_features_are_what_enters_the_last_linear_layer(tmp_path: Path) -> None:
    x, model, whole = images().train.x, head(backbone_seed=3), network(3).eval()
    last = whole.get_submodule(model.cut)
    found = F.linear(model.load_backbone(tmp_path).eval()(x), last.weight, last.bias)
    torch.testing.assert_close(
        found, whole(normalised(x, 32, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    )
    made, grey = backbone(tmp_path, input_size=64), images(1, 28).train.x
    assert made(grey).shape == (6, model.head.in_features)
    assert torch.equal(made(grey), made(grey.repeat(1, 3, 1, 1)))


def test_features_are_computed_once_for_a_backbone_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(head(), tmp_path)
    assert "features of train images on cpu" in capsys.readouterr().err
    assert (first.mean, first.std, first.input_shape, first.train.x.dtype) == (
        None,
        None,
        (1280,),
        torch.float32,
    )
    monkeypatch.setattr(features, "BATCH_SIZE", 4)
    torch.testing.assert_close(run(head(), tmp_path / "in batches").train.x, first.train.x)
    cases: list[dict[str, Any]] = [
        {"backbone_seed": 1},
        {"input_size": 40},
        {"backbone": "mnasnet0_75"},
    ]
    others = [run(head(**values), tmp_path) for values in cases]
    assert len({data.fingerprint for data in (first, *others)}) == 4
    assert not any(torch.equal(first.train.x, other.train.x) for other in others)
    monkeypatch.setattr(LibraryHead, "load_backbone", None)
    again = run(head(hidden=5), tmp_path)  # whatever the head
    assert (again.fingerprint, capsys.readouterr().out) == (first.fingerprint, "")
    assert torch.equal(first.train.x, again.train.x)
    assert torch.equal(first.test.x, again.test.x)
    scaled = Samples(images().train.x / 255, images().train.y)
    with pytest.raises(
        DataError, match=r"needs images of type uint8; the data set has torch\.float32"
    ):
        extract(
            LoadedData(scaled, scaled, 6, None, None, "scaled"), head(), tmp_path, tmp_path, CPU
        )


def test_random_weights_depend_on_their_own_seed_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    a = backbone(tmp_path, backbone_seed=5).network.state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    b, c = (backbone(tmp_path, backbone_seed=seed).network.state_dict() for seed in (5, 6))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["layers.0.weight"], c["layers.0.weight"])


# --- files of weights ----------------------------------------------------------------------------------------------


def test_imagenet_weights_are_fetched_once_and_checked_or_named_with_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = saved(tmp_path, network(5).state_dict()).read_bytes()
    digits = hashlib.sha256(content).hexdigest()[:8]
    fetched: list[str] = []

    def fetch(url: str, path: str, **_: Any) -> None:
        fetched.append(url)
        Path(path).write_bytes(content)

    def offline(*_: Any, **__: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr(backbones, "_url", lambda name: f"http://localhost/{name}-{digits}.pth")
    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    x = images().train.x
    found = [backbone(tmp_path, weights="imagenet")(x) for _ in range(2)]
    assert fetched == [f"http://localhost/{TINY}-{digits}.pth"]
    assert all(torch.equal(one, backbone(tmp_path, backbone_seed=5)(x)) for one in found)
    assert head(weights="imagenet").backbone_key() != head(backbone_seed=5).backbone_key()
    file = tmp_path / "weights" / f"{TINY}-{digits}.pth"
    file.write_text("<html>try again later</html>")
    with pytest.raises(
        DataError, match=rf"{file} is damaged: its SHA-256 does not begin with {digits}"
    ):
        backbone(tmp_path, weights="imagenet")
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(
        DataError, match=rf"no mnasnet0_5-.*\.pth in {tmp_path / 'new' / 'weights'}.*no network"
    ):
        run(head(weights="imagenet"), tmp_path / "new")


@pytest.mark.parametrize(
    ("suffix", "wrapper"), [("pth", None), ("pth", "state_dict"), ("safetensors", None)]
)
def test_weights_from_a_file_that_was_trained_on_other_classes(
    tmp_path: Path, suffix: str, wrapper: str | None
) -> None:
    def state(seed: int) -> Any:
        other = {"classifier.1.weight": torch.zeros(3, 1280), "classifier.1.bias": torch.zeros(3)}
        whole = network(seed).state_dict() | other
        return whole if wrapper is None else {wrapper: whole, "epoch": 3}

    file = saved(tmp_path, state(5), suffix)
    given, seeded = head(weights=str(file)), head(backbone_seed=5)
    x = images().train.x
    assert torch.equal(*(one.load_backbone(tmp_path).eval()(x) for one in (given, seeded)))
    before = given.backbone_key()
    saved(tmp_path, state(6), suffix)
    assert len({before, given.backbone_key(), seeded.backbone_key()}) == 3


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("library", "name"), [("torchvision", TINY), ("timm", "tiny")])
def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path, library: str, name: str) -> None:
    weight, html = {"weight": torch.zeros(2)}, b"<html>not found</html>"
    truncated = saved(tmp_path, network(5).state_dict()).read_bytes()[:-1000]
    cases: list[tuple[str, Any]] = [("pth", html), ("safetensors", html), ("pth", truncated)]
    for suffix, content in [*cases, ("safetensors", weight), ("pth", [weight])]:
        file = tmp_path / f"w.{suffix}"
        file.write_bytes(content) if isinstance(content, bytes) else saved(
            tmp_path, content, suffix
        )
        with pytest.raises(DataError, match=rf"model\.weights={file}: .*does not hold .*{name}"):
            run(head(library=library, backbone=name, weights=str(file)), tmp_path)


class Hostile:
    """Unpickling it plants the file `marker`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_nothing_in_a_file_is_run_and_one_without_a_layer_or_that_is_not_there_is_refused(
    tmp_path: Path,
) -> None:
    file, marker = tmp_path / "w.pth", tmp_path / "marker"
    file.write_bytes(pickle.dumps(Hostile(marker), protocol=2))
    with pytest.raises(DataError, match=rf"does not hold .*{TINY}"):
        run(head(weights=str(file)), tmp_path)
    assert not marker.exists()
    pickle.loads(file.read_bytes())
    assert marker.exists(), "the file would have done harm"
    state = network(5).state_dict()
    state.pop("layers.0.weight")
    with pytest.raises(
        DataError, match=rf"does not hold the weights of {TINY} .*layers\.0\.weight"
    ):
        backbone(tmp_path, weights=str(saved(tmp_path, state)))
    with pytest.raises(
        DataError, match=r"model\.weights=nowhere\.pth: no such file; give imagenet, random, or"
    ):
        run(head(weights="nowhere.pth"), tmp_path)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("library", "name"), [(None, TINY), ("timm", "tiny")])
def test_the_checksum_of_a_file_is_compared_before_it_is_read(
    library: str | None, name: str, tmp_path: Path
) -> None:
    file = saved(
        tmp_path, network(5).state_dict() if library is None else TinyNet(1000).state_dict()
    )
    values = {"library": library, "backbone": name, "weights": str(file)}
    run(head(**values, sha256=hashlib.sha256(file.read_bytes()).hexdigest()), tmp_path)
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(
        DataError, match=r"model\.sha256=.* has [0-9a-f]{64}; it is damaged or another file"
    ):
        run(head(**values, sha256="0" * 64), tmp_path)


@pytest.mark.usefixtures("stand_in")
def test_mistakes_in_the_keys() -> None:
    ours: dict[str, Any] = {"library": "torchvision", "backbone": TINY}
    for text, values in {
        "sha256='12': must be null or 64": {**ours, "sha256": "12"},
        "is for a file that model.weights names": {**ours, "sha256": "0" * 64},
        "weights='imagenet': is for library=torchvision; files of timm are not fetched": {
            "weights": "imagenet"
        },
        "model.library='keras': must be one of torchvision, timm or null": {"library": "keras"},
        "backbone='resnet19': must be a model of timm": {"backbone": "resnet19"},
    }.items():
        with pytest.raises(ConfigError, match=re.escape(text)):
            timm_head(**values)


# --- timm ----------------------------------------------------------------------------------------------------------


class TinyNet(nn.Module):
    """A network as timm makes them: a stem, a mean, and a classifier `head.fc`, which
    `num_classes=0` leaves out."""

    pretrained_cfg: dict[str, Any] = {"classifier": "head.fc", "input_size": (3, 48, 48)}  # noqa: RUF012
    pretrained_cfg |= {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)}

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
    def create_model(name: str, *, pretrained: bool, num_classes: int) -> nn.Module:
        assert not pretrained
        return TinyNet(num_classes)

    module = SimpleNamespace(
        __version__="0", is_model=lambda name: name == "tiny", create_model=create_model
    )
    monkeypatch.setitem(sys.modules, "timm", module)  # type: ignore[arg-type]


def test_a_package_is_asked_for_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        ConfigError, match=r"model\.library='timm': needs the package timm; .*extra 'timm'"
    ):
        timm_head()
    monkeypatch.setattr(heads, "version", absent)
    with pytest.raises(DataError, match="extra 'features'"):
        build("efficientnet_head", (3, 32, 32)).backbone_key()  # type: ignore[operator]


@pytest.mark.usefixtures("stand_in")
@torch.no_grad()
def test_timms_features_enter_the_classifier_of_the_whole_network(tmp_path: Path) -> None:
    file, whole = saved(tmp_path, TinyNet(1000).state_dict()), TinyNet(1000)
    model = timm_head(weights=str(file), input_size=40)
    assert model.head.in_features == 5
    whole.load_state_dict(torch.load(file, weights_only=True))
    scaled = normalised(
        images().train.x, 40, whole.pretrained_cfg["mean"], whole.pretrained_cfg["std"]
    )
    torch.testing.assert_close(run(model, tmp_path).train.x, whole.stem(scaled).mean((2, 3)))


@pytest.mark.usefixtures("stand_in")
def test_timms_features_are_known_by_network_weights_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(saved(tmp_path, TinyNet(10).state_dict()))
    cases: list[dict[str, Any]] = [{}, {"backbone_seed": 1}, {"input_size": 40}, {"weights": file}]
    made = [timm_head(**values) for values in cases]
    keys = {one.backbone_key() for one in made}
    saved(tmp_path, TinyNet(10).state_dict())
    assert len({*keys, made[3].backbone_key()}) == 5
    before = torch.random.get_rng_state()
    first, again, other = (
        one.load_backbone(tmp_path).network.stem.weight for one in (made[0], made[0], made[1])
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    monkeypatch.setattr(TinyNet, "forward", lambda self, x: self.stem(x[..., :8, :8]))
    with pytest.raises(
        ConfigError, match=r"input_size=32: images of this size cannot pass tiny .*\n.*48 fits"
    ):
        timm_head()


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "efficientnet_lite0"])
@torch.no_grad()
def test_networks_of_timm(name: str, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    own = timm.create_model(name, pretrained=False, num_classes=7).eval()
    model = timm_head(
        backbone=name, weights=str(saved(tmp_path, own.state_dict(), "safetensors")), input_size=64
    )
    x = images().test.x
    classifier = own.get_submodule(own.pretrained_cfg["classifier"])
    assert model.head.in_features == classifier.in_features
    entered: list[Sequence[torch.Tensor]] = []
    classifier.register_forward_pre_hook(lambda layer, inputs: entered.append(inputs))
    own(normalised(x, 64, own.pretrained_cfg["mean"], own.pretrained_cfg["std"]))
    torch.testing.assert_close(model.load_backbone(tmp_path).eval()(x), entered[0][0].flatten(1))


# --- VGG16 and EfficientNet-Lite0 ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "names"), [("one", ["6"]), ("two", ["3", "6"])])
def test_the_heads_layers_are_those_of_vgg16(layers: str, names: list[str]) -> None:
    with torch.device("meta"):  # 138 million parameters, which take seconds and half a gigabyte
        whole = torchvision.models.get_model("vgg16").classifier
    model: Any = build("vgg16_head", (3, 32, 32), weights="random", layers=layers)
    own = model.classifier
    assert (model.backbone, model.cut) == ("vgg16", f"classifier.{names[0]}")
    assert [name for name, layer in own.named_children() if isinstance(layer, nn.Linear)] == names
    assert all(
        own.get_submodule(name).in_features == whole.get_submodule(name).in_features
        for name in names
    )
    assert all(
        own.get_submodule(n).out_features == whole.get_submodule(n).out_features for n in names[:-1]
    )


@torch.no_grad()
def test_efficientnet_lite_gives_its_head_what_its_own_last_layer_gets(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    x = images().test.x
    own: Any = build("efficientnet_head", (3, 32, 32), input_size=64)
    found = own.load_backbone(tmp_path).eval()
    scaled = F.interpolate(x.float(), (64, 64), mode="bilinear", antialias=True)
    deep = found.network.extract_features((scaled - 127) / 128).mean((2, 3))
    torch.testing.assert_close(found(x), deep)
    assert found(x).shape == (2, own.classifier[-1].in_features)
    assert not any(parameter.requires_grad for parameter in found.network.parameters())
    larger: Any = build("efficientnet_head", (3, 32, 32))
    assert own.backbone_key() != larger.backbone_key()


def test_features_are_computed_anew_for_other_code_of_the_users_classes(tmp_path: Path) -> None:
    """Whose data set may say the same fingerprint after an edit; without such classes the key is as
    it was."""
    data, model = images(), head()
    known = [
        extract(data, model, tmp_path, tmp_path / "cache", CPU, code).fingerprint
        for code in (None, "a", "b")
    ]
    assert len({*known}) == 3
    assert (
        known[0]
        == hashlib.sha256(f"{data.fingerprint} {model.backbone_key()}".encode()).hexdigest()
    )
