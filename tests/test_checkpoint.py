"""Resumed is uninterrupted, to the last bit; in the file of a checkpoint values are as they were,
damage is noticed."""

import collections
import copy
import re
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
from fedsim.running.checkpoint import Checkpoints, pack, unpack
from fedsim.selectors.random import Random
from tests import goldens
from tests.checkpoint_toys import CPU, EVERY, WORDS, folder_in, result, through_a_file
from tests.clocks import NEED_A_CLOCK
from tests.run_toys import plan_of

pytestmark = pytest.mark.usefixtures("empty_folder")


DIFFERENT = ("fedcor", "gpfl", "hics", "oort", "pair_study", "pncs_q2")
"""Selectors whose states are made of different types; all others are in
tests/test_selector_contract.py, too."""
OTHERS = [selector for selector in goldens.SELECTORS if selector not in DIFFERENT]
CASES = [
    *((selector, "mlp", "batched", "uniform") for selector in DIFFERENT),
    *(
        pytest.param(selector, "mlp", "batched", "uniform", marks=pytest.mark.slow)
        for selector in OTHERS
    ),
    *(
        ("random", "mlp", "batched", one)
        for one in ("by_size", "fedavgm", "fedadam", "mifa", "dp_fedavg")
    ),
    ("poisson", "mlp", "batched", "dp_fedavg"),
    *(("gpfl", "convolutions", backend, "uniform") for backend in goldens.BACKENDS[1:]),
    ("gpfl", "norms", "sequential", "fedadam"),
]


def simulations_of(
    selector: str, setting: str, backend: str, aggregator: str, folder: Path
) -> list[Simulation]:
    choices = [f"selector={selector}", f"engine={backend}", f"output_dir={folder}"]
    settings = [w for w in goldens.SETTINGS[setting] if "aggregator" not in w]
    settings += ["system=lognormal"] * (selector in NEED_A_CLOCK)
    with search_path():
        (job,) = compose_jobs(
            [*choices, *goldens.COMMON, *settings, f"aggregator={aggregator}"], multirun=False
        )
    return [
        build(make_plan(goldens.fitted(copy.deepcopy(job.config)), job.choices)).simulation
        for _ in range(2)
    ]


def without_seconds(record: Record) -> dict[str, Any]:
    return {k: v for k, v in record.as_dict().items() if "seconds" not in k}


@pytest.mark.parametrize(("selector", "setting", "backend", "aggregator"), CASES)
def test_a_run_that_is_saved_and_built_anew_goes_on_as_if_nothing_had_happened(
    selector: str, setting: str, backend: str, aggregator: str, tmp_path: Path
) -> None:
    whole, second = simulations_of(selector, setting, backend, aggregator, tmp_path)
    for _ in range(5):
        whole.step()
    parts = whole.components
    second.load_state_dict(through_a_file(whole.state_dict(), parts.selector, parts.aggregator))
    rest, traces = zip(
        *((without_seconds(r), whole.components.selector.trace) for r in whole), strict=True
    )
    again, traces_again = zip(
        *((without_seconds(r), second.components.selector.trace) for r in second), strict=True
    )
    assert rest[0]["round"] == 6
    assert again == rest
    assert traces_again == traces
    assert all(torch.equal(second.params[name], value) for name, value in whole.params.items())


@pytest.mark.parametrize("forgets", [False, True])
def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been(
    forgets: bool, killed: Any, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the same run with a selector whose state is not restored."""
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
    records = read_metrics(folder)
    assert [r["wall_seconds"] for r in records] == sorted(r["wall_seconds"] for r in records)
    phases = [sum(v for k, v in r.items() if k.startswith("seconds_")) for r in records]
    assert records[-1]["wall_seconds"] == pytest.approx(sum(phases))


def test_how_often_a_run_is_saved(killed: Any, rounds: list[int]) -> None:
    """Never, where that is asked for; `auto`: when some seconds have passed and it is cheap. Its
    folder is the same."""
    killed("checkpoint.every=null")
    assert not list(Path("outputs").rglob("checkpoint*"))
    rounds.clear()
    assert run([*WORDS, "checkpoint.every=null"]) == 0
    assert rounds[0] == 1
    with search_path():
        plans = [plan_of(*WORDS, w) for w in (EVERY, "checkpoint.every=auto")]
    assert plans[0].folder == plans[1].folder
    checkpoints = Checkpoints(RunFolder(plans[1].folder), plans[1], build(plans[1]))
    assert [checkpoints.due(1, seconds) for seconds in (4.9, 5.0)] == [False, True]
    checkpoints.cost, checkpoints.saved_at = 0.2, 5.0
    assert [checkpoints.due(2, seconds) for seconds in (24.9, 25.1)] == [False, True]
    with pytest.raises(ConfigError, match=r"checkpoint\.every=0: must be >= 1"):
        run([*WORDS, "checkpoint.every=0"])


@pytest.mark.parametrize("launcher", ["basic", "lanes"])
def test_a_sweep_that_dies_in_the_middle_goes_on_with_what_is_not_finished(
    launcher: str, killed: Any, rounds: list[int]
) -> None:
    words = ["-m", "seed=0,1,2", f"hydra/launcher={launcher}", EVERY]
    assert run([*WORDS, *words, "output_dir=whole"]) == 0
    killed(*words, seed=1)
    finished = (
        {p: p.stat().st_mtime_ns for p in Path("outputs").glob("*/*-s0-*/*")}
        if launcher == "basic"
        else {}
    )
    rounds.clear()
    assert run([*WORDS, *words]) == 0
    assert len(rounds) < 24
    whole = {p.parent.name: result(p.parent) for p in Path("whole").glob("*/*/summary.json")}
    assert len(whole) == 3
    assert {
        p.parent.name: result(p.parent) for p in Path("outputs").glob("*/*/summary.json")
    } == whole
    assert all(path.stat().st_mtime_ns == time for path, time in finished.items())


# --- the file ------------------------------------------------------------------------------------------------------


class Owner:
    """Its module has `Pair`."""


@dataclass(frozen=True)
class Pair:
    one: Any
    other: Any


VALUES: list[Any] = [
    *(
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
    ),
    *(
        collections.deque([1, 2], 4),
        np.float32(0.1),
        np.int64(-1),
        np.bool_(True),
        np.arange(6.0).reshape(2, 3).T,
    ),
    *(
        np.zeros(0),
        np.array(3),
        torch.ones(2, 3, dtype=torch.float64).T,
        torch.tensor(True),
        torch.zeros(0, 2),
    ),
    Pair(np.arange(3), Pair(1, ())),
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Pair):
        return isinstance(other, Pair) and same(one.one, other.one) and same(one.other, other.other)
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
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


REFUSED = [
    *(
        (value, "")
        for value in (np.random.default_rng(0), object(), np.array([None]), lambda: 0, int, 1j)
    ),
    (np.ma.masked_array([1, 2], [True, False]), "numpy.ma.MaskedArray"),
    (np.arange(2.0).astype(">f8"), "numpy.ndarray"),
    (torch.eye(2).to_sparse(), "torch.Tensor"),
]


@pytest.mark.parametrize(("value", "told"), REFUSED)
def test_a_value_that_would_not_come_back_as_it_was_is_refused_with_its_place(
    value: Any, told: str
) -> None:
    with pytest.raises(EncodingError, match=re.escape(f"state['a'][1] is of type {told}")):
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


def test_a_dataclass_that_the_selector_does_not_know_is_refused_with_its_place_and_not_built() -> (
    None
):
    @dataclass
    class Local:
        count: int

    for value, known, told in (
        (Local(1), Owner(), ".*Local"),
        (Pair(1, 2), Random, ".*`from tests.test_checkpoint "),
    ):
        with pytest.raises(EncodingError, match=rf"state\['a'\] is of the dataclass {told}"):
            encode({"a": value}, {}, dataclasses=dataclasses_known_to(known))
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
