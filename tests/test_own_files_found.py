"""Mistakes with the files of parts of one's own: what the message of an unknown choice, or of a part, says to do."""

from pathlib import Path

import pytest

from fedsim.config.compose import search_path
from fedsim.core.errors import ConfigError
from fedsim.core.types import Population
from fedsim.selectors.random import Random
from tests.run_toys import plan_of

OWN = f"_target_: {__name__}.Forgetful\n"


class Forgetful(Random):
    def __init__(self, population: Population) -> None:
        self.count = population.cohort_size


def told(*words: str, config_dir: str | None = None) -> str:
    """The error of a command line."""
    with search_path(config_dir), pytest.raises(ConfigError) as caught:
        plan_of(*words)
    return str(caught.value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, with a folder for `--config-dir` below it."""
    (tmp_path / "mine/selector").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OWN)


@pytest.mark.parametrize(
    ("file", "config_dir", "remedy"),
    [
        ("conf/selector/own.yaml", None, "conf/selector/own.yaml is there: add --config-dir conf"),
        ("selector/own.yaml", None, "selector/own.yaml is there: add --config-dir ."),
        ("mine/selectors/own.yaml", "mine", "known here: "),
        ("mine/partition/own.yaml", "mine", "did you mean partition=own?"),
        ("elsewhere/own.yaml", "mine", "known here: "),
    ],
)
def test_the_file_of_a_choice_that_is_not_found(here: Path, file: str, config_dir: str | None, remedy: str) -> None:
    write(here / file)
    assert f"selector='own': is not a choice of conf/selector/\n    {remedy}" in told(
        "selector=own", config_dir=config_dir
    )


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("dataset=dirichlet_qp", "did you mean partition=dirichlet_qp?"),
        ("optimizer=cosine", "did you mean optimizer/schedule=cosine?"),
        ("selector=randon", "did you mean random?"),
    ],
)
def test_a_choice_of_another_group(word: str, remedy: str) -> None:
    assert told(word).endswith(remedy)


@pytest.mark.parametrize("choice", ["n" * 300, "'**'", "'a[b'", "mine/own", "none"])
def test_no_file_is_looked_for_by_what_is_no_name(here: Path, choice: str) -> None:
    write(here / "mine/own.yaml")
    assert "is not a choice of conf/selector/\n    known here: " in told(f"selector={choice}", config_dir="mine")


def test_a_choice_that_names_no_class_is_told_which_line_it_needs(here: Path) -> None:
    (here / "mine/selector/own.yaml").write_text("count: 3\n")
    text = told("selector=own", config_dir="mine")
    assert "selector._target_=None: must be the dotted path of a subclass of fedsim.selectors.base.Selector\n" in text
    assert "needs the line `_target_: <module>.<Class>`" in text


def test_a_selector_that_does_not_call_its_base_is_told_so_before_the_run(here: Path) -> None:
    write(here / "mine/selector/own.yaml")
    text = told("selector=own", config_dir="mine")
    assert "selector='Forgetful': must call super().__init__(population) in its __init__" in text
