"""Runs over nodes of Flower against the simulator: equal choices, equal ledgers, equal bits."""

import copy
import itertools
import os
import shutil
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict

from fedsim import load_runs, run_experiment
from fedsim.api.experiments import compose
from fedsim.commands import dispatch
from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError, FedsimError
from fedsim.flower import Example, Selecting, client_app, command, example, strategy
from fedsim.flower.engine import RemoteEngine
from fedsim.flower.messages import digest_of_frozen, engine_of, packed
from fedsim.results.reading import read_summary
from tests.clocks import NEED_A_CLOCK
from tests.flower_grid import LocalGrid, through_bytes
from tests.flower_runs import NUM_CLIENTS, RUN, Run, grid_of, on_nodes, simulated
from tests.goldens import SELECTORS
from tests.pretended_cuda import PretendedCard

SERVER = ("server.validation_fraction=0.1", "server.public_samples=20")
DATA = {
    "images of digits": (
        "dataset=digits",
        "partition=shards",
        "model=logistic",
        "local.batch_size=64",
    ),
    "writers": (
        "dataset=femnist_generated",
        "dataset.num_writers=10",
        "dataset.samples_per_writer=30",
        "dataset.test_samples=50",
        "partition=natural",
        "partition.min_samples=1",
        "model=logistic",
    ),
    "clients of unequal size": (
        "dataset=synthetic",
        "dataset.num_owners=10",
        "dataset.samples_per_owner=30",
        "dataset.size_deviation=0.7",
        "dataset.test_samples=60",
        "partition=natural",
        "partition.min_samples=1",
        "model=logistic",
    ),
}
UNEQUAL = (*DATA["clients of unequal size"], "dataset.num_owners=6")
METHODS = {
    "scaffold": ("local_algorithm=scaffold",),
    "fedprox": ("local_algorithm=fedprox", "local_algorithm.mu=0.1"),
    "by_size": ("aggregator=by_size",),
    "uniform": ("aggregator=uniform",),
    "unreliable": ("local.drop_out=0.3", "local.partial_rate=0.5", "local_algorithm=fednova"),
    "by size": ("availability=by_size",),
}
COUNTED = (
    "contacted",
    "trained",
    "uploaded",
    "bytes_down",
    "bytes_up",
    "forward_samples",
    "train_samples",
    "server_forward_samples",
    "participation_ratio",
    "test_accuracy",
)


def assert_equal_to_the_simulator(*words: str) -> None:
    example = Example(*RUN, *words)
    deployed = on_nodes(example, grid_of(example), *RUN, *words)
    records, params = simulated(example)
    chosen = [record["selected"] for record in deployed.records]
    assert chosen == [record.selected for record in records]
    for record, expected in zip(deployed.records, records, strict=True):
        for name in COUNTED:
            assert record[name] == getattr(expected, name), (record["round"], name)
    for name, value in params.items():
        assert torch.equal(deployed.model[name], value.cpu()), name


def words_of(selectors: Sequence[str]) -> list[str]:
    """What the selectors need in addition; all of `selectors` need the same."""
    words = [f"selector={','.join(selectors)}", *SERVER, "num_clients=10"]
    if set(selectors) & set(NEED_A_CLOCK):
        words.append("system=lognormal")
    if "pncs_two" in selectors:  # its layers are those of another model
        words.append("selector.layers=null")
    return words


def plans_of(data: str, selectors: Sequence[str]) -> dict[str, Plan]:
    """The plans of selectors on a data set. To compose them together is faster."""
    with_clock = [name for name in selectors if name in NEED_A_CLOCK]
    two_layers = [name for name in selectors if name == "pncs_two"]
    plain = [name for name in selectors if name not in (*with_clock, *two_layers)]
    groups = [plain, with_clock, two_layers]
    composed = {}
    for group in filter(None, groups):
        for plan in compose([*RUN, *DATA[data], *words_of(group)]):
            composed[plan.choices["selector"]] = plan
    return composed


def assert_plan_is_equal(data: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (example, strategy):
        monkeypatch.setattr(module, "compose", lambda words, config_dir: [plan])
    assert_equal_to_the_simulator(*DATA[data])


TURNS = {data: SELECTORS[turn :: len(DATA)] for turn, data in enumerate(DATA)}
"""The selectors of each data set in the fast test."""


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    composed = {}
    for data, selectors in TURNS.items():
        composed |= plans_of(data, selectors)
    return composed


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("selector", SELECTORS)
def test_every_selector_chooses_on_nodes_as_in_the_simulator(
    selector: str, plans: dict[str, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    (data,) = (data for data, selectors in TURNS.items() if selector in selectors)
    assert_plan_is_equal(data, plans[selector], monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("data", DATA)
def test_every_selector_chooses_as_in_the_simulator_on_all_data_sets(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for plan in plans_of(data, SELECTORS).values():
        assert_plan_is_equal(data, plan, monkeypatch)


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("method", METHODS)
def test_methods_of_training_and_aggregation_are_those_of_the_simulator(method: str) -> None:
    assert_equal_to_the_simulator(*UNEQUAL, *METHODS[method])


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("selector", ["entropy_greedy", "lefl"])
def test_classes_of_which_no_client_has_samples_are_counted(selector: str) -> None:
    example = Example(*RUN, *UNEQUAL, *SERVER)
    assert max(int(example.samples(client)[1].max()) for client in range(NUM_CLIENTS)) < 9
    assert_equal_to_the_simulator(*UNEQUAL, *SERVER, f"selector={selector}")


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("selector", ["divfl", "power_of_choice"])
def test_nodes_and_server_compute_on_the_device_of_their_tensors(selector: str) -> None:
    with PretendedCard():
        assert_equal_to_the_simulator(
            *DATA["images of digits"], f"selector={selector}", "device=cuda", "num_rounds=2"
        )


class Lossy(LocalGrid):
    """A Grid that loses the replies of which `is_lost(message type, client)` is true."""

    def __init__(self, grid: LocalGrid, is_lost: Callable[[str, int], bool]) -> None:
        self.__dict__.update(grid.__dict__)
        self.is_lost = is_lost

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        arrived = []
        for reply in super().send_and_receive(messages, timeout=timeout):
            client = reply.metadata.src_node_id - 1000
            if not self.is_lost(reply.metadata.message_type, client):
                arrived.append(reply)
        return arrived


@pytest.mark.usefixtures("empty_folder")
def test_a_gradient_that_is_lost_is_zero_on_the_device() -> None:
    words = (*RUN, *UNEQUAL, "selector=fl_dp3s", "device=cuda", "num_rounds=1")
    with PretendedCard():
        example = Example(*words)
        grid = Lossy(
            grid_of(example), lambda kind, client: (kind, client) == ("train.gradients", 3)
        )
        assert len(on_nodes(example, grid, *words).records) == 1


class InDoublePrecision(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.double())


@pytest.mark.usefixtures("empty_folder")
def test_gradients_of_a_model_in_double_precision_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warnings: list[Any] = []
    monkeypatch.setattr("fedsim.flower.engine.LOG.warning", lambda *texts: warnings.append(texts))
    words = (*RUN, *UNEQUAL, "selector=fl_dp3s", "num_rounds=2")
    example = Example(*words)
    app = client_app(
        lambda: InDoublePrecision(example.model()),
        lambda context: example.samples(context.node_config["partition-id"]),
        answers=["gradients"],
    )
    model = InDoublePrecision(example.model())
    strategy = Selecting(*words, model=model, server=example.server())
    strategy.start(LocalGrid(app, range(NUM_CLIENTS)), timeout=1)
    assert not warnings


class Faulty(LocalGrid):
    """A Grid whose `spoil` changes the answers to training; it gets the round and the client."""

    def __init__(self, grid: LocalGrid, spoil: Any) -> None:
        self.__dict__.update(grid.__dict__)
        self.spoil = spoil

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        messages = list(messages)
        replies = list(super().send_and_receive(messages, timeout=timeout))
        if messages[0].metadata.message_type != "train":
            return replies
        round = messages[0].content.config_records["request"]["round"]
        spoiled = []
        for reply, message in zip(replies, messages[::-1], strict=True):
            client = message.metadata.dst_node_id - 1000
            spoiled += self.spoil(round, client, reply)
        return spoiled


def run_with(spoil: Any, *words: str) -> Run:
    """Run all clients in 3 rounds; `spoil` returns the replies that arrive in place of one."""
    words = (*RUN, *UNEQUAL, "selector=full", "num_rounds=3", *words)
    example = Example(*words)
    return on_nodes(example, Faulty(grid_of(example), spoil), *words)


def changed(reply: Message, change: Any) -> Message:
    """The reply with each array replaced by `change` of it."""
    arrays = reply.content.array_records["arrays"]
    tensors = {name: change(torch.tensor(a.numpy())) for name, a in arrays.items()}
    reply.content["arrays"] = packed(tensors)
    return reply


def late_in(run: Run) -> list[list[int]]:
    return [record["late"] for record in run.records]


@pytest.mark.usefixtures("empty_folder")
def test_a_client_that_sends_nothing_is_late_and_not_uploaded() -> None:
    run = run_with(lambda t, client, reply: [] if (t, client) == (2, 4) else [reply])
    assert late_in(run) == [[], [4], []]
    assert [record["uploaded"] for record in run.records] == [6, 5, 6]


@pytest.mark.usefixtures("empty_folder")
def test_a_round_in_which_nobody_answers_leaves_the_model_and_the_run_goes_on() -> None:
    run = run_with(lambda t, client, reply: [] if t == 2 else [reply])
    first, second, third = (record["test_loss"] for record in run.records)
    assert first == second != third
    assert late_in(run) == [[], [0, 1, 2, 3, 4, 5], []]


@pytest.mark.usefixtures("empty_folder")
def test_an_update_of_another_shape_is_late() -> None:
    def spoil(t: int, client: int, reply: Message) -> list[Message]:
        return [changed(reply, lambda x: x[:1]) if (t, client) == (1, 0) else reply]

    assert late_in(run_with(spoil)) == [[0], [], []]


def without_records(reply: Message) -> Message:
    reply.content.clear()
    return reply


def with_other_numbers(reply: Message) -> Message:
    reply.content["numbers"] = MetricRecord({"training_loss": [1.0, 2.0]})
    return reply


def with_damaged_arrays(reply: Message) -> Message:
    arrays = reply.content.array_records["arrays"]
    for name, array in arrays.items():
        arrays[name] = Array(array.dtype, array.shape, array.stype, b"damaged")
    return reply


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    ("damage", "late"),
    [(without_records, [0]), (with_damaged_arrays, [0]), (with_other_numbers, [])],
)
def test_a_malformed_answer_does_not_end_the_run(
    damage: Callable[[Message], Message], late: list[int]
) -> None:
    def spoil(t: int, client: int, reply: Message) -> list[Message]:
        return [damage(reply) if (t, client) == (1, 0) else reply]

    run = run_with(spoil)
    assert late_in(run) == [late, [], []]
    assert all(value.isfinite().all() for value in run.model.values())


@pytest.mark.usefixtures("empty_folder")
def test_a_round_begins_when_a_node_is_connected() -> None:
    """In the third look, before round 2, no node is connected."""
    words = (*RUN, *UNEQUAL, "selector=full", "num_rounds=3")
    example = Example(*words)
    grid, undisturbed = grid_of(example), on_nodes(example, grid_of(example), *words)
    nodes = grid.get_node_ids()
    looks = itertools.count(1)
    grid.get_node_ids = lambda: [] if next(looks) == 3 else nodes  # type: ignore[method-assign]
    run = on_nodes(example, grid, *words, "overwrite=true")
    assert next(looks) > 4
    assert late_in(run) == [[], [], []]
    for name, value in undisturbed.model.items():
        assert torch.equal(run.model[name], value)


@pytest.mark.usefixtures("empty_folder")
def test_a_run_without_any_node_ends_and_can_be_resumed() -> None:
    words = (*RUN, *UNEQUAL, "selector=full", "num_rounds=3")
    example = Example(*words)
    grid = grid_of(example)
    nodes = grid.get_node_ids()
    looks = itertools.count(1)
    grid.get_node_ids = lambda: nodes if next(looks) < 3 else []  # type: ignore[method-assign]
    with pytest.raises(FedsimError, match="for 1 s no node has been connected"):
        on_nodes(example, grid, *words)
    assert len(on_nodes(example, grid_of(example), *words).records) == 3


@pytest.mark.usefixtures("empty_folder")
def test_frozen_tensors_must_be_those_of_the_server() -> None:
    words = (*RUN, *UNEQUAL, "selector=full", "num_rounds=1")
    example = Example(*words)

    def model_with_frozen_bias(value: float) -> torch.nn.Module:
        model = copy.deepcopy(example.model())
        *_, bias = model.parameters()
        bias.requires_grad_(False).fill_(value)
        return model

    def load(context: Any) -> Any:
        return example.samples(context.node_config["partition-id"])

    def run(value_at_clients: float) -> None:
        app = client_app(lambda: model_with_frozen_bias(value_at_clients), load)
        selecting = Selecting(*words, model=model_with_frozen_bias(1.0), server=example.server())
        selecting.start(LocalGrid(app, range(NUM_CLIENTS)), timeout=1)

    with pytest.raises(FedsimError, match=r"other frozen tensors than .* clients \[0, 1, 2, 3, 4"):
        run(2.0)
    run(1.0)


def test_the_count_of_batches_is_no_frozen_tensor() -> None:
    used = torch.nn.BatchNorm1d(2)
    used(torch.zeros(3, 2))
    assert digest_of_frozen(used) == digest_of_frozen(torch.nn.BatchNorm1d(2))
    fixed = torch.nn.BatchNorm1d(2).requires_grad_(False)
    assert digest_of_frozen(fixed) != digest_of_frozen(used)


class WithAStranger(LocalGrid):
    """A Grid with a seventh node, which answers the question who it is by `facts`."""

    def __init__(self, grid: LocalGrid, facts: dict[str, Any]) -> None:
        self.__dict__.update(grid.__dict__)
        self.facts = facts

    def get_node_ids(self) -> list[int]:
        return [*super().get_node_ids(), 2000]

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        messages = list(messages)
        clients = [m for m in messages if m.metadata.dst_node_id != 2000]
        replies = list(super().send_and_receive(clients, timeout=timeout))
        for message in messages:
            if message.metadata.dst_node_id == 2000:
                message.metadata.__dict__["_message_id"] = "message to the stranger"
                records = {"facts": ConfigRecord(self.facts)} if self.facts else {}
                replies.append(Message(RecordDict(records), reply_to=message))
        return replies


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("facts", [{}, {"client": "six"}, {"client": 2}])
def test_a_node_with_another_app_is_ignored(facts: dict[str, Any]) -> None:
    words = (*RUN, *UNEQUAL, "selector=full", "num_rounds=2")
    example = Example(*words)
    run = on_nodes(example, WithAStranger(grid_of(example), facts), *words)
    assert late_in(run) == [[], []]


@pytest.mark.usefixtures("empty_folder")
def test_an_update_with_nan_is_dropped() -> None:
    def spoil(t: int, client: int, reply: Message) -> list[Message]:
        return [changed(reply, lambda x: x * np.nan) if (t, client) == (1, 0) else reply]

    run = run_with(spoil)
    assert [record["dropped_updates"] for record in run.records] == [1, 0, 0]
    assert all(value.isfinite().all() for value in run.model.values())


@pytest.mark.usefixtures("empty_folder")
def test_a_second_answer_changes_nothing() -> None:
    once = run_with(lambda t, client, reply: [reply])
    again = "name=again"
    twice = run_with(
        lambda t, client, reply: [reply, changed(through_bytes(reply), torch.zeros_like)], again
    )
    for name, value in once.model.items():
        assert torch.equal(twice.model[name], value)


@pytest.mark.usefixtures("empty_folder")
def test_a_node_that_leaves_is_not_selected_and_comes_back_with_another_id() -> None:
    words = (*RUN, *UNEQUAL, "selector=full", "num_rounds=3")
    example = Example(*words)
    grid = grid_of(example)
    everybody = dict(grid.contexts)

    def ids() -> list[int]:
        """All nodes before round 1 and in it; two are gone in round 2; one has a new id in 3."""
        ids.calls += 1
        if ids.calls == 4:
            grid.contexts[77] = everybody[1001]
        gone = {3: {1001, 1002}, 4: {1001, 1002}}.get(ids.calls, set())
        return [node for node in grid.contexts if node not in gone]

    ids.calls = 0
    grid.get_node_ids = ids
    run = on_nodes(example, grid, *words)
    assert [record["selected"] for record in run.records] == [
        [0, 1, 2, 3, 4, 5],
        [0, 3, 4, 5],
        [0, 1, 3, 4, 5],
    ]


@pytest.mark.usefixtures("empty_folder")
def test_a_killed_server_resumes_with_the_same_bits() -> None:
    words = (*RUN, *UNEQUAL, "selector=oort", "aggregator=fedavgm", "checkpoint.every=1")
    example = Example(*words)

    class Killed(BaseException): ...

    def kill_in_round_4(t: int, client: int, reply: Message) -> list[Message]:
        if t == 4:
            raise Killed
        return [reply]

    with pytest.raises(Killed):
        on_nodes(example, Faulty(grid_of(example), kill_in_round_4), *words)
    grid = grid_of(example)
    resumed = on_nodes(example, grid, *words)
    assert grid.num_messages["train"] == 3 * 2  # rounds 4 to 6, two clients each
    records, params = simulated(example)
    assert [record["selected"] for record in resumed.records] == [r.selected for r in records]
    for name, value in params.items():
        assert torch.equal(resumed.model[name], value), name


@pytest.mark.usefixtures("empty_folder")
def test_a_signal_that_an_app_does_not_answer_rejects_the_selector_before_round_1() -> None:
    words = (*RUN, *UNEQUAL, "selector=power_of_choice")
    example = Example(*words)
    grid = grid_of(example, answers=["training_loss"])
    expected = (
        r"selector='power_of_choice': needs 'losses', which the client apps of "
        r"\[0, 1, 2, 3, 4, 5\] do not answer\n.*answers=\[..., 'losses'\].*one number"
    )
    with pytest.raises(ConfigError, match=expected):
        on_nodes(example, grid, *words)
    assert set(grid.num_messages) == {"query.about"}


@pytest.mark.usefixtures("empty_folder")
def test_missing_nodes_are_named() -> None:
    words = (*RUN, *UNEQUAL)
    example = Example(*words)
    grid = grid_of(example)
    del grid.contexts[1002]
    with pytest.raises(FedsimError, match=r"num_clients=6: after 1 s no node .* clients \[2\]"):
        on_nodes(example, grid, *words)


@pytest.mark.usefixtures("empty_folder")
def test_clients_evaluate_if_the_server_has_no_samples() -> None:
    words = (*RUN, *UNEQUAL, "num_rounds=1")
    example = Example(*words)
    run = on_nodes(example, grid_of(example), *words, server=None)
    engine = example.experiment.simulation.components.engine
    accuracies = engine.accuracies(run.model, engine.data.train)
    sizes = np.array([len(rows) for rows in engine.data.train])
    assert run.records[0]["test_accuracy"] == pytest.approx(accuracies @ sizes / sizes.sum())


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("num_evaluated", [0, 1])
def test_a_round_that_no_client_evaluates_has_no_accuracy(num_evaluated: int) -> None:
    words = (*RUN, *UNEQUAL, "num_rounds=2")
    example = Example(*words)
    evaluations = itertools.count()

    def is_lost(kind: str, client: int) -> bool:
        """All evaluations are lost after round `num_evaluated`; the first is before round 1."""
        in_time = 2 * NUM_CLIENTS * (1 + num_evaluated)
        return kind.startswith("evaluate") and next(evaluations) >= in_time

    run = on_nodes(example, Lossy(grid_of(example), is_lost), *words, server=None)
    accuracies = [record["test_accuracy"] for record in run.records]
    measured = [accuracy for accuracy in accuracies if accuracy is not None]
    assert len(measured) == num_evaluated
    assert accuracies[num_evaluated:] == [None] * (2 - num_evaluated)
    summary = read_summary(run.strategy.plan.folder)
    last = measured[-1] if measured else None
    assert summary["last_accuracy"] == summary["best_accuracy"] == last
    assert summary["final_accuracy"] == last


def test_positions_of_one_client_are_not_sent_to_the_next() -> None:
    """Client 0 has positions 0 to 2 and is asked about 1; client 1 is asked about all it has."""
    asked = []
    engine = RemoteEngine.__new__(RemoteEngine)
    engine._sizes, engine._ends = np.array([3, 2]), np.array([3, 5])
    engine._client_work = ""
    engine.nodes = Namespace(
        ask=lambda clients, kind, contents: asked.extend(contents) or [None] * len(clients)
    )
    losses = engine.losses({"w": torch.zeros(1)}, [np.array([1]), np.array([3, 4])])
    requests = [content.config_records["request"] for content in asked]
    assert [request.get("positions") for request in requests] == [[1], None]
    assert np.isnan(losses).all()


@pytest.mark.usefixtures("empty_folder")
def test_a_run_that_reaches_stop_at_returns_its_model() -> None:
    words = (*RUN, *UNEQUAL, "stop_at=0.001", "final_window=1")
    run = on_nodes(Example(*words), grid_of(Example(*words)), *words)
    assert len(run.records) == 1
    assert run.model


def test_a_client_makes_no_objects_of_classes_outside_the_engine() -> None:
    work = '{"optimizer": {"schedule": {"_target_": "os.system"}}}'
    with pytest.raises(FedsimError, match="the server names os"):
        engine_of(work, torch.nn.Linear(1, 1), torch.zeros(1, 1), torch.zeros(1).long(), 0)


ONLY_SIMULATED = ["clients=label_noise", "init_seed=per_client", "availability=cycles"]


def test_augmentation_is_rejected() -> None:
    words = (*RUN, "dataset=digits", "dataset.augment=crop_flip")
    with pytest.raises(ConfigError, match=r"dataset\.augment='crop_flip': only the simulator"):
        Selecting(*words, model=torch.nn.Linear(1, 1))


def test_models_of_different_sizes_are_different_runs() -> None:
    names = {Selecting(*RUN, model=torch.nn.Linear(n, 3)).plan.folder.name for n in (8, 8, 20)}
    assert len(names) == 2


@pytest.mark.parametrize("word", ONLY_SIMULATED)
def test_what_only_the_simulator_can_do_is_rejected(word: str) -> None:
    with pytest.raises(ConfigError, match="only the simulator can do that"):
        strategy.Selecting(*RUN, *UNEQUAL, word, model=torch.nn.Linear(1, 1))


def test_without_flower_the_error_names_the_extra() -> None:
    code = """
import sys
sys.modules["flwr"] = None  # as if it were not installed
import fedsim
assert "fedsim.flower" not in sys.modules
try:
    fedsim.flower
except fedsim.core.errors.ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "fedsim.flower: needs flwr, which is not installed" in done.stdout
    assert "pip install 'fedsim-selection[flower]'" in done.stdout


@pytest.mark.usefixtures("empty_folder")
def test_a_report_shows_a_deployed_run_next_to_the_simulated_one() -> None:
    words = (*RUN, *UNEQUAL, "num_rounds=2")
    example = Example(*words)
    on_nodes(example, grid_of(example), *words)
    run_experiment(words)
    runs = load_runs("outputs/default").sort_values("engine")
    assert runs["engine"].tolist() == ["flower", "sequential"]
    for same in ("dataset", "partition", "model", "selector", "final_accuracy"):
        assert runs[same].nunique() == 1


@pytest.mark.usefixtures("empty_folder")
def test_new_writes_an_app_whose_two_sides_work_together(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["selector=oort", *RUN, "num_rounds=1"]
    command.run(Namespace(folder=Path("my_app"), words=words, config_dir=None))
    project = tomllib.loads(Path("my_app/pyproject.toml").read_text())
    # flwr accepts letters, digits and hyphens, whatever the name of the folder.
    assert project["project"]["name"] == "fedsim-app"
    assert project["tool"]["flwr"]["app"]["components"] == {
        "serverapp": "server_app:app",
        "clientapp": "client_app:app",
    }
    monkeypatch.syspath_prepend("my_app")
    client, server = import_module("client_app"), import_module("server_app")
    server.main(LocalGrid(client.app, range(6)), None)
    (metrics,) = Path("outputs/default").glob("flower-oort-s0-*/metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == 1


LAB = """
from flower_helpers import steps
from fedsim.selectors.random import Random


class MyOwn(Random):
    def select(self, round, clients, rng):
        steps.append(round)
        return super().select(round, clients, rng)
"""


@pytest.mark.usefixtures("empty_folder")
def test_an_app_carries_the_users_own_class_to_another_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The processes find only fedsim and the app, in a folder elsewhere."""
    Path("lab/selector").mkdir(parents=True)
    Path("lab/selector/mine.yaml").write_text("_target_: flower_lab.MyOwn\nmode: uniform\n")
    Path("lab/notes.yaml").write_text("home: 1")
    Path("flower_lab.py").write_text(LAB)
    Path("flower_helpers").mkdir()
    Path("flower_helpers/__init__.py").write_text("from .inner import steps\n")
    Path("flower_helpers/inner.py").write_text("steps = []\n")
    Path("flower_helpers/unused.py").write_text("")
    words = [*RUN, "num_rounds=1", "--config-dir", "lab", "selector=mine"]
    monkeypatch.setattr(sys, "argv", ["fedsim", "flower", "new", "app", *words])
    with pytest.raises(SystemExit) as end:
        dispatch.main()
    assert end.value.code == 0, capsys.readouterr().err
    files = {path.relative_to("app").as_posix() for path in Path("app").rglob("*.*")}
    assert files == {
        "client_app.py",
        "server_app.py",
        "pyproject.toml",
        "conf/selector/mine.yaml",
        "flower_lab.py",
        "flower_helpers/__init__.py",
        "flower_helpers/inner.py",
    }
    for name in files:
        assert str(tmp_path) not in Path("app", name).read_text()

    elsewhere = tmp_path.with_name("elsewhere")
    elsewhere.mkdir()
    shutil.move("app", elsewhere / "installed")
    code = """
import sys
from pathlib import Path

sys.path.insert(0, "installed")
import client_app, server_app
from tests.flower_grid import LocalGrid

server_app.main(LocalGrid(client_app.app, range(6)), None)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (metrics,) = elsewhere.glob("outputs/default/flower-mine-s0-*/metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == 1


@pytest.mark.usefixtures("empty_folder")
def test_new_rejects_a_module_that_has_the_name_of_a_file_of_the_app(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "client_app", raising=False)
    Path("client_app.py").write_text("from fedsim.selectors.random import Random as MyOwn\n")
    words = [*RUN, "selector=random", "selector._target_=client_app.MyOwn"]
    with pytest.raises(ConfigError, match="has the name of a file of the app"):
        command.run(Namespace(folder=Path("app"), words=words, config_dir=None))
    assert not Path("app").exists()


@pytest.mark.usefixtures("empty_folder")
def test_new_keeps_the_users_words_and_takes_a_folder_of_any_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path("FL (2024), x=1")
    folder.mkdir()
    monkeypatch.chdir(folder)
    words = [*RUN, "output_dir=mine", "checkpoint.every=5"]
    command.run(Namespace(folder=Path("a"), words=words, config_dir=None))
    text = Path("a/client_app.py").read_text()
    assert "output_dir=mine" in text
    assert "checkpoint.every=1" not in text


@pytest.mark.usefixtures("empty_folder")
def test_new_overwrites_no_folder() -> None:
    Path("my_app").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        command.run(Namespace(folder=Path("my_app"), words=["selector=oort"], config_dir=None))


def test_telemetry_is_off() -> None:
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "0"
    assert os.environ["FLWR_DISABLE_UPDATE_CHECK"] == "1"
