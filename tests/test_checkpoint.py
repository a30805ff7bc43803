"""Resumed is uninterrupted, to the last bit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.plan import make_plan
from fedsim.core.errors import ConfigError
from fedsim.core.record import Record
from fedsim.jobs.cli import run
from fedsim.results.files import RunFolder, read_metrics
from fedsim.rounds.loop import Simulation
from fedsim.running.assembly import build
from fedsim.running.checkpoint import Checkpoints
from tests import goldens
from tests.checkpoint_toys import EVERY, WORDS, folder_in, result, through_a_file

pytestmark = pytest.mark.usefixtures("empty_folder")


# --- every part that has a state -----------------------------------------------------------------------------------

AGGREGATORS = ("uniform", "by_size", "fedavgm", "fedadam")
DIFFERENT = ("fedcor", "gpfl", "hics", "oort", "pair_study", "pncs_q2")
"""Selectors whose states are made of different types; all others are in tests/test_selector_contract.py, too."""
CASES = [
    *((selector, "mlp", "batched", "uniform") for selector in DIFFERENT),
    *(
        pytest.param(selector, "mlp", "batched", "uniform", marks=pytest.mark.slow)
        for selector in goldens.SELECTORS
        if selector not in DIFFERENT
    ),
    *(("random", "mlp", "batched", aggregator) for aggregator in AGGREGATORS[1:]),
    *((selector, "convolutions", backend, "uniform") for selector in ("gpfl",) for backend in goldens.BACKENDS[1:]),
    ("gpfl", "norms", "sequential", "fedadam"),
]


def simulations_of(selector: str, setting: str, backend: str, aggregator: str, folder: Path) -> list[Simulation]:
    choices = [f"selector={selector}", f"engine={backend}", f"output_dir={folder}"]
    settings = [w for w in goldens.SETTINGS[setting] if "aggregator" not in w]
    with search_path():
        (job,) = compose_jobs([*choices, *goldens.COMMON, *settings, f"aggregator={aggregator}"], multirun=False)
    return [build(make_plan(goldens.fitted(copy.deepcopy(job.config)), job.choices)).simulation for _ in range(2)]


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
    rest, traces = zip(*((without_seconds(r), whole.components.selector.trace) for r in whole), strict=True)
    again, traces_again = zip(*((without_seconds(r), second.components.selector.trace) for r in second), strict=True)
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


def test_no_checkpoint_is_made_where_none_is_asked_for(killed: Any, rounds: list[int]) -> None:
    killed("checkpoint.every=null")
    assert not list(Path("outputs").rglob("checkpoint*"))
    rounds.clear()
    assert run([*WORDS, "checkpoint.every=null"]) == 0
    assert rounds[0] == 1


def test_how_often_a_run_is_saved_does_not_change_its_folder() -> None:
    with search_path():
        jobs = [compose_jobs([*WORDS, w], multirun=False)[0] for w in (EVERY, "checkpoint.every=auto")]
    assert len({make_plan(job.config, job.choices).folder for job in jobs}) == 1
    with pytest.raises(ConfigError, match=r"checkpoint\.every=0: must be >= 1"):
        run([*WORDS, "checkpoint.every=0"])


def test_auto_saves_when_some_seconds_have_passed_and_it_is_cheap() -> None:
    with search_path():
        (job,) = compose_jobs(WORDS, multirun=False)
    plan = make_plan(job.config, job.choices)
    checkpoints = Checkpoints(RunFolder(plan.folder), plan, build(plan))
    assert [checkpoints.due(1, seconds) for seconds in (4.9, 5.0)] == [False, True]
    checkpoints.cost, checkpoints.saved_at = 0.2, 5.0
    assert [checkpoints.due(2, seconds) for seconds in (24.9, 25.1)] == [False, True]


@pytest.mark.parametrize("launcher", ["basic", "lanes"])
def test_a_sweep_that_dies_in_the_middle_goes_on_with_what_is_not_finished(
    launcher: str, killed: Any, rounds: list[int]
) -> None:
    words = ["-m", "seed=0,1,2", f"hydra/launcher={launcher}", EVERY]
    assert run([*WORDS, *words, "output_dir=whole"]) == 0
    killed(*words, seed=1)
    finished = {p: p.stat().st_mtime_ns for p in Path("outputs").glob("*/*-s0-*/*")} if launcher == "basic" else {}
    rounds.clear()
    assert run([*WORDS, *words]) == 0
    assert len(rounds) < 24
    whole = {p.parent.name: result(p.parent) for p in Path("whole").glob("*/*/summary.json")}
    assert len(whole) == 3
    assert {p.parent.name: result(p.parent) for p in Path("outputs").glob("*/*/summary.json")} == whole
    assert all(path.stat().st_mtime_ns == time for path, time in finished.items())
