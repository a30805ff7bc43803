"""What is told once and counted: dropped updates, rounds with too few clients or none, clients
without samples."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from fedsim.core.record import Record
from fedsim.core.types import Ids, Params, Population
from fedsim.engine.engine import Engine
from fedsim.jobs.cli import run
from fedsim.partitions.division import Division, divide
from fedsim.results.files import MODEL
from fedsim.results.reading import SUMMARY, read_metrics, read_summary
from fedsim.rounds.availability import Always
from fedsim.rounds.loop import Simulation
from fedsim.running.experiment import TEXTS, Incidents
from tests.test_experiment import entry

POPULATION = Population(np.array([4, 4, 0, 4]), cohort_size=3, num_rounds=5)
FOUND = [([0, 1, 3], 0, 0), ([0, 1, 3], 2, 1), ([0], 0, 0), ([], 0, 0), ([1], 1, 0)]
RECORDS = [
    replace(
        entry(t + 1, 0.5), selected=selected, dropped_updates=dropped, nonfinite_reports=reports
    )
    for t, (selected, dropped, reports) in enumerate(FOUND)
]


@pytest.mark.parametrize("adaptive", [False, True])
def test_each_kind_is_told_once_and_counted_over_all_rounds(adaptive: bool) -> None:
    """A selector that decides how many take part may take few."""
    told: list[str] = []
    incidents = Incidents(POPULATION, adaptive, told.append)
    for record in RECORDS:
        incidents.see(record)
    assert [(line.partition(":")[0], line.rpartition(".")[2].rstrip(")")) for line in told] == [
        ("before round 1", "empty_clients"),
        ("round 2", "dropped_updates"),
        ("round 2", "nonfinite_reports"),
        *([] if adaptive else [("round 3", "rounds_with_too_few_clients")]),
        ("round 4", "rounds_without_clients"),
    ]
    counts = incidents.counts
    assert counts.pop("rounds_with_too_few_clients") == (0 if adaptive else 2)
    rest = {
        "dropped_updates": 3,
        "nonfinite_reports": 1,
        "rounds_without_clients": 1,
        "empty_clients": 1,
    }
    assert counts == rest


# --- whole runs ----------------------------------------------------------------------------------------------------

WORDS = [
    *(
        "num_rounds=8",
        "local.epochs=1",
        "tracker=default",
        "~tracker.wandb",
        "num_clients=6",
        "cohort_size=2",
    ),
    *("selector=power_of_choice", "checkpoint.every=2", "local.holdout_fraction=0"),
]
EXPECTED = dict.fromkeys(TEXTS, 1) | {"dropped_updates": 2, "nonfinite_reports": 2}


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let an update (or `every_one`), and a loss that is asked for, be nan in some `rounds` of runs
    of some `seeds`."""
    monkeypatch.chdir(tmp_path)
    train, losses, context, now = Engine.train, Engine.losses, Simulation._context, [0]

    def call(*rounds: int, every_one: bool = False, seeds: Sequence[int] = (0,)) -> None:
        def in_round(self: Simulation, t: int, *more: Any) -> Any:
            now.append(t)
            return context(self, t, *more)

        def failing(self: Engine, params: Params, ids: Ids, round: int, *more: Any) -> Any:
            updates = train(self, params, ids, round, *more)
            if round in rounds and self._streams.seed in seeds:
                for value in updates.delta.values():
                    value[0 if every_one else 1 :] = torch.nan
            return updates

        def reporting(self: Engine, *arguments: Any) -> NDArray[np.float64]:
            found = losses(self, *arguments)
            found[:1] = np.nan if now[-1] in rounds else found[:1]
            return found

        monkeypatch.setattr(Simulation, "_context", in_round)
        monkeypatch.setattr(Engine, "train", failing)
        monkeypatch.setattr(Engine, "losses", reporting)

    return call


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last client has no samples; in round 3 it and the first are available, in round 4
    nobody."""

    def emptied(*arguments: Any) -> Division:
        found = divide(*arguments)
        return replace(found, train=[*found.train[:-1], found.train[-1][:0]])

    def available(self: Always, round: int, num_clients: int, rng: Any) -> NDArray[np.bool_]:
        there: dict[int, list[int]] = {3: [0, num_clients - 1], 4: []}
        return np.isin(np.arange(num_clients), there.get(round, range(num_clients)))

    monkeypatch.setattr("fedsim.running.assembly.divide", emptied)
    monkeypatch.setattr(Always, "available", available)


def incidents_in(place: str) -> dict[str, Any]:
    (folder,) = (path.parent for path in Path(place).glob("*/*/summary.json"))
    found: dict[str, Any] = (read_summary(folder) or {})["incidents"]
    return found


def told(text: str) -> dict[str, int]:
    """How often each kind is told on the screen."""
    return {name: text.count(f"incidents.{name})") for name in TEXTS}


@pytest.mark.usefixtures("scarce")
def test_a_run_tells_each_kind_once_and_its_summary_counts_all_of_them(
    broken: Any, killed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one process, and in two of which the first dies in round 6: counted once, told by the
    process that sees it."""
    broken(2, 6)
    assert run([*WORDS, "output_dir=whole"]) == 0
    assert incidents_in("whole") == EXPECTED
    assert told(capsys.readouterr().out) == dict.fromkeys(TEXTS, 1)
    killed(*WORDS, "output_dir=cut", "checkpoint.every=3", before=7)
    assert told(capsys.readouterr().out) == dict.fromkeys(TEXTS, 1)
    assert run([*WORDS, "output_dir=cut", "checkpoint.every=3"]) == 0
    assert incidents_in("cut") == EXPECTED
    again = told(capsys.readouterr().out)
    assert again == dict.fromkeys(TEXTS, 0) | {"empty_clients": 1}


def test_fewer_clients_than_are_over_selected_are_enough_from_cohort_size_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scarcity = ("availability=bernoulli", "availability.probability=0.4")
    assert (
        run([*WORDS, *scarcity, "system=lognormal", "system.over_selection=2", "selector=random"])
        == 0
    )
    (folder,) = (path.parent for path in Path("outputs").glob("*/*/summary.json"))
    counts = [len(record["selected"]) for record in read_metrics(folder)]
    assert {1, 2, 4} <= set(counts)  # where cohort_size=2, of whom twice as many are asked
    assert incidents_in("outputs")["rounds_with_too_few_clients"] == counts.count(1)


@pytest.mark.parametrize("launcher", ["basic", "lanes"])
def test_a_run_of_which_all_updates_are_nan_keeps_its_last_model_and_the_sweep_goes_on(
    launcher: str, broken: Any, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(4, every_one=True, seeds=(1,))
    last: dict[int, Params] = {}
    step = Simulation.step

    def noted(self: Simulation) -> Record:
        record = step(self)
        last[self.components.streams.seed] = {
            name: value.clone() for name, value in self.params.items()
        }
        return record

    monkeypatch.setattr(Simulation, "step", noted)
    words = [w for w in WORDS if "selector" not in w] + [
        "-m",
        "seed=range(3)",
        f"hydra/launcher={launcher}",
    ]
    assert run(words) == 4
    folders = {
        int(path.parent.name.split("-s")[-1].split("-")[0]): path.parent
        for path in Path().rglob(SUMMARY)
    }
    assert sorted(folders) == [0, 1, 2]
    for seed, folder in folders.items():
        summary, expected = (
            read_summary(folder) or {},
            ("diverged", 3) if seed == 1 else ("done", 8),
        )
        assert (summary["status"], summary["rounds"], len(read_metrics(folder))) == (
            *expected,
            expected[1],
        )
        model = load_file(folder / MODEL)
        assert model.keys() == last[seed].keys()
        assert all(
            torch.equal(model[name], value) and value.isfinite().all()
            for name, value in last[seed].items()
        )
    assert "every update of the round" in (read_summary(folders[1]) or {})["error"]
    rounds.clear()
    assert run(words) == 4
    assert not rounds
