"""Deployments with `secure_aggregation=true`: SecAgg+ of Flower over an in-process Grid."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
from torch import Tensor

from fedsim.core.errors import ConfigError, FedsimError
from fedsim.flower import Example, LabelledSamples, Selecting, ServerData, client_app, secagg
from fedsim.flower.messages import unpacked
from tests.flower_grid import LocalGrid, context_of
from tests.flower_runs import NUM_CLIENTS, RUN, Run, grid_of, on_nodes, simulated
from tests.test_flower import SERVER, UNEQUAL

SECURE = ("secure_aggregation=true", "cohort_size=4", *UNEQUAL, *SERVER)
SELECTORS = {
    "random": ("selector=random",),
    "uniform": ("selector=random", "aggregator=uniform"),
    "weights of a selector": ("selector=f3ast",),
    "label counts": ("selector=fedcbs",),
    "FedProx and a server optimiser": ("local_algorithm=fedprox", "aggregator=fedavgm"),
    "partial work": ("local.partial_rate=0.5",),
}


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("name", SELECTORS)
def test_a_secure_sum_is_the_simulators_up_to_rounding(name: str) -> None:
    words = (*RUN, *SECURE, "num_rounds=3", *SELECTORS[name])
    example = Example(*words)
    deployed = on_nodes(example, grid_of(example), *words)
    records, params = simulated(example)
    assert [record["selected"] for record in deployed.records] == [r.selected for r in records]
    for record, expected in zip(deployed.records, records, strict=True):
        assert (record["uploaded"], record["late"]) == (expected.uploaded, [])
        assert record["train_samples"] == expected.train_samples
    for key, value in params.items():
        torch.testing.assert_close(deployed.model[key], value, rtol=0, atol=1e-4)


class Nodes:
    """The app of nodes of which some die at a stage of the protocol, or in plain training.

    `sent` has the content of all answers to training. A node whose app raises an error answers with
    it, as Flower's nodes do.
    """

    def __init__(self, app: ClientApp, stage: str, dead: Iterable[int]) -> None:
        self.app = app
        self.stage = stage
        self.dead = [1000 + client for client in dead]
        self.sent: list[RecordDict] = []

    def __call__(self, message: Message, context: Context) -> Message:
        configs = message.content.config_records.get(RECORD_KEY_CONFIGS, {})
        is_training = message.metadata.message_type == "train"
        is_dead = message.metadata.dst_node_id in self.dead
        if is_training and is_dead and configs.get(Key.STAGE, "") == self.stage:
            return Message(Error(0, "it died"), reply_to=message)
        try:
            reply = self.app(message, context)
        except Exception as error:
            return Message(Error(0, str(error)), reply_to=message)
        if is_training:
            self.sent.append(reply.content)
        return reply


def after(*words: str, stage: str = "", dead: Iterable[int] = ()) -> tuple[Run, Nodes]:
    """Return a run of two rounds of all six clients, of which some die, and their nodes."""
    words = (*RUN, *UNEQUAL, *SERVER, "selector=full", "num_rounds=2", *words)
    example = Example(*words)
    grid = grid_of(example)
    nodes = Nodes(grid.app, stage, dead)
    grid.app = nodes  # type: ignore[assignment]
    return on_nodes(example, grid, *words), nodes


@pytest.mark.usefixtures("empty_folder")
def test_the_sum_without_a_node_that_dies_is_that_of_the_others() -> None:
    plain, _ = after(dead=[2])
    secure, _ = after(*SECURE, stage="collect_masked_vectors", dead=[2])
    for run in (plain, secure):
        assert [record["late"] for record in run.records] == [[2], [2]]
        assert [record["uploaded"] for record in run.records] == [5, 5]
    for key, value in plain.model.items():
        torch.testing.assert_close(secure.model[key], value, rtol=0, atol=1e-4)


UNFINISHED = [
    ("collect_masked_vectors", [0, 1, 2]),  # fewer than two thirds are left
    ("setup", [2]),  # the others have no share of its key
    ("unmask", [0, 1, 2]),
]


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(("stage", "dead"), UNFINISHED)
def test_a_protocol_that_cannot_end_leaves_the_model(stage: str, dead: list[int]) -> None:
    run, _ = after(*SECURE, stage=stage, dead=dead)
    assert [record["late"] for record in run.records] == [[*range(NUM_CLIENTS)]] * 2
    assert run.records[0]["test_accuracy"] == run.records[1]["test_accuracy"]


@pytest.mark.usefixtures("empty_folder")
def test_a_client_that_is_selected_alone_sends_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(secagg.LOG, "warning", lambda text, *values: told.append(text % values))
    run, _ = after(*SECURE, "cohort_size=2", "selector=md", "num_rounds=4", "seed=1")
    alone = [record for record in run.records if len(record["selected"]) == 1]
    assert 0 < len(alone) < 4
    for record in alone:
        assert (record["late"], record["uploaded"]) == (record["selected"], 0)
        assert record["wire_bytes_up"] == 0
    text = "no secure sum in round {}: it needs two clients, and 1 could be asked"
    assert told == [text.format(record["round"]) for record in alone]


@pytest.mark.usefixtures("empty_folder")
def test_no_client_sends_an_update_that_can_be_read() -> None:
    """Masked numbers are spread over the whole range of the modulus, 2^32."""
    _, nodes = after(*SECURE)
    masked = []
    for content in nodes.sent:
        assert not any(content.array_records.values())
        assert "numbers" not in content.metric_records
        parts = content.config_records[RECORD_KEY_CONFIGS].get(Key.MASKED_PARAMETERS)
        if parts is not None:
            masked.append(np.concatenate([bytes_to_ndarray(part).ravel() for part in parts]))
    assert len(masked) == 2 * NUM_CLIENTS
    for vector in masked:
        assert vector.mean() / 2**32 == pytest.approx(0.5, abs=0.1)
        assert vector.std() / 2**32 == pytest.approx(12**-0.5, abs=0.1)


@pytest.mark.usefixtures("empty_folder")
def test_an_app_may_send_only_masked_updates() -> None:
    words = (*RUN, *UNEQUAL, *SERVER)
    example = Example(*words)

    def load(context: Any) -> Any:
        return example.samples(context.node_config["partition-id"])

    grid = LocalGrid(client_app(example.model, load, only_masked=True), range(NUM_CLIENTS))
    fault = r"secure_aggregation=False: must be true: the client apps of \[0, 1, 2, 3, 4, 5\]"
    with pytest.raises(FedsimError, match=fault):
        on_nodes(example, grid, *words)
    question = RecordDict({"request": ConfigRecord({})})
    with pytest.raises(FedsimError, match="sends its update only for a secure sum"):
        grid.app(Message(question, 1000, "train"), grid.contexts[1000])


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("kind", ["train.gradients", "evaluate.losses", "evaluate.accuracies"])
def test_an_app_with_masked_updates_answers_nothing_about_chosen_samples(kind: str) -> None:
    app = client_app(lambda: torch.nn.Linear(8, 3), lambda _: None, only_masked=True)  # type: ignore
    with pytest.raises(FedsimError, match="this app does not answer"):
        app(Message(RecordDict({}), 1000, kind), context_of(1000, 0))


def spoiled(grid: LocalGrid, spoil: Callable[[Message], list[Message]]) -> LocalGrid:
    """Return the grid with other answers of node 1001 to training."""
    send_and_receive = grid.send_and_receive

    def spoil_answers(messages: Any, *, timeout: float | None = None) -> list[Message]:
        replies: list[Message] = []
        for reply in send_and_receive(messages, timeout=timeout):
            is_spoiled = reply.metadata.message_type == "train"
            is_spoiled = is_spoiled and reply.metadata.src_node_id == 1001
            replies += spoil(reply) if is_spoiled else [reply]
        return replies

    grid.send_and_receive = spoil_answers  # type: ignore[method-assign]
    return grid


def without_records(reply: Message) -> list[Message]:
    reply.content.clear()
    return [reply]


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    ("spoil", "late"), [(without_records, [*range(NUM_CLIENTS)]), (lambda reply: [reply] * 2, [])]
)
def test_a_malformed_answer_spoils_the_sum_and_a_second_one_does_not(
    spoil: Callable[[Message], list[Message]], late: list[int]
) -> None:
    words = (*RUN, *UNEQUAL, *SERVER, *SECURE, "selector=full", "num_rounds=2")
    example = Example(*words)
    run = on_nodes(example, spoiled(grid_of(example), spoil), *words)
    assert [record["late"] for record in run.records] == [late] * 2


class Scaled(torch.nn.Module):
    """A linear layer times a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 3)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


@pytest.mark.usefixtures("empty_folder")
def test_a_parameter_without_dimensions_is_summed() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(40, 8, generator=rng)
    y = x[:, :3].argmax(1)
    server = ServerData(LabelledSamples(x, y))
    grid = LocalGrid(client_app(Scaled, lambda _: (x, y)), range(NUM_CLIENTS))
    models = []
    for words in (SECURE[1:], SECURE):
        selecting = Selecting(*RUN, *words, "num_rounds=2", model=Scaled(), server=server)
        result = selecting.start(grid, timeout=1)
        models.append(unpacked(RecordDict({"model": result.arrays}), "model", torch.device("cpu")))
    assert models[0]["scale"] != 1
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=0, atol=1e-4)


REJECTED = {
    "cohort_size=1": "cohort_size=1: does not work with SecAgg",
    "selector=aocs": "selector='aocs': does not work with SecAgg",
    "aggregator=dp_fedavg": "aggregator='dp_fedavg': does not work with SecAgg",
    "local_algorithm=scaffold": "local_algorithm='scaffold': does not work with SecAgg",
    "system=lognormal": "system='lognormal': does not work with SecAgg",
    "local.drop_out=0.1": "local.drop_out=0.1: does not work with SecAgg",
    "num_clients=1001": "num_clients=1001: does not work with SecAgg",
    "selector=oort": "needs losses of single clients",
}


@pytest.mark.parametrize("word", REJECTED)
def test_what_does_not_work_with_secure_sums_is_rejected(word: str) -> None:
    words = ("secure_aggregation=true", "device=cpu", "dataset=synthetic", "partition=iid")
    with pytest.raises(ConfigError, match=REJECTED[word]):
        Selecting(*words, word, model=torch.nn.Linear(1, 1), server=NO_SAMPLES)


def test_without_samples_of_the_server_clients_would_send_losses() -> None:
    with pytest.raises(ConfigError, match="single losses to evaluate"):
        Selecting("secure_aggregation=true", model=torch.nn.Linear(1, 1))


NO_SAMPLES = ServerData(LabelledSamples(torch.empty(0, 1), torch.empty(0)))
