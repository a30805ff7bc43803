"""Incidents are printed once and counted.

They are dropped updates, rounds with too few clients or none, and clients without samples.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedsim.core.arrays import Bools, Floats
from fedsim.core.record import Record
from fedsim.core.types import Cohort, Ids, Params, Population
from fedsim.engine.engine import Engine
from fedsim.jobs.cli import run
from fedsim.partitions.division import Division, divide
from fedsim.results.files import MODEL
from fedsim.results.reading import SUMMARY, read_metrics, read_summary
from fedsim.rounds.availability import Always
from fedsim.rounds.loop import Simulation
from fedsim.running.incidents import TEXTS, Incidents
from tests.test_experiment import entry


def incidents_of(adaptive: bool) -> tuple[list[str], dict[str, int]]:
    """Return the lines printed and the counts of five rounds of 3 of 4 clients."""
    population = Population(np.array([4, 4, 0, 4]), cohort_size=3, num_rounds=5)
    lines: list[str] = []
    incidents = Incidents(population, adaptive, lines.append)
    rounds: list[tuple[list[int], int, int]] = [  # selected, dropped updates, reports of nan
        ([0, 1, 3], 0, 0),
        ([0, 1, 3], 2, 1),
        ([0], 0, 0),
        ([], 0, 0),
        ([1], 1, 0),
    ]
    for number, (selected, dropped, reports) in enumerate(rounds, 1):
        record = entry(number, 0.5)
        incidents.see(
            replace(record, selected=selected, dropped_updates=dropped, nonfinite_reports=reports)
        )
    return lines, incidents.counts


COUNTS = {
    "dropped_updates": 3,
    "nonfinite_reports": 1,
    "rounds_with_too_few_clients": 2,
    "rounds_without_clients": 1,
    "empty_clients": 1,
}


def test_each_kind_is_printed_once_and_counted_over_all_rounds() -> None:
    lines, counts = incidents_of(adaptive=False)
    printed = [(line.partition(":")[0], line.rpartition(".")[2].rstrip(")")) for line in lines]
    assert printed == [
        ("before round 1", "empty_clients"),
        ("round 2", "dropped_updates"),
        ("round 2", "nonfinite_reports"),
        ("round 3", "rounds_with_too_few_clients"),
        ("round 4", "rounds_without_clients"),
    ]
    assert counts == COUNTS


def test_a_selector_that_decides_how_many_take_part_may_take_few() -> None:
    lines, counts = incidents_of(adaptive=True)
    assert len(lines) == 4
    assert counts == COUNTS | {"rounds_with_too_few_clients": 0}


# --- whole runs ---

WORDS = [
    "num_rounds=8",
    "num_clients=6",
    "cohort_size=2",
    "selector=power_of_choice",
    "local.epochs=1",
    "local.holdout_fraction=0",
    "checkpoint.every=2",
    "tracker=default",
    "~tracker.wandb",
]


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that breaks some `rounds` of runs with a seed.

    In these rounds the second update (or all of them) and the first loss that is asked for are nan.
    """
    monkeypatch.chdir(tmp_path)
    train = Engine.train
    losses = Engine.losses
    context = Simulation._context
    present = [0]

    def break_rounds(*rounds: int, all_updates: bool = False, seed: int = 0) -> None:
        def note_round(self: Simulation, t: int, *arguments: Any) -> Any:
            present[0] = t
            return context(self, t, *arguments)

        def broken_train(
            self: Engine, params: Params, ids: Ids, round: int, *arguments: Any
        ) -> Cohort:
            cohort = train(self, params, ids, round, *arguments)
            if round in rounds and self._streams.seed == seed:
                for value in cohort.delta.values():
                    value[0 if all_updates else 1 :] = torch.nan
            return cohort

        def broken_losses(self: Engine, *arguments: Any) -> Floats:
            values = losses(self, *arguments)
            if present[0] in rounds:
                values[:1] = np.nan
            return values

        monkeypatch.setattr(Simulation, "_context", note_round)
        monkeypatch.setattr(Engine, "train", broken_train)
        monkeypatch.setattr(Engine, "losses", broken_losses)

    return break_rounds


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last client has no samples; in round 3 only it and the first are available, in round 4
    nobody."""

    def divide_emptied(*arguments: Any) -> Division:
        division = divide(*arguments)
        return replace(division, train=[*division.train[:-1], division.train[-1][:0]])

    def available(self: Always, round: int, num_clients: int, rng: Any) -> Bools:
        clients: dict[int, list[int]] = {3: [0, num_clients - 1], 4: []}
        return np.isin(np.arange(num_clients), clients.get(round, range(num_clients)))

    monkeypatch.setattr("fedsim.running.assembly.divide", divide_emptied)
    monkeypatch.setattr(Always, "available", available)


def incidents_in(place: str) -> dict[str, Any]:
    (path,) = Path(place).glob("*/*/summary.json")
    incidents: dict[str, Any] = (read_summary(path.parent) or {})["incidents"]
    return incidents


def printed_kinds(text: str) -> list[str]:
    """Return the kinds of incidents that the screen shows, as often as it does."""
    return [kind for kind in TEXTS for _ in range(text.count(f"incidents.{kind})"))]


@pytest.mark.usefixtures("scarce")
def test_a_run_in_two_processes_prints_and_counts_each_incident_once(
    broken: Any, killed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first process dies in round 7, after its checkpoint of round 6."""
    broken(2, 6)
    killed(*WORDS, "checkpoint.every=3", before=7)
    assert printed_kinds(capsys.readouterr().out) == list(TEXTS)
    assert run([*WORDS, "checkpoint.every=3"]) == 0
    assert printed_kinds(capsys.readouterr().out) == ["empty_clients"]
    assert incidents_in("outputs") == {
        "dropped_updates": 2,
        "nonfinite_reports": 2,
        "rounds_with_too_few_clients": 1,
        "rounds_without_clients": 1,
        "empty_clients": 1,
    }


def test_fewer_clients_than_are_over_selected_are_enough_from_cohort_size_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["availability=bernoulli", "availability.probability=0.4", "selector=random"]
    words += ["system=lognormal", "system.over_selection=2"]
    assert run([*WORDS, *words]) == 0
    (path,) = Path("outputs").glob("*/*/summary.json")
    counts = [len(record["selected"]) for record in read_metrics(path.parent)]
    assert {1, 2, 4} <= set(counts)  # cohort_size=2, and twice as many are asked
    assert incidents_in("outputs")["rounds_with_too_few_clients"] == counts.count(1)


@pytest.mark.parametrize("launcher", ["basic", "lanes"])
def test_a_run_of_which_all_updates_are_nan_keeps_its_last_model_and_the_sweep_continues(
    launcher: str, broken: Any, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(4, all_updates=True, seed=1)
    last_params: dict[int, Params] = {}
    step = Simulation.step

    def note_params(self: Simulation) -> Record:
        record = step(self)
        params = {name: value.clone() for name, value in self.params.items()}
        last_params[self.components.streams.seed] = params
        return record

    monkeypatch.setattr(Simulation, "step", note_params)
    words = [*WORDS, "selector=random", "-m", "seed=0,1", f"hydra/launcher={launcher}"]
    assert run(words) == 4
    for seed, status, num_rounds in ((0, "done", 8), (1, "diverged", 3)):
        (path,) = Path().rglob(f"*-s{seed}-*/{SUMMARY}")
        summary = read_summary(path.parent) or {}
        assert (summary["status"], summary["rounds"]) == (status, num_rounds)
        assert len(read_metrics(path.parent)) == num_rounds
        assert (seed == 1) == ("every update of the round" in str(summary["error"]))
        model = load_file(path.parent / MODEL)
        assert model.keys() == last_params[seed].keys()
        for name, value in last_params[seed].items():
            assert torch.equal(model[name], value)
            assert value.isfinite().all()
    rounds.clear()
    assert run(words) == 4
    assert not rounds
