"""Devices, tables of devices, and the group `system` in whole runs."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.clients.devices import DeviceModel, Devices, LogNormal, Tiers, Trace, Uniform
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


# --- devices ----------------------------------------------------------------------------------------------------------


def test_uniform_devices_lie_evenly_between_their_bounds() -> None:
    model = Uniform(ms_per_sample=(5.0, 25.0), down_kbps=(800.0, 1600.0), up_kbps=(80.0, 80.0))
    found = draw(model)
    assert found.forward.min() == pytest.approx(0.005, abs=1e-4)
    assert found.forward.mean() == pytest.approx(0.015, rel=0.02)
    assert (found.down.min(), found.down.max()) == pytest.approx(
        (100_000, 200_000), rel=0.01
    )  # bytes a second
    assert (found.up == 10_000).all()
    assert draw(model, 3).down.tolist() == found.down[:3].tolist()  # whatever the number of clients


def test_log_normal_devices_have_median_and_sigma() -> None:
    values = {"ms_per_sample_median": 15.0, "down_kbps_median": 8000.0, "up_kbps_median": 2000.0}
    sigmas = {"ms_per_sample_sigma": 0.6, "down_kbps_sigma": 0.8, "up_kbps_sigma": 0.0}
    found = draw(LogNormal(**values, **sigmas))
    for drawn, median, sigma in ((found.forward, 0.015, 0.6), (found.down, 1e6, 0.8)):
        assert np.median(drawn) == pytest.approx(median, rel=0.05)
        assert np.log(drawn).std() == pytest.approx(sigma, rel=0.05)
    assert (found.up == 250_000).all()
    assert abs(np.corrcoef(found.forward, found.down)[0, 1]) < 0.05


def test_tiers_have_their_shares() -> None:
    model = Tiers(
        shares=[1.0, 3.0], ms_per_sample=[1.0, 2.0], down_kbps=[8.0, 16.0], up_kbps=[80.0, 160.0]
    )
    found = draw(model, 8)
    assert sorted(
        zip(found.forward.tolist(), found.down.tolist(), found.up.tolist(), strict=True)
    ) == [
        *[(0.001, 1000.0, 10_000.0)] * 2,
        *[(0.002, 2000.0, 20_000.0)] * 6,
    ]
    assert draw(model, 8, seed=1).forward.tolist() != found.forward.tolist()


def test_tiers_may_be_of_any_size_and_speed_but_none() -> None:
    made = lambda shares, value=0.5: Tiers(
        shares=shares,
        **dict.fromkeys(("ms_per_sample", "down_kbps", "up_kbps"), [value] * len(shares)),
    )
    for shares in ([0.25], [0.0, 0.25]):
        assert made(shares).draw(3, np.random.default_rng(0)).forward.tolist() == [0.0005] * 3
    for shares, value in (
        ([], 1.0),
        ([-0.5, 2.0], 1.0),
        ([0.0, 0.0], 1.0),
        ([math.inf], 1.0),
        ([1.0], math.inf),
    ):
        with pytest.raises(ValueError, match="must be"):
            made(shares, value)


# --- tables -----------------------------------------------------------------------------------------------------------

OURS = "client_id,ms_per_sample,down_kbps,up_kbps\n1,20,1600,800\n0,10,800,400\n"
FEDSCALE = 'computation,communication,active,inactive,finish_time,model\n30,8,"[0, 100]","[50, 200]",200,x\n40,16,10,20,60,y\n'


def table(folder: Path, text: str) -> Path:
    path = folder / "devices.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_devices_of_a_table_by_id_and_a_client_without_a_row_is_named(tmp_path: Path) -> None:
    found = draw(Trace(path=table(tmp_path, OURS), assign="id"), 2)
    assert found.forward.tolist() == [0.01, 0.02]
    assert found.down.tolist() == [100_000, 200_000]
    assert found.up.tolist() == [50_000, 100_000]
    assert found.presence is None
    with pytest.raises(
        ConfigError, match=r"(?s)has no row for client 2; .* system\.devices\.assign=random"
    ):
        draw(Trace(path=table(tmp_path, OURS), assign="id"), 4)


def test_columns_of_fedscale_and_rows_drawn_at_random(tmp_path: Path) -> None:
    found = draw(Trace(path=table(tmp_path, FEDSCALE), assign="random"), 500)
    first = found.forward == 0.03
    assert first.mean() == pytest.approx(0.5, abs=0.1)
    assert (found.down[first] == 1000).all()
    assert (found.up[~first] == 2000).all()
    assert found.presence is not None
    at = {now: found.presence.remaining(now) for now in (0.0, 15.0, 75.0, 260.0)}
    assert {now: (set(r[first]), set(r[~first])) for now, r in at.items()} == {
        **{0.0: ({50.0}, {0.0}), 15.0: ({35.0}, {5.0}), 75.0: ({0.0}, {5.0})},
        260.0: ({0.0}, {0.0}),  # 60 of 200 s and 20 of 60 s
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "",
            "lacks the column ms_per_sample (or computation), down_kbps (or communication), up_kbps",
        ),
        ("ms_per_sample,down_kbps,up_kbps\n", "has no row below its header"),
        (
            "ms_per_sample,down_kbps\n1,2\n",
            "lacks the column up_kbps (or communication); it has ms_per_sample, down",
        ),
        ("computation,communication,active\n1,2,0\n", "lacks the column inactive, finish_time"),
        ("computation,computation,communication\n1,1,2\n", "has a column twice"),
        (
            "computation,communication\n1,2\n12,5,8000\n",
            "line 3: has more cells than the header, 2",
        ),
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
        (
            "computation,communication,active,inactive,finish_time\n1,1,0;5,4,9\n",
            "active has 2 numbers and inactive 1",
        ),
        (
            "computation,communication,active,inactive,finish_time\n1,1,0;5,6;9,9\n",
            "must rise strictly",
        ),
        (
            "computation,communication,active,inactive,finish_time\n1,1,0,10,9\n",
            "[0, finish_time=9]",
        ),
    ],
)
def test_a_bad_table_is_refused_with_line_and_column(
    tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Trace(path=table(tmp_path, text), assign="random")
    (problem,) = caught.value.problems
    assert problem.key == "path"
    assert reason in problem.rule


# --- configs ----------------------------------------------------------------------------------------------------------


def test_without_a_clock_configs_and_hashes_are_those_from_before_it() -> None:
    (job,) = compose_jobs(["device=cpu", "aggregator=uniform"], multirun=False)
    made = make_plan(job.config, job.choices)
    assert "system" not in job.config
    assert made.config_hash == "1ebe676b2ce516df869242134d5a5bbbb21c2cf078d5ac45d58f50f3ae5edfc6"
    assert plan("system=lognormal").config_hash != plan().config_hash


@pytest.mark.parametrize(
    ("words", "message"),
    [
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
    ],
)
def test_mistakes_are_named_with_their_remedy(words: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(*words.replace("FEDSCALE", str(table(tmp_path, FEDSCALE))).split())


def test_more_clients_are_selected_than_are_to_arrive() -> None:
    for factor, selected in ((1.0, 2), (1.4, 3), (1.5, 3), (2.0, 4), (9.0, 6), (1000, 6)):
        parts = build(plan("system=tiers", f"system.over_selection={factor}")).simulation.components
        assert parts.population.cohort_size == selected
        assert parts.simulated_clock is not None
        assert parts.simulated_clock.num_counted == 2


# --- whole runs -------------------------------------------------------------------------------------------------------


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    measured = ("seconds_", "wall_seconds")
    return {k: v for k, v in record.items() if not k.startswith(measured)}


def test_a_clock_without_rules_changes_no_result() -> None:
    plain, timed = (list(build(plan(*words)).simulation) for words in ((), ("system=lognormal",)))
    assert len(plain) == 4
    for one, other in zip(plain, timed, strict=True):
        before, after = without_times(one.as_dict()), without_times(other.as_dict())
        assert before.items() <= after.items()
        assert after.keys() - before.keys() == {
            *(
                "simulated_seconds",
                "simulated_seconds_ask",
                "simulated_seconds_train",
                "simulated_time",
                "late",
            )
        }
        assert after["late"] == []


@pytest.mark.parametrize("selector", ["random", "oort", "fedcs", "tifl"])
def test_a_run_that_goes_on_from_a_checkpoint_is_the_same(
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
    one, other = (list(map(without_times, read_metrics(p.folder))) for p in (whole, halved))
    assert one == other
    assert one[-1]["simulated_time"] == pytest.approx(sum(r["simulated_seconds"] for r in one))
    assert any(r["late"] for r in one) or selector == "fedcs"
    summary = read_summary(whole.folder) or {}
    assert summary["simulated_seconds"] == one[-1]["simulated_time"]
    assert summary["late_updates"] == sum(len(r["late"]) for r in one)


def test_devices_are_drawn_by_the_seed_and_nothing_else() -> None:
    def speeds(*words: str) -> list[float]:
        clock = build(plan("system=lognormal", *words)).simulation.components.simulated_clock
        assert clock is not None
        return clock.devices.forward.tolist()

    assert speeds() == speeds() == speeds("selector=afl") == speeds("num_clients=9")[:6]
    assert speeds() != speeds("seed=1")


def test_a_rule_about_the_clients_to_select_names_their_number() -> None:
    with pytest.raises(ConfigError) as told:
        plan(
            "selector=power_of_choice",
            "selector.num_candidates=1",
            *CLOCK,
            "system.over_selection=1.5",
        )
    assert told.value.problems[0].rule == "must lie in [cohort_size=3, num_clients=6]"
