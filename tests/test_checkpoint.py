"""A resumed run is the uninterrupted one, to the last bit.

In the file of a checkpoint values are as they were, and damage is noticed.
"""

import collections
import copy
import re
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.core.encoding import EncodingError, dataclasses_known_to, decode, encode
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.record import Record
from fedsim.jobs.cli import run
from fedsim.results.files import RunFolder
from fedsim.results.reading import read_metrics
from fedsim.rounds.loop import Simulation
from fedsim.running.assembly import build
from fedsim.running.checkpoint import Checkpoints
from fedsim.running.checkpoint_file import pack, unpack
from fedsim.selectors.random import Random
from tests import goldens
from tests.checkpoint_toys import CPU, EVERY, WORDS, folder_in, result, through_a_file
from tests.clocks import NEED_A_CLOCK
from tests.run_toys import plan_of

pytestmark = pytest.mark.usefixtures("empty_folder")


DIFFERENT = ("fedcor", "gpfl", "hics", "oort", "pair_study", "pncs_q2")
"""Selectors whose states hold different types. test_selector_contract.py checks all others."""
AGGREGATORS = ("by_size", "fedavgm", "fedadam", "mifa", "dp_fedavg")


def cases() -> Iterator[Any]:
    """Yield selector, setting, engine and aggregator of each case."""
    for selector in goldens.SELECTORS:
        marks = [] if selector in DIFFERENT else [pytest.mark.slow]
        yield pytest.param(selector, "mlp", "batched", "uniform", marks=marks)
    for aggregator in AGGREGATORS:
        yield "random", "mlp", "batched", aggregator
    yield "poisson", "mlp", "batched", "dp_fedavg"
    for backend in goldens.BACKENDS[1:]:
        yield "gpfl", "convolutions", backend, "uniform"
    yield "gpfl", "norms", "sequential", "fedadam"


def simulation_of(
    selector: str, setting: str, backend: str, aggregator: str, folder: Path
) -> Simulation:
    words = [f"selector={selector}", f"engine={backend}", f"output_dir={folder}", *goldens.COMMON]
    words += [word for word in goldens.SETTINGS[setting] if "aggregator" not in word]
    words.append(f"aggregator={aggregator}")
    if selector in NEED_A_CLOCK:
        words.append("system=lognormal")
    with search_path():
        (job,) = compose_jobs(words, multirun=False)
    return build(make_plan(goldens.fitted(copy.deepcopy(job.config)), job.choices)).simulation


def without_seconds(record: Record) -> dict[str, Any]:
    return {name: value for name, value in record.as_dict().items() if "seconds" not in name}


@pytest.mark.parametrize(("selector", "setting", "backend", "aggregator"), list(cases()))
def test_a_run_that_is_saved_and_built_anew_continues_as_if_nothing_had_happened(
    selector: str, setting: str, backend: str, aggregator: str, tmp_path: Path
) -> None:
    whole = simulation_of(selector, setting, backend, aggregator, tmp_path)
    resumed = simulation_of(selector, setting, backend, aggregator, tmp_path)
    for _ in range(5):
        whole.step()
    components = whole.components
    state = through_a_file(whole.state_dict(), components.selector, components.aggregator)
    resumed.load_state_dict(state)
    for number, (record, again) in enumerate(zip(whole, resumed, strict=True), 6):
        assert record.round == number
        assert without_seconds(again) == without_seconds(record)
        assert resumed.components.selector.trace == components.selector.trace
    for name, value in whole.params.items():
        assert torch.equal(resumed.params[name], value)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_killed_run_resumes_and_ends_as_if_it_had_not_been_killed(
    forgets: bool, killed: Any, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control (`forgets`) is the same run with a selector whose state is not restored."""
    assert run([*WORDS, "output_dir=whole", EVERY]) == 0
    killed(EVERY, "output_dir=cut")
    folder = folder_in("cut")
    assert len(read_metrics(folder)) == 5
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 6, "te')  # half of a line
    rounds.clear()
    if forgets:
        monkeypatch.setattr("fedsim.selectors.oort.Oort.load_state_dict", lambda self, state: None)
    assert run([*WORDS, "output_dir=cut", EVERY]) == 0
    assert rounds == [5, 6, 7, 8]
    assert (result(folder) == result(folder_in("whole"))) != forgets


def test_the_clock_of_a_resumed_run_goes_on(killed: Any) -> None:
    killed(EVERY)
    assert run([*WORDS, EVERY]) == 0
    records = read_metrics(folder_in("outputs"))
    seconds = [record["wall_seconds"] for record in records]
    assert seconds == sorted(seconds)
    phases = 0.0
    for record in records:
        phases += sum(value for name, value in record.items() if name.startswith("seconds_"))
    assert seconds[-1] == pytest.approx(phases)


def test_a_run_may_be_saved_never(killed: Any, rounds: list[int]) -> None:
    killed("checkpoint.every=null")
    assert not list(Path("outputs").rglob("checkpoint*"))
    rounds.clear()
    assert run([*WORDS, "checkpoint.every=null"]) == 0
    assert rounds[0] == 1


def test_auto_saves_a_run_when_some_seconds_have_passed_and_it_is_cheap() -> None:
    with search_path():
        plan = plan_of(*WORDS, "checkpoint.every=auto")
        assert plan.folder == plan_of(*WORDS, EVERY).folder  # it decides no result
    checkpoints = Checkpoints(RunFolder(plan.folder), plan.config, plan.checkpoint, build(plan))
    assert [checkpoints.due(1, seconds) for seconds in (4.9, 5.0)] == [False, True]
    checkpoints.cost = 0.2  # at most a share of 0.01: once in 20 s
    checkpoints.saved_at = 5.0
    assert [checkpoints.due(2, seconds) for seconds in (24.9, 25.1)] == [False, True]


def test_a_run_cannot_be_saved_every_0_rounds() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.every=0: must be >= 1"):
        run([*WORDS, "checkpoint.every=0"])


@pytest.mark.parametrize("launcher", ["basic", "lanes"])
def test_a_sweep_that_dies_resumes_with_what_is_not_finished(
    launcher: str, killed: Any, rounds: list[int]
) -> None:
    words = ["-m", "seed=0,1", f"hydra/launcher={launcher}", EVERY]
    assert run([*WORDS, *words, "output_dir=whole"]) == 0
    killed(*words, seed=1)
    finished = list(Path("outputs").glob("*/*-s0-*/*")) if launcher == "basic" else []
    stamps = [path.stat().st_mtime_ns for path in finished]
    rounds.clear()
    assert run([*WORDS, *words]) == 0
    assert len(rounds) < 16
    for summary in Path("whole").glob("*/*/summary.json"):
        resumed = Path("outputs", *summary.parent.parts[-2:])
        assert result(resumed) == result(summary.parent)
    assert len(list(Path("outputs").glob("*/*/summary.json"))) == 2
    assert [path.stat().st_mtime_ns for path in finished] == stamps


# --- the file ---


class OwnTensor(torch.Tensor):
    """A class of a user."""


class Owner:
    """Its module has `Pair`."""


@dataclass(frozen=True)
class Pair:
    one: Any
    other: Any


VALUES: list[Any] = [
    None,
    True,
    3,
    -(2**70),
    "text",
    0.1,
    -0.0,
    float("inf"),
    [1, [2.5]],
    (1, "a"),
    {1, 2},
    {(1, 2): {"a": None}},
    collections.deque([1, 2], 4),
    np.float32(0.1),
    np.int64(-1),
    np.bool_(True),
    np.arange(6.0).reshape(2, 3).T,
    np.zeros(0),
    np.array(3),
    torch.ones(2, 3, dtype=torch.float64).T,
    torch.tensor(True),
    torch.zeros(0, 2),
    torch.ones(2, requires_grad=True),
    torch.nn.Parameter(torch.ones(2)),
    torch.nn.Parameter(torch.ones(2), requires_grad=False),
    Pair(np.arange(3), Pair(1, ())),
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Pair):
        return isinstance(other, Pair) and same(one.one, other.one) and same(one.other, other.other)
    if isinstance(one, torch.Tensor):
        return (
            type(one) is type(other)
            and one.requires_grad == other.requires_grad
            and one.dtype == other.dtype
            and one.stride() == other.stride()
            and torch.equal(one, other)
        )
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype and one.strides == other.strides and np.array_equal(one, other)
        )
    return type(one) is type(other) and bool(one == other) and repr(one) == repr(other)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_as_they_were(value: Any) -> None:
    found = through_a_file({"value": value}, Owner())["value"]
    assert same(value, found)


@pytest.mark.parametrize(
    ("value", "type_name"),
    [
        (np.random.default_rng(0), "numpy.random"),
        (object(), "builtins.object"),
        (np.array([None]), "numpy.ndarray"),
        (lambda: 0, "builtins.function"),
        (int, "builtins.type"),
        (1j, "builtins.complex"),
        (np.ma.masked_array([1, 2], [True, False]), "numpy.ma.MaskedArray"),
        (np.arange(2.0).astype(">f8"), "numpy.ndarray"),
        (torch.eye(2).to_sparse(), "torch.Tensor"),
        (torch.ones(2).as_subclass(OwnTensor), "tests.test_checkpoint.OwnTensor"),
    ],
)
def test_a_value_that_would_not_come_back_as_it_was_is_rejected_with_its_place(
    value: Any, type_name: str
) -> None:
    error = re.escape(f"state['a'][1] is of type {type_name}")
    with pytest.raises(EncodingError, match=error):
        encode({"a": [0, value]}, {})


@dataclass
class Needy:
    """Its constructor changes what it takes, needs what is no field, and sets more than its
    fields."""

    terms: list[int]
    start: InitVar[int]
    total: int = field(init=False)

    def __post_init__(self, start: int) -> None:
        self.terms = [*self.terms, 0]
        self.total, self.next = sum(self.terms), start


def test_the_attributes_of_a_dataclass_come_back_whatever_its_constructor_does() -> None:
    value = Needy([1], 2)
    value.total = 7
    found = through_a_file({"value": value}, Owner())["value"]
    assert vars(found) == {"terms": [1, 0], "total": 7, "next": 2}


def test_a_dataclass_of_another_module_is_rejected_with_its_place() -> None:
    error = r"state\['a'\] is of the dataclass .*`from tests.test_checkpoint "
    with pytest.raises(EncodingError, match=error):
        encode({"a": Pair(1, 2)}, {}, dataclasses=dataclasses_known_to(Random))


def test_a_dataclass_of_a_function_is_rejected_with_its_place() -> None:
    @dataclass
    class Local:
        count: int

    with pytest.raises(EncodingError, match=r"state\['a'\] is of the dataclass .*Local"):
        encode({"a": Local(1)}, {}, dataclasses=dataclasses_known_to(Owner()))


def test_a_dataclass_that_the_reader_does_not_know_is_not_built() -> None:
    header, tensors = unpack(pack({}, {"a": Pair(1, 2)}, dataclasses_known_to(Owner())))
    with pytest.raises(KeyError):
        decode(header["content"], tensors, CPU, dataclasses_known_to(Random))


def test_every_flipped_bit_and_every_truncation_is_noticed() -> None:
    data = pack({"a": "0" * 64}, {"b": np.arange(20), "c": "0" * 64})
    assert unpack(data)[0]["identity"] == {"a": "0" * 64}
    for position in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(DataError):
            unpack(bytes(damaged))
    for length in (0, 7, 8, 100, len(data) // 2, len(data) - 1):
        with pytest.raises(DataError):
            unpack(data[:length])
