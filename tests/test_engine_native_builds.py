"""The C code under sanitizers, and for processors with shorter vectors than this one's."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

DRIVER = Path(__file__).with_name("native_drive.c")
THREADS = 5
"""Lines of the driver for one net and momentum; they differ in the number of threads."""


def output_of(folder: Path, *flags: str, runner: tuple[str, ...] = ()) -> list[str]:
    """Lines of the driver, built with these flags. Skips where they cannot be built or run here."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no gcc")
    program = folder / "drive"
    command = [compiler, "-g", "-DREAL=double", "-pthread", *flags, "-o", str(program), str(DRIVER), "-lm"]
    built = subprocess.run(command, check=False, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(built.stderr[:200])
    done = subprocess.run([*runner, str(program)], check=False, capture_output=True, text=True)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run here")
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout.splitlines()


def numbers(lines: list[str]) -> np.ndarray:
    return np.array([[float(word) for word in line.split()] for line in lines])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return output_of(tmp_path_factory.mktemp("plain"), "-O3", "-march=native", "-Wall", "-Wextra", "-Werror")


def test_the_number_of_threads_changes_no_bit(plain: list[str]) -> None:
    assert len(plain) == 4 * THREADS
    for start in range(0, len(plain), THREADS):
        assert len(set(plain[start : start + THREADS])) == 1
    assert len(set(plain)) == 4
    assert np.isfinite(numbers(plain)).all()
    assert not numbers(plain)[:, -1].any()  # none failed


@pytest.mark.slow
@pytest.mark.parametrize("target", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_other_vectors_give_the_same(target: str, plain: list[str], tmp_path: Path) -> None:
    lines = output_of(tmp_path, "-O2", f"-march={target}")
    np.testing.assert_allclose(numbers(lines), numbers(plain), rtol=1e-9)


@pytest.mark.slow
def test_memory_is_its_own(plain: list[str], tmp_path: Path) -> None:
    flags = ("-O1", "-march=native", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    lines = output_of(tmp_path, *flags)
    np.testing.assert_allclose(numbers(lines), numbers(plain), rtol=1e-9)


@pytest.mark.slow
def test_threads_do_not_race(plain: list[str], tmp_path: Path) -> None:
    runner = ("setarch", "-R") if shutil.which("setarch") else ()  # its shadow wants addresses that do not move
    lines = output_of(tmp_path, "-O1", "-march=native", "-fsanitize=thread", runner=runner)
    np.testing.assert_allclose(numbers(lines), numbers(plain), rtol=1e-9)
