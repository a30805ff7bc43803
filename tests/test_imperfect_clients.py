"""Imperfect clients: which clients they are, their wrong labels, their false updates, and how often
methods select them.

An imperfect client has wrong labels, or sends something else than its update. The config group
`clients` chooses the behaviour of a run's imperfect clients. `clients.share` is their share.
"""

import csv
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp

from fedsim.clients.behaviour import FreeRider, LabelNoise, RandomUpdate, ScaledUpdate
from fedsim.clients.context import Signal
from fedsim.config.compose import search_path
from fedsim.core.arrays import Floats, Ints
from fedsim.core.errors import ConfigError
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import ClientPositions, Cohort
from fedsim.jobs.cli import run
from fedsim.partitions.division import Division
from fedsim.report.figures import all_plots
from fedsim.results.archive import write_archive
from fedsim.results.reading import read_metrics
from fedsim.results.runs import read_runs
from fedsim.rounds.loop import Simulation
from fedsim.running.assembly import Experiment, build
from fedsim.selectors.full import Full
from tests.checkpoint_toys import EVERY as SAVE_EVERY_SECOND_ROUND
from tests.checkpoint_toys import WORDS as EIGHT_ROUNDS
from tests.checkpoint_toys import folder_in, result
from tests.report_toys import drawn_runs, looks_of, make_report
from tests.run_toys import folders, plan_of, refused, without_seconds
from tests.toys import ToyEngine, toy_clients, toy_components, toy_params, toy_population

LABEL_NOISE = ("clients=label_noise", "clients.share=0.3", "clients.noise_rate=0.4")
"""Overrides: 6 of the default 20 clients have 40 % wrong labels."""


def built(*overrides: str) -> Experiment:
    """Return an experiment with the default 20 clients, who hold out a fifth of their samples."""
    with search_path():
        return build(plan_of("engine=batched", "local.holdout_fraction=0.2", *overrides))


def label_noise(
    share: float, noise_rate: float = 0.4, kind: Any = "symmetric", num_classes: int = 5
) -> LabelNoise:
    """Return label noise of 20 clients."""
    return LabelNoise(
        num_clients=20,
        num_classes=num_classes,
        streams=Streams(seed=0),
        share=share,
        noise_rate=noise_rate,
        kind=kind,
    )


# --- Which clients are imperfect


def test_the_imperfect_clients_of_a_smaller_share_are_among_those_of_a_larger_one() -> None:
    sets = [set(label_noise(share).imperfect.tolist()) for share in (0, 0.1, 0.3, 1)]
    assert [len(ids) for ids in sets] == [0, 2, 6, 20]
    for smaller, larger in pairwise(sets):
        assert smaller < larger


@pytest.mark.parametrize(
    ("cls", "values"),
    [(ScaledUpdate, {"factor": 2.0}), (RandomUpdate, {"std": None}), (FreeRider, {})],
)
def test_all_behaviours_have_the_same_imperfect_clients_at_a_seed(
    cls: Any, values: dict[str, Any]
) -> None:
    expected = label_noise(share=0.3).imperfect.tolist()  # at seed 0
    assert expected == sorted(expected)
    same_seed = cls(num_clients=20, num_classes=5, streams=Streams(seed=0), share=0.3, **values)
    another_seed = cls(num_clients=20, num_classes=5, streams=Streams(seed=1), share=0.3, **values)
    assert same_seed.imperfect.tolist() == expected
    assert another_seed.imperfect.tolist() != expected


# --- Wrong labels


@pytest.mark.parametrize("kind", ["symmetric", "pair"])
def test_exactly_the_noise_rate_of_imperfect_clients_labels_is_wrong(kind: str) -> None:
    experiment = built(*LABEL_NOISE, f"clients.kind={kind}")
    division = experiment.division
    engine = experiment.simulation.components.engine
    imperfect = experiment.simulation.components.behaviour.imperfect
    assert len(imperfect) == 6  # 0.3 * 20 clients
    assert engine.data.true_y is not None
    is_wrong = (engine.data.y != engine.data.true_y).numpy()
    for samples_by_client in (division.train, division.holdout):
        for client, samples in enumerate(samples_by_client):
            num_wrong = round(0.4 * len(samples)) if client in imperfect else 0
            assert is_wrong[samples].sum() == num_wrong
    clients_samples = np.concatenate([*division.train, *division.holdout])
    is_wrong_at_server = np.delete(is_wrong, clients_samples)
    assert not is_wrong_at_server.any()


def test_label_noise_changes_neither_division_nor_first_model_nor_random_streams() -> None:
    honest = built()
    noisy = built(*LABEL_NOISE)
    honest_components = honest.simulation.components
    noisy_components = noisy.simulation.components
    assert noisy_components.engine.data.true_y is honest_components.engine.data.y
    assert noisy_components.streams == honest_components.streams  # equal batches and selections
    assert noisy.division.hash == honest.division.hash
    for name, value in honest.simulation.params.items():
        assert torch.equal(noisy.simulation.params[name], value)


def noisy_labels(y: torch.Tensor, noise_rate: float, kind: str = "symmetric") -> Ints:
    """Return the labels of 20 imperfect clients, who hold samples with the true labels `y`.

    Each client trains on a twentieth of the samples, and holds out none.
    """
    positions = np.arange(len(y))
    no_samples = np.empty(0, np.int64)
    division = Division(
        train=ClientPositions(flat=positions, sizes=np.full(20, len(y) // 20)),
        holdout=[no_samples] * 20,
        validation=no_samples,
        public=no_samples,
        histograms=np.zeros((20, 5), int),  # not used
    )
    behaviour = label_noise(share=1, noise_rate=noise_rate, kind=kind)
    labels: Ints = behaviour.labels(y, division).numpy()
    return labels


def test_symmetric_labels_are_uniform_over_the_other_classes() -> None:
    """The seed is fixed, so the counts are the same whenever the test runs."""
    y = torch.arange(20_000) % 5
    label_shifts = (noisy_labels(y, noise_rate=1.0) - y.numpy()) % 5
    counts = np.bincount(label_shifts, minlength=5)
    assert counts[0] == 0
    # The shifts 1 to 4 have probability 0.25 each. The standard deviation of a share of n samples
    # is sqrt(p (1 - p) / n).
    four_deviations = 4 * np.sqrt(0.25 * 0.75 / 20_000)
    np.testing.assert_allclose(counts[1:] / 20_000, 0.25, atol=four_deviations)


def test_pair_labels_are_the_next_class() -> None:
    y = torch.arange(100) % 5
    labels = noisy_labels(y, noise_rate=1.0, kind="pair")
    assert (labels == (y.numpy() + 1) % 5).all()


def test_the_wrong_labels_of_a_lower_rate_are_among_those_of_a_higher_one() -> None:
    y = torch.arange(20_000) % 5
    low = noisy_labels(y, noise_rate=0.2)
    high = noisy_labels(y, noise_rate=1.0)
    is_wrong = low != y.numpy()
    assert is_wrong.sum() == 4_000  # 0.2 * 20,000 samples
    assert (low[is_wrong] == high[is_wrong]).all()


def test_label_noise_needs_two_classes() -> None:
    text = r"kind='pair': needs two classes or more, and the data set has 1"
    with pytest.raises(ConfigError, match=text):
        label_noise(share=0.5, kind="pair", num_classes=1)


def test_fedsim_measures_accuracy_by_the_true_labels() -> None:
    overrides = ("client_accuracy=train", "num_rounds=1")
    evaluation, accuracies = built(*overrides).simulation.measure()
    noisy = built(*overrides, *LABEL_NOISE, "clients.noise_rate=1").simulation
    noisy_evaluation, noisy_accuracies = noisy.measure()
    assert noisy_evaluation == evaluation
    assert np.array_equal(np.asarray(noisy_accuracies), np.asarray(accuracies))


def test_clients_report_losses_by_their_own_labels() -> None:
    honest = built("local.evaluate_on=train").simulation
    noisy = built("local.evaluate_on=train", *LABEL_NOISE, "clients.noise_rate=1").simulation
    losses = []
    for simulation in (honest, noisy):
        engine = simulation.components.engine
        # the losses of the same model, by the labels of this simulation's clients
        losses.append(engine.losses(honest.params, engine.data.evaluate))
    honest_losses, noisy_losses = losses
    imperfect = noisy.components.behaviour.imperfect
    assert np.flatnonzero(noisy_losses != honest_losses).tolist() == imperfect.tolist()


# --- False updates
#
# These tests use the toy engine, whose model has two numbers. Training from the initial model
# (0, 0), client k has the update k/2 * (1, -1), the training loss k, and a momentum of ten times
# the update. Of three clients, client 0 has no samples, so the cohort is clients 1 and 2. Client 2
# is imperfect. The new global model is the old one plus the mean update.

SIZES = [0, 4, 4]
UPDATE_1 = np.array([0.5, -0.5])
UPDATE_2 = np.array([1.0, -1.0])
DRAWS = Streams(seed=0).generator(Purpose.RANDOM_UPDATE, 1, 2).standard_normal(2)
"""The normal numbers that the random stream of round 1 and client 2 draws."""

FALSIFICATIONS = [
    pytest.param(ScaledUpdate, {"factor": -1.0}, lambda vector: -vector, id="sign flip"),
    pytest.param(ScaledUpdate, {"factor": 10.0}, lambda vector: 10 * vector, id="boosting"),
    pytest.param(RandomUpdate, {"std": 3.0}, lambda vector: 3 * DRAWS, id="given std"),
    pytest.param(
        RandomUpdate,
        {"std": None},  # the draws, scaled to the norm of the true vector
        lambda vector: DRAWS * np.hypot(*vector) / np.hypot(*DRAWS),
        id="true norm",
    ),
    pytest.param(FreeRider, {}, lambda vector: 0 * vector, id="free rider"),
]
"""A behaviour, its values, and a function of what client 2 sends in place of a true vector [2]."""


def with_client_2_imperfect(cls: Any, **values: Any) -> Any:
    """Return the behaviour of three clients, of whom only client 2 is imperfect."""
    behaviour = cls(num_clients=3, num_classes=3, streams=Streams(seed=0), share=0.4, **values)
    assert len(behaviour.imperfect) == 1  # 0.4 * 3 clients, rounded
    behaviour.imperfect = np.array([2])  # in place of the client that the seed would choose
    return behaviour


def assert_close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize(("cls", "values", "falsify"), FALSIFICATIONS)
def test_the_server_averages_the_updates_that_clients_send(
    cls: Any, values: dict[str, Any], falsify: Callable[[Floats], Floats]
) -> None:
    population = toy_population(SIZES, cohort_size=2)
    components = toy_components(ToyEngine(SIZES), population, Full(population))
    behaviour = with_client_2_imperfect(cls, **values)
    simulation = Simulation(replace(components, behaviour=behaviour), toy_params())
    record = simulation.step()
    assert_close(simulation.params["w"], (UPDATE_1 + falsify(UPDATE_2)) / 2)
    assert record.uploaded == 2
    # A free rider is not charged for training. Others make two passes over their four samples.
    num_trained = 1 if cls is FreeRider else 2
    assert record.trained == num_trained
    assert record.train_samples == num_trained * 2 * 4
    # The training loss is the mean over both clients. fedsim trains a free rider all the same,
    # without a charge, so that the batches of other clients stay the same, and reports its loss.
    assert record.train_loss == (1 + 2) / 2


@pytest.mark.parametrize(("cls", "values", "falsify"), FALSIFICATIONS)
def test_updates_momentum_gradients_and_norms_are_falsified_alike(
    cls: Any, values: dict[str, Any], falsify: Callable[[Floats], Floats]
) -> None:
    needs = frozenset({Signal.TRAINING, Signal.GRADIENTS, Signal.UPDATES})
    ids = np.array([1, 2])
    honest = toy_clients(SIZES, needs)
    gradient_1, gradient_2 = (gradient.numpy() for gradient in honest.gradients(ids))

    clients = toy_clients(SIZES, needs)
    behaviour = with_client_2_imperfect(cls, **values)
    clients._context = replace(clients._context, behaviour=behaviour)
    false_update = falsify(UPDATE_2)
    false_gradient = falsify(gradient_2)
    momentum_1, momentum_2 = clients.momentum_buffers(ids)["w"]
    assert_close(clients.updates(ids)["w"], [UPDATE_1, false_update])
    assert_close(clients.update_norms(ids), [np.hypot(*UPDATE_1), np.hypot(*false_update)])
    assert_close(momentum_1, 10 * UPDATE_1)
    assert_close(momentum_2, falsify(10 * UPDATE_2))
    assert_close(torch.stack([*clients.gradients(ids)]), [gradient_1, false_gradient])
    gradient_norms = [np.hypot(*gradient_1), np.hypot(*false_gradient)]
    assert_close(clients.gradient_norms(ids), gradient_norms)


def cohort_with_variance() -> Cohort:
    """Return clients 1 and 2 after training, with a running variance whose change is 1 for both."""
    ids = np.array([1, 2])
    cohort = ToyEngine(SIZES).train(toy_params(), ids, round=1, lr=1.0)
    return replace(cohort, delta=cohort.delta | {"variance": torch.ones(2, 1)})


@pytest.mark.parametrize(
    ("cls", "values", "variances"),
    [
        (ScaledUpdate, {"factor": -1.0}, [1, 1]),
        (RandomUpdate, {"std": 3.0}, [1, 1]),
        (FreeRider, {}, [1, 0]),
    ],
)
def test_of_all_false_updates_only_those_of_free_riders_have_false_running_statistics(
    cls: Any, values: dict[str, Any], variances: list[float]
) -> None:
    behaviour = with_client_2_imperfect(cls, **values)
    sent_cohort = behaviour.sent(cohort_with_variance(), round=1)
    assert sent_cohort.delta["variance"].flatten().tolist() == variances


@pytest.mark.parametrize(
    ("behaviour", "factor"), [("sign_flip", -1.0), ("free_rider", 0.0)], ids=["flip", "rider"]
)
def test_false_clients_send_false_gradients_to_scaffold(behaviour: str, factor: float) -> None:
    """In option I, c_k is the gradient that client k sends. c is zero in the first round."""
    scaffold = ("local_algorithm=scaffold", "local_algorithm.option=I")
    honest = built(*scaffold).simulation
    false = built(*scaffold, f"clients={behaviour}", "clients.share=1").simulation
    honest.step()
    false.step()
    sent_honestly = honest.components.local_algorithm.variates
    sent = false.components.local_algorithm.variates
    assert sent.keys() == sent_honestly.keys()
    for client, gradient in sent_honestly.items():
        assert gradient.abs().max() > 0
        assert torch.equal(sent[client], factor * gradient)


@pytest.mark.parametrize(("cls", "values"), [(ScaledUpdate, {"factor": -1.0}), (FreeRider, {})])
def test_falsifying_does_not_modify_the_true_updates(cls: Any, values: dict[str, Any]) -> None:
    cohort = cohort_with_variance()
    with_client_2_imperfect(cls, **values).sent(cohort, round=1)
    assert_close(cohort.delta["w"], [UPDATE_1, UPDATE_2])
    assert cohort.delta["variance"].flatten().tolist() == [1, 1]


# --- Whole runs


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    "choice", ["label_noise", "sign_flip", "scaled_update", "random_update", "free_rider"]
)
def test_a_share_of_0_is_the_honest_run_to_the_last_bit(choice: str, tmp_path: Path) -> None:
    behaviour = f"clients={choice}"
    assert run([*EIGHT_ROUNDS, "name=honest"]) == 0
    assert run([*EIGHT_ROUNDS, "name=imperfect", behaviour, "clients.share=0.3"]) == 0
    assert run([*EIGHT_ROUNDS, "name=nobody", behaviour, "clients.share=0"]) == 0
    # `folders` sorts them by path: honest, imperfect, nobody.
    honest, imperfect, nobody = (without_seconds(folder) for folder in folders(tmp_path))
    assert nobody == honest
    assert imperfect != honest
    (file,) = tmp_path.rglob("imperfect.json")  # only one run lists imperfect clients
    assert file.parent.parent.name == "imperfect"


@pytest.mark.parametrize("overrides", [LABEL_NOISE, ("clients=random_update", "clients.share=0.5")])
@pytest.mark.usefixtures("empty_folder")
def test_a_killed_run_resumes_with_the_same_imperfect_clients(
    overrides: tuple[str, ...], killed: Any
) -> None:
    words = [*overrides, SAVE_EVERY_SECOND_ROUND]
    assert run([*EIGHT_ROUNDS, *words, "output_dir=whole"]) == 0
    killed(*words, "output_dir=cut")  # runs EIGHT_ROUNDS, and dies before round 6
    assert run([*EIGHT_ROUNDS, *words, "output_dir=cut"]) == 0
    assert result(folder_in("cut")) == result(folder_in("whole"))


# --- Reports
#
# The report says how often each method selected imperfect clients, and tests whether that is more
# often than their share of all clients, 0.3.


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the folders `honest` and `label_noise`, each with the runs of a sweep.

    A sweep has two methods, random selection and Power-of-Choice, and the seeds 0, 1 and 2. The
    seeds determine the results. The statistics of these tests are therefore always the same.
    """
    folder = tmp_path_factory.mktemp("runs")
    sweep = ("-m", "selector=random,power_of_choice", "seed=0,1,2")
    quick = ("num_rounds=12", "local.epochs=1", "tracker=files_only")
    noisy = ("clients=label_noise", "clients.share=0.3")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, overrides in (("honest", ()), ("label_noise", noisy)):
            words = [*sweep, *quick, *overrides, f"output_dir={folder / name}"]
            patch.setattr(sys, "argv", ["fedsim", *words])
            assert run(words) == 0
    return folder


@pytest.fixture(params=["folder", "archive"])
def source(
    request: pytest.FixtureRequest,
    runs_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """Return what `fedsim report` reads: the folder of both sweeps, or an archive of it.

    The working folder is an empty one.
    """
    monkeypatch.chdir(tmp_path)
    if request.param == "folder":
        return str(runs_folder)
    archive = tmp_path / "runs.parquet"
    write_archive(read_runs(runs_folder), runs_folder, archive)
    return str(archive)


def imperfect_selections(runs_folder: Path) -> dict[str, list[float]]:
    """Return, for each selector, the share of a run's selections that went to imperfect clients.

    The three values of a selector are those of the seeds 0, 1 and 2, in this order.
    """
    shares = {"random": [np.nan] * 3, "power_of_choice": [np.nan] * 3}
    for path in runs_folder.rglob("imperfect.json"):
        imperfect = json.loads(path.read_text())["clients"]
        summary = json.loads((path.parent / "summary.json").read_text())
        selected: list[int] = []
        for record in read_metrics(path.parent):
            selected += record["selected"]
        share = float(np.isin(selected, imperfect).mean())
        shares[summary["choices"]["selector"]][summary["seed"]] = share
    return shares


def holm_p_values(runs_folder: Path) -> dict[str, float]:
    """Return, for each selector, the p-value of selecting imperfect clients more often than 0.3.

    Holm's correction doubles the smaller of two p-values. Power-of-Choice has the smaller one,
    because it seeks clients with high losses.
    """
    p_values = {}
    for selector, shares in imperfect_selections(runs_folder).items():
        p_values[selector] = float(ttest_1samp(shares, 0.3, alternative="greater").pvalue)
    assert p_values["power_of_choice"] < p_values["random"]
    p_values["power_of_choice"] *= 2
    return p_values


def test_a_table_says_how_often_each_method_selected_imperfect_clients(
    runs_folder: Path, source: str
) -> None:
    assert make_report([source, "--no-figures", "--to", "report"]) == 0
    lines = Path("report/imperfect.csv").read_text().splitlines()
    rows = {row["run"]: row for row in csv.DictReader(lines)}
    shares = imperfect_selections(runs_folder)
    p_values = holm_p_values(runs_folder)
    assert rows.keys() == shares.keys()
    for selector, row in rows.items():
        assert row["seeds"] == "3"
        assert row["of the clients"] == "0.300"
        mean = np.mean(shares[selector])
        assert row["of the choices"].startswith(f"{mean:.4f} [")  # then its interval
        assert row["p (Holm)"] == f"{p_values[selector]:.3f}"


def test_a_message_says_which_methods_prefer_imperfect_clients(
    runs_folder: Path, source: str, capsys: Any
) -> None:
    p_values = holm_p_values(runs_folder)
    assert p_values["power_of_choice"] < 0.05 < p_values["random"]
    capsys.readouterr()  # discard what the sweeps have printed
    assert make_report([source, "--no-figures", "--to", "report"]) == 0
    printed = " ".join(capsys.readouterr().out.split())  # without the line breaks
    assert "share, beyond chance: label_noise power_of_choice (0." in printed
    assert "not beyond chance: label_noise random (0." in printed


def test_a_figure_shows_the_shares_of_all_runs(runs_folder: Path) -> None:
    """Each method has a dashed line at the share of imperfect clients, and a point for each run.

    A further point, the mean, has an error bar. All of its lines have a single x.
    """
    runs = drawn_runs(runs_folder)
    plots = {plot.name: plot for plot in all_plots(runs, looks_of(runs))}
    x_values = []
    for axes in plots["imperfect"].figure.axes:
        for line in axes.lines:
            x = np.asarray(line.get_xdata()).tolist()
            if len(x) > 1:
                x_values.append(x)
    shares = imperfect_selections(runs_folder)
    expected_share = [0.3, 0.3]  # both ends of the dashed line
    assert x_values == [
        expected_share,
        shares["random"],
        expected_share,
        shares["power_of_choice"],
    ]


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("sweep", ["honest", "label_noise"])
def test_a_report_without_known_imperfect_clients_does_not_mention_them(
    sweep: str, runs_folder: Path, capsys: Any
) -> None:
    """Runs without imperfect.json have no known imperfect clients, even with noisy labels."""
    copytree(runs_folder / sweep, "runs")
    for path in Path("runs").rglob("imperfect.json"):
        path.unlink()
    runs = drawn_runs(Path("runs"))
    assert "imperfect" not in [plot.name for plot in all_plots(runs, looks_of(runs))]
    capsys.readouterr()  # discard what the sweeps have printed
    assert make_report(["runs", "--no-figures", "--to", "report"]) == 0
    assert "imperfect" not in capsys.readouterr().out
    assert not list(Path("report").glob("*imperfect*"))


# --- Mistakes


MISTAKES = [
    ("label_noise", "clients.share=1.5", "must lie in [0, 1]"),
    ("sign_flip", "clients.share=-0.1", "must lie in [0, 1]"),
    ("free_rider", "clients.share=0.02", "is less than one of 20 clients"),
    ("label_noise", "clients.noise_rate=2.0", "must lie in [0, 1]"),
    ("label_noise", "clients.kind='odd'", "must be one of symmetric, pair"),
    ("scaled_update", "clients.factor=inf", "must lie in [-1e+06, 1e+06]"),
    ("random_update", "clients.std=0.0", "must be > 0"),
]
"""A choice of `clients`, an override with a mistake, and the rule that the message states."""


@pytest.mark.parametrize(("choice", "override", "rule"), MISTAKES)
def test_mistakes_are_reported_before_anything_runs(
    fedsim: Any, tmp_path: Path, choice: str, override: str, rule: str
) -> None:
    message = refused(fedsim, tmp_path, f"clients={choice}", override)
    assert message.splitlines()[0].startswith(f"{override}: {rule}")
