from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch.nn import functional as F

from fedsim.data.base import LoadedData, Samples
from fedsim.data.features import Extractor, TrainsOnFeatures, extract
from fedsim.errors import DataError
from fedsim.models.backbone import TorchvisionExtractor, last_linear
from tests.test_models import build

TINY = "mnasnet0_5"


def images(channels: int = 3, side: int = 32) -> LoadedData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (6, channels, side, side), generator=generator, dtype=torch.uint8)
    samples = Samples(x, torch.arange(6))
    return LoadedData(samples, Samples(x[:2], torch.arange(2)), 6, (0.5,) * channels, (0.5,) * channels, "images")


def head(**values: Any) -> Any:
    return build("frozen_features", (3, 32, 32), 6, backbone=TINY, weights="random", input_size=32, **values)


def test_features_are_what_enters_the_last_linear_layer(tmp_path: Path) -> None:
    data = images()
    path, width = last_linear(TINY)
    extractor = TorchvisionExtractor(TINY, path, "random", 3, 32, tmp_path).eval()
    features = extractor(data.train.x)
    assert features.shape == (6, width)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = torchvision.models.get_model(TINY, weights=None).eval()
    mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
    with torch.no_grad():
        expected = network((data.train.x.float() / 255 - mean) / std)
        last = network.get_submodule(path)
        torch.testing.assert_close(F.linear(features, last.weight, last.bias), expected)


def test_grey_and_small_images_are_repeated_and_enlarged(tmp_path: Path) -> None:
    extractor = TorchvisionExtractor(TINY, last_linear(TINY)[0], "random", 0, 64, tmp_path).eval()
    assert extractor(images(1, 28).train.x).shape == (6, 1280)


def test_features_are_computed_once_and_a_damaged_cache_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    forward = TorchvisionExtractor.forward
    monkeypatch.setattr(TorchvisionExtractor, "forward", lambda s, x: passes.append(len(x)) or forward(s, x))
    cpu = torch.device("cpu")

    def run(model: Any) -> LoadedData:
        passes.clear()
        return extract(images(), model, tmp_path, tmp_path / "cache", cpu)

    first = run(head(backbone_seed=0))
    assert sum(passes) == 8
    again = run(head(backbone_seed=0))
    assert not passes
    assert torch.equal(first.train.x, again.train.x)
    assert (again.mean, again.input_shape, again.fingerprint) == (None, (1280,), first.fingerprint)
    other = run(head(backbone_seed=1))
    assert sum(passes) == 8
    assert not torch.equal(first.train.x, other.train.x)
    (file,) = [p for p in (tmp_path / "cache").glob("*.safetensors") if first.fingerprint[:32] in p.name]
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert torch.equal(run(head(backbone_seed=0)).train.x, first.train.x)
    assert sum(passes) == 8


def test_a_head_is_all_that_is_trained() -> None:
    model = head(hidden=5)
    assert isinstance(model, TrainsOnFeatures)
    assert sum(p.numel() for p in model.parameters()) == 1280 * 5 + 5 + 5 * 6 + 6
    assert model(torch.randn(2, 1280)).shape == (2, 6)


def test_weights_that_are_not_there_are_named_with_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", offline)
    with pytest.raises(DataError, match=r"mnasnet0\.5_.*\.pth could not be downloaded .*weights"):
        build("frozen_features", (3, 32, 32), backbone=TINY).extractor(tmp_path)
    with pytest.raises(DataError, match=r"model\.weights=nowhere\.pth: no such file"):
        build("frozen_features", (3, 32, 32), backbone=TINY, weights="nowhere.pth").extractor(tmp_path)


def test_weights_from_a_file(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        network = torchvision.models.get_model(TINY, weights=None)
    torch.save(network.state_dict(), tmp_path / "w.pth")
    path = last_linear(TINY)[0]
    file, seeded = (
        TorchvisionExtractor(TINY, path, w, 5, 32, tmp_path).eval() for w in (str(tmp_path / "w.pth"), "random")
    )
    x = images().train.x
    assert torch.equal(file(x), seeded(x))
    assert file.fingerprint != seeded.fingerprint


@pytest.mark.slow
def test_vgg16_gives_both_heads_their_input(tmp_path: Path) -> None:
    x = images().test.x
    one, two = (
        build("vgg16_head", (3, 32, 32), weights="random", layers=n).extractor(tmp_path) for n in ("one", "two")
    )
    assert isinstance(one, Extractor)
    a, b = one.eval()(x), two.eval()(x)
    assert a.shape == b.shape == (2, 4096)
    layer = one.network.classifier[3]  # type: ignore[union-attr, index]
    torch.testing.assert_close(F.relu(F.linear(b, layer.weight, layer.bias)), a)  # type: ignore[arg-type, union-attr]
