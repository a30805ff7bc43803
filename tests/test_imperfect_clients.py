"""Imperfect clients: who they are, whose labels are wrong, what they send, and how often they are
chosen."""

import csv
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp

from fedsim.clients.behaviour import FreeRider, LabelNoise, RandomUpdate, ScaledUpdate
from fedsim.clients.context import Signal
from fedsim.config.compose import search_path
from fedsim.core.errors import ConfigError
from fedsim.core.rng import Streams
from fedsim.core.types import ClientPositions
from fedsim.jobs.cli import run
from fedsim.partitions.division import Division
from fedsim.report.figures import all_plots
from fedsim.results.archive import write_archive
from fedsim.results.reading import read_metrics
from fedsim.results.runs import read_runs
from fedsim.rounds.loop import Simulation
from fedsim.running.assembly import Experiment, build
from fedsim.selectors.full import Full
from tests.checkpoint_toys import EVERY, WORDS, folder_in, result
from tests.report_toys import make_report, panels_of
from tests.run_toys import folders, plan_of, refused, without_seconds
from tests.toys import ToyEngine, toy_clients, toy_components, toy_params, toy_population

NOISE = ("clients=label_noise", "clients.share=0.3", "clients.noise_rate=0.4")
NAMES = ("label_noise", "sign_flip", "scaled_update", "random_update", "free_rider")


def built(*words: str) -> Experiment:
    with search_path():
        return build(plan_of("engine=batched", "local.holdout_fraction=0.2", *words))


def noise(share: float, rate: float = 0.4, kind: Any = "symmetric", classes: int = 5) -> LabelNoise:
    return LabelNoise(20, classes, Streams(0), share=share, noise_rate=rate, kind=kind)


def of_two(cls: Any, **values: Any) -> Any:
    """The behaviour of three clients, of whom client 2 is imperfect."""
    behaviour = cls(3, 3, Streams(0), share=0.4, **values)
    behaviour.imperfect = np.array([2])
    return behaviour


def test_a_smaller_share_is_contained_in_a_larger_one_and_the_same_for_every_behaviour() -> None:
    sets = [noise(share).imperfect.tolist() for share in (0, 0.1, 0.3, 1)]
    assert [len(ids) for ids in sets] == [0, 2, 6, 20]
    assert all(set(less) < set(more) for less, more in pairwise(sets))
    assert (
        sets[2]
        == sorted(sets[2])
        == ScaledUpdate(20, 5, Streams(0), share=0.3, factor=2).imperfect.tolist()
    )
    assert sets[2] != ScaledUpdate(20, 5, Streams(1), share=0.3, factor=2).imperfect.tolist()


@pytest.mark.parametrize(("kind", "shifts"), [("symmetric", {*range(10)}), ("pair", {0, 1})])
def test_exactly_the_drawn_share_of_the_drawn_clients_labels_is_wrong(
    kind: str, shifts: set[int]
) -> None:
    """And all else is equal to the honest run, whose labels are still what they were."""
    honest, noisy = built(), built(*NOISE, f"clients.kind={kind}")
    one, other = (experiment.simulation.components for experiment in (honest, noisy))
    true, given = (parts.engine.data.y.numpy() for parts in (one, other))
    for own in (noisy.division.train, noisy.division.holdout):
        wrong = [int((true[rows] != given[rows]).sum()) for rows in own]
        imperfect = other.behaviour.imperfect
        assert wrong == [
            round(0.4 * len(rows)) if i in imperfect else 0 for i, rows in enumerate(own)
        ]
        assert np.count_nonzero(wrong) == 6
    held = np.concatenate([*noisy.division.train, *noisy.division.holdout])
    assert (np.delete(true, held) == np.delete(given, held)).all()
    assert {*((given - true) % 10).tolist()} == shifts
    assert other.engine.data.true_y is one.engine.data.y  # which both runs share
    assert (noisy.division.hash, other.streams) == (
        honest.division.hash,
        one.streams,
    )  # of which batches are drawn
    assert all(
        torch.equal(value, honest.simulation.params[name])
        for name, value in noisy.simulation.params.items()
    )


def test_symmetric_labels_are_uniform_over_the_other_classes_and_a_lower_rate_is_part_of_a_higher_one() -> (
    None
):
    y, rows = torch.arange(20_000) % 5, np.arange(20_000)
    division = Division(
        ClientPositions(rows, np.full(20, 1000)),
        [rows[:0]] * 20,
        rows[:0],
        rows[:0],
        np.zeros((20, 5), int),
    )
    low, high = (noise(1, rate).labels(y, division).numpy() for rate in (0.2, 1.0))
    steps = np.bincount((high - y.numpy()) % 5, minlength=5)
    assert steps[0] == 0
    np.testing.assert_allclose(steps[1:] / 20_000, 0.25, atol=0.012)  # four standard deviations
    changed = low != y.numpy()
    assert (changed.sum(), (low[changed] == high[changed]).all()) == (4000, True)
    with pytest.raises(
        ConfigError, match=r"kind='pair': needs two classes or more, and the data set has 1"
    ):
        noise(0.5, kind="pair", classes=1)


def test_clients_report_by_their_labels_and_the_simulator_measures_by_the_true_ones() -> None:
    words = ("client_accuracy=train", "local.evaluate_on=train", "num_rounds=1")
    honest, noisy = (
        built(*words, *more).simulation for more in ((), (*NOISE, "clients.noise_rate=1"))
    )
    first, second = (np.asarray(simulation.measure()[1]) for simulation in (honest, noisy))
    assert np.array_equal(first, second)
    engines = [simulation.components.engine for simulation in (honest, noisy)]
    true, told = (engine.losses(honest.params, engine.data.evaluate) for engine in engines)
    assert np.flatnonzero(true != told).tolist() == noisy.components.behaviour.imperfect.tolist()
    assert honest.evaluate() == noisy.evaluate()


RANDOM = Streams(0).generator(33, 1, 2).standard_normal(2)  # type: ignore[arg-type]
SENT = [
    (ScaledUpdate, {"factor": -1.0}, [-1, 1]),
    (ScaledUpdate, {"factor": 10.0}, [10, -10]),
    (RandomUpdate, {"std": 3.0}, 3 * RANDOM),
    (RandomUpdate, {"std": None}, RANDOM * np.sqrt(2 / (RANDOM**2).sum())),
    (FreeRider, {}, [0, 0]),
]


@pytest.mark.parametrize(("cls", "values", "sent"), SENT)
def test_what_is_sent_in_place_of_an_update(cls: Any, values: dict[str, Any], sent: Any) -> None:
    """Of clients 1 and 2, who move two numbers by (1/2, -1/2) and (1, -1), the latter is
    imperfect."""
    parts = toy_components(
        ToyEngine([0, 4, 4]), population := toy_population([0, 4, 4], 2), Full(population)
    )
    simulation = Simulation(replace(parts, behaviour=of_two(cls, **values)), toy_params())
    record = simulation.step()
    np.testing.assert_allclose(
        simulation.params["w"], (np.array([0.5, -0.5]) + sent) / 2, rtol=1e-6
    )
    trained = (1, 8) if cls is FreeRider else (2, 16)
    assert (record.trained, record.train_samples, record.uploaded, record.train_loss) == (
        *trained,
        2,
        1.5,
    )


@pytest.mark.parametrize(("cls", "values", "sent"), SENT)
def test_all_answers_are_of_one_and_the_same_update(
    cls: Any, values: dict[str, Any], sent: Any
) -> None:
    """The toy's momentum is ten times the update; the gradient of client 2 is (6.5, -5.5^2 / 7)."""
    clients, ids = (
        toy_clients([0, 4, 4], frozenset({Signal.TRAINING, Signal.GRADIENTS})),
        np.array([1, 2]),
    )
    true, other = (gradient.numpy() for gradient in clients.gradients(ids))
    clients._context = replace(clients._context, behaviour=of_two(cls, **values))
    np.testing.assert_allclose(clients.updates(ids)["w"], [[0.5, -0.5], sent], rtol=1e-6)
    np.testing.assert_allclose(
        clients.update_norms(ids), [np.sqrt(0.5), np.hypot(*sent)], rtol=1e-6
    )
    of_norm: Any = lambda v: (
        sent if values.get("std") else np.multiply(sent, np.hypot(*v) / np.sqrt(2))
    )
    np.testing.assert_allclose(clients.momentum_buffers(ids)["w"][1], of_norm([10, 10]), rtol=1e-6)
    expected = other * values.get("factor", 0) if cls is not RandomUpdate else of_norm(other)
    np.testing.assert_allclose(torch.stack([*clients.gradients(ids)]), [true, expected], rtol=1e-6)
    np.testing.assert_allclose(
        clients.gradient_norms(ids), [np.hypot(*true), np.hypot(*expected)], rtol=1e-6
    )


def test_running_statistics_stay_but_for_those_of_a_free_rider() -> None:
    cohort = ToyEngine([0, 4, 4]).train(toy_params(), np.array([1, 2]), 1, 1.0)
    cohort = replace(cohort, delta={**cohort.delta, "variance": torch.ones(2, 1)})
    before = {name: value.clone() for name, value in cohort.delta.items()}
    found = [
        of_two(c, **more).sent(cohort, 1).delta
        for c, more in ((ScaledUpdate, {"factor": -1.0}), (FreeRider, {}))
    ]
    assert [delta["variance"].flatten().tolist() for delta in found] == [[1, 1], [1, 0]]
    assert all(torch.equal(cohort.delta[name], value) for name, value in before.items())


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("behaviour", [f"clients={name}" for name in NAMES])
def test_a_share_of_0_is_the_honest_run_to_the_last_bit(behaviour: str, tmp_path: Path) -> None:
    for words in (["name=a"], ["name=b", behaviour, "clients.share=0"], ["name=c", behaviour]):
        assert run([*WORDS, *words]) == 0
    a, b, c = map(without_seconds, folders(tmp_path))
    assert a == b != c
    assert [path.parent.parent.name for path in tmp_path.rglob("imperfect.json")] == ["c"]


@pytest.mark.parametrize("words", [NOISE, ("clients=random_update", "clients.share=0.5")])
@pytest.mark.usefixtures("empty_folder")
def test_a_killed_run_goes_on_with_the_same_clients(words: tuple[str, ...], killed: Any) -> None:
    assert run([*WORDS, *words, "output_dir=whole", EVERY]) == 0
    killed(*words, EVERY, "output_dir=cut")
    assert run([*WORDS, *words, "output_dir=cut", EVERY]) == 0
    assert result(folder_in("cut")) == result(folder_in("whole"))


def test_the_report_says_how_often_each_method_chose_them(
    fedsim: Any, tmp_path: Path, capsys: Any
) -> None:
    sweep = (
        "selector=random,power_of_choice",
        "clients=honest,label_noise",
        "seed=0,1,2",
        "num_rounds=12",
    )
    assert fedsim("-m", *sweep) == 0
    chosen: dict[str, list[float]] = {}
    for path in sorted(tmp_path.rglob("imperfect.json")):
        ids = json.loads(path.read_text())["clients"]
        picks = [client for record in read_metrics(path.parent) for client in record["selected"]]
        chosen.setdefault(path.parent.name.split("-")[3], []).append(
            sum(c in ids for c in picks) / len(picks)
        )
    p = {
        name: ttest_1samp(shares, 0.3, alternative="greater").pvalue
        for name, shares in chosen.items()
    }
    assert 2 * p["power_of_choice"] < 0.05 < p["random"]  # the former seeks losses
    p["power_of_choice"] *= 2  # Holm
    write_archive(read_runs(tmp_path / "outputs"), tmp_path / "outputs", Path("runs.parquet"))
    for source in ("default", "runs.parquet"):
        capsys.readouterr()
        assert make_report([source, "--no-figures", "--to", "report"]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert "share, beyond chance: label_noise power_of_choice (0." in told
        assert "not beyond chance: label_noise random (0." in told
        lines = (tmp_path / "report" / "imperfect.csv").read_text().splitlines()
        rows = {row["run"]: row for row in csv.DictReader(lines)}
        assert {name: row["p (Holm)"] for name, row in rows.items()} == {
            name: f"{p[name]:.3f}" for name in chosen
        }
        for name, row in rows.items():
            assert (row["seeds"], row["of the clients"]) == ("3", "0.300")
            assert row["of the choices"].startswith(f"{np.mean(chosen[name]):.4f} [")
    (figure,) = (
        plot.figure
        for plot in all_plots(panels_of(tmp_path / "outputs"))
        if plot.name == "imperfect"
    )
    drawn = [
        [*x]
        for ax in figure.axes
        for line in ax.lines
        if len(x := np.asarray(line.get_xdata())) > 1
    ]
    assert drawn == [
        x for name in ("random", "power_of_choice") for x in ([0.3, 0.3], chosen[name])
    ]
    for path in tmp_path.rglob("imperfect.json"):
        path.unlink()
    assert "imperfect" not in [plot.name for plot in all_plots(panels_of(tmp_path / "outputs"))]
    assert make_report(["default", "--no-figures", "--to", "honest"]) == 0
    assert "imperfect" not in capsys.readouterr().out + "".join(
        path.name for path in Path("honest").iterdir()
    )


MISTAKES = """
label_noise clients.share=1.5: must lie in [0, 1]
sign_flip clients.share=-0.1: must lie in [0, 1]
free_rider clients.share=0.02: is less than one of 20 clients
label_noise clients.noise_rate=2.0: must lie in [0, 1]
label_noise clients.kind='odd': must be one of symmetric, pair
scaled_update clients.factor=inf: must lie in [-1e+06, 1e+06]
random_update clients.std=0.0: must be > 0
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_mistakes_are_told_before_anything_runs(fedsim: Any, tmp_path: Path, line: str) -> None:
    choice, told = line.split(" ", 1)
    assert (
        refused(fedsim, tmp_path, f"clients={choice}", told.partition(":")[0])
        .partition("\n")[0]
        .startswith(told)
    )
