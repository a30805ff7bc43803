"""Tuning: the spaces that selectors declare, the points in them, and the runs that are made."""

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest

from fedsim.benchmark import study
from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.config.words import parse
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError
from fedsim.search import tune

pytestmark = pytest.mark.usefixtures("stop")
SELECTORS = sorted((conf_dir() / "selector").glob("*.yaml"))
DECLARING = [path.stem for path in SELECTORS if "#   tune:" in path.read_text()]


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("x=interval(10,20)", [15.0, 17.5, 12.5]),
        ("x=tag(log,interval(0.01,100))", [1.0, 10.0, 0.1]),
        ("x=int(interval(2,9))", [6, 7, 4]),  # 5.5, 7.25 and 3.75, rounded
    ],
)
def test_points_of_an_interval_are_those_of_the_sobol_sequence(
    axis: str, values: list[float]
) -> None:
    """In one dimension it is 0.5, 0.75, 0.25, ... (Sobol, 1967) of the way, or of the way of the
    logarithms."""
    points = tune.points_of(parse([axis]), 3)
    assert [point.words for point in points] == [(), *((f"x={value}",) for value in values)]


def test_points_of_choices_repeat_none_and_reach_all() -> None:
    space = parse(["x=a,b,c", "y=range(0,4)"])
    default, *words = [point.words for point in tune.points_of(space, 8)]
    assert default == ()
    assert len(set(words)) == len(words) == 8
    assert {x for x, _ in words} == {"x=a", "x=b", "x=c"}
    assert {y for _, y in words} == {"y=0", "y=1", "y=2", "y=3"}


def test_a_space_of_three_values_has_four_points_at_most() -> None:
    assert len(tune.points_of(parse(["x=a,b,c"]), 63)) == 4


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("0.5", "is one value"),
        ("0.1-0.5", "is one value"),
        ("interval(a,b)", "cannot be read"),
        ("interval(0.1, 0.5)", "cannot be read"),
        ("range(5,5)", "has no values"),
        ("interval(0.5,0.1)", "must have a < b"),
        ("interval(0.1,inf)", "must have a < b"),
        ("tag(log,interval(0,1))", "must have a > 0"),
    ],
)
def test_a_wrong_line_tune_is_reported_before_a_run(value: str, fault: str, tmp_path: Path) -> None:
    """The message has the file, the word of the line, the rule and an example."""
    for folder in ("own/selector", "own/cell"):
        Path(folder).mkdir(parents=True)
    text = (conf_dir() / "selector" / "oort.yaml").read_text()
    line = f"#   tune: selector.cutoff={value}"
    Path("own/selector/mine.yaml").write_text(re.sub("#   tune: .*", line, text))
    Path("own/cell/tiny.yaml").write_text("# @package _global_\nnum_clients: 20\n")
    word = re.escape(f"selector.cutoff={value.split()[0]}")
    example = re.escape("interval(0.1,0.9)")
    message = rf"mine\.yaml: tune='{word}': {fault}.*\n.*{example}"
    words = ["--config-dir", "own", "selector=mine"]
    with pytest.raises(ConfigError, match=message):
        tune.run(words)
    with pytest.raises(ConfigError, match=message):
        study.run([*words, "cell=tiny"])
    assert not list(tmp_path.rglob("outputs"))


QUICK = ("oort", "power_of_choice")


@pytest.mark.parametrize(
    "selector",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in DECLARING],
)
def test_all_combinations_of_the_ends_of_a_shipped_space_pass_the_checks(selector: str) -> None:
    words = ["num_clients=100", "cohort_size=3,10", "system=lognormal", "server.public_samples=100"]
    with search_path(None, None):
        for axis in tune.declared_space(selector):
            high = tune.word_at(axis, 1 - 1e-9).partition("=")[2]
            words.append(f"{tune.word_at(axis, 0.0)},{high}")
        check_jobs(compose_jobs([f"selector={selector}", *words], multirun=True))


def test_the_best_point_is_printed_and_nothing_runs_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = Path("own/selector")
    own.mkdir(parents=True)
    text = (conf_dir() / "selector" / "power_of_choice.yaml").read_text()
    (own / "mine.yaml").write_text(text.replace("range(10,51,5)", "2,5"))
    words = ["--config-dir", "own", "selector=mine,top_loss,random", "points=2", "seed=0"]
    words += ["num_rounds=2", "local.steps=2", "num_clients=6", "cohort_size=2"]
    words.append("tracker=files_only")
    assert tune.run(words) == 0
    printed = capsys.readouterr().out
    file = Path("outputs/default/tuning.json")
    tuned = json.loads(file.read_text())
    assert [point["words"] for point in tuned["mine"]] == [[], ["selector.num_candidates=5"]]
    assert len(tuned["top_loss"]) == 2  # first_round_full=true is the default
    best = max(point["accuracy"] for point in tuned["top_loss"])
    assert f"{best:.4f}" in printed
    assert "without a search space: random" in printed
    runs = sorted(Path("outputs").glob("*/*/summary.json"))
    assert len(runs) == len(tuned["mine"]) + len(tuned["top_loss"])

    stamps = [path.stat().st_mtime_ns for path in runs]
    assert tune.run(words) == 0
    assert json.loads(file.read_text()) == tuned
    assert [path.stat().st_mtime_ns for path in runs] == stamps


def test_points_that_are_not_valid_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """With 20 clients, power_of_choice can have up to 20 of the 10 to 50 candidates of its space.
    The command is that of `fedsim tune --help`, with less work."""
    words = ["selector=oort,power_of_choice", "partition=shards_1,iid", "seed=0,1"]
    args = Namespace(overrides=words, config_name="config", config_dir=None, config_path=None)
    tuning = tune.Tuning(args, tune.TuneSettings())
    points = [point.words for point in tuning.selectors["power_of_choice"].points]
    candidates = [int(words[0].partition("=")[2]) for words in points[1:]]
    assert points[0] == ()
    assert candidates
    assert all(5 <= number <= 20 for number in candidates)
    printed = " ".join(capsys.readouterr().out.split())
    left_out = "power_of_choice: selector.num_candidates=30 is not valid here: "
    assert f"{left_out}selector.num_candidates=30: must lie in" in printed
    assert len(tuning.selectors["oort"].points) == 9


def test_a_point_that_is_the_default_in_one_of_several_settings_runs() -> None:
    """The default is 30 candidates in the setting `ca` and 10 in `cb`; the first point has 30."""
    for name, candidates in (("ca", 30), ("cb", 10)):
        file = Path(f"own/cell/{name}.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = ["# @package _global_", "num_clients: 60"]
        lines.append(f"selector: {{num_candidates: {candidates}}}")
        file.write_text("\n".join(lines))
    words = ["selector=power_of_choice", "cell=ca,cb", "seed=0"]
    args = Namespace(overrides=words, config_name="config", config_dir="own", config_path=None)
    tuning = tune.Tuning(args, tune.TuneSettings(points=2))
    points = [point.words for point in tuning.selectors["power_of_choice"].points]
    assert points == [(), ("selector.num_candidates=30",), ("selector.num_candidates=40",)]


def test_a_default_that_nothing_was_compared_with_is_not_called_the_best(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both points of the space have more candidates than there are clients."""
    Path("own/selector").mkdir(parents=True)
    text = (conf_dir() / "selector" / "power_of_choice.yaml").read_text()
    Path("own/selector/mine.yaml").write_text(text.replace("range(10,51,5)", "30,40"))
    words = ["--config-dir", "own", "selector=mine", "points=2", "num_rounds=1", "local.steps=1"]
    assert tune.run([*words, "num_clients=6", "cohort_size=2", "tracker=files_only"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"mine: default 0\.\d+, no other point was run\n", printed)
    assert re.search(r"mine +0\.\d+ +0\.\d+ +its default: no other point was run\n", printed)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            "selector=power_of_choice selector.num_candidates=8,12",
            "selector.num_candidates='8,12': is tuned, .*\n.*leave it out",
        ),
        ("selector=oort ++selector.penalty=1", "selector.penalty='1': is tuned"),
        ("selector=gpfl selector.rho=1", "selector.exploration.rho='1': is tuned"),
        ("preset=gpfl_rho", "rho='0.5,1,2,5': is tuned, .*\n.*another preset"),
    ],
)
def test_a_parameter_that_is_tuned_cannot_have_values_of_its_own(words: str, error: str) -> None:
    """Its values would replace the default, and points would replace them."""
    args = Namespace(
        overrides=words.split(), config_name="config", config_dir=None, config_path=None
    )
    with pytest.raises(ConfigError, match=error):
        tune.Tuning(args, tune.TuneSettings(points=1))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("selector=random,full", "selector='random,full': declare no search space\n.*`tune:`"),
        ("selector=oort points=0", "points=0: must be >= 1"),
        ("selector=oort points=64", "points=64: must be at most 63"),
        ("selector=oort lr=1", "lr: is not a known key\n.*keys of the tune itself: points"),
        ("selector=oort stop_at=0.4", "stop_at=.*0.4.*: ends runs near the same accuracy"),
        ("selector=oort cohort_size=99", "cohort_size=99: must"),
    ],
)
def test_mistakes_are_reported_before_a_run(words: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=error):
        tune.run(words.split())
    assert not list(tmp_path.rglob("*"))
