"""Keyed dropout, masked BatchNorm, and layers that are refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.errors import ConfigError
from fedsim.core.rng import Streams
from fedsim.engine.data import ClientData
from fedsim.engine.model import initial, layout_for
from fedsim.engine.optimizers import SGD, Constant
from fedsim.engine.schedule import LocalWork
from fedsim.engine.training_copies import for_sequential
from fedsim.engine.training_layers import KeyedDropout, LenientBatchNorm, MaskedBatchNorm, mix
from tests.engines import auto, batched, graph, reference
from tests.pretended_cuda import PretendedCard

WORK = (
    LocalWork(1, None, 4),
    SGD(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0, schedule=Constant()),
    Streams(0),
)
BOTH = (batched, reference)


def dropout(p: float, key: int, layer: int = 0) -> KeyedDropout:
    made = KeyedDropout(p, layer)
    made.key.fill_(key)
    return made.train()


def test_the_mixer_is_splitmix64() -> None:
    """The first outputs of the reference generator from state 0: mix(g), mix(2g), ... for g =
    0x9E3779B97F4A7C15."""
    golden = 0x9E3779B97F4A7C15
    states = torch.tensor([(n * golden % 2**64 + 2**63) % 2**64 - 2**63 for n in range(1, 6)])
    first = [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
        0xF88BB8A8724C81EC,
        0x1B39896A51A8749B,
    ]
    assert [int(z) % 2**64 for z in mix(states)] == first


def test_dropout_is_a_function_of_key_layer_and_element_with_the_right_share_and_mean() -> None:
    y = dropout(0.3, 12345)(torch.ones(200, 500))
    assert float((y == 0).double().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(y.mean()) == pytest.approx(1, abs=0.01)
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.7])
    x, layer = torch.ones(100, 100), dropout(0.5, 1)
    expected = layer(x) == 0
    assert torch.equal(dropout(0.5, 1)(x) == 0, expected)
    assert torch.equal(dropout(0.5, 1)(x[:7]) == 0, expected[:7])  # padding does not matter
    for other in (
        dropout(0.5, 2),
        dropout(0.5, 1, layer=1),
        layer,
    ):  # another key, another layer, applied twice
        assert 0.45 < float(((other(x) == 0) == expected).double().mean()) < 0.55
    x = torch.arange(4.0)
    assert dropout(1.0, 1)(x).tolist() == [0, 0, 0, 0]
    assert torch.equal(dropout(0.0, 1)(x), x)
    assert torch.equal(dropout(0.5, 1).eval()(x), x)


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 2), (5, 3, 2, 2), (1, 3, 2, 2), (1, 3)])
def test_masked_batch_norm_sees_only_valid_samples(shape: tuple[int, ...]) -> None:
    source = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(3, momentum=0.3).double()
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 1
    masked, plain = (
        MaskedBatchNorm(LenientBatchNorm.like(source)).double(),
        LenientBatchNorm.like(source),
    )  # type: ignore[arg-type]
    masked.mask = torch.cat([torch.ones(len(x)), torch.zeros(2)]).double()
    padded = masked(torch.cat([x, torch.full_like(x[:1], 77).expand(2, *shape[1:])]))
    torch.testing.assert_close(padded[: len(x)], plain(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(masked.running_mean, plain.running_mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(masked.running_var, plain.running_var, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("of", "mean", "var"),
    [
        ({"momentum": 0.25}, [2, 1.75], [1.0625, 2.5625]),
        ({"momentum": None}, [5, 4], [1, 4]),
        ({"affine": False}, 0, 0),
    ],
)
def test_a_batch_of_one_value_is_a_batch_of_variance_zero(
    of: dict[str, Any], mean: Any, var: Any
) -> None:
    """For any BatchNorm; behind it comes a batch of two, as torch takes it."""
    source = nn.BatchNorm1d(2, track_running_stats=bool(mean), **of)
    layer: Any = for_sequential(source)
    shift = 5 if source.affine else 0
    if source.affine:
        layer.bias.data += shift
    assert layer(torch.tensor([[8.0, 4.0]])).tolist() == [[shift, shift]]
    pair = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    torch.testing.assert_close(layer(pair), source(pair) + shift)
    if mean:
        assert (layer.running_mean.tolist(), layer.running_var.tolist()) == (mean, var)


class Named(nn.Module):
    """A model in the usual style, whose attribute happens to be called dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.linear(x))
        return out


class Functional(Named):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5, self.training)


class Branching(Named):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out if float(x.sum()) > 0 else -out


class Recurrent(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.cell = nn.GRU(2, 3, num_layers=2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cell(x.view(len(x), 2, 2))[0][:, -1]
        return out


def build(kind: Any, model: nn.Module) -> Any:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    data = ClientData(x, torch.arange(6) % 3, [np.arange(6)], [np.arange(6)], 3)
    return kind(model, data, *WORK)


class Viewing(nn.Conv2d):
    """Looks at a convolution's output as torch's tutorials do, which needs it contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(len(x), -1)


@pytest.mark.parametrize("flatten", [True, False])
def test_channels_last_is_for_models_that_can_take_it(flatten: bool) -> None:
    x = torch.ones(4, 2, 3, 3)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten()) if flatten else Viewing(2, 3, 2)
    assert (layout_for(model, x) is torch.channels_last) == flatten
    assert layout_for(mlp(nn.ReLU()), x) is torch.contiguous_format
    assert layout_for(model, x[:0]) is torch.contiguous_format
    engine = reference(model, ClientData(x, torch.arange(4), [np.arange(4)], [], 4), *WORK)
    assert np.isfinite(engine.train(initial(model), np.array([0]), 1, 0.1).loss).all()
    with PretendedCard():
        assert layout_for(model.cuda(), x.cuda()) is torch.contiguous_format
        assert (layout_for(model, x.cuda(), "bf16") is torch.channels_last) == flatten


def mlp(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), layer, nn.Linear(3, 3))


@pytest.mark.parametrize(
    "model",
    [
        mlp(nn.BatchNorm1d(3, momentum=None)),
        mlp(nn.BatchNorm1d(3, track_running_stats=False)),
        Recurrent(0.0),
    ],
)
def test_layers_that_cannot_run_batched_are_named_with_the_engine_that_runs_them(
    model: nn.Module,
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"model (\w+): layer '(1|cell)' \((\w+)\) cannot run.*\n.*engine=sequential",
    ):
        build(batched, model)
    trained = build(reference, model).train(dict(model.state_dict()), np.array([0]), 1, 0.1)
    assert np.isfinite(trained.loss).all()


def test_recurrent_layers_are_in_training_mode_where_a_gradient_is_taken() -> None:
    """cuDNN refuses the backward pass of one in eval mode; what else is in the model stays in eval
    mode."""
    model = nn.Sequential(Recurrent(0.0), nn.BatchNorm1d(3))
    engine = build(reference, model)
    seen: set[tuple[bool, bool, bool]] = set()
    cell, norm = engine.backend.model[0].cell, engine.backend.model[1]
    cell.register_forward_hook(
        lambda layer, x, y: seen.add((torch.is_grad_enabled(), layer.training, norm.training))
    )
    (gradient,) = engine.client_gradients(dict(model.state_dict()), [np.arange(6)])
    engine.losses(dict(model.state_dict()), [np.arange(6)])
    assert seen == {(True, True, False), (False, False, False)}
    model.eval()
    loss = F.cross_entropy(model(engine.data.x), engine.data.y)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    assert torch.allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize("kind", BOTH)
def test_hidden_randomness_is_named_with_what_to_use_and_undone(kind: Any) -> None:
    for model in (mlp(nn.Dropout1d(0.5)), mlp(nn.AlphaDropout(0.5)), Recurrent(0.5)):
        with pytest.raises(
            ConfigError, match=r"layer '(1|cell)' .* global generator\n.*nn.Dropout has masks keyed"
        ):
            build(kind, model)
    model, before = Functional(), torch.get_rng_state()
    with pytest.raises(ConfigError, match="model Functional draws from torch's global generator"):
        build(kind, model)
    assert torch.equal(torch.get_rng_state(), before)


class Mixing(Named):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out - out.mean(0)


@pytest.mark.parametrize(
    ("kind", "model", "text"),
    [
        (batched, Branching(), "Branching cannot run for several clients"),
        (batched, Mixing(), "Mixing mixes the samples of a batch"),
        (graph, Mixing(), "Mixing mixes the samples of a batch"),
    ],
)
def test_what_is_found_out_by_a_pass_is_told_with_the_engine_that_runs_it(
    kind: Any, model: Any, text: str
) -> None:
    with pytest.raises(ConfigError, match=rf"model {text}.*\n.*engine=sequential"):
        build(kind, model)
    assert f"sequential (auto: model {text}" in build(auto, model).description


def test_a_model_is_left_as_it_was_and_what_does_not_travel_is_each_clients_own() -> None:
    """BatchNorm without a momentum weighs a batch by the number of those before it."""
    for kind, momentum in ((batched, 0.1), (reference, None)):
        model = nn.Sequential(
            nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=momentum), nn.Dropout(0.5)
        )
        before = {name: value.clone() for name, value in model.state_dict().items()}
        engine, params = build(kind, model), initial(model)
        first, second = (engine.train(params, np.array([0]), 1, 0.1) for _ in range(2))
        assert all(torch.equal(first.delta[name], second.delta[name]) for name in params)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
