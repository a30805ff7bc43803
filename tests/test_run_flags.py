"""Flags of the command line, and questions to Hydra."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from fedsim.jobs.cli import run
from tests.run_toys import Run, folders, shell


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "selector=random,full", "seed=3", "name=x"],
        ["selector=random,full", "-m", "seed=3", "name=x"],
        ["selector=random,full", "seed=3", "name=x", "--multirun"],
        [
            "name=x",
            "--config-dir",
            "{own}",
            "selector=random,full",
            "--multirun",
            "seed=3",
            "--config-name=config",
        ],
    ],
)
def test_flags_may_stand_anywhere(fedsim: Run, tmp_path: Path, words: list[str]) -> None:
    own = tmp_path / "own"
    own.mkdir()
    assert fedsim(*(word.format(own=own) for word in words)) == 0
    found = folders(tmp_path)
    assert [f.name.split("-")[3:5] for f in found] == [["full", "s3"], ["random", "s3"]]
    assert {f.parent.name for f in found} == {"x"}


QUESTIONS = """
--hydra-help -> Hydra's help
selector=full --info searchpath seed=1 -> conf
seed=1 -i defaults -> partition/shards
name=x --cfg=job --resolve data_dir=${name} -> data_dir: x
-c hydra hydra.verbose=true -> verbose: true
preset=gpfl_alpha --cfg job scale=small -> num_rounds: 100
preset=gpfl_alpha --cfg job scale=small -> name: gpfl_alpha_small
preset=gpfl_alpha --cfg job scale=small num_rounds=7 -> num_rounds: 7
-cp own --cfg job -cn mine -cd own/more -> key: value
--cfg job -p selector selector=gpfl -> _target_: fedsim.selectors.gpfl.GPFL
selector=gpfl --cfg job -pselector -> _target_: fedsim.selectors.gpfl.GPFL
install=bash --shell-completion -> complete -o
"""


@pytest.fixture
def _logging() -> Iterator[None]:
    """As it was before Hydra, which logs its answers to the standard output."""
    before, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = [handler for handler in logging.root.handlers if handler in before]
    logging.root.setLevel(level)


@pytest.mark.usefixtures("_logging")
@pytest.mark.parametrize("row", QUESTIONS.strip().splitlines())
def test_questions_to_hydra_are_answered_with_flags_anywhere(
    tmp_path: Path, row: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fedsim"])
    (tmp_path / "own" / "more").mkdir(parents=True)
    (tmp_path / "own" / "mine.yaml").write_text("key: value\n")
    words, _, answer = row.partition(" -> ")
    with suppress(SystemExit):
        assert run(words.split()) == 0
    printed = capsys.readouterr()
    assert answer in printed.out
    assert not printed.err


@pytest.mark.parametrize(
    "words", [["-m", "--cfg", "job"], ["--resolve"], ["--run", "seed=1", "-m"], ["--info", "moon"]]
)
def test_flags_that_do_not_go_together_are_told(fedsim: Run, words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        fedsim(*words)
    assert caught.value.code == 2


def test_the_config_can_be_shown_without_running(tmp_path: Path) -> None:
    result = shell(tmp_path, "--cfg", "job", "selector=full")
    assert yaml.safe_load(result.stdout)["selector"]["_target_"] == "fedsim.selectors.full.Full"
    assert not list(tmp_path.iterdir())
