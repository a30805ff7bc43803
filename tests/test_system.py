"""Devices, tables of devices, and the group `system` in whole runs."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.clients.devices import (
    DeviceModel,
    Devices,
    LogNormal,
    Tiers,
    Trace,
    Uniform,
    read_table,
)
from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError
from fedsim.core.rng import Purpose, Streams
from fedsim.results.reading import read_metrics, read_summary
from fedsim.rounds.loop import Simulation
from fedsim.running.assembly import build
from fedsim.running.experiment import execute
from tests.run_toys import plan_of

FEW = (
    "num_rounds=4",
    "local.epochs=1",
    "tracker=files_only",
    "num_clients=6",
    "cohort_size=2",
    "engine=batched",
)
CLOCK = (
    "system=lognormal",
    "system.deadline=4",
    "system.over_selection=1.5",
    "system.variation=0.3",
)


@pytest.fixture(autouse=True)
def _conf() -> Iterator[None]:
    with search_path():
        yield


def plan(*words: str) -> Plan:
    return plan_of(*FEW, *words)


def draw(model: DeviceModel, num: int = 4000, seed: int = 0) -> Devices:
    return model.draw(num, Streams(seed).generator(Purpose.DEVICES))


# --- devices ---


def test_uniform_devices_lie_evenly_between_their_bounds() -> None:
    """1 ms is 0.001 s, and 8 kilobits per second are 1000 bytes per second."""
    model = Uniform(ms_per_sample=(5.0, 25.0), down_kbps=(800.0, 1600.0), up_kbps=(80.0, 80.0))
    devices = draw(model)
    assert devices.forward.min() == pytest.approx(0.005, abs=1e-4)
    assert devices.forward.mean() == pytest.approx(0.015, rel=0.02)
    assert devices.down.min() == pytest.approx(100_000, rel=0.01)
    assert devices.down.max() == pytest.approx(200_000, rel=0.01)
    assert (devices.up == 10_000).all()
    first = draw(model, 3)  # they do not depend on the number of clients
    assert first.down.tolist() == devices.down[:3].tolist()


def test_log_normal_devices_have_their_median_and_sigma() -> None:
    model = LogNormal(
        ms_per_sample_median=15.0,
        ms_per_sample_sigma=0.6,
        down_kbps_median=8000.0,
        down_kbps_sigma=0.8,
        up_kbps_median=2000.0,
        up_kbps_sigma=0.0,
    )
    devices = draw(model)
    for values, median, sigma in ((devices.forward, 0.015, 0.6), (devices.down, 1e6, 0.8)):
        assert np.median(values) == pytest.approx(median, rel=0.05)
        assert np.log(values).std() == pytest.approx(sigma, rel=0.05)
    assert (devices.up == 250_000).all()
    assert abs(np.corrcoef(devices.forward, devices.down)[0, 1]) < 0.05


def tiers(shares: list[float], values: list[float]) -> Tiers:
    return Tiers(shares=shares, ms_per_sample=values, down_kbps=values, up_kbps=values)


def test_tiers_have_their_shares_and_are_drawn_by_seed() -> None:
    """A quarter of 8 clients is in the first tier."""
    model = tiers([1.0, 3.0], [8.0, 16.0])
    devices = draw(model, 8)
    is_first = devices.forward == 0.008
    assert is_first.sum() == 2
    assert (devices.forward[~is_first] == 0.016).all()
    assert devices.down[is_first].tolist() == devices.up[is_first].tolist() == [1000.0] * 2
    assert draw(model, 8, seed=1).forward.tolist() != devices.forward.tolist()


@pytest.mark.parametrize("shares", [[0.25], [0.0, 0.25]])
def test_shares_of_tiers_need_not_sum_to_one(shares: list[float]) -> None:
    assert draw(tiers(shares, [0.5] * len(shares)), 3).forward.tolist() == [0.0005] * 3


@pytest.mark.parametrize("shares", [[], [-0.5, 2.0], [0.0, 0.0], [math.inf]])
def test_impossible_shares_of_tiers_are_rejected(shares: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"shares=.* must be numbers >= 0"):
        tiers(shares, [1.0] * len(shares))


def test_infinite_speeds_of_tiers_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"ms_per_sample=.* must be positive numbers"):
        tiers([1.0], [math.inf])


# --- tables ---

OURS = """client_id,ms_per_sample,down_kbps,up_kbps
1,20,1600,800
0,10,800,400
"""
FEDSCALE = """computation,communication,active,inactive,finish_time,model
30,8,"[0, 100]","[50, 200]",200,x
40,16,10,20,60,y
"""


def table(folder: Path, text: str) -> Path:
    path = folder / "devices.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_client_has_the_device_with_its_id(tmp_path: Path) -> None:
    devices = draw(Trace(path=table(tmp_path, OURS), assign="id"), 2)
    assert devices.forward.tolist() == [0.01, 0.02]
    assert devices.down.tolist() == [100_000, 200_000]
    assert devices.up.tolist() == [50_000, 100_000]
    assert devices.presence is None


def test_a_client_without_a_row_is_named(tmp_path: Path) -> None:
    trace = Trace(path=table(tmp_path, OURS), assign="id")
    message = r"(?s)has no row for client 2; .* system\.devices\.assign=random"
    with pytest.raises(ConfigError, match=message):
        draw(trace, 4)


def test_rows_of_fedscale_are_drawn_at_random(tmp_path: Path) -> None:
    devices = draw(Trace(path=table(tmp_path, FEDSCALE), assign="random"), 500)
    is_first = devices.forward == 0.03
    assert is_first.mean() == pytest.approx(0.5, abs=0.1)
    assert (devices.down[is_first] == 1000).all()
    assert (devices.up[~is_first] == 2000).all()


@pytest.mark.parametrize(
    ("now", "first", "second"),
    [
        (0.0, 50, 0),
        (15.0, 35, 5),
        (75.0, 0, 5),  # 15 s into the second period of the second device
        (260.0, 0, 0),  # 60 s of 200, and 20 s of 60
    ],
)
def test_presence_of_fedscale(tmp_path: Path, now: float, first: float, second: float) -> None:
    devices, _ = read_table(table(tmp_path, FEDSCALE))
    assert devices.presence is not None
    assert devices.presence.remaining(now).tolist() == [first, second]


PRESENCE = "computation,communication,active,inactive,finish_time\n"
BAD_TABLES = [
    ("", "lacks the column ms_per_sample (or computation), down_kbps (or communication), up_kbps"),
    ("ms_per_sample,down_kbps,up_kbps\n", "has no row below its header"),
    (
        "ms_per_sample,down_kbps\n1,2\n",
        "lacks the column up_kbps (or communication); it has ms_per_sample, down",
    ),
    ("computation,communication,active\n1,2,0\n", "lacks the column inactive, finish_time"),
    ("computation,computation,communication\n1,1,2\n", "has a column twice"),
    ("computation,communication\n1,2\n12,5,8000\n", "line 3: has more cells than the header, 2"),
    (
        "computation,communication\n1,2\nfast,3\n4\n",
        "line 3: computation='fast' must be a finite number > 0",
    ),
    (
        "computation,communication\ninf,2\nnan,2\n",
        "line 2: computation='inf' must be a finite number > 0",
    ),
    (
        "client_id,computation,communication\n1,1,1\n1,2,2\n",
        "line 3: client_id=1 is that of line 2, too",
    ),
    ("client_id,computation,communication\na,1,1\n", "client_id='a' must be an integer >= 0"),
    (f"{PRESENCE}1,1,0;5,4,9\n", "active has 2 numbers and inactive 1"),
    (f"{PRESENCE}1,1,0;5,6;9,9\n", "must rise strictly"),
    (f"{PRESENCE}1,1,0,10,9\n", "[0, finish_time=9]"),
    (
        "computation,communication,finish_time,active,inactive\n1,1,9,0,5\n1,1,9\n",
        "line 3: has fewer cells than the header, 5",
    ),
    (f"{PRESENCE}1,1,0;a,5;6,9\n", "line 2: active must be a list of numbers, not 'a'"),
    (f"{PRESENCE}1,1,0,[5 s],9\n", "line 2: inactive must be a list of numbers, not 's'"),
]


@pytest.mark.parametrize(("text", "reason"), BAD_TABLES)
def test_a_bad_table_is_rejected_with_line_and_column(
    tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Trace(path=table(tmp_path, text), assign="random")
    (problem,) = caught.value.problems
    assert problem.key == "path"
    assert reason in problem.rule


# --- configs ---


def test_a_config_without_a_clock_keeps_its_hash() -> None:
    (job,) = compose_jobs(["device=cpu", "aggregator=uniform"], multirun=False)
    assert "system" not in job.config
    config_hash = make_plan(job.config, job.choices).config_hash
    assert config_hash == "1ebe676b2ce516df869242134d5a5bbbb21c2cf078d5ac45d58f50f3ae5edfc6"
    assert plan("system=lognormal").config_hash != plan().config_hash


MISTAKES = [
    (
        "system=lognormal system.over_selection=0.9",
        r"system\.over_selection=0\.9: must lie in \[1, 1000\]",
    ),
    (
        "system=tiers system.devices.up_kbps=[1]",
        r"system\.devices\.up_kbps.*one value for each of the 5",
    ),
    (
        "system=uniform system.devices.up_kbps=[9,1]",
        r"system\.devices\.up_kbps.*the lower one first",
    ),
    ("system=trace", r"system\.devices\.path='': must be the path of a CSV file"),
    ("system=trace system.devices.path=nothing.csv", r"system\.devices\.path=.*cannot be read"),
    (
        "system=trace system.devices.path=FEDSCALE system.devices.assign=id",
        "has no column client_id",
    ),
    (
        "selector=fedcs",
        r"system='none': must be a simulated clock for FedCS\n.*system=lognormal",
    ),
    (
        "system.deadline=3",
        r"system\.deadline: is not a known key\n    it is a key of system=lognormal",
    ),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistakes_are_named_with_their_remedy(words: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(*words.replace("FEDSCALE", str(table(tmp_path, FEDSCALE))).split())


@pytest.mark.parametrize(
    ("factor", "selected"), [(1.0, 2), (1.4, 3), (1.5, 3), (2.0, 4), (9.0, 6), (1000, 6)]
)
def test_more_clients_are_selected_than_count(factor: float, selected: int) -> None:
    """ceil(factor x 2) of six clients, of whom the first two count."""
    components = build(
        plan("system=tiers", f"system.over_selection={factor}")
    ).simulation.components
    assert components.population.cohort_size == selected
    assert components.simulated_clock is not None
    assert components.simulated_clock.num_counted == 2


# --- whole runs ---


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    measured = ("seconds_", "wall_seconds")
    return {k: v for k, v in record.items() if not k.startswith(measured)}


def test_a_clock_without_rules_only_adds_times() -> None:
    plain = list(build(plan()).simulation)
    timed = list(build(plan("system=lognormal")).simulation)
    assert len(plain) == len(timed) == 4
    for plain_record, timed_record in zip(plain, timed, strict=True):
        values = without_times(timed_record.as_dict())
        for name in ("seconds", "seconds_ask", "seconds_train", "time"):
            assert values.pop(f"simulated_{name}") >= 0
        assert values.pop("late") == []
        assert values == without_times(plain_record.as_dict())


@pytest.mark.parametrize("selector", ["random", "oort", "fedcs", "tifl"])
def test_a_resumed_run_is_the_same(
    tmp_path: Path, selector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*CLOCK, f"selector={selector}", "checkpoint.every=1")
    whole = plan(*words, f"output_dir={tmp_path / 'whole'}")
    assert execute(whole).status == "done"
    halved = plan(*words, f"output_dir={tmp_path / 'halved'}")
    step = Simulation.step

    def interrupted(self: Simulation) -> Any:
        if self.round == 2:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            execute(halved)
    assert execute(halved).status == "done"
    records = [without_times(record) for record in read_metrics(whole.folder)]
    assert [without_times(record) for record in read_metrics(halved.folder)] == records
    total = sum(record["simulated_seconds"] for record in records)
    num_late = sum(len(record["late"]) for record in records)
    assert records[-1]["simulated_time"] == pytest.approx(total)
    assert num_late or selector == "fedcs"
    summary = read_summary(whole.folder) or {}
    assert summary["simulated_seconds"] == records[-1]["simulated_time"]
    assert summary["late_updates"] == num_late


def test_devices_depend_only_on_the_seed() -> None:
    def speeds(*words: str) -> list[float]:
        clock = build(plan("system=lognormal", *words)).simulation.components.simulated_clock
        assert clock is not None
        return clock.devices.forward.tolist()

    assert speeds() == speeds() == speeds("selector=afl") == speeds("num_clients=9")[:6]
    assert speeds() != speeds("seed=1")


@pytest.mark.parametrize(
    ("over_selection", "rule"),
    [
        (1, "must lie in [cohort_size=2, num_clients=6]"),
        (
            1.5,
            "must lie in [cohort_size=3, num_clients=6] "
            "(system.over_selection makes cohort_size=2 into 3)",
        ),
    ],
)
def test_a_rule_about_the_clients_to_select_says_where_their_number_comes_from(
    over_selection: float, rule: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(
            "selector=power_of_choice",
            "selector.num_candidates=1",
            *CLOCK,
            f"system.over_selection={over_selection}",
        )
    (problem,) = caught.value.problems
    assert (problem.key, problem.rule) == ("selector.num_candidates", rule)


def test_a_rule_of_something_else_does_not_mention_over_selection() -> None:
    with pytest.raises(ConfigError) as caught:
        plan("selector=top_loss", "selector.count=7", *CLOCK)
    assert caught.value.problems[0].rule == "must lie in [1, num_clients=6]"


def test_too_large_schedules_say_where_the_number_of_clients_comes_from() -> None:
    large = plan(*CLOCK, "local.steps=1000000", "local.epochs=null", "local.batch_size=1000")
    message = r"cohort_size=3 clients .*\(system\.over_selection makes cohort_size=2 into 3\)"
    with pytest.raises(ConfigError, match=message):
        build(large)
