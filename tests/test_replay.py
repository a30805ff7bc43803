"""`fedsim replay`: methods choose on the models of one run as if each were a run of its own; what
is made of that."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from fedsim.commands.replay import lead_of, real_accuracies, run
from fedsim.commands.replay_analysis import ReplayAnalysis, verdict
from fedsim.commands.replay_plots import plots
from fedsim.config.compose import search_path
from fedsim.config.plan import Plan
from fedsim.core.errors import ConfigError, DivergedError
from fedsim.core.types import Cohort, Correction, Evaluation
from fedsim.engine.engine import Engine
from fedsim.running.assembly import build
from fedsim.running.replay import Replay, TrainsOnce
from tests.run_toys import Run, folders, plan_of, without_seconds

SMALL = ("num_rounds=3", "local.epochs=1", "num_clients=6", "cohort_size=2", "tracker=files_only")
METHODS = ("power_of_choice", "pncs", "gpfl", "fedcor")


def plans_of(*words: str, methods: tuple[str, ...] = METHODS) -> dict[str, Plan]:
    with search_path():
        return {name: plan_of(*SMALL, *words, f"selector={name}") for name in methods}


def replay_of(*words: str, methods: tuple[str, ...] = METHODS) -> Replay:
    plans = plans_of(*words, methods=methods)
    return Replay(lead_of(plans[methods[0]]), plans, num_cohorts=4)


def choices_of(replay: Replay) -> dict[str, list[list[int]]]:
    rows = [row for _ in range(3) for row in replay.play()[0]]
    return {
        name: [row["chosen"] for row in rows if row["selector"] == name] for name in replay.methods
    }


def test_the_lead_is_the_ordinary_run_of_random_selection(fedsim: Run, tmp_path: Path) -> None:
    fedsim(*SMALL, "selector=random")
    replay = replay_of(methods=("random",))
    played = [replay.play() for _ in range(3)]
    leads = [{k: v for k, v in lead.as_dict().items() if "seconds" not in k} for _, lead in played]
    assert leads == without_seconds(folders(tmp_path)[0])
    assert [rows[0]["chosen"] for rows, _ in played] == [lead["selected"] for lead in leads]
    model = load_file(folders(tmp_path)[0] / "model.safetensors")
    assert all(torch.equal(value, model[name]) for name, value in replay.lead.params.items())


SLOW_DEVICES = (
    "init_seed=per_client",
    "local_algorithm=fedprox",
    "system=lognormal",
    "system.over_selection=1.5",
)


@pytest.mark.parametrize(
    "words", [(), ("local_algorithm=scaffold", "aggregator=fedavgm"), SLOW_DEVICES]
)
def test_methods_choose_as_if_each_were_alone_and_nothing_remembered(
    words: tuple[str, ...],
) -> None:
    methods = METHODS[1:3] if words else METHODS
    found = choices_of(replay := replay_of(*words, methods=methods))
    for name, plan in plans_of(*words, methods=methods).items():
        alone, lead, chosen = build(plan).simulation, build(lead_of(plan)).simulation, []
        for _ in range(3):
            alone.params, alone.simulated_time = lead.params, lead.simulated_time
            for group in ("aggregator", "local_algorithm"):
                getattr(alone.components, group).load_state_dict(
                    getattr(lead.components, group).state_dict()
                )
            chosen.append(alone.step().selected)
            lead.step()
        assert [found[name], found[name][0]] == [chosen, build(plan).simulation.step().selected]
        assert all(
            torch.equal(value, alone.params[n]) for n, value in replay.methods[name].params.items()
        )


def test_a_client_trains_once_a_round_for_all_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, train = Counter[tuple[int, int]](), Engine.train

    def counted(self: Engine, params: Any, ids: Any, round: int, *more: Any) -> Cohort:
        trained.update((round, int(i)) for i in ids)
        return train(self, params, ids, round, *more)

    monkeypatch.setattr(Engine, "train", counted)
    choices_of(replay_of(methods=("power_of_choice", "pncs", "grad_norm")))
    assert trained == Counter(itertools.product((1, 2, 3), range(6)))


def test_what_is_remembered_answers_the_same_question_alone() -> None:
    (plan,) = plans_of(methods=("random",)).values()
    engine, params = build(plan).simulation.components.engine, build(plan).simulation.params
    once, ids, other = (
        TrainsOnce(engine),
        np.array([1, 2, 4]),
        {n: value + 0.01 for n, value in params.items()},
    )
    own = [(name, (3, *params[name].shape)) for name in engine.trained]
    shifts = [
        Correction(0.0, {name: torch.full(shape, size) for name, shape in own})
        for size in (1.0, 2.0)
    ]
    questions: list[list[Any]] = [
        [1, 0.1],
        [1, 0.1, [params, other, params]],
        [1, 0.1, [other] * 3],
        [1, 0.1],
    ]
    questions += [[1, 0.1, None, added] for added in (*shifts, Correction(0.5))]
    questions += [[2, 0.1], [2, 0.2], [1, 0.1]]
    once.train(params, np.array([0, 2]), 1, 0.1)
    for more, model in itertools.product(questions, (params, other, params)):
        found, expected = once.train(model, ids, *more), engine.train(model, ids, *more)
        assert found.start is model
        assert all(torch.equal(value, expected.delta[name]) for name, value in found.delta.items())
        assert np.array_equal(found.loss, expected.loss)  # type: ignore[arg-type]
        torch._foreach_zero_([*found.delta.values()])  # they are copies


def test_losses_and_percentiles_are_those_of_all_cohorts() -> None:
    experiment, replay = build(plans_of()["pncs"]), replay_of(methods=("random", "power_of_choice"))
    engine, params = experiment.simulation.components.engine, experiment.simulation.params
    held = torch.as_tensor(experiment.division.validation)
    lr = experiment.simulation.components.learning_rate(1)
    moved = [engine.train(params, np.array([i]), 1, lr).delta for i in range(6)]

    def loss(*ids: int) -> float:
        model = {
            n: value + sum(moved[i][n][0] for i in ids) / len(ids) for n, value in params.items()
        }
        experiment.model.load_state_dict(model, strict=False)
        logits = experiment.model.eval()(engine.data.x[held]).detach().double()
        return float(cross_entropy(logits, engine.data.y[held]))

    losses = {ids: loss(*ids) for ids in itertools.combinations(range(6), 2)}
    ends = [min(losses.values()), max(losses.values())]
    for row in replay.play()[0]:
        own = losses[tuple(row["chosen"])]
        assert [row["loss"], row["best"], row["worst"]] == pytest.approx([own, *ends], rel=1e-6)
        assert row["percentile"] == pytest.approx(
            100 * sum(other < own for other in losses.values()) / 15
        )


@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_a_replay_ends_if_a_model_has_no_finite_validation_loss(
    loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = replay_of(methods=("random",))
    monkeypatch.setattr(replay.engine, "evaluate", lambda *samples: Evaluation(0.1, loss))
    with pytest.raises(DivergedError, match=f"round 1: the validation loss is {loss}"):
        replay.play()


def test_measures_by_hand() -> None:
    same = {
        "best": 1.0,
        "worst": 3.0,
        "percentile": 0,
        "clients": 2,
        "seconds_select": 0,
        "bytes_asked": 0,
    }
    did = ([0, 1], 2.0), ([1, 2], 1.5), ([0, 1], 3.0), ([0, 1], 1.0)
    rows = [
        {"chosen": chosen, "loss": loss, "available": 4, "drawn": 2, **same} for chosen, loss in did
    ]
    found = ReplayAnalysis(
        ["a", "b"], rows, [{"size": np.array([1.0, 2, 3, 4]), "loss": np.zeros(4)}]
    )
    assert (found.measured["regret"].tolist(), found.order) == ([[0.75, 0.125]], [1, 0])
    assert found.distances == pytest.approx([(2 / 3 + 0) / 2])
    pairs = [
        ({*a}, {*b}) for a, b in itertools.product(itertools.combinations(range(4), 2), repeat=2)
    ]
    assert found.chance == pytest.approx(np.mean([len(a & b) / len(a | b) for a, b in pairs]))
    assert found.preferences["size"] == pytest.approx(np.array([[-0.8944272, -0.632455532]]))
    assert np.isnan(found.preferences["loss"]).all()


@pytest.mark.filterwarnings("error")
def test_a_replay_in_whose_rounds_no_client_was_available_has_no_chance() -> None:
    row = {"chosen": [], "available": 0, "drawn": 0, "clients": 0}
    row |= dict.fromkeys(("loss", "best", "worst"), 1.0)
    row |= dict.fromkeys(("percentile", "seconds_select", "bytes_asked"), 0)
    choices = ReplayAnalysis(["a", "b"], [row, row], [{"size": np.ones(4)}])
    assert np.isnan(choices.chance)


@pytest.mark.filterwarnings("error")
def test_equal_regrets_rank_no_methods() -> None:
    sentence = verdict(np.zeros(4), np.arange(4.0))
    assert sentence.endswith("is open: all methods have equal regret.")


def test_rounds_in_which_random_cohorts_do_not_differ_have_no_regret() -> None:
    """In round 2 a single client is available."""
    common = {"clients": 1, "seconds_select": 0, "bytes_asked": 0, "available": 4, "drawn": 1}
    informative = {"best": 1.0, "worst": 3.0, "percentile": 50} | common
    alone = {"best": 2.0, "worst": 2.0, "percentile": 0} | common
    rows = [
        {"chosen": [0], "loss": 2.0, **informative},
        {"chosen": [1], "loss": 3.0, **informative},
        {"chosen": [0], "loss": 2.0, **alone},
        {"chosen": [], "loss": 5.0, **alone},
    ]
    found = ReplayAnalysis(["power_of_choice", "power"], rows, [{"size": np.array([1.0, 2, 3, 4])}])
    assert found.measured["regret"].tolist() == [[0.5, 1.0]]
    assert found.measured["percentile"].tolist() == [[50, 50]]
    choices, _, agreement = found.tables({})
    assert "without 1 of 2 rounds" in " ".join(choices.full_note.split())
    assert list(agreement.values) == ["method", "power_of_choice", "power"]


def test_preferences_are_drawn_without_the_seeds_that_have_none() -> None:
    """Both clients are of one size in the second seed."""
    common = {"clients": 1, "seconds_select": 0, "bytes_asked": 0, "available": 2, "drawn": 1}
    row = {"chosen": [1], "loss": 2.0, "best": 1.0, "worst": 3.0, "percentile": 0, **common}
    sizes = ([1.0, 2.0], [1.0, 1.0])
    found = ReplayAnalysis(["a"], [row, row], [{"size": np.array(size)} for size in sizes])
    assert found.preferences["size"] == pytest.approx(np.array([[1.0], [np.nan]]), nan_ok=True)
    _, preferences, _ = plots(found)
    (image,) = preferences.figure.axes[0].get_images()
    assert np.asarray(image.get_array()) == pytest.approx(np.ones((1, 1)))


def test_seeds_without_any_regret_leave_a_method_last() -> None:
    common = {"clients": 1, "seconds_select": 0, "bytes_asked": 0, "available": 1, "drawn": 1}
    row = {"chosen": [0], "loss": 2.0, "best": 2.0, "worst": 2.0, "percentile": 0, **common}
    found = ReplayAnalysis(["a", "b"], [row, row], [{"size": np.array([1.0, 2])}])
    assert np.isnan(found.measured["regret"]).all()
    assert len(plots(found)) == 3


def test_the_verdict_is_by_kendalls_test() -> None:
    regrets = np.arange(8.0)
    # All of the 8! orders but one have a lower tau: p = 2 / 40,320.
    assert verdict(regrets, -regrets) == (
        "Regret ranks methods as real accuracy does: Kendall's tau 1.00 (p = 5e-05) over 8 methods."
    )
    assert "is not shown to rank methods" in verdict(regrets, regrets)
    assert "is not shown to rank methods" in verdict(regrets, -np.array([3.0, 1, 2, 5, 4, 0, 7, 6]))
    # Four methods in perfect order: 2 of the 24 orders are as far from chance.
    assert "is not shown to rank methods as real accuracy does: Kendall's tau 1.00 (p = 0.083)" in (
        verdict(regrets[:4], -regrets[:4])
    )
    assert "is open: 4 methods" in verdict(regrets[:3], regrets[:3])


def test_real_accuracies_are_those_of_seeds_that_all_methods_have(
    fedsim: Run, tmp_path: Path
) -> None:
    fedsim("-m", *SMALL, "selector=random", "seed=0,1")
    fedsim(*SMALL, "selector=md", "seed=1")
    methods = ("random", "md", "round_robin")
    plans_by_seed = {seed: plans_of(f"seed={seed}", methods=methods) for seed in (0, 1)}
    accuracies = real_accuracies(plans_by_seed)
    assert {name: len(values) for name, values in accuracies.items()} == {"random": 1, "md": 1}


def test_the_command_writes_whole_seeds(
    fedsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = "selector=random,round_robin,pncs,md"
    fedsim("-m", *SMALL, methods, "seed=0")
    play = Replay.play

    def interrupted(self: Replay) -> Any:
        if self.lead.components.streams.seed == 1 and self.lead.round == 2:
            raise KeyboardInterrupt
        return play(self)

    monkeypatch.setattr(Replay, "play", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run([*SMALL, methods, "seed=0,1"])
    (folder,) = tmp_path.glob("outputs/default/replay-*")
    rows = (folder / "choices.jsonl").read_text().splitlines()
    assert [row[:10] for row in rows] == ['{"seed": 0'] * 12
    assert {path.name for path in folder.glob("*.png")} == {
        "agreement.png",
        "preferences.png",
        "regret.png",
    }
    assert "over 4 methods" in (folder / "tables.md").read_text()


def replays(tmp_path: Path) -> dict[str, bytes]:
    """Return the choices of each replay by the name of its folder."""
    paths = tmp_path.glob("outputs/default/replay*/choices.jsonl")
    return {path.parent.name: path.read_bytes() for path in paths}


OTHER_REPLAYS = (
    ["selector=random,md", "seed=0"],
    ["selector=random,round_robin", "seed=1"],
    ["selector=random,round_robin", "seed=0", "optimizer.lr=0.2"],
    ["selector=random,round_robin", "seed=0", "--cohorts=7"],
)


@pytest.mark.usefixtures("empty_folder")
def test_a_replay_leaves_the_files_of_another_one(tmp_path: Path) -> None:
    run([*SMALL, "selector=random,round_robin", "seed=0"])
    first = replays(tmp_path)
    for words in OTHER_REPLAYS:
        run([*SMALL, *words])
    all_replays = replays(tmp_path)
    assert len(all_replays) == 1 + len(OTHER_REPLAYS)
    assert first.items() <= all_replays.items()


@pytest.mark.usefixtures("empty_folder")
def test_a_stopped_replay_leaves_the_complete_files_of_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "selector=random,round_robin", "seed=0,1"]
    run(words)
    complete = replays(tmp_path)
    play = Replay.play

    def interrupted(self: Replay) -> Any:
        if self.lead.components.streams.seed == 1:
            raise KeyboardInterrupt
        return play(self)

    with monkeypatch.context() as patch:
        patch.setattr(Replay, "play", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(words)
    assert replays(tmp_path) == complete
    assert "they stay until this one has as many" in " ".join(capsys.readouterr().out.split())
    run(words)  # a complete replay replaces them
    (content,) = replays(tmp_path).values()
    assert content.count(b"\n") == 12
    assert content != next(iter(complete.values()))  # it has measured seconds


REFUSED = [
    ("server.validation_fraction=0", "server.validation_fraction=0.0: must be > 0"),
    ("cohort_size=2,3", "cohort_size: differs between jobs"),
    ("--cohorts=0", "--cohorts=0: must be >= 1"),
    ("selector=random,tifl", "system='none': must be a simulated clock for TiFL"),
    ("hydra/launcher=lanes", "hydra/launcher='fedsim.jobs.sweep.Lanes': must be basic"),
]


@pytest.mark.parametrize(("word", "told"), REFUSED)
@pytest.mark.usefixtures("empty_folder")
def test_what_cannot_be_replayed_is_refused(word: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run([*SMALL, word])
    assert [str(problem).startswith(told) for problem in caught.value.problems] == [True]
    assert not list(tmp_path.iterdir())
