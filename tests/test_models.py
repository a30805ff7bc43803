import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.func import functional_call, grad, vmap

from fedsim.config.build import instantiate
from fedsim.core.errors import ConfigError
from fedsim.core.rng import Streams
from fedsim.data.base import TokenShape
from fedsim.engine.data import ClientData
from fedsim.engine.model import initial
from fedsim.engine.optimizers import SGD, Constant
from fedsim.engine.schedule import LocalWork
from fedsim.running.assembly import build_model
from tests.engines import reference

FOLDER = Path(__file__).parents[1] / "conf" / "model"
DIGITS, FASHION, CIFAR, TEXT = (1, 8, 8), (1, 28, 28), (3, 32, 32), TokenShape(20, 27)


def build(
    choice: str, input_shape: tuple[int, ...], num_classes: int = 10, **values: Any
) -> nn.Module:
    node = yaml.safe_load((FOLDER / f"{choice}.yaml").read_text())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return instantiate({**node, **values}, nn.Module, "model", input_shape, num_classes)


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("choice", "shape", "values", "expected"),
    [
        *(
            ("logistic", FASHION, {}, 7850),
            ("mlp", FASHION, {}, 52500),
            ("mlp_64", FASHION, {}, 50890),
        ),
        *(
            ("cnn", CIFAR, {}, 122570),
            ("femnist_cnn", FASHION, {}, 1199882),
            ("resnet20", CIFAR, {}, 269722),
        ),
        *(("vgg16_head", CIFAR, {}, 40970), ("efficientnet_head", CIFAR, {}, 12810)),
        ("resnet20", CIFAR, {"shortcut": "conv"}, 272474),
        ("efficientnet_head", CIFAR, {"layers": "two"}, 1280 * 128 + 128 + 1290),
        ("vgg16_head", CIFAR, {"layers": "two"}, 16822282),
    ],
)
def test_parameter_counts_are_those_of_the_papers(
    choice: str, shape: tuple[int, ...], values: dict[str, Any], expected: int
) -> None:
    assert num_parameters(build(choice, shape, **values)) == expected


@pytest.mark.parametrize(
    ("choice", "shape", "values"),
    [
        *(
            ("logistic", DIGITS, {}),
            ("mlp", DIGITS, {}),
            ("cnn", FASHION, {}),
            ("femnist_cnn", FASHION, {}),
        ),
        *(("resnet20", DIGITS, {}), ("frozen_features", (512,), {}), ("vgg16_head", (4096,), {})),
        *(("resnet20", DIGITS, {"norm": "group"}), ("resnet20", DIGITS, {"shortcut": "conv"})),
    ],
)
def test_gradients_of_stacked_models_equal_those_of_each(
    choice: str, shape: tuple[int, ...], values: dict[str, Any]
) -> None:
    given = (
        CIFAR if shape in ((512,), (4096,)) else shape
    )  # a head gets features in place of the images
    models = [build(choice, given, **values).double().eval() for _ in range(2)]
    with torch.no_grad():
        for p in models[1].parameters():
            p.mul_(1.5)
    own = [dict(model.named_parameters()) for model in models]
    stack = {name: torch.stack([one[name].detach() for one in own]) for name in own[0]}
    x = torch.randn(2, 4, *shape, dtype=torch.float64)

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(models[0], params, (x,)).square().mean()

    together = vmap(grad(loss))(stack, x)
    for row, model in enumerate(models):
        model.zero_grad()
        model(x[row]).square().mean().backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(together[name][row], p.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("choice", "shape"),
    [
        *(("cnn", DIGITS), ("femnist_cnn", (1, 5, 5)), ("resnet20", (64,))),
        *(("vgg16_head", (4, 8, 8)), ("frozen_features", (64,)), ("efficientnet_head", (4, 8, 8))),
        *(
            ("mlp", TEXT),
            ("logistic", TEXT),
            ("cnn", TEXT),
            ("text_gru", DIGITS),
            ("text_mlp", DIGITS),
        ),
    ],
)
def test_a_data_set_that_does_not_fit_is_named_with_a_model_that_does(
    choice: str, shape: tuple[int, ...]
) -> None:
    text = "texts of 20 tokens" if shape is TEXT else "x".join(map(str, shape))
    told = (
        rf"model: model={choice} (needs images|reads) .*has {text}(\n.*)*model=mlp .*model=text_gru"
    )
    with pytest.raises(ConfigError, match=told):
        build(choice, shape)


@pytest.mark.parametrize(
    ("choice", "key", "value"),
    [
        *(
            ("mlp", "dropout", 1.0),
            ("mlp", "hidden", [0]),
            ("resnet20", "groups", 3),
            ("femnist_cnn", "dropout", -0.1),
        ),
        *(
            ("vgg16_head", "input_size", 31),
            ("vgg16_head", "dropout", 1.0),
            ("frozen_features", "hidden", 0),
        ),
        *(("efficientnet_head", "input_size", 100), ("efficientnet_head", "hidden", 0)),
        *(
            ("frozen_features", "backbone", "resnet_18"),
            ("frozen_features", "backbone", "squeezenet1_0"),
        ),
        *(("frozen_features", "backbone_seed", -1), ("frozen_features", "input_size", 1025)),
    ],
)
def test_values_out_of_range_are_refused_with_their_key(choice: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{key}=.*must"):
        build(choice, CIFAR, **{key: value})


def test_a_size_that_a_backbone_cannot_take_is_refused_and_widths_that_are_computed_are_understood() -> (
    None
):
    for name, size in (("alexnet", 32), ("vit_b_16", 64)):
        with pytest.raises(
            ConfigError, match=rf"model\.input_size={size}: .*cannot pass {name}(.*\n)+.*224 fits"
        ):
            build("frozen_features", CIFAR, backbone=name, input_size=size)
        build("frozen_features", CIFAR, backbone=name, input_size=224)
    before = torch.random.get_rng_state()
    assert (
        num_parameters(build("frozen_features", CIFAR, backbone="regnet_y_400mf")) == 440 * 10 + 10
    )
    assert torch.equal(torch.random.get_rng_state(), before)


class Hooked(nn.Linear):
    """Clips its gradients, which copies of it do not."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, by: str) -> None:
        super().__init__(input_shape[0], num_classes)
        if by:
            getattr(self.bias, by)(lambda given: None)


@pytest.mark.parametrize("by", ["", "register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused_as_copies_lack_them(by: str) -> None:
    told = r"model='Hooked': has a hook on its parameter bias.*\n"
    with pytest.raises(ConfigError, match=told) if by else nullcontext():
        build_model({"_target_": "tests.test_models.Hooked", "by": by}, (4,), 2, Streams(0))


class NotLogits(nn.Linear):
    """Returns what the last layer of a forgetful author does."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, outputs: int) -> None:
        super().__init__(input_shape[-1], outputs)


@pytest.mark.parametrize(("form", "outputs", "found"), [((4,), 2, [6, 2]), ((5, 4), 3, [6, 5, 3])])
def test_an_output_that_is_no_logits_is_refused_with_its_shape(
    form: Any, outputs: int, found: list[int]
) -> None:
    model = build_model(
        {"_target_": "tests.test_models.NotLogits", "outputs": outputs}, form, 3, Streams(0)
    )
    x, y = torch.zeros(6, *form), torch.arange(6) % 3
    data = ClientData(x, y, [np.arange(6)], [np.arange(6)], 3)
    optimizer = SGD(lr=0.1, momentum=0, nesterov=False, weight_decay=0, schedule=Constant())
    engine = reference(model, data, LocalWork(1, None, 2), optimizer, Streams(0))
    text = (
        f"model='NotLogits': must return logits [batch, num_classes=3], not {found} for 6 samples"
    )
    with pytest.raises(ConfigError, match=re.escape(text)):
        engine.evaluate(initial(model), x, y)
