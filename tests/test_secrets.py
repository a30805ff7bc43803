"""Secrets of the environment and the command line are in no byte that runs and reports write."""

import base64
import io
import os
import signal
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "planted/aws+f3a9c41b7e",
    "WANDB_API_KEY": "0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c",
    "HF_TOKEN": "hf_plantedQm7Zp1Xc8Vb",
    "ZQ_UNRELATED_8141": "planted-8141-Lk5Tr2",
}
MARK = "marked-6620-Wd9Fh3"
"""The value of a variable that configs may name: what the search finds where a value is
recorded."""
ON_THE_COMMAND_LINE = "planted-argument-77Gq"
TINY = (
    *(
        "name=trial",
        "num_clients=5",
        "cohort_size=2",
        "num_rounds=3",
        "local.epochs=1",
        "engine=batched",
    ),
    *("checkpoint.every=1", "tracker.console.progress=false"),
)
PARTS = """
import os, signal
from fedsim.selectors.random import Random

class Failing(Random):
    def select(self, round, clients, rng):
        if round == 3:
            raise RuntimeError("as it is told")
        return super().select(round, clients, rng)

class Killed(Random):
    def select(self, round, clients, rng):
        if round == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().select(round, clients, rng)
"""


def forms(secret: str) -> set[bytes]:
    """A secret as it is, in hexadecimal, and in base64 wherever it may begin in a group of three
    bytes."""
    plain = secret.encode()
    encoded = [
        base64.b64encode(b"\0" * shift + plain)[4 if shift else 0 : -4] for shift in range(3)
    ]
    return {
        plain,
        plain[::-1],
        plain.hex().encode(),
        *encoded,
    }  # without the groups that its neighbours share


def contents(path: Path) -> Iterator[bytes]:
    """A file's bytes, those that it holds compressed, and a log of W&B without the headers of its
    blocks."""
    content = path.read_bytes()
    yield content
    yield b"".join(content[start + 7 : start + 32768] for start in range(0, len(content), 32768))
    with (
        suppress(zipfile.BadZipFile, NotImplementedError),
        zipfile.ZipFile(io.BytesIO(content)) as archive,
    ):
        yield from (archive.read(name) for name in archive.namelist())
    with suppress(zlib.error):
        yield zlib.decompress(content, 47)  # of zlib or gzip, as its head says


def found_in(folder: Path, secret: str) -> set[str]:
    """The files below `folder`, and names of files, in which `secret` is."""
    wanted = forms(secret)
    found = set()
    for path in folder.rglob("*"):
        if path.is_symlink() and secret in str(path.readlink()):
            found.add(str(path.relative_to(folder)))
        with suppress(OSError):
            name = str(path.relative_to(folder))
            if secret in name or (
                path.is_file() and any(w in c for c in contents(path) for w in wanted)
            ):
                found.add(name)
    return found


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="kills by SIGKILL, and W&B's folders as on Linux"
)
@pytest.mark.slow
def test_no_secret_is_in_any_byte_that_is_written(tmp_path: Path) -> None:
    """By a sweep with a failing job, a killed run, a refused one and a report."""
    for name in ("home", "tmp", "work", "cache"):
        (tmp_path / name).mkdir()
    (tmp_path / "work" / "planted_parts.py").write_text(PARTS)
    folders = {
        "HOME": "home",
        "TMPDIR": "tmp",
        "FEDSIM_CACHE": "cache",
        "XDG_CACHE_HOME": "home/cache",
    }
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("WANDB_")
    }
    environment |= (
        {name: str(tmp_path / folder) for name, folder in folders.items()}
        | SECRETS
        | {"FEDSIM_MARK": MARK}
    )
    environment["OMP_NUM_THREADS"] = "1"

    def fedsim(*words: str) -> int:
        command = [sys.executable, "-m", "fedsim", *words]
        done = subprocess.run(
            command, cwd=tmp_path / "work", env=environment, capture_output=True, check=False
        )
        for secret in SECRETS.values():
            assert secret.encode() not in done.stdout + done.stderr
        return done.returncode

    targets = "selector._target_=planted_parts.Failing,fedsim.selectors.random.Random"
    marked = "tracker.wandb.tags=['${oc.env:FEDSIM_MARK}']"
    assert fedsim(*TINY, "-m", "tracker.wandb.mode=offline", marked, targets) == 1
    killed = (*TINY[:-1], "tracker=files_only", "selector._target_=planted_parts.Killed", "seed=7")
    assert fedsim(*killed) == -signal.SIGKILL
    assert fedsim(*TINY, f"+api_key={ON_THE_COMMAND_LINE}") == 2
    assert fedsim("report", "outputs/trial") == 0
    kinds = {path.name for path in tmp_path.rglob("*")}
    assert {
        "error.txt",
        "checkpoint.safetensors",
        "summary.json",
        "report.html",
        "partition.npz",
    } <= kinds
    for secret in (*SECRETS.values(), ON_THE_COMMAND_LINE):
        assert found_in(tmp_path, secret) == set()
    # the negative control: a variable that configs may name is in the config, and in the log of W&B
    assert {Path(name).suffix for name in found_in(tmp_path / "work", MARK)} >= {".yaml", ".wandb"}
