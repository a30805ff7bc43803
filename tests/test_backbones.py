"""Backbones of torchvision and timm from a user's file: checksums, other classes, what is refused.

Where timm is not installed, a stand-in with the same calls takes its place, and the tests on its own networks are
skipped.
"""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn

from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.plan import hash_config
from fedsim.core.errors import ConfigError, DataError
from fedsim.data.features import TrainsOnFeatures
from fedsim.models.backbone import WeightsFile
from fedsim.models.heads import TimmExtractor
from tests.test_features import TINY, Hostile, extractor, images, network, run
from tests.test_models import build


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


def head(**values: Any) -> Any:
    given = {"library": "timm", "backbone": "tiny", "weights": "random", "input_size": 32, **values}
    return build("frozen_features", (3, 32, 32), 6, **given)


def saved(folder: Path, state: Any, suffix: str = "pth") -> Path:
    file = folder / f"w.{suffix}"
    save_file(state, file) if suffix == "safetensors" else torch.save(state, file)
    return file


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


# --- files of either library ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [None, "state_dict", "model"])
def test_a_file_trained_on_other_classes_gives_the_same_features(tmp_path: Path, wrapped: str | None) -> None:
    whole = network(5)
    other = whole.state_dict() | {"classifier.1.weight": torch.zeros(3, 1280), "classifier.1.bias": torch.zeros(3)}
    file = saved(tmp_path, other if wrapped is None else {wrapped: other, "epoch": 3})
    x = images().train.x
    assert torch.equal(extractor(tmp_path, str(file)).load().eval()(x), extractor(tmp_path, seed=5).load().eval()(x))


def test_a_file_without_a_layer_before_the_cut_is_refused(tmp_path: Path) -> None:
    state = network(5).state_dict()
    state.pop("layers.0.weight")
    with pytest.raises(DataError, match=rf"does not hold the weights of {TINY} .*layers\.0\.weight"):
        extractor(tmp_path, str(saved(tmp_path, state))).load()


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("library", "backbone"), [(None, TINY), ("timm", "tiny")])
def test_the_checksum_of_a_file_is_compared_before_it_is_read(
    library: str | None, backbone: str, tmp_path: Path
) -> None:
    file = saved(tmp_path, network(5).state_dict() if library is None else TinyNet(1000).state_dict())
    values = {"library": library, "backbone": backbone, "weights": str(file)}
    run(head(**values, sha256=sha256(file)), tmp_path)
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(DataError, match=r"model\.sha256=.* has [0-9a-f]{64}; it is damaged or another file"):
        run(head(**values, sha256="0" * 64), tmp_path)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"library": None, "backbone": TINY, "sha256": "12"}, "sha256='12': must be null or 64"),
        ({"library": None, "backbone": TINY, "sha256": "0" * 64}, "is for a file that model.weights names"),
        ({"weights": "imagenet"}, "weights='imagenet': is for library=torchvision; files of timm are not fetched"),
        ({"library": "keras"}, "model.library='keras': must be one of torchvision, timm or null"),
        ({"backbone": "resnet19"}, "backbone='resnet19': must be a model of timm"),
        ({"backbone": "hf-hub:somebody/something"}, "must be a model of timm"),
    ],
)
@pytest.mark.usefixtures("stand_in")
def test_mistakes_in_the_keys(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        head(**values)
    assert text in str(caught.value)


def test_folders_of_earlier_configs_keep_their_names() -> None:
    with search_path():
        (job,) = compose_jobs(["model=frozen_features"], multirun=False)
    earlier = {k: v for k, v in job.config["model"].items() if k not in ("library", "sha256")}
    assert hash_config({**job.config, "model": earlier}) == hash_config(job.config)
    assert hash_config({**job.config, "model": {**earlier, "library": "timm"}}) != hash_config(job.config)


def test_a_config_from_before_the_keys_is_still_good() -> None:
    node = yaml.safe_load((Path(__file__).parents[1] / "conf" / "model" / "frozen_features.yaml").read_text())
    assert (node["library"], node["sha256"]) == (None, None)
    model = build("frozen_features", (3, 32, 32), 6, backbone=TINY, weights="random", input_size=32)
    assert isinstance(model, TrainsOnFeatures)


# --- timm ----------------------------------------------------------------------------------------------------------


def test_timm_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"model\.library='timm': needs the package timm; .*extra 'timm'\n.*torchvision"
    ):
        head()


@pytest.mark.usefixtures("stand_in")
@torch.no_grad()
def test_features_of_timm_are_what_enters_the_classifier(tmp_path: Path) -> None:
    """Pixels normalised as the network's own config says; its width is found out."""
    file = saved(tmp_path, TinyNet(1000).state_dict())
    model = head(weights=str(file), input_size=40)
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
    made = [TimmExtractor("tiny", None, seed, 32) for seed in (0, 1)]
    made += [TimmExtractor("tiny", WeightsFile(str(file)), 0, 32) for file in files]
    made += [TimmExtractor("tiny", None, 0, 40)]
    assert len({one.fingerprint for one in made}) == 5
    before = torch.random.get_rng_state()
    first, again, other = (TimmExtractor("tiny", None, seed, 32).load().network.stem.weight for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("kind", ["other", "hostile"])
def test_a_foreign_or_hostile_file_is_refused_by_timms_networks_too(kind: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    file = saved(tmp_path, {"weight": torch.zeros(2)} if kind == "other" else Hostile(marker))
    with pytest.raises(DataError, match=r"does not hold the weights of tiny"):
        run(head(weights=str(file)), tmp_path)
    assert not marker.exists()


@pytest.mark.usefixtures("stand_in")
def test_images_that_cannot_pass_are_told_the_networks_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinyNet, "forward", lambda self, x: self.stem(x[..., :8, :8]))
    with pytest.raises(ConfigError, match=r"input_size=32: images of this size cannot pass tiny .*\n.*48 is the"):
        head()


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050", "convnext_atto", "efficientnet_lite0"])
@torch.no_grad()
def test_networks_of_timm(name: str, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    own = timm.create_model(name, pretrained=False, num_classes=7).eval()
    model = head(backbone=name, weights=str(saved(tmp_path, own.state_dict(), "safetensors")), input_size=64)
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
