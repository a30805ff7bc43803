import hashlib
import pickle
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedsim.core.errors import DataError
from fedsim.data import features
from fedsim.data.base import LoadedData, Samples
from fedsim.data.features import TrainsOnFeatures, extract
from fedsim.models import backbone as weights_module
from fedsim.models import heads as efficientnet_head
from fedsim.models.backbone import TorchvisionExtractor, TruncatedNetwork, last_linear
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


def extractor(folder: Path, weights: str = "random", seed: int = 0, size: int = 32) -> TorchvisionExtractor:
    return TorchvisionExtractor(TINY, last_linear(TINY, size)[0], weights, seed, size, folder)


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


@torch.no_grad()
def test_features_are_what_enters_the_last_linear_layer(tmp_path: Path) -> None:
    x = images().train.x
    path, width = last_linear(TINY, 32)
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
    assert (first.mean, first.std, first.input_shape, first.train.x.dtype) == (None, None, (1280,), torch.float32)
    monkeypatch.setattr(TorchvisionExtractor, "load", None)
    again = run(head(hidden=5), tmp_path)
    assert torch.equal(first.train.x, again.train.x)
    assert torch.equal(first.test.x, again.test.x)
    assert first.fingerprint == again.fingerprint
    assert len(list((tmp_path / "cache").glob("features-*.safetensors"))) == 1  # whatever the head


@pytest.mark.parametrize("values", [{"backbone_seed": 1}, {"input_size": 40}, {"backbone": "mnasnet0_75"}])
def test_another_backbone_has_features_of_its_own(tmp_path: Path, passes: list[int], values: dict[str, Any]) -> None:
    first = run(head(), tmp_path)
    other = run(head(**values), tmp_path)
    assert sum(passes) == 16
    assert first.fingerprint != other.fingerprint
    assert not torch.equal(first.train.x, other.train.x)


def test_a_damaged_cache_is_computed_again(tmp_path: Path, passes: list[int]) -> None:
    first = run(head(), tmp_path)
    (file,) = (tmp_path / "cache").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert torch.equal(run(head(), tmp_path).train.x, first.train.x)
    assert sum(passes) == 16


def test_batches_do_not_show_in_the_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(head(), tmp_path / "a")
    monkeypatch.setattr(features, "BATCH", 4)
    torch.testing.assert_close(run(head(), tmp_path / "b").train.x, whole.train.x)


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


def test_a_head_is_all_that_is_trained() -> None:
    model = head(hidden=5)
    assert isinstance(model, TrainsOnFeatures)
    assert sum(p.numel() for p in model.parameters()) == 1280 * 5 + 5 + 5 * 6 + 6


@pytest.mark.parametrize(("choice", "width"), [("frozen_features", 512), ("vgg16_head", 4096)])
def test_gradients_of_stacked_heads_equal_those_of_each(choice: str, width: int) -> None:
    models = [build(choice, (3, 32, 32), 3, backbone_seed=s).double() for s in (0, 1)]
    with torch.no_grad():
        for p in models[1].parameters():
            p.mul_(1.5)
    states = [dict(m.named_parameters()) for m in models]
    stack = {n: torch.stack([s[n].detach() for s in states]) for n in states[0]}
    x = torch.randn(2, 4, width, dtype=torch.float64)

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(models[0], params, (x,)).square().mean()

    together = vmap(grad(loss))(stack, x)
    for row, model in enumerate(models):
        alone = torch.autograd.grad(model(x[row]).square().mean(), list(model.parameters()))
        for name, expected in zip(states[0], alone, strict=True):
            torch.testing.assert_close(together[name][row], expected, rtol=1e-8, atol=1e-10)


def imagenet_file(folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> Path:
    """A stand-in for torchvision's file, named by its checksum as theirs are."""
    torch.save(network(seed).state_dict(), folder / "w.pth")
    digits = hashlib.sha256((folder / "w.pth").read_bytes()).hexdigest()[:8]
    monkeypatch.setattr(weights_module, "_url", lambda name: f"http://localhost/{name}-{digits}.pth")
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
    with pytest.raises(DataError, match=rf"{re.escape(str(file))} is damaged: expected SHA-256 {digits}.*found"):
        extractor(tmp_path, "imagenet").load()


def test_imagenet_weights_are_fetched_once_where_there_is_a_network(
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


def test_imagenet_weights_without_a_network_are_named_with_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    folder = re.escape(str(tmp_path / "weights"))
    with pytest.raises(DataError, match=rf"model\.weights=imagenet: .*mnasnet0\.5_.*\.pth in {folder}.*no network"):
        run(head(weights="imagenet"), tmp_path)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_weights_from_a_file(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"w.{suffix}"
    state = network(5).state_dict()
    torch.save(state, file) if suffix == "pth" else save_file(state, file)
    given, seeded = extractor(tmp_path, str(file)), extractor(tmp_path, seed=5)
    x = images().train.x
    assert torch.equal(given.load().eval()(x), seeded.load().eval()(x))
    before = given.fingerprint
    torch.save(network(6).state_dict(), file)
    assert len({before, given.fingerprint, seeded.fingerprint}) == 3


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model\.weights=nowhere\.pth: no such file; give imagenet, random, or"):
        run(head(weights="nowhere.pth"), tmp_path)


class Hostile:
    """Unpickling it plants the file `marker`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("kind", ["html", "truncated", "other", "list", "hostile"])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_damaged_foreign_or_hostile_file_is_refused(tmp_path: Path, kind: str, suffix: str) -> None:
    file, marker = tmp_path / f"w.{suffix}", tmp_path / "marker"
    state = network(5).state_dict() if kind == "truncated" else {"weight": torch.zeros(2)}
    torch.save(state, file) if suffix == "pth" else save_file(state, file)
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    elif kind == "html":
        file.write_text("<html>not found</html>")
    elif kind == "list":
        torch.save([torch.zeros(2)], file)
    elif kind == "hostile":
        file.write_bytes(pickle.dumps(Hostile(marker), protocol=2))
    with pytest.raises(DataError, match=rf"model\.weights={re.escape(str(file))}: .*does not hold .*{TINY}"):
        run(head(weights=str(file)), tmp_path)
    assert not marker.exists()
    if kind == "hostile":
        pickle.loads(file.read_bytes())
        assert marker.exists(), "the file would have done harm"


def test_images_that_are_numbers_already_are_refused(tmp_path: Path) -> None:
    data = images()
    scaled = Samples(data.train.x / 255, data.train.y)
    with pytest.raises(DataError, match=r"needs images of type uint8; the data set has torch\.float32"):
        extract(LoadedData(scaled, scaled, 6, None, None, "scaled"), head(), tmp_path, tmp_path, CPU)


@pytest.mark.parametrize(("layers", "names"), [("one", ["6"]), ("two", ["3", "6"])])
def test_the_heads_layers_are_those_of_vgg16(layers: str, names: list[str]) -> None:
    with torch.device("meta"):  # 138 million parameters, which take seconds and half a gigabyte
        whole = torchvision.models.get_model("vgg16").classifier
    own = build("vgg16_head", (3, 32, 32), weights="random", layers=layers).classifier
    assert [name for name, layer in own.named_children() if isinstance(layer, nn.Linear)] == names
    assert all(own.get_submodule(name).in_features == whole.get_submodule(name).in_features for name in names)
    assert all(own.get_submodule(n).out_features == whole.get_submodule(n).out_features for n in names[:-1])


@pytest.mark.slow
@torch.no_grad()
def test_vgg16_gives_both_heads_their_input(tmp_path: Path) -> None:
    x = images().test.x
    one, two = (
        build("vgg16_head", (3, 32, 32), weights="random", layers=n).extractor(tmp_path).load().eval()
        for n in ("one", "two")
    )
    a, b = one(x), two(x)
    assert a.shape == b.shape == (2, 4096)
    layer = one.network.get_submodule("classifier.3")
    torch.testing.assert_close(F.relu(F.linear(b, layer.weight, layer.bias)), a)


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

    monkeypatch.setattr(efficientnet_head, "version", absent)
    with pytest.raises(DataError, match="extra 'features'"):
        build("efficientnet_head", (3, 32, 32)).extractor(tmp_path).fingerprint  # noqa: B018
