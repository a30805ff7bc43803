"""The lock of a run's folder: held by a live process it keeps others out, left by a dead one it
does not. Nothing is written through a link, and what a link leads to is not deleted."""

import errno
import os
import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from fedsim.commands.dispatch import answer
from fedsim.core.errors import FedsimError
from fedsim.data.cache import load_or_build
from fedsim.jobs.cli import run
from fedsim.results.files import (
    ERROR,
    LOCKS,
    REPLACEMENTS,
    HeldError,
    OutputError,
    RunFolder,
    is_free,
    owned,
)
from fedsim.results.reading import METRICS
from tests.checkpoint_toys import WORDS, folder_in
from tests.run_toys import ROOT

pytestmark = pytest.mark.usefixtures("empty_folder")

HOLD = """
import sys, time
from pathlib import Path
from fedsim.results.files import owned

with owned(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(3600)
"""


def test_the_lock_of_a_process_that_is_killed_is_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(HeldError, match="another process is running this"), owned(folder):
            pass
    finally:
        process.kill()
        process.communicate()
    with owned(folder):
        pass


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("who", ["dead", "alive", "of another host"])
def test_without_flock_the_lock_of_a_dead_process_is_taken_over_and_any_other_respected(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a file with number and host of its process is the lock. Of another host it cannot be
    known whether the process lives."""

    def missing(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", missing)
    (tmp_path / LOCKS).mkdir()
    host = "another-host" if who == "of another host" else socket.gethostname()
    (tmp_path / LOCKS / "run.lock").write_text(
        f"{os.getppid() if who == 'alive' else dead.pid}\n{host}\n"
    )
    taken = (
        nullcontext()
        if who == "dead"
        else pytest.raises(HeldError, match="another process is running this")
    )
    with taken, owned(tmp_path / "run"):
        pass


# --- links ---

CONTENT = b"of somebody else\n"


def planted(*links: Path) -> Path:
    """A file to which all of `links` lead."""
    victim = Path("victim").absolute()
    victim.write_bytes(CONTENT)
    for link in links:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(victim)
    return victim


def test_links_in_place_of_temporary_files() -> None:
    folder, holder = Path("outputs/a"), Path("outputs/.locks/a.holder.txt")
    victim = planted(
        *(folder / f"{name}.tmp" for name in ("config.yaml", ERROR)), holder.with_suffix(".txt.tmp")
    )
    RunFolder(folder).write_error({}, "text")
    with owned(folder):
        assert holder.is_file()
    assert victim.read_bytes() == CONTENT
    assert (folder / ERROR).read_text() == "text"


def test_records_that_are_a_link() -> None:
    assert run([*WORDS, "num_rounds=2"]) == 0
    folder = RunFolder(folder_in("outputs"))
    victim = planted(folder.path / METRICS)
    for write in (
        lambda: folder.append({}),
        folder.sync_records,
        lambda: folder.reopen({METRICS: 3}),
    ):
        with pytest.raises(OutputError, match="it is a link: remove it"):
            write()
        assert victim.read_bytes() == CONTENT


def test_a_run_folder_that_is_a_link() -> None:
    assert run([*WORDS]) == 0
    folder, elsewhere = folder_in("outputs"), Path("elsewhere")
    folder.rename(elsewhere)
    (elsewhere / "summary.json").unlink()
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    folder.symlink_to(elsewhere.absolute())
    for words in ([], ["overwrite=true"]):
        with pytest.raises(FedsimError, match="is a link; remove it, or choose another output_dir"):
            run([*WORDS, *words])
        assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before


@pytest.mark.parametrize("name", [LOCKS, REPLACEMENTS])
def test_a_link_in_place_of_a_folder_next_to_the_runs(name: str) -> None:
    assert run([*WORDS]) == 0
    elsewhere, link = Path("elsewhere").absolute(), folder_in("outputs").parent / name
    elsewhere.mkdir()
    shutil.rmtree(link, ignore_errors=True)
    link.symlink_to(elsewhere)
    for words in (["overwrite=true"], ["-m", "seed=1,2", "overwrite=true"]):
        with pytest.raises(
            FedsimError, match=rf"{name} is a link; remove it, or choose another output_dir"
        ):
            run([*WORDS, *words])
        assert not list(elsewhere.iterdir())


def test_a_lock_file_that_is_a_link() -> None:
    """The oldest filelock that is allowed follows none, and empties no file that has a second
    name."""
    folder, lock = Path("outputs/a"), Path("outputs/.locks/a.lock")
    victim = planted(lock)
    assert is_free(folder)
    with pytest.raises(OutputError, match=r"a\.lock .*it is a link: remove it"), owned(folder):
        pass
    assert victim.read_bytes() == CONTENT
    lock.unlink()
    lock.hardlink_to(victim)
    assert is_free(folder)
    with owned(folder):
        pass
    assert victim.read_bytes() == CONTENT


def test_reports_go_where_a_link_leads_only_if_it_was_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([*WORDS]) == 0
    place, elsewhere = folder_in("outputs").parent, Path("elsewhere").absolute()
    elsewhere.mkdir()
    (place / "report").symlink_to(elsewhere)
    assert answer(["report", str(place), "--no-figures"]) == 1
    assert f"{place / 'report'} is a link" in capsys.readouterr().err
    assert not list(elsewhere.iterdir())
    assert answer(["report", str(place), "--no-figures", "--to", str(place / "report")]) == 0
    assert (elsewhere / "report.html").is_file()


def test_a_link_in_place_of_the_cache_s_temporary_file() -> None:
    victim = planted(Path("cache/x.safetensors.tmp"))
    load_or_build(Path("cache/x.safetensors").absolute(), lambda: {"x": torch.ones(2)})
    assert victim.read_bytes() == CONTENT


def test_a_link_in_place_of_wandb_s_folder() -> None:
    victim = planted(Path("elsewhere/file"))
    folder = Path("outputs/a")
    folder.mkdir(parents=True)
    (folder / "wandb").symlink_to(victim.parent / "elsewhere")
    RunFolder.create(folder, {})
    assert not (folder / "wandb").is_symlink()
    assert Path("elsewhere/file").read_bytes() == CONTENT
