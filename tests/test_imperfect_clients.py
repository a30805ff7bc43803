"""Imperfect clients: who they are, their wrong labels, what they send, and how often they are
selected."""

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
from fedsim.core.rng import Purpose, Streams
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
from tests.report_toys import drawn_runs, make_report
from tests.run_toys import folders, plan_of, refused, without_seconds
from tests.toys import ToyEngine, toy_clients, toy_components, toy_params, toy_population

NOISE = ("clients=label_noise", "clients.share=0.3", "clients.noise_rate=0.4")
NAMES = ("label_noise", "sign_flip", "scaled_update", "random_update", "free_rider")


def built(*words: str) -> Experiment:
    with search_path():
        return build(plan_of("engine=batched", "local.holdout_fraction=0.2", *words))


def noise(
    share: float, noise_rate: float = 0.4, kind: Any = "symmetric", num_classes: int = 5
) -> LabelNoise:
    """Return label noise of 20 clients."""
    return LabelNoise(20, num_classes, Streams(0), share=share, noise_rate=noise_rate, kind=kind)


def with_client_2_imperfect(cls: Any, **values: Any) -> Any:
    """Return the behaviour of three clients, of whom client 2 is imperfect."""
    behaviour = cls(3, 3, Streams(0), share=0.4, **values)
    behaviour.imperfect = np.array([2])
    return behaviour


def test_a_smaller_share_is_part_of_a_larger_one() -> None:
    sets = [set(noise(share).imperfect.tolist()) for share in (0, 0.1, 0.3, 1)]
    assert [len(ids) for ids in sets] == [0, 2, 6, 20]
    for smaller, larger in pairwise(sets):
        assert smaller < larger


def test_all_behaviours_have_the_same_imperfect_clients_at_a_seed() -> None:
    expected = noise(0.3).imperfect.tolist()
    assert expected == sorted(expected)
    same_seed = ScaledUpdate(20, 5, Streams(0), share=0.3, factor=2)
    another_seed = ScaledUpdate(20, 5, Streams(1), share=0.3, factor=2)
    assert same_seed.imperfect.tolist() == expected
    assert another_seed.imperfect.tolist() != expected


@pytest.mark.parametrize("kind", ["symmetric", "pair"])
def test_exactly_the_given_share_of_imperfect_clients_labels_is_wrong(kind: str) -> None:
    noisy = built(*NOISE, f"clients.kind={kind}")
    engine = noisy.simulation.components.engine
    imperfect = noisy.simulation.components.behaviour.imperfect
    assert len(imperfect) == 0.3 * 20
    assert engine.data.true_y is not None
    is_wrong = (engine.data.y != engine.data.true_y).numpy()
    for positions in (noisy.division.train, noisy.division.holdout):
        for client, samples in enumerate(positions):
            expected = round(0.4 * len(samples)) if client in imperfect else 0
            assert is_wrong[samples].sum() == expected
    held = np.concatenate([*noisy.division.train, *noisy.division.holdout])
    assert not np.delete(is_wrong, held).any()  # the server's samples


def test_label_noise_changes_nothing_else() -> None:
    honest, noisy = built(), built(*NOISE)
    components = honest.simulation.components
    assert noisy.simulation.components.engine.data.true_y is components.engine.data.y
    assert noisy.simulation.components.streams == components.streams  # of batches
    assert noisy.division.hash == honest.division.hash
    for name, value in honest.simulation.params.items():
        assert torch.equal(noisy.simulation.params[name], value)


def division_of(num_samples: int) -> Division:
    """Return the division of samples among 20 clients, who hold out none."""
    rows = np.arange(num_samples)
    train = ClientPositions(rows, np.full(20, num_samples // 20))
    nothing = rows[:0]
    return Division(train, [nothing] * 20, nothing, nothing, np.zeros((20, 5), int))


def noisy_labels(y: torch.Tensor, noise_rate: float, kind: str = "symmetric") -> Any:
    return noise(1, noise_rate, kind).labels(y, division_of(len(y))).numpy()


def test_symmetric_labels_are_uniform_over_the_other_classes() -> None:
    y = torch.arange(20_000) % 5
    steps = (noisy_labels(y, 1.0) - y.numpy()) % 5
    counts = np.bincount(steps, minlength=5)
    assert counts[0] == 0
    four_deviations = 4 * np.sqrt(0.25 * 0.75 / 20_000)
    np.testing.assert_allclose(counts[1:] / 20_000, 0.25, atol=four_deviations)


def test_pair_labels_are_the_next_class() -> None:
    y = torch.arange(100) % 5
    assert (noisy_labels(y, 1.0, "pair") == (y.numpy() + 1) % 5).all()


def test_the_wrong_labels_of_a_lower_rate_are_among_those_of_a_higher_one() -> None:
    y = torch.arange(20_000) % 5
    low, high = noisy_labels(y, 0.2), noisy_labels(y, 1.0)
    is_wrong = low != y.numpy()
    assert is_wrong.sum() == 0.2 * 20_000
    assert (low[is_wrong] == high[is_wrong]).all()


def test_label_noise_needs_two_classes() -> None:
    text = r"kind='pair': needs two classes or more, and the data set has 1"
    with pytest.raises(ConfigError, match=text):
        noise(0.5, kind="pair", num_classes=1)


def test_clients_report_by_their_labels_and_fedsim_measures_by_the_true_ones() -> None:
    words = ("client_accuracy=train", "local.evaluate_on=train", "num_rounds=1")
    honest = built(*words).simulation
    noisy = built(*words, *NOISE, "clients.noise_rate=1").simulation
    evaluation, accuracies = honest.measure()
    noisy_evaluation, noisy_accuracies = noisy.measure()
    assert noisy_evaluation == evaluation
    assert np.array_equal(np.asarray(noisy_accuracies), np.asarray(accuracies))
    losses = []
    for simulation in (honest, noisy):
        engine = simulation.components.engine
        losses.append(engine.losses(honest.params, engine.data.evaluate))
    imperfect = noisy.components.behaviour.imperfect
    assert np.flatnonzero(losses[0] != losses[1]).tolist() == imperfect.tolist()


NORMAL = Streams(0).generator(Purpose.RANDOM_UPDATE, 1, 2).standard_normal(2)
"""The numbers that client 2 draws in round 1."""
SENT = [
    (ScaledUpdate, {"factor": -1.0}, [-1, 1]),
    (ScaledUpdate, {"factor": 10.0}, [10, -10]),
    (RandomUpdate, {"std": 3.0}, 3 * NORMAL),
    (RandomUpdate, {"std": None}, NORMAL * np.hypot(1, -1) / np.hypot(*NORMAL)),
    (FreeRider, {}, [0, 0]),
]
"""What client 2 sends in place of its update (1, -1). Client 1 sends (1/2, -1/2)."""


@pytest.mark.parametrize(("cls", "values", "sent"), SENT)
def test_the_server_averages_what_is_sent_in_place_of_an_update(
    cls: Any, values: dict[str, Any], sent: Any
) -> None:
    population = toy_population([0, 4, 4], 2)
    components = toy_components(ToyEngine([0, 4, 4]), population, Full(population))
    behaviour = with_client_2_imperfect(cls, **values)
    simulation = Simulation(replace(components, behaviour=behaviour), toy_params())
    record = simulation.step()
    expected = (np.array([0.5, -0.5]) + sent) / 2
    np.testing.assert_allclose(simulation.params["w"], expected, rtol=1e-6)
    num_trained = 1 if cls is FreeRider else 2
    assert (record.trained, record.train_samples) == (num_trained, num_trained * 2 * 4)
    assert (record.uploaded, record.train_loss) == (2, (1 + 2) / 2)


@pytest.mark.parametrize(("cls", "values", "sent"), SENT)
def test_all_answers_are_of_the_same_false_update(
    cls: Any, values: dict[str, Any], sent: Any
) -> None:
    """The toy's momentum is ten times the update. A vector of another norm is replaced by `sent`
    scaled to this norm, but not if the standard deviation is given."""
    needs = frozenset({Signal.TRAINING, Signal.GRADIENTS})
    clients, ids = toy_clients([0, 4, 4], needs), np.array([1, 2])
    gradient_1, gradient_2 = (gradient.numpy() for gradient in clients.gradients(ids))

    def falsified(vector: Any) -> Any:
        if cls is not RandomUpdate:
            return np.multiply(vector, values.get("factor", 0))
        return sent if values["std"] else np.multiply(sent, np.hypot(*vector) / np.sqrt(2))

    clients._context = replace(clients._context, behaviour=with_client_2_imperfect(cls, **values))
    false_gradient = falsified(gradient_2)
    answers = {
        "updates": (clients.updates(ids)["w"], [[0.5, -0.5], sent]),
        "update norms": (clients.update_norms(ids), [np.sqrt(0.5), np.hypot(*sent)]),
        "momentum": (clients.momentum_buffers(ids)["w"][1], falsified([10, -10])),
        "gradients": (torch.stack([*clients.gradients(ids)]), [gradient_1, false_gradient]),
        "norms": (
            clients.gradient_norms(ids),
            [np.hypot(*gradient_1), np.hypot(*false_gradient)],
        ),
    }
    for question, (answer, expected) in answers.items():
        np.testing.assert_allclose(answer, expected, rtol=1e-6, err_msg=question)


@pytest.mark.parametrize(
    ("cls", "values", "variances"),
    [(ScaledUpdate, {"factor": -1.0}, [1, 1]), (FreeRider, {}, [1, 0])],
)
def test_only_free_riders_send_false_running_statistics(
    cls: Any, values: dict[str, Any], variances: list[float]
) -> None:
    cohort = ToyEngine([0, 4, 4]).train(toy_params(), np.array([1, 2]), 1, 1.0)
    cohort = replace(cohort, delta=cohort.delta | {"variance": torch.ones(2, 1)})
    before = {name: value.clone() for name, value in cohort.delta.items()}
    sent = with_client_2_imperfect(cls, **values).sent(cohort, 1)
    assert sent.delta["variance"].flatten().tolist() == variances
    for name, value in before.items():
        assert torch.equal(cohort.delta[name], value)  # the true ones are not modified


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("behaviour", [f"clients={name}" for name in NAMES])
def test_a_share_of_0_is_the_honest_run_to_the_last_bit(behaviour: str, tmp_path: Path) -> None:
    assert run([*WORDS, "name=honest"]) == 0
    assert run([*WORDS, "name=imperfect", behaviour]) == 0
    assert run([*WORDS, "name=nobody", behaviour, "clients.share=0"]) == 0
    honest, imperfect, nobody = (without_seconds(folder) for folder in folders(tmp_path))
    assert nobody == honest != imperfect
    (file,) = tmp_path.rglob("imperfect.json")
    assert file.parent.parent.name == "imperfect"


@pytest.mark.parametrize("words", [NOISE, ("clients=random_update", "clients.share=0.5")])
@pytest.mark.usefixtures("empty_folder")
def test_a_killed_run_resumes_with_the_same_clients(words: tuple[str, ...], killed: Any) -> None:
    assert run([*WORDS, *words, "output_dir=whole", EVERY]) == 0
    killed(*words, EVERY, "output_dir=cut")
    assert run([*WORDS, *words, "output_dir=cut", EVERY]) == 0
    assert result(folder_in("cut")) == result(folder_in("whole"))


SWEEP = ("selector=random,power_of_choice", "clients=honest,label_noise", "seed=0,1,2")


def shares_selected(outputs: Path) -> dict[str, list[float]]:
    """Return the share of imperfect clients among a run's selections, for each run by selector."""
    shares: dict[str, list[float]] = {}
    for path in sorted(outputs.rglob("imperfect.json")):
        imperfect = json.loads(path.read_text())["clients"]
        selected: list[int] = []
        for record in read_metrics(path.parent):
            selected += record["selected"]
        selector = path.parent.name.split("-")[3]
        shares.setdefault(selector, []).append(float(np.isin(selected, imperfect).mean()))
    return shares


def test_the_report_says_how_often_each_method_selected_imperfect_clients(
    fedsim: Any, tmp_path: Path, capsys: Any
) -> None:
    outputs = tmp_path / "outputs"
    assert fedsim("-m", *SWEEP, "num_rounds=12") == 0
    shares = shares_selected(outputs)
    p_values = {
        name: ttest_1samp(values, 0.3, alternative="greater").pvalue
        for name, values in shares.items()
    }
    p_values["power_of_choice"] *= 2  # Holm's correction of the smaller of two
    assert p_values["power_of_choice"] < 0.05 < p_values["random"]  # it seeks high losses

    # 1. Tables, of folders and of an archive
    write_archive(read_runs(outputs), outputs, Path("runs.parquet"))
    for source in ("default", "runs.parquet"):
        capsys.readouterr()
        assert make_report([source, "--no-figures", "--to", "report"]) == 0
        screen = " ".join(capsys.readouterr().out.split())
        assert "share, beyond chance: label_noise power_of_choice (0." in screen
        assert "not beyond chance: label_noise random (0." in screen
        lines = (tmp_path / "report" / "imperfect.csv").read_text().splitlines()
        rows = {row["run"]: row for row in csv.DictReader(lines)}
        assert rows.keys() == shares.keys()
        for name, row in rows.items():
            assert row["p (Holm)"] == f"{p_values[name]:.3f}"
            assert (row["seeds"], row["of the clients"]) == ("3", "0.300")
            assert row["of the choices"].startswith(f"{np.mean(shares[name]):.4f} [")

    # 2. The figure: for each method the expected share, and the shares of its runs
    plots = {plot.name: plot for plot in all_plots(drawn_runs(outputs))}
    lines_drawn = []
    for axes in plots["imperfect"].figure.axes:
        for line in axes.lines:
            x = np.asarray(line.get_xdata()).tolist()
            if len(x) > 1:
                lines_drawn.append(x)
    expected = [0.3, 0.3]
    assert lines_drawn == [expected, shares["random"], expected, shares["power_of_choice"]]

    # 3. Neither of these without imperfect clients
    for path in tmp_path.rglob("imperfect.json"):
        path.unlink()
    assert "imperfect" not in [plot.name for plot in all_plots(drawn_runs(outputs))]
    assert make_report(["default", "--no-figures", "--to", "honest"]) == 0
    assert "imperfect" not in capsys.readouterr().out
    assert not list(Path("honest").glob("*imperfect*"))


MISTAKES = [
    ("label_noise", "clients.share=1.5", "must lie in [0, 1]"),
    ("sign_flip", "clients.share=-0.1", "must lie in [0, 1]"),
    ("free_rider", "clients.share=0.02", "is less than one of 20 clients"),
    ("label_noise", "clients.noise_rate=2.0", "must lie in [0, 1]"),
    ("label_noise", "clients.kind='odd'", "must be one of symmetric, pair"),
    ("scaled_update", "clients.factor=inf", "must lie in [-1e+06, 1e+06]"),
    ("random_update", "clients.std=0.0", "must be > 0"),
]


@pytest.mark.parametrize(("choice", "word", "rule"), MISTAKES)
def test_mistakes_are_reported_before_anything_runs(
    fedsim: Any, tmp_path: Path, choice: str, word: str, rule: str
) -> None:
    message = refused(fedsim, tmp_path, f"clients={choice}", word)
    assert message.splitlines()[0].startswith(f"{word}: {rule}")
