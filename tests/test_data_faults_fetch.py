"""Downloads from a server that accepts connections and never answers, and what those learn that wait for another."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torchvision

from fedsim.core.errors import DataError
from fedsim.data import femnist, fetch, torchvision_sets
from tests.dataset_toys import build

BOUND = 0.3
"""Seconds without a byte, in place of 30."""


@pytest.fixture
def black_hole(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server on this machine that accepts connections and sends nothing."""
    monkeypatch.setattr(fetch, "STALL_SECONDS", BOUND)
    monkeypatch.setattr(fetch, "TELL_SECONDS", 0.2)
    monkeypatch.setattr(fetch, "_failures", {})
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/"
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [address])
        monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", address + "cifar-10-python.tar.gz")
        yield address


@pytest.mark.usefixtures("black_hole")
@pytest.mark.parametrize(("choice", "file"), [("mnist", "train-images-idx3-ubyte"), ("cifar10", "data_batch_1")])
def test_a_server_that_never_answers_is_given_up(tmp_path: Path, choice: str, file: str) -> None:
    wanted = rf"no {file}, .* in {tmp_path}/new/.* sent nothing for 0\.3 s\).*Put the files there, or .* FEDSIM_DATA"
    with pytest.raises(DataError, match=wanted):
        build(choice, tmp_path / "new").load()
    assert not list(tmp_path.iterdir())
    assert socket.getdefaulttimeout() is None


def test_the_bound_is_what_ends_it(tmp_path: Path, black_hole: str) -> None:
    """Without it torchvision waits for as long as the server keeps the connection."""
    ended = threading.Event()

    def unbounded() -> None:
        with contextlib.suppress(Exception):  # when the test closes the server
            torchvision_sets._fetch("CIFAR10", tmp_path)
        ended.set()

    threading.Thread(target=unbounded, daemon=True).start()
    assert not ended.wait(4 * BOUND)


def test_femnists_own_download_has_the_same_bound(black_hole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(femnist, "PROTOCOL", "http://")
    with fetch.stall_bounded(), pytest.raises(TimeoutError):
        femnist._download(black_hole)


def test_those_that_wait_fail_at_once_and_for_the_same_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts, started = [], threading.Event()

    def failing(*_: object) -> None:
        attempts.append(1)
        started.set()
        time.sleep(0.4)
        raise OSError("the true reason")

    def load(number: int) -> str:
        if number:
            assert started.wait(5)
        with pytest.raises(DataError) as caught:
            build("mnist", tmp_path / "new").load()
        return str(caught.value)

    monkeypatch.setattr(torchvision_sets, "_fetch", failing)
    monkeypatch.setattr(fetch, "RETRY_SECONDS", 0.0)  # each thread stands for a process of its own
    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(load, range(4)))
    assert all("fetching failed (the true reason)" in text for text in told)
    assert len(attempts) == 1
    assert not list(tmp_path.iterdir())


def test_one_that_failed_leaves_the_folder_of_the_next_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tells its reason for a while, and tidies up; the second has begun in the meantime."""
    data_dir, folder, failed = tmp_path / "data", tmp_path / "data" / "MNIST" / "raw", threading.Event()
    monkeypatch.setattr(fetch, "_failures", {})
    monkeypatch.setattr(fetch, "RETRY_SECONDS", 0.0)  # each thread stands for a process of its own
    monkeypatch.setattr(fetch, "TELL_SECONDS", 0.2)

    def failing() -> None:
        folder.mkdir(parents=True)
        failed.set()
        raise OSError("no network")

    def slow() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        first.join(5)
        (folder / "file").touch()

    def require(attempt: Callable[[], None]) -> None:
        with contextlib.suppress(DataError):
            fetch.require_files(folder, data_dir, lambda: [] if (folder / "file").exists() else ["file"], attempt)

    first = threading.Thread(target=require, args=[failing])
    first.start()
    assert failed.wait(5)
    while list(data_dir.glob(".*.lock")):  # its turn is over
        time.sleep(0.005)
    require(slow)
    assert (folder / "file").exists()


def test_the_reason_is_there_before_the_turn_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a process that waits could come before it, and ask the same dead server."""
    monkeypatch.setattr(fetch, "_failures", {})
    monkeypatch.setattr(fetch, "TELL_SECONDS", 0.0)
    seen: list[str] = []
    turn = fetch._turn

    @contextlib.contextmanager
    def watched(lock: Path, name: str) -> Iterator[bool]:
        with turn(lock, name) as waited:
            try:
                yield waited
            finally:
                seen.extend(path.read_text() for path in tmp_path.glob(".mine.failed"))

    def failing() -> None:
        raise OSError("no network")

    monkeypatch.setattr(fetch, "_turn", watched)
    with pytest.raises(DataError, match="no network"):
        fetch.require_files(tmp_path / "mine", tmp_path, lambda: ["file"], failing)
    assert seen == ["no network"]


def test_later_jobs_of_a_process_do_not_wait_for_the_same_server_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def failing(*_: object) -> None:
        attempts.append(1)
        raise OSError("no network")

    monkeypatch.setattr(torchvision_sets, "_fetch", failing)
    for _ in range(3):
        with pytest.raises(DataError, match="no network"):
            build("mnist", tmp_path / "new").load()
    assert len(attempts) == 1
