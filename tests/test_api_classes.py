"""Own classes in place of files of conf/, from Python."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim import compose, run_experiment, run_sweep
from fedsim.api import parts
from fedsim.core.errors import ConfigError
from fedsim.data.digits import Digits
from fedsim.engine.optimizers import Constant
from fedsim.rounds.aggregators import FedAvgM
from fedsim.running.assembly import forget
from fedsim.selectors.random import Random

WORDS = ["num_clients=6", "cohort_size=2", "local.epochs=1", "num_rounds=4", "tracker=files_only"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Kept(Random):
    """A class that another process can import (`tests.test_api.Kept`)."""


def test_a_class_of_a_module_is_a_config_like_any_other() -> None:
    result = run_experiment(WORDS, selector=partial(Kept, mode="uniform"))
    assert result.kept
    assert result.plan.config["selector"] == {
        "_target_": "tests.test_api_classes.Kept",
        "mode": "uniform",
    }
    assert result.plan.choices["selector"] == "Kept"
    assert result.folder.parent == Path("outputs/default")
    by_path = compose([*WORDS, "selector._target_=tests.test_api_classes.Kept"])[0]
    assert by_path.config_hash == result.plan.config_hash


class Given(Random):
    """Takes any value."""

    def __init__(self, population: Any, *, value: Any, count: int = 0) -> None:
        super().__init__(population, mode="uniform")


def test_scalars_of_numpy_are_the_numbers_of_python_that_they_are() -> None:
    plain = [3, 0.5, True, "a", [2], {"a": 1}]
    scalars = [
        np.int64(3),
        np.float32(0.5),
        np.bool_(True),
        np.str_("a"),
        [np.uint8(2)],
        {"a": np.int8(1)},
    ]
    (given,), (meant,) = (
        compose(WORDS, selector=partial(Given, value=values)) for values in (scalars, plain)
    )
    assert given.config["selector"] == meant.config["selector"]
    assert [type(value) for value in given.config["selector"]["value"]] == [
        int,
        float,
        bool,
        str,
        list,
        dict,
    ]
    assert (given.folder, given.config_hash) == (meant.folder, meant.config_hash)
    with pytest.raises(ConfigError, match=r"selector\.count=2\.0: must be an integer"):
        compose(WORDS, selector=partial(Given, value=1, count=np.float32(2)))


def local_selector(first: int) -> type[Random]:
    class Mine(Random):
        """Takes `first` and the client behind it."""

        def select(self, round: int, clients: Any, rng: Any) -> Any:
            from fedsim.core.types import Selection

            return Selection(np.array([first, first + 1]))

    return Mine


def test_classes_without_a_module_run_in_a_temporary_folder_each_as_itself() -> None:
    plans = [
        compose(WORDS, selector=partial(local_selector(first), mode="uniform"))[0]
        for first in (0, 3)
    ]
    sweep = run_sweep(plans)
    assert [result.records[0]["selected"] for result in sweep] == [[0, 1], [3, 4]]
    assert not any(result.kept for result in sweep)
    assert not Path("outputs").exists()
    folder = sweep[0].folder
    assert len(sweep[0].rounds) == 4
    del sweep
    assert not folder.exists()
    with pytest.raises(ConfigError, match="keep=True: cannot be kept"):
        run_experiment(WORDS, selector=partial(local_selector(0), mode="uniform"), keep=True)


def test_a_class_without_a_module_leaves_the_other_runs_of_a_sweep_in_their_folders() -> None:
    run_experiment([*WORDS, "seed=5"])
    plans = compose([*WORDS, "seed=5,6"])
    sweep = run_sweep(
        [*plans, *compose(WORDS, selector=partial(local_selector(0), mode="uniform"))]
    )
    assert [(result.kept, result.skipped) for result in sweep] == [
        (True, True),
        (True, False),
        (False, False),
    ]
    assert sorted(Path("outputs/default").glob("digits*")) == sorted(
        result.folder for result in sweep[:2]
    )
    assert not any(result.kept or result.skipped for result in run_sweep(plans, keep=False))


def value_of(value: Any) -> dict[str, Any]:
    return {"selector": partial(Given, value=value)}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"selector": object()}, "must be a class"),
        ({"selector": partial(Kept, "uniform")}, "give them by keyword"),
        ({"selector": partial(Kept, mode="uniform", size=3)}, "selector.size: is not a known key"),
        (
            {"selector": partial(Given, valu=1)},
            r"valu: is not .*\n.*did you mean selector\.value\?",
        ),
        ({"engine": Kept}, "engine=.*takes no class"),
        ({"partition": partial(Kept, mode="uniform")}, "partition._target_"),
        (value_of(np.eye(1)), r"selector\.value=.*is a ndarray; .*\n.*array\.tolist\(\)"),
        (value_of([1, {"a": np.eye(1)}]), r"selector\.value\.1\.a=.*is a ndarray"),
        (value_of(Constant()), r"selector\.value=.*is a Constant; .*\n.*'_target_'"),
    ],
)
def test_what_is_no_part_is_refused_by_its_group(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        compose(WORDS, **given)


FED_AVG_M = partial(FedAvgM, weighting="uniform", lr=1.0, momentum=0.9)


def test_a_class_takes_the_place_of_what_words_and_presets_choose() -> None:
    words = ["aggregator=fedavgm", "aggregator.lr=0.001,0.5", "~aggregator.momentum"]
    with pytest.raises(
        ConfigError, match=r"no effect: a class takes .*\n.*functools\.partial"
    ) as refused:
        compose([*WORDS, *words], aggregator=FED_AVG_M)
    keys = [problem.key for problem in refused.value.problems]
    assert keys == ["aggregator", "aggregator.lr", "aggregator.momentum"]
    with pytest.raises(ConfigError, match=r"selector\.value: has no effect: a class takes"):
        compose([*WORDS, "selector.value=1"], selector=partial(Given, value=1))  # random has none
    words = ["preset=gpfl_table2_fmnist", "cell=gpfl_2spc", "seed=0"]
    plans = compose(words, selector=partial(Kept, mode="uniform"), aggregator=FED_AVG_M)
    assert [plan.config["aggregator"]["momentum"] for plan in plans] == [
        0.9
    ]  # once, and not once a selector


def test_data_are_read_once_and_again_for_what_is_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads: list[object] = []
    load = Digits.load
    monkeypatch.setattr(Digits, "load", lambda self: loads.append(self) or load(self))
    forget()
    for more, count in (("seed=1", 1), ("seed=2", 1), ("overwrite=true", 2)):
        run_experiment([*WORDS, "num_rounds=1", more])
        assert len(loads) == count


def test_classes_of_a_script_are_not_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts.is_importable(Kept)
    assert not parts.is_importable(local_selector(0))
    monkeypatch.setattr(Kept, "__module__", "__main__")
    monkeypatch.setattr(
        sys.modules["__main__"], "Kept", Kept, raising=False
    )  # found there, in this process
    assert not parts.is_importable(Kept)
