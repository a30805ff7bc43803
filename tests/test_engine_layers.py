"""Keyed dropout, masked BatchNorm, memory layouts, and models that are rejected."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.errors import ConfigError
from fedsim.core.rng import Streams
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.model import initial, layout_for
from fedsim.engine.optimizers import SGD, Constant
from fedsim.engine.schedule import LocalWork
from fedsim.engine.training_copies import for_sequential
from fedsim.engine.training_layers import KeyedDropout, LenientBatchNorm, MaskedBatchNorm, mix
from tests.engines import auto, batched, graph, reference, schedule_of
from tests.pretended_cuda import PretendedCard

Build = Callable[..., Engine]
exactly = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def engine(build: Build, model: nn.Module, x: Tensor | None = None) -> Any:
    """Build an engine for one client with six samples [4] of three classes, or with `x`."""
    if x is None:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    positions = [np.arange(len(x))]
    data = ClientData(x, torch.arange(len(x)) % 3, positions, positions, 3)
    optimizer = SGD(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0, schedule=Constant())
    return build(model, data, LocalWork(1, None, 4), optimizer, Streams(0))


def train(engine: Engine) -> Any:
    return engine.train(initial(engine.workload.model), np.array([0]), 1, 0.1)


# --- dropout --------------------------------------------------------------------------------------


def dropout(p: float, key: int, layer: int = 0) -> KeyedDropout:
    module = KeyedDropout(p, layer)
    module.key.fill_(key)
    return module.train()


def test_the_mixer_is_splitmix64() -> None:
    """The reference generator's first outputs from state 0 are mix(g), mix(2 g), ..."""
    golden = 0x9E3779B97F4A7C15
    unsigned = [n * golden % 2**64 for n in (1, 2, 3)]
    states = torch.tensor([(value + 2**63) % 2**64 - 2**63 for value in unsigned])
    outputs = [int(z) % 2**64 for z in mix(states)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    y = dropout(0.3, 12345)(torch.ones(200, 500))
    assert float((y == 0).double().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(y.mean()) == pytest.approx(1, abs=0.01)
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.7])


def test_a_dropout_mask_depends_on_key_layer_call_and_element_only() -> None:
    x, layer = torch.ones(100, 100), dropout(0.5, key=1)
    mask = layer(x) == 0
    assert torch.equal(dropout(0.5, key=1)(x) == 0, mask)
    assert torch.equal(dropout(0.5, key=1)(x[:7]) == 0, mask[:7])  # without padding
    another_key, another_layer, another_call = dropout(0.5, 2), dropout(0.5, 1, layer=1), layer
    for other in (another_key, another_layer, another_call):
        share_of_equal = float(((other(x) == 0) == mask).double().mean())
        assert share_of_equal == pytest.approx(0.5, abs=0.05)


def test_dropout_of_everything_of_nothing_and_in_eval_mode() -> None:
    x = torch.arange(4.0)
    assert not dropout(1.0, 1)(x).any()
    assert torch.equal(dropout(0.0, 1)(x), x)
    assert torch.equal(dropout(0.5, 1).eval()(x), x)


# --- BatchNorm ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 2), (5, 3, 2, 2), (1, 3, 2, 2), (1, 3)])
def test_masked_batch_norm_sees_only_valid_samples(shape: tuple[int, ...]) -> None:
    source = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(3, momentum=0.3).double()
    plain: Any = LenientBatchNorm.like(source)
    masked = MaskedBatchNorm(source).double()
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 1
    padding = torch.full((2, *shape[1:]), 77.0).double()
    masked.mask = torch.cat([torch.ones(len(x)), torch.zeros(2)]).double()
    exactly(masked(torch.cat([x, padding]))[: len(x)], plain(x))
    exactly(masked.running_mean, plain.running_mean)
    exactly(masked.running_var, plain.running_var)


@pytest.mark.parametrize(
    ("options", "mean", "var"),
    [
        # Batches [8, 4] and [[1, 2], [3, 6]] have means (8, 4) and (2, 4), and variances (0, 0) and
        # (2, 8). With momentum 0.25: 0.75 (0.25 * 8) + 0.25 * 2 = 2, ..., from mean 0, variance 1.
        ({"momentum": 0.25}, [2, 1.75], [0.5625 + 0.5, 0.5625 + 2]),
        ({"momentum": None}, [5, 4], [1, 4]),
        ({"track_running_stats": False, "affine": False}, None, None),
    ],
)
def test_a_batch_of_one_value_is_a_batch_of_variance_zero(
    options: dict[str, Any], mean: Any, var: Any
) -> None:
    source = nn.BatchNorm1d(2, **options)
    layer: Any = for_sequential(source)
    shift = 5 if source.affine else 0
    if source.affine:
        layer.bias.data += shift
    assert layer(torch.tensor([[8.0, 4.0]])).tolist() == [[shift, shift]]
    pair = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    torch.testing.assert_close(layer(pair), source(pair) + shift)
    if mean is not None:
        assert layer.running_mean.tolist() == mean
        assert layer.running_var.tolist() == var


def test_a_batch_of_one_value_may_be_in_less_precision_than_the_statistics() -> None:
    layer: Any = for_sequential(nn.BatchNorm1d(2, momentum=0.25))
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.tensor([[8.0, 4.0]], dtype=torch.bfloat16))
    assert layer.running_mean.tolist() == [2, 1]


@pytest.mark.parametrize(("build", "momentum"), [(batched, 0.1), (reference, None)])
def test_training_leaves_the_model_and_later_clients_as_they_were(
    build: Build, momentum: float | None
) -> None:
    """Without a momentum, BatchNorm weighs a batch by the number of batches before it."""
    norm = nn.BatchNorm1d(3, momentum=momentum)
    model = nn.Sequential(nn.Linear(4, 3), norm, nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = engine(build, model)
    first, second = train(trained).delta, train(trained).delta
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Frozen(nn.Sequential):
    """A linear layer, a layer that stays in eval mode, and a linear layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(nn.Linear(4, 3), layer, nn.Linear(3, 3))

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self[1].eval()
        return self


class WithoutGradients(nn.Sequential):
    """A linear layer that is not trained, and one that is."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 3), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self[0](x).relu()
        out: Tensor = self[1](hidden)
        return out


def norm_with_statistics() -> nn.Module:
    norm = nn.BatchNorm1d(3)
    norm.running_mean, norm.running_var = torch.full((3,), 0.5), torch.full((3,), 2.0)
    return norm


@pytest.mark.parametrize("build", [batched, graph, auto])
@pytest.mark.parametrize(
    "make_model",
    [
        lambda: Frozen(norm_with_statistics()),
        lambda: Frozen(nn.Dropout(0.5)),
        WithoutGradients,
    ],
    ids=["BatchNorm in eval mode", "dropout in eval mode", "without gradients"],
)
def test_what_a_model_keeps_from_training_is_not_trained(
    build: Build, make_model: Callable[[], nn.Module]
) -> None:
    """A client's four and two samples make a full and a padded batch."""
    torch.manual_seed(0)
    model = make_model().double()
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = train(engine(reference, model, x)).delta
    actual = train(engine(build, model, x)).delta
    for name, change in expected.items():
        exactly(actual[name], change)
        if "running" in name or (isinstance(model, WithoutGradients) and name.startswith("0")):
            assert not change.any()
        else:
            assert change.any()


class MovingMean(nn.Linear):
    """A linear layer that tracks the mean of its outputs, by a new buffer in each pass."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * out.detach().mean()
        return out


def test_a_buffer_that_the_model_replaces_is_kept_for_the_client() -> None:
    """By hand: two steps of SGD, of four and of two samples."""
    model = MovingMean()
    trained = engine(reference, model)
    x, y = trained.data.x, trained.data.y
    expected, linear = 0.0, nn.Linear(4, 3)
    linear.load_state_dict({"weight": model.weight, "bias": model.bias})
    schedule = schedule_of(trained, np.array([0]), 1)
    for step, count in enumerate(schedule.counts[0]):
        batch = torch.as_tensor(schedule.positions[0, step, :count])
        out = linear(x[batch])
        expected = 0.5 * expected + 0.5 * float(out.detach().mean())
        linear.zero_grad()
        F.cross_entropy(out, y[batch]).backward()
        with torch.no_grad():
            for parameter in linear.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
    for _ in range(2):  # A client starts from the model that it is given.
        assert float(train(trained).delta["mean"][0]) == pytest.approx(expected, rel=1e-5)


class Counting(nn.Linear):
    """A linear layer that counts its passes in an integer buffer, which clients do not send."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count = self.count + 1
        return super().forward(x) * (1 + self.count)


def test_a_counter_that_clients_would_share_is_rejected() -> None:
    rejects = pytest.raises(ConfigError, match=r"(?s)Counting .*engine=sequential")
    for build in (batched, graph):
        with rejects:
            engine(build, Counting())
    built = engine(auto, Counting())
    assert built.description.startswith("sequential")
    assert torch.equal(train(built).delta["weight"], train(built).delta["weight"])


# --- memory layout --------------------------------------------------------------------------------


class Viewing(nn.Conv2d):
    """Views a convolution's output as torch's tutorials do, which needs it contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(len(x), -1)


FLATTENING = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten())


@pytest.mark.parametrize(("model", "possible"), [(FLATTENING, True), (Viewing(2, 3, 2), False)])
def test_channels_last_is_for_convolutions_that_can_take_it(
    model: nn.Module, possible: bool
) -> None:
    x = torch.ones(4, 2, 3, 3)
    assert (layout_for(model, x) is torch.channels_last) == possible
    assert layout_for(model, x[:0]) is torch.contiguous_format
    assert np.isfinite(train(engine(reference, model, x)).loss).all()
    with PretendedCard():
        on_card = x.cuda()
        model = model.cuda()
        assert layout_for(model, on_card) is torch.contiguous_format
        assert (layout_for(model, on_card, "bf16") is torch.channels_last) == possible


def test_models_without_convolutions_take_contiguous_batches() -> None:
    assert layout_for(mlp(nn.ReLU()), torch.ones(4, 2, 3, 3)) is torch.contiguous_format


# --- what is rejected -----------------------------------------------------------------------------


def mlp(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), layer, nn.Linear(3, 3))


class Recurrent(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.cell = nn.GRU(2, 3, num_layers=2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cell(x.view(len(x), 2, 2))[0][:, -1]
        return out


class Functional(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if float(x.sum()) > 0 else -out


class Mixing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out - out.mean(0)


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
    message = r"model (\w+): layer '(1|cell)' \((\w+)\) cannot run.*\n.*engine=sequential"
    with pytest.raises(ConfigError, match=message):
        engine(batched, model)
    assert np.isfinite(train(engine(reference, model)).loss).all()


@pytest.mark.parametrize("build", [batched, reference])
@pytest.mark.parametrize("model", [mlp(nn.Dropout1d(0.5)), mlp(nn.AlphaDropout()), Recurrent(0.5)])
def test_random_layers_are_named_with_what_to_use(build: Build, model: nn.Module) -> None:
    message = r"layer '(1|cell)' .* global generator\n.*nn.Dropout has masks keyed"
    with pytest.raises(ConfigError, match=message):
        engine(build, model)


@pytest.mark.parametrize("build", [batched, reference])
def test_hidden_randomness_is_found_and_undone(build: Build) -> None:
    model, before = Functional(4, 3), torch.get_rng_state()
    message = "model Functional draws from torch's global generator"
    with pytest.raises(ConfigError, match=message):
        engine(build, model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("build", "model", "fault"),
    [
        (batched, Branching, "Branching cannot run for several clients"),
        (batched, Mixing, "Mixing mixes the samples of a batch"),
        (graph, Mixing, "Mixing mixes the samples of a batch"),
    ],
)
def test_a_fault_that_a_trial_pass_finds_is_told_with_the_engine_that_runs_the_model(
    build: Build, model: type[nn.Linear], fault: str
) -> None:
    with pytest.raises(ConfigError, match=rf"model {fault}.*\n.*engine=sequential"):
        engine(build, model(4, 3))
    assert f"sequential (auto: model {fault}" in engine(auto, model(4, 3)).description


def test_recurrent_layers_are_in_training_mode_when_a_gradient_is_computed() -> None:
    """cuDNN rejects the backward pass in eval mode. Other layers stay in eval mode."""
    model = nn.Sequential(Recurrent(0.0), nn.BatchNorm1d(3))
    built = engine(reference, model)
    recurrent, norm = built.backend.model
    modes: set[tuple[bool, bool, bool]] = set()

    def note_modes(layer: nn.Module, x: Any, y: Any) -> None:
        modes.add((torch.is_grad_enabled(), layer.training, norm.training))

    recurrent.cell.register_forward_hook(note_modes)
    (gradient,) = built.client_gradients(dict(model.state_dict()), [np.arange(6)])
    built.losses(dict(model.state_dict()), [np.arange(6)])
    assert modes == {(True, True, False), (False, False, False)}
    model.eval()
    loss = F.cross_entropy(model(built.data.x), built.data.y)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    assert torch.allclose(gradient, torch.cat([grad.flatten() for grad in grads]), atol=1e-6)
