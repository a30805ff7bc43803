"""Convolutions of several clients: all ways give what single convolutions give, and the fastest
one is remembered."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedsim.engine.graph import choices, client_convolutions
from fedsim.engine.graph.client_convolutions import ClientConv2d, use_client_convolutions
from tests.pretended_cuda import PretendedCard

NUM_CLIENTS = 3
LAYERS = {
    "plain": nn.Conv2d(2, 4, 3),
    "stride and padding": nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False),
    "dilation": nn.Conv2d(2, 4, (3, 1), dilation=2, padding=(2, 0)),
}


def gradients(layer: nn.Module, tensors: dict[str, Tensor], x: Tensor) -> Any:
    """Return the gradients of a sum of cubes in the weights and inputs of each client."""

    def loss(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        # A second layer's slope depends on its input.
        return functional_call(layer, tensors, (x,)).pow(3).sum()

    return vmap(grad(loss, argnums=(0, 1)))(tensors, x)


@pytest.mark.parametrize("way", ["grouped", "channels last", "one by one"])
@pytest.mark.parametrize("name", LAYERS)
def test_all_ways_equal_torch(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_convolutions, "_choose_way", lambda *layer: way)
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_CLIENTS, 5, 2, 7, 6)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    plain = nn.Sequential(LAYERS[name]).double()
    tensors = {}
    for tensor_name, value in plain.named_parameters():
        size = (NUM_CLIENTS, *value.shape)
        tensors[tensor_name] = torch.randn(size, generator=generator, dtype=torch.float64)
    clients = use_client_convolutions(nn.Sequential(LAYERS[name]), "float32").double()
    layer = clients[0]  # type: ignore[index]
    assert type(layer) is ClientConv2d
    actual = gradients(clients, tensors, x)
    layer.__class__ = nn.Conv2d  # type: ignore[assignment]
    torch.testing.assert_close(actual, gradients(plain, tensors, x), rtol=1e-12, atol=1e-12)


def test_the_input_of_the_first_layer_needs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(*arguments: Any) -> Any:
        asked.append(arguments[3])
        return original(*arguments)

    original = client_convolutions.convolution_gradients
    monkeypatch.setattr(client_convolutions, "convolution_gradients", noted)
    model = use_client_convolutions(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)), "float32"
    )
    tensors = {n: torch.stack([p.detach()] * 2) for n, p in model.named_parameters()}

    def loss(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, tensors, (x,)).sum()

    vmap(grad(loss))(tensors, torch.ones(2, 1, 1, 6, 6))
    assert asked == [(True, True, True), (False, True, True)]


def test_other_convolutions_stay() -> None:
    layers = [nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(1, 1, 3, padding="same"), nn.Conv1d(1, 1, 3)]
    layers.append(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"))
    model = use_client_convolutions(nn.Sequential(*layers), "float32")
    assert not any(isinstance(layer, ClientConv2d) for layer in model.modules())


@pytest.mark.parametrize("content", [None, "{", "[]", '{"a": "b"}', '{"a layer": ["fast"]}'])
def test_the_faster_way_is_remembered(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "choices" / "card.json"
    if content is not None:
        path.parent.mkdir()
        path.write_text(content)
    monkeypatch.setattr(choices, "_choices_path", lambda device: path)
    times = {"slow": mock.Mock(return_value=2.0), "fast": mock.Mock(return_value=1.0)}
    for _ in range(2):
        choices._choices_of_process.cache_clear()  # as another process begins
        assert choices.fastest(torch.device("cuda"), "a layer", times) == "fast"
    assert times["slow"].call_count == 1
    assert json.loads(path.read_text())["a layer"] == "fast"
    choices.fastest(torch.device("cuda"), "another layer", times)
    assert times["slow"].call_count == 2


def test_processes_that_choose_at_the_same_time_share_their_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "card.json"
    monkeypatch.setattr(choices, "_choices_path", lambda device: path)
    device = torch.device("cuda")

    def another_process_chooses() -> float:
        path.write_text('{"a layer": "slow", "a model": "together"}')
        return 2.0

    times = {"slow": another_process_chooses, "fast": lambda: 1.0}
    assert choices.fastest(device, "a layer", times) == "slow"
    assert choices.fastest(device, "another layer", {"grouped": lambda: 1.0}) == "grouped"
    assert json.loads(path.read_text()) == {
        "a layer": "slow",
        "a model": "together",
        "another layer": "grouped",
    }


def test_a_way_is_timed_as_a_graph() -> None:
    with PretendedCard() as card:
        x = torch.ones(4, device="cuda")
        assert client_convolutions.milliseconds(lambda: x.add_(1)) >= 0
        assert card.counts.waits.total() > 0
