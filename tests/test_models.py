"""Models: parameter counts, gradients of stacks, and data sets or values that do not fit."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedsim.config.build import instantiate
from fedsim.config.yaml_files import head_of
from fedsim.core.errors import ConfigError
from fedsim.core.rng import Streams
from fedsim.data.base import TokenShape
from fedsim.engine.data import ClientData
from fedsim.engine.model import initial, model_problems
from fedsim.engine.optimizers import SGD, Constant
from fedsim.engine.schedule import LocalWork
from fedsim.running.assembly import build_model
from tests.engines import reference

FOLDER = Path(__file__).parents[1] / "conf" / "model"
DIGITS = (1, 8, 8)
FASHION = (1, 28, 28)
CIFAR = (3, 32, 32)
TEXT = TokenShape(20, 27)


def build(
    choice: str, input_shape: tuple[int, ...], num_classes: int = 10, **values: Any
) -> nn.Module:
    """Build the model of conf/model/<choice>.yaml with some other values."""
    node = yaml.safe_load((FOLDER / f"{choice}.yaml").read_text())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return instantiate(node | values, nn.Module, "model", input_shape, num_classes)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("choice", "shape", "values", "expected"),
    [
        ("logistic", FASHION, {}, 7850),
        ("mlp", FASHION, {}, 52500),
        ("mlp_64", FASHION, {}, 50890),
        ("cnn", CIFAR, {}, 122570),
        ("femnist_cnn", FASHION, {}, 1199882),
        ("lenet", CIFAR, {}, 62006),  # the number that BlazeFL's benchmark has
        ("resnet20", CIFAR, {}, 269722),
        ("resnet20", CIFAR, {"shortcut": "conv"}, 272474),
        ("resnet18", CIFAR, {}, 11173962),
        ("resnet18", CIFAR, {"norm": "batch"}, 11173962),
        # torchvision's 11,689,512 parameters for 1000 classes; the last layer has 513 a class.
        ("torchvision", CIFAR, {"network": "resnet18"}, 11689512 - 990 * 513),
        # tokens and positions, two layers (norms, 4 + 2 linear layers), a norm and the output
        (
            "text_transformer",
            TEXT,
            {},
            64 * (27 + 20) + 2 * (256 + 4 * 64 * 65 + 64 * 256 * 2 + 320) + 128 + 65 * 10,
        ),
        ("vgg16_head", CIFAR, {}, 40970),
        ("vgg16_head", CIFAR, {"layers": "two"}, 16822282),
        ("efficientnet_head", CIFAR, {}, 12810),
        # 1280 features, 128 hidden units and 10 classes, with biases.
        ("efficientnet_head", CIFAR, {"layers": "two"}, 1280 * 128 + 128 + 1290),
        # 440 features: fedsim finds their number by running the network.
        ("frozen_features", CIFAR, {"backbone": "regnet_y_400mf"}, 440 * 10 + 10),
    ],
)
def test_parameter_counts_are_those_of_the_papers(
    choice: str, shape: tuple[int, ...], values: dict[str, Any], expected: int
) -> None:
    state = torch.random.get_rng_state()
    assert num_parameters(build(choice, shape, **values)) == expected
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_description_of_lenet_has_its_numbers_of_parameters() -> None:
    prose, _ = head_of((FOLDER / "lenet.yaml").read_text())
    for shape in (CIFAR, FASHION):
        size = "x".join(map(str, shape))
        assert f"{num_parameters(build('lenet', shape)):,} for {size}" in prose


@pytest.mark.parametrize(
    ("choice", "shape", "values"),
    [
        ("logistic", DIGITS, {}),
        ("mlp", DIGITS, {}),
        ("cnn", FASHION, {}),
        ("femnist_cnn", FASHION, {}),
        ("lenet", FASHION, {}),
        ("resnet20", DIGITS, {}),
        ("resnet20", DIGITS, {"norm": "group"}),
        ("resnet20", DIGITS, {"shortcut": "conv"}),
        ("frozen_features", (512,), {}),
        ("vgg16_head", (4096,), {}),
    ],
)
def test_gradients_of_stacked_models_equal_those_of_each(
    choice: str, shape: tuple[int, ...], values: dict[str, Any]
) -> None:
    receives_features = len(shape) == 1  # such a head is built for the images themselves
    input_shape = CIFAR if receives_features else shape
    models = [build(choice, input_shape, **values).double().eval() for _ in range(2)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.5)
    stack, _ = stack_module_state(models)
    x = torch.randn(2, 4, *shape, dtype=torch.float64)

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(models[0], params, (x,)).square().mean()

    gradients = vmap(grad(loss))(stack, x)
    for row, model in enumerate(models):
        model(x[row]).square().mean().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name][row], parameter.grad, rtol=1e-8, atol=1e-10)


# --- data sets and values that do not fit --------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "shape", "shape_text"),
    [
        ("cnn", DIGITS, "1x8x8"),
        ("femnist_cnn", (1, 5, 5), "1x5x5"),
        ("lenet", DIGITS, "1x8x8"),
        ("resnet20", (64,), "64"),
        ("resnet18", (64,), "64"),
        ("torchvision", (4, 8, 8), "4x8x8"),
        ("timm", (64,), "64"),
        ("vgg16_head", (4, 8, 8), "4x8x8"),
        ("frozen_features", (64,), "64"),
        ("efficientnet_head", (4, 8, 8), "4x8x8"),
        ("mlp", TEXT, "texts of 20 tokens"),
        ("logistic", TEXT, "texts of 20 tokens"),
        ("cnn", TEXT, "texts of 20 tokens"),
        ("text_gru", DIGITS, "1x8x8"),
        ("text_mlp", DIGITS, "1x8x8"),
        ("text_transformer", DIGITS, "1x8x8"),
        ("cnn", (6, 100), "6x100"),
    ],
)
def test_a_data_set_that_does_not_fit_is_rejected_with_models_that_do(
    choice: str, shape: tuple[int, ...], shape_text: str
) -> None:
    need = rf"model: model={choice} (needs images|reads) .*has {shape_text}"
    fitting = {TEXT: "text_mlp, text_gru and text_transformer", (6, 100): "cnn1d .*, mlp and log"}
    remedy = f"{fitting.get(shape, 'mlp and logistic')}.* fit .* smartwatch series, shakespeare"
    with pytest.raises(ConfigError, match=rf"{need}(\n.*)*{remedy}"):
        build(choice, shape)


@pytest.mark.parametrize(
    ("choice", "key", "value"),
    [
        ("mlp", "dropout", 1.0),
        ("mlp", "hidden", [0]),
        ("resnet20", "groups", 3),
        ("resnet18", "groups", 3),
        ("resnet18", "groups", 0),
        ("femnist_cnn", "dropout", -0.1),
        ("vgg16_head", "input_size", 31),
        ("vgg16_head", "dropout", 1.0),
        ("efficientnet_head", "input_size", 100),
        ("efficientnet_head", "hidden", 0),
        ("frozen_features", "hidden", 0),
        ("frozen_features", "backbone", "resnet_18"),
        ("frozen_features", "backbone", "squeezenet1_0"),
        ("frozen_features", "backbone_seed", -1),
        ("frozen_features", "input_size", 1025),
    ],
)
def test_values_out_of_range_are_rejected_with_their_key(choice: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{key}=.*must"):
        build(choice, CIFAR, **{key: value})


@pytest.mark.parametrize(("name", "size"), [("alexnet", 32), ("vit_b_16", 64)])
def test_a_size_that_a_backbone_cannot_take_is_rejected(name: str, size: int) -> None:
    rule = rf"model\.input_size={size}: .*cannot pass {name}(.*\n)+.*224 fits"
    with pytest.raises(ConfigError, match=rule):
        build("frozen_features", CIFAR, backbone=name, input_size=size)
    build("frozen_features", CIFAR, backbone=name, input_size=224)


# --- models of users -----------------------------------------------------------------------------


class Hooked(nn.Linear):
    """A layer with a hook on its bias, which copies of the layer lack."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, register: str) -> None:
        super().__init__(input_shape[0], num_classes)
        getattr(self.bias, register)(lambda tensor: None)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_rejected(register: str) -> None:
    node = {"_target_": "tests.test_models.Hooked", "register": register}
    with pytest.raises(ConfigError, match=r"model='Hooked': has a hook on its parameter bias.*\n"):
        build_model(node, (4,), 2, Streams(0))


class NotLogits(nn.Linear):
    """A linear layer whose output need not be one logit for each class."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, outputs: int) -> None:
        super().__init__(input_shape[-1], outputs)


class Squeezed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).squeeze()


class Pair(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), 0


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        (Pair(4, 3), r"must return logits \[batch, num_classes=3\], not tuple for 2 samples"),
        (Squeezed(4, 3), r"\[batch, num_classes=3\], not \[3\] for 1 sample$"),
        (nn.Identity(), "has no parameters that are trained"),
        (nn.Linear(4, 3).requires_grad_(False), "has no parameters that are trained"),
        (nn.LazyLinear(3), "has a lazy layer, whose size is not known"),
    ],
)
def test_models_that_cannot_be_trained_are_named_before_the_run(
    model: nn.Module, rule: str
) -> None:
    x, y = torch.zeros(6, 4), torch.arange(6) % 3
    data = ClientData(x, y, [np.arange(6)], [np.arange(6)], 3)
    [problem] = model_problems(model, data)
    assert re.search(rule, problem.rule)
    assert model_problems(nn.Linear(4, 3), data) == []


@pytest.mark.parametrize(
    ("input_shape", "outputs", "shape"), [((4,), 2, [6, 2]), ((5, 4), 3, [6, 5, 3])]
)
def test_outputs_that_are_not_logits_are_rejected_with_their_shape(
    input_shape: tuple[int, ...], outputs: int, shape: list[int]
) -> None:
    node = {"_target_": "tests.test_models.NotLogits", "outputs": outputs}
    model = build_model(node, input_shape, 3, Streams(0))
    x = torch.zeros(6, *input_shape)
    y = torch.arange(6) % 3
    data = ClientData(x, y, [np.arange(6)], [np.arange(6)], 3)
    optimizer = SGD(lr=0.1, momentum=0, nesterov=False, weight_decay=0, schedule=Constant())
    [problem] = model_problems(model, data)
    two = [2, *shape[1:]]
    assert problem.rule == f"must return logits [batch, num_classes=3], not {two} for 2 samples"
    engine = reference(model, data, LocalWork(1, None, 2), optimizer, Streams(0))
    rule = f"must return logits [batch, num_classes=3], not {shape} for 6 samples"
    with pytest.raises(ConfigError, match=re.escape(f"model='NotLogits': {rule}")):
        engine.evaluate(initial(model), x, y)
