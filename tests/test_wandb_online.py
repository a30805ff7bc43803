"""Weights & Biases online, with a server in the place of theirs: a run is there once, whatever
happened to it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fedsim.commands.dispatch import answer
from fedsim.results.files import WANDB_ID, RunFolder
from fedsim.results.reading import METRICS, read_metrics
from fedsim.tracking.wandb_messages import TARGET
from tests.test_tracking import info, record, summary
from tests.wandb_stand_in import StandIn, serving
from tests.wandb_toys import play, tracker

pytestmark = pytest.mark.usefixtures("no_account")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with serving() as stand_in:
        monkeypatch.setenv("WANDB_BASE_URL", stand_in.url)
        monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
        yield stand_in


def begin(folder: Path) -> RunFolder:
    node = {"_target_": TARGET, "mode": "auto", "project": "fedsim"}
    config = {
        "name": "trial",
        "seed": 0,
        "num_rounds": 3,
        "num_clients": 2,
        "tracker": {"wandb": node},
    }
    return RunFolder.create(folder, config)


def send(folder: RunFolder, rounds: Sequence[int], status: str) -> str:
    """These rounds, of which those that are on file are sent again. Returns the tracker's
    notice."""
    mirror, kept = tracker(), len(read_metrics(folder.path))
    mirror.start(info(folder.path))
    for t in rounds:
        (mirror.replay if t <= kept else mirror.log)(record(t))
        if t > kept:
            folder.append(record(t))
    ended = {**summary(), "status": status}
    folder.write_summary(ended)
    mirror.finish(ended)
    return str(mirror.notice)


def steps(server: StandIn) -> dict[str, list[tuple[int, int]]]:
    """Of each run on the server: steps and rounds."""
    return {
        name: [(line["_step"], line["round"]) for line in run.history]
        for name, run in server.runs.items()
    }


WHOLE = [(1, 1), (2, 2), (3, 3)]


def test_a_run_is_there_with_all_rounds_and_its_summary_also_where_it_is_sent_again(
    tmp_path: Path, server: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = tracker()
    assert play(mirror, tmp_path / "run") == {}
    assert mirror.notice is None
    ((name, run),) = server.runs.items()
    assert (tmp_path / "run" / WANDB_ID).read_text().strip() == name
    assert steps(server) == {name: WHOLE}
    assert run.summary["last_accuracy"] == 0.75
    assert run.exit_code == 0
    told = run.described
    assert (told["displayName"], told["groupName"], told["jobType"]) == ("run", "trial", "random")
    send(begin(tmp_path / "other"), (1, 2, 3), "done")
    assert answer(["sync", "--again", str(tmp_path / "other")]) == 0
    assert "1 of 1 sent" in capsys.readouterr().out
    assert list(steps(server).values()) == [WHOLE, WHOLE]


def test_a_run_that_goes_on_is_the_same_run_there_and_one_that_is_begun_anew_another(
    tmp_path: Path, server: StandIn
) -> None:
    folder = begin(tmp_path / "run")
    assert send(folder, (1, 2), "preempted") == "None"
    (run,) = server.runs.values()
    assert run.exit_code == 1
    folder.reopen({METRICS: (folder.path / METRICS).stat().st_size})
    assert send(folder, (1, 2, 3), "done") == "None"
    assert steps(server) == {run.name: WHOLE}
    assert (run.exit_code, run.summary["status"]) == (0, "done")
    send(begin(tmp_path / "run"), (1, 2), "failed")
    assert list(steps(server).values()) == [WHOLE, WHOLE[:2]]


@pytest.mark.slow
def test_a_run_that_was_deleted_there_is_sent_as_another(tmp_path: Path, server: StandIn) -> None:
    folder = begin(tmp_path / "run")
    send(folder, (1, 2, 3), "done")
    (first,) = server.runs
    server.delete(first)
    assert answer(["sync", "--again", str(tmp_path)]) == 0
    assert list(steps(server).values()) == [WHOLE]
    assert (folder.path / WANDB_ID).read_text().strip() in server.runs


@pytest.mark.slow
def test_a_run_that_could_not_be_sent_keeps_its_id_for_later(
    tmp_path: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B would refuse the offline record of an id with which going online has just failed."""
    folder = begin(tmp_path / "run")
    send(folder, (1, 2), "preempted")
    folder.reopen({METRICS: (folder.path / METRICS).stat().st_size})
    server.down = True
    assert "could not go online" in send(folder, (1, 2, 3), "done")
    server.down = False
    assert answer(["sync", str(tmp_path)]) == 0
    assert list(steps(server).values()) == [WHOLE]
