"""Flags of the command line, and questions to Hydra."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.run_toys import HANG, Run, folders, shell


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "selector=random,full", "seed=3", "name=x"],
        ["selector=random,full", "-m", "seed=3", "name=x"],
        ["selector=random,full", "seed=3", "name=x", "--multirun"],
        ["name=x", "--config-dir", "{own}", "selector=random,full", "--multirun", "seed=3", "--config-name=config"],
    ],
)
def test_flags_may_stand_anywhere(fedsim: Run, tmp_path: Path, words: list[str]) -> None:
    own = tmp_path / "own"
    own.mkdir()
    assert fedsim(*(word.format(own=own) for word in words)) == 0
    found = folders(tmp_path)
    assert [f.name.split("-")[3:5] for f in found] == [["full", "s3"], ["random", "s3"]]
    assert {f.parent.name for f in found} == {"x"}


def test_hydras_own_flags_may_stand_anywhere(fedsim: Run, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for words in (["--cfg", "job", "-p", "selector", "selector=gpfl"], ["selector=gpfl", "--cfg", "job", "-pselector"]):
        assert fedsim(*words) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert "_target_: fedsim.selectors.gpfl.GPFL" in outputs[0]


QUESTIONS = (
    (["--hydra-help"], "Hydra's help"),
    (["selector=full", "--info", "searchpath", "seed=1"], "conf"),
    (["seed=1", "-i", "defaults"], "partition/shards"),
    (["name=x", "--cfg=job", "--resolve", "data_dir=${name}"], "data_dir: x"),
    (["-c", "hydra", "hydra.verbose=true"], "verbose: true"),
    (["preset=gpfl_alpha", "--cfg", "job", "scale=small"], "num_rounds: 100"),
    (["preset=gpfl_alpha", "--cfg", "job", "scale=small"], "name: gpfl_alpha_small"),
    (["preset=gpfl_alpha", "--cfg", "job", "scale=small", "num_rounds=7"], "num_rounds: 7"),
    (["-cp", "own", "--cfg", "job", "-cn", "mine", "-cd", "own/more"], "key: value"),
    (["install=bash", "--shell-completion"], "complete -o"),
)
ASK = """
import json, os, sys
import fedsim.jobs.cli, hydra.main  # what every command imports, once for all of them
from fedsim import run

for number, words in enumerate(json.loads(sys.argv[1])):
    if (pid := os.fork()) == 0:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
        sys.argv = [run.__file__, *words]
        run.main()
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each question, asked by a process of its own."""
    folder = tmp_path_factory.mktemp("questions")
    (folder / "own" / "more").mkdir(parents=True)
    (folder / "own" / "mine.yaml").write_text("key: value\n")
    command = [sys.executable, "-c", ASK, json.dumps([words for words, _ in QUESTIONS])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG, check=True)
    codes = [int(line) for line in done.stdout.splitlines()]
    return [(c, *((folder / f"{n}.{kind}").read_text() for kind in ("out", "err"))) for n, c in enumerate(codes)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("number", range(len(QUESTIONS)), ids=[" ".join(words) for words, _ in QUESTIONS])
def test_questions_to_hydra_are_answered_with_flags_anywhere(number: int, answers: list[tuple[int, str, str]]) -> None:
    code, printed, errors = answers[number]
    assert (code, errors) == (0, "")
    assert QUESTIONS[number][1] in printed


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
