"""Frozen networks as feature extractors, and the heads that are trained on their features.

Where timm is not installed, a stand-in with the same calls takes its place, and the tests on its own networks are
skipped.
"""

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

from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.plan import hash_config
from fedsim.core.errors import ConfigError, DataError
from fedsim.data import features
from fedsim.data.base import LoadedData, Samples
from fedsim.data.features import extract
from fedsim.models import backbone as backbones
from fedsim.models import heads
from fedsim.models.backbone import LibraryExtractor, TruncatedNetwork, measure
from tests.test_models import build

TINY = "mnasnet0_5"
CPU = torch.device("cpu")


def images(channels: int = 3, side: int = 32) -> LoadedData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (6, channels, side, side), generator=generator, dtype=torch.uint8)
    samples = Samples(x, torch.arange(6))
    return LoadedData(samples, Samples(x[:2], torch.arange(2)), 6, (0.5,) * channels, (0.5,) * channels, "images")


def head(**values: Any) -> Any:
    given = {"backbone": TINY, "weights": "random", "input_size": 32, **values}
    return build("frozen_features", (3, 32, 32), 6, **given)


def timm_head(**values: Any) -> Any:
    return head(**{"library": "timm", "backbone": "tiny", **values})


def extractor(folder: Path, weights: str = "random", seed: int = 0, size: int = 32) -> LibraryExtractor:
    return LibraryExtractor(TINY, measure(TINY, size, is_timm=False)[0], weights, seed, size, folder)


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        found: nn.Module = torchvision.models.get_model(TINY, weights=None)
    return found


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images went through a backbone, batch by batch; trials without values do not count."""
    seen: list[int] = []
    forward = TruncatedNetwork.forward

    def counting(self: TruncatedNetwork, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            seen.append(len(x))
        return forward(self, x)

    monkeypatch.setattr(TruncatedNetwork, "forward", counting)
    return seen


def run(model: Any, folder: Path) -> LoadedData:
    return extract(images(), model, folder, folder / "cache", CPU)


def saved(folder: Path, state: Any, suffix: str = "pth") -> Path:
    file = folder / f"w.{suffix}"
    save_file(state, file) if suffix == "safetensors" else torch.save(state, file)
    return file


@torch.no_grad()
def test_features_are_what_enters_the_last_linear_layer(tmp_path: Path) -> None:
    x = images().train.x
    path, width = measure(TINY, 32, is_timm=False)
    found = extractor(tmp_path, seed=3).load().eval()(x)
    assert found.shape == (6, width)
    whole = network(3).eval()
    mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
    last = whole.get_submodule(path)
    torch.testing.assert_close(F.linear(found, last.weight, last.bias), whole((x.float() / 255 - mean) / std))


def test_grey_and_small_images_are_repeated_and_enlarged(tmp_path: Path) -> None:
    backbone = extractor(tmp_path, size=64).load().eval()
    grey = images(1, 28).train.x
    found = backbone(grey)
    assert found.shape == (6, 1280)
    assert torch.equal(found, backbone(grey.repeat(1, 3, 1, 1)))


def test_features_are_computed_once_without_loading_the_backbone_again(
    tmp_path: Path, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(head(), tmp_path)
    assert sum(passes) == 8
    monkeypatch.setattr(features, "BATCH", 4)
    torch.testing.assert_close(run(head(), tmp_path / "in batches").train.x, first.train.x)
    assert (first.mean, first.std, first.input_shape, first.train.x.dtype) == (None, None, (1280,), torch.float32)
    monkeypatch.setattr(LibraryExtractor, "load", None)
    again = run(head(hidden=5), tmp_path)
    assert torch.equal(first.train.x, again.train.x)
    assert torch.equal(first.test.x, again.test.x)
    assert first.fingerprint == again.fingerprint
    assert len(list((tmp_path / "cache").glob("features-*.safetensors"))) == 1  # whatever the head


def test_another_backbone_has_features_of_its_own(tmp_path: Path, passes: list[int]) -> None:
    cases: list[dict[str, Any]] = [{}, {"backbone_seed": 1}, {"input_size": 40}, {"backbone": "mnasnet0_75"}]
    found = [run(head(**values), tmp_path) for values in cases]
    assert sum(passes) == 4 * 8
    assert len({data.fingerprint for data in found}) == 4
    assert not any(torch.equal(found[0].train.x, other.train.x) for other in found[1:])


def test_long_work_is_announced_with_an_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(head(), tmp_path / "quick")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(features, "ANNOUNCED_SECONDS", 0)
    run(head(), tmp_path / "slow")
    assert "features of 6 train images on cpu: about 0 min" in capsys.readouterr().err


def test_random_weights_depend_on_their_own_seed_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    a = extractor(tmp_path, seed=5).load().network.state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    b = extractor(tmp_path, seed=5).load().network.state_dict()
    assert all(torch.equal(a[n], b[n]) for n in a)
    c = extractor(tmp_path, seed=6).load().network.state_dict()
    assert not torch.equal(a["layers.0.weight"], c["layers.0.weight"])


def test_images_that_are_numbers_already_are_refused(tmp_path: Path) -> None:
    data = images()
    scaled = Samples(data.train.x / 255, data.train.y)
    with pytest.raises(DataError, match=r"needs images of type uint8; the data set has torch\.float32"):
        extract(LoadedData(scaled, scaled, 6, None, None, "scaled"), head(), tmp_path, tmp_path, CPU)


# --- files of weights ----------------------------------------------------------------------------------------------


def imagenet_file(folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> Path:
    """A stand-in for torchvision's file, named by its checksum as theirs are."""
    torch.save(network(seed).state_dict(), folder / "w.pth")
    digits = hashlib.sha256((folder / "w.pth").read_bytes()).hexdigest()[:8]
    monkeypatch.setattr(backbones, "_url", lambda name: f"http://localhost/{name}-{digits}.pth")
    return (folder / "w.pth").rename(folder / f"{TINY}-{digits}.pth")


def test_imagenet_weights_are_found_on_disk_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = imagenet_file(tmp_path, monkeypatch, 5)
    (tmp_path / "weights").mkdir()
    file = source.rename(tmp_path / "weights" / source.name)
    x = images().train.x
    seeded = extractor(tmp_path, seed=5)
    assert torch.equal(extractor(tmp_path, "imagenet").load().eval()(x), seeded.load().eval()(x))
    assert extractor(tmp_path, "imagenet").fingerprint != seeded.fingerprint
    file.write_text("<html>try again later</html>")
    digits = file.stem[-8:]
    with pytest.raises(
        DataError, match=rf"{re.escape(str(file))} is damaged: its SHA-256 does not begin with {digits}"
    ):
        extractor(tmp_path, "imagenet").load()


def test_imagenet_weights_are_fetched_once_or_named_with_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = imagenet_file(tmp_path, monkeypatch, 5)
    fetched: list[str] = []

    def fetch(url: str, path: str, **_: Any) -> None:
        fetched.append(url)
        Path(path).write_bytes(source.read_bytes())

    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    for _ in range(2):
        extractor(tmp_path / "data", "imagenet").load()
    assert fetched == [f"http://localhost/{source.name}"]

    def offline(*_: Any, **__: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    folder = re.escape(str(tmp_path / "weights"))
    with pytest.raises(DataError, match=rf"model\.weights=imagenet: .*mnasnet0_5-.*\.pth in {folder}.*no network"):
        run(head(weights="imagenet"), tmp_path)


@pytest.mark.parametrize(("suffix", "wrapper"), [("pth", None), ("pth", "state_dict"), ("safetensors", None)])
def test_weights_from_a_file_that_was_trained_on_other_classes(
    tmp_path: Path, suffix: str, wrapper: str | None
) -> None:
    def state(seed: int) -> Any:
        other = {"classifier.1.weight": torch.zeros(3, 1280), "classifier.1.bias": torch.zeros(3)}
        whole = network(seed).state_dict() | other
        return whole if wrapper is None else {wrapper: whole, "epoch": 3}

    file = saved(tmp_path, state(5), suffix)
    given, seeded = extractor(tmp_path, str(file)), extractor(tmp_path, seed=5)
    x = images().train.x
    assert torch.equal(given.load().eval()(x), seeded.load().eval()(x))
    before = given.fingerprint
    saved(tmp_path, state(6), suffix)
    assert len({before, given.fingerprint, seeded.fingerprint}) == 3


def test_a_file_without_a_layer_before_the_cut_or_that_is_not_there_is_refused(tmp_path: Path) -> None:
    state = network(5).state_dict()
    state.pop("layers.0.weight")
    with pytest.raises(DataError, match=rf"does not hold the weights of {TINY} .*layers\.0\.weight"):
        extractor(tmp_path, str(saved(tmp_path, state))).load()
    with pytest.raises(DataError, match=r"model\.weights=nowhere\.pth: no such file; give imagenet, random, or"):
        run(head(weights="nowhere.pth"), tmp_path)


class Hostile:
    """Unpickling it plants the file `marker`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("library", ["torchvision", "timm"])
@pytest.mark.parametrize("kind", ["html.pth", "html.safetensors", "truncated.pth", "other.safetensors", "list.pth"])
def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path, kind: str, library: str) -> None:
    what, suffix = kind.split(".")
    state = network(5).state_dict() if what == "truncated" else {"weight": torch.zeros(2)}
    file = saved(tmp_path, [state] if what == "list" else state, suffix)
    if what == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    elif what == "html":
        file.write_text("<html>not found</html>")
    name = {"torchvision": TINY, "timm": "tiny"}[library]
    with pytest.raises(DataError, match=rf"model\.weights={re.escape(str(file))}: .*does not hold .*{name}"):
        run(head(library=library, backbone=name, weights=str(file)), tmp_path)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    file, marker = tmp_path / "w.pth", tmp_path / "marker"
    file.write_bytes(pickle.dumps(Hostile(marker), protocol=2))
    with pytest.raises(DataError, match=rf"does not hold .*{TINY}"):
        run(head(weights=str(file)), tmp_path)
    assert not marker.exists()
    pickle.loads(file.read_bytes())
    assert marker.exists(), "the file would have done harm"


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("library", "backbone"), [(None, TINY), ("timm", "tiny")])
def test_the_checksum_of_a_file_is_compared_before_it_is_read(
    library: str | None, backbone: str, tmp_path: Path
) -> None:
    file = saved(tmp_path, network(5).state_dict() if library is None else TinyNet(1000).state_dict())
    values = {"library": library, "backbone": backbone, "weights": str(file)}
    run(head(**values, sha256=hashlib.sha256(file.read_bytes()).hexdigest()), tmp_path)
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(DataError, match=r"model\.sha256=.* has [0-9a-f]{64}; it is damaged or another file"):
        run(head(**values, sha256="0" * 64), tmp_path)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"library": "torchvision", "backbone": TINY, "sha256": "12"}, "sha256='12': must be null or 64"),
        ({"library": "torchvision", "backbone": TINY, "sha256": "0" * 64}, "is for a file that model.weights names"),
        ({"weights": "imagenet"}, "weights='imagenet': is for library=torchvision; files of timm are not fetched"),
        ({"library": "keras"}, "model.library='keras': must be one of torchvision, timm or null"),
        ({"backbone": "resnet19"}, "backbone='resnet19': must be a model of timm"),
    ],
)
@pytest.mark.usefixtures("stand_in")
def test_mistakes_in_the_keys(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        timm_head(**values)
    assert text in str(caught.value)


def test_folders_of_earlier_configs_keep_their_names() -> None:
    with search_path():
        (job,) = compose_jobs(["model=frozen_features"], multirun=False)
    earlier = {k: v for k, v in job.config["model"].items() if k not in ("library", "sha256")}
    assert hash_config({**job.config, "model": earlier}) == hash_config(job.config)
    assert hash_config({**job.config, "model": {**earlier, "library": "timm"}}) != hash_config(job.config)


# --- timm ----------------------------------------------------------------------------------------------------------


class TinyNet(nn.Module):
    """A network as timm makes them: a stem, a mean, and a classifier `head.fc`, which `num_classes=0` leaves out."""

    pretrained_cfg: dict[str, Any] = {  # noqa: RUF012
        "classifier": "head.fc",
        "mean": (0.1, 0.2, 0.3),
        "std": (0.5, 0.6, 0.7),
        "input_size": (3, 48, 48),
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
    def create_model(name: str, *, pretrained: bool, num_classes: int) -> nn.Module:
        assert not pretrained
        return TinyNet(num_classes)

    module = SimpleNamespace(__version__="0", is_model=lambda name: name == "tiny", create_model=create_model)
    monkeypatch.setitem(sys.modules, "timm", module)  # type: ignore[arg-type]


def test_timm_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"model\.library='timm': needs the package timm; .*extra 'timm'\n.*torchvision"
    ):
        timm_head()


@pytest.mark.usefixtures("stand_in")
@torch.no_grad()
def test_features_of_timm_are_what_enters_the_classifier(tmp_path: Path) -> None:
    file = saved(tmp_path, TinyNet(1000).state_dict())
    model = timm_head(weights=str(file), input_size=40)
    assert model.head.in_features == 5
    x = images().train.x
    data = run(model, tmp_path)
    whole = TinyNet(1000)
    whole.load_state_dict(torch.load(file, weights_only=True))
    scaled = nn.functional.interpolate(x.float() / 255, (40, 40), mode="bilinear", antialias=True)
    mean, std = (torch.tensor(whole.pretrained_cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(data.train.x, whole.stem((scaled - mean) / std).mean((2, 3)))


@pytest.mark.usefixtures("stand_in")
def test_timms_features_are_known_by_network_weights_and_size(tmp_path: Path) -> None:
    files = [tmp_path / str(n) for n in range(2)]
    for file in files:
        torch.save(TinyNet(10).state_dict(), file)
    cases: list[dict[str, Any]] = [{}, {"backbone_seed": 1}, {"input_size": 40}]
    made = [timm_head(**values).extractor(tmp_path) for values in [*cases, *({"weights": str(file)} for file in files)]]
    assert len({one.fingerprint for one in made}) == 5
    before = torch.random.get_rng_state()
    first, again, other = (one.load().network.stem.weight for one in (made[0], made[0], made[1]))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.usefixtures("stand_in")
def test_images_that_cannot_pass_are_told_the_networks_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinyNet, "forward", lambda self, x: self.stem(x[..., :8, :8]))
    with pytest.raises(ConfigError, match=r"input_size=32: images of this size cannot pass tiny .*\n.*48 fits"):
        timm_head()


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "efficientnet_lite0"])
@torch.no_grad()
def test_networks_of_timm(name: str, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    own = timm.create_model(name, pretrained=False, num_classes=7).eval()
    model = timm_head(backbone=name, weights=str(saved(tmp_path, own.state_dict(), "safetensors")), input_size=64)
    x = images().test.x
    backbone = model.extractor(tmp_path).load().eval()
    classifier = own.get_submodule(own.pretrained_cfg["classifier"])
    assert model.head.in_features == classifier.in_features
    entered: list[Sequence[torch.Tensor]] = []
    classifier.register_forward_pre_hook(lambda layer, inputs: entered.append(inputs))
    scaled = nn.functional.interpolate(x.float() / 255, (64, 64), mode="bilinear", antialias=True)
    mean, std = (torch.tensor(own.pretrained_cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    own((scaled - mean) / std)
    torch.testing.assert_close(backbone(x), entered[0][0].flatten(1))


# --- VGG16 and EfficientNet-Lite0 ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "names"), [("one", ["6"]), ("two", ["3", "6"])])
def test_the_heads_layers_are_those_of_vgg16(layers: str, names: list[str]) -> None:
    with torch.device("meta"):  # 138 million parameters, which take seconds and half a gigabyte
        whole = torchvision.models.get_model("vgg16").classifier
    own = build("vgg16_head", (3, 32, 32), weights="random", layers=layers).classifier
    assert [name for name, layer in own.named_children() if isinstance(layer, nn.Linear)] == names
    assert all(own.get_submodule(name).in_features == whole.get_submodule(name).in_features for name in names)
    assert all(own.get_submodule(n).out_features == whole.get_submodule(n).out_features for n in names[:-1])


@torch.no_grad()
def test_efficientnet_lite_gives_its_head_what_its_own_last_layer_gets(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    x = images().test.x
    own = build("efficientnet_head", (3, 32, 32), input_size=64)
    found = own.extractor(tmp_path).load().eval()
    network = found.network
    scaled = F.interpolate(x.float(), (64, 64), mode="bilinear", antialias=True)
    deep = network.extract_features((scaled - 127) / 128).mean((2, 3))
    torch.testing.assert_close(found(x), deep)
    assert found(x).shape == (2, own.classifier[-1].in_features)
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert (
        own.extractor(tmp_path).fingerprint != build("efficientnet_head", (3, 32, 32)).extractor(tmp_path).fingerprint
    )


def test_a_missing_package_of_features_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(heads, "version", absent)
    with pytest.raises(DataError, match="extra 'features'"):
        build("efficientnet_head", (3, 32, 32)).extractor(tmp_path).fingerprint  # noqa: B018
