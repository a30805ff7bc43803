"""Tuning: the spaces that selectors declare, the points in them, and the runs that are made."""

import json
from pathlib import Path

import pytest

from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.config.words import parse
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError
from fedsim.search import tune

pytestmark = pytest.mark.usefixtures("stop")
WORDS = [
    "num_rounds=2",
    "local.steps=2",
    "num_clients=6",
    "cohort_size=2",
    "seed=0,1",
    "tracker=files_only",
]
DECLARING = [
    p.stem for p in sorted((conf_dir() / "selector").glob("*.yaml")) if "#   tune:" in p.read_text()
]


@pytest.mark.parametrize("log", [False, True])
def test_points_of_an_interval_are_those_of_the_sobol_sequence(log: bool) -> None:
    """0.5, 0.75, 0.25, ... in one dimension (Sobol, 1967): of the way, or of the way of the
    logarithms."""
    (axis,) = parse(["x=tag(log,interval(0.01,100))" if log else "x=interval(10,20)"])
    found = [point.words for point in tune.points_of([axis], 3)]
    assert found == [(), *((f"x={x}",) for x in ([1.0, 10.0, 0.1] if log else [15.0, 17.5, 12.5]))]


def test_points_of_choices_repeat_none_and_reach_all() -> None:
    space = parse(["x=a,b,c", "y=range(0,4)"])
    words = [point.words for point in tune.points_of(space, 8)]
    assert len(set(words)) == len(words) == 9
    assert {x for x, _ in words[1:]} == {"x=a", "x=b", "x=c"}
    assert {y for _, y in words[1:]} == {f"y={y}" for y in range(4)}
    assert len(tune.points_of(space[:1], 63)) == 4


def test_spaces_of_the_shipped_selectors_hold_in_the_benchmark() -> None:
    """All combinations of their ends pass all checks of a config, with 3 and 10 of 100 clients
    selected."""
    words = ["num_clients=100", "cohort_size=3,10", "system=lognormal", "server.public_samples=100"]
    with search_path(None, None):
        for name in DECLARING:
            ends = [
                (tune.word_at(axis, 0.0), tune.word_at(axis, 1 - 1e-9))
                for axis in tune.space_of(name)
            ]
            swept = [f"{low},{high.partition('=')[2]}" for low, high in ends]
            check_jobs(compose_jobs([f"selector={name}", *words, *swept], multirun=True))


def test_the_best_point_is_told_and_nothing_runs_twice(capsys: pytest.CaptureFixture[str]) -> None:
    own = Path("own/selector")
    own.mkdir(parents=True)
    text = (conf_dir() / "selector" / "power_of_choice.yaml").read_text()
    (own / "mine.yaml").write_text(text.replace("range(10,51,5)", "2,5"))
    words = ["--config-dir", "own", *WORDS, "selector=mine,top_loss,random", "points=2"]
    assert tune.run(words) == 0
    told = capsys.readouterr().out
    found = json.loads(Path("outputs/default/tuning.json").read_text())
    assert [point["words"] for point in found["mine"]] == [[], ["selector.num_candidates=5"]]
    assert len(found["top_loss"]) == 2  # first_round_full=true is the default
    best = max(found["top_loss"], key=lambda point: point["accuracy"])
    assert f"{100 * best['accuracy']:.2f}" in told
    assert "without a search space: random" in told
    runs = sorted(Path("outputs").glob("*/*/summary.json"))
    assert len(runs) == 2 * sum(map(len, found.values()))
    assert tune.run(words) == 0
    assert json.loads(Path("outputs/default/tuning.json").read_text()) == found
    assert sorted(Path("outputs").glob("*/*/summary.json")) == runs


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "selector=random,full",
            "selector='random,full': declare no search space\n    a line `tune:`",
        ),
        ("selector=oort points=0", "points=0: must be >= 1"),
        ("selector=oort points=64", "points=64: must be at most 63"),
        ("selector=oort lr=1", "lr: is not a known key\n.*keys of the tune itself: points"),
    ],
)
def test_mistakes_are_told_before_a_run(words: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        tune.run(words.split())
    assert not list(tmp_path.rglob("*"))
