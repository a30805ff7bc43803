"""The C code by itself: headers, invalid tasks, sanitizers, and instruction sets other than this
processor's."""

import math
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from fedsim.engine.native.library import FLAGS, SOURCES

DRIVER = Path(__file__).with_name("native_drive.c")
THREADS = 7
"""Lines of the driver for one network, momentum and shift; they differ in the number of threads."""
CASES = 12
"""Networks times momenta times shifts of the driver."""
WARNINGS = ("-Wall", "-Wextra", "-Werror")
SANITIZED = ("-O1", "-march=native", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
OTHERS = (
    *(
        ("gcc", "-O0", "-march=native"),
        ("gcc", "-O2", "-march=x86-64"),
        ("gcc", "-O3", "-march=x86-64-v3"),
    ),
    *(
        ("gcc", "-O2", "-march=x86-64-v4"),
        ("gcc", "-O2", "-march=sandybridge"),
        ("clang", "-O0", "-march=x86-64"),
    ),
    *(("clang", "-O3", "-march=x86-64-v3"), ("clang", "-O2", "-march=x86-64-v4")),
)
"""Compilers, optimisation and instruction sets: with fused multiply-adds and without."""


def compiler(name: str = "gcc") -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}")
    return found


def knows(name: str, flags: Sequence[str]) -> bool:
    """Return whether a compiler builds an empty program with these flags."""
    command = [compiler(name), *flags, "-x", "c", "-", "-o", os.devnull]
    program = b"int main(void) { return 0; }"
    done = subprocess.run(command, check=False, input=program, capture_output=True)
    return done.returncode == 0


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Returns the path of the driver built with the given flags. Skips where this compiler does not
    know them."""

    @cache
    def built(*flags: str, real: str = "double", name: str = "gcc") -> str:
        program = str(tmp_path_factory.mktemp("drive") / "drive")
        fixed = ("-g", "-pthread", "-ffp-contract=off", f"-DREAL={real}")
        command = [compiler(name), *fixed, *flags, "-o", program, str(DRIVER), "-lm"]
        if not knows(name, flags):
            pytest.skip(f"this {name} does not know {' '.join(flags)}")
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return program

    return built


def output_of(*command: str) -> list[str]:
    """Lines that a program prints. It must not fail, nor a sanitizer have found anything."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run here")
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def expected(build: Callable[..., str]) -> Callable[[str], list[str]]:
    """Lines of the driver as the library itself is built, for a type."""
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    return cache(lambda real: output_of(build(*flags, *WARNINGS, real=real)))


def test_the_number_of_threads_changes_no_bit(expected: Callable[[str], list[str]]) -> None:
    lines = expected("double")
    assert len(lines) == CASES * THREADS
    for start in range(0, len(lines), THREADS):
        assert len(set(lines[start : start + THREADS])) == 1
    assert len(set(lines)) == CASES
    assert {line.split(maxsplit=1)[1] for line in lines} == {"0 1"}  # status, all finite


@pytest.mark.parametrize(
    "flags", [("-O1", "-march=native"), pytest.param(SANITIZED, marks=pytest.mark.slow)]
)
def test_an_invalid_task_is_refused(flags: tuple[str, ...], build: Callable[..., str]) -> None:
    """By train, gradient and outputs, the last of which does not read labels."""
    found = [line.split(": ") for line in output_of(build(*flags), "invalid")]
    kinds = {
        5: ["position"],
        4: ["count"],
        3: ["threads", "batch_size", "num_steps"],
        2: ["num_layers", "inputs", "outputs", "kernel", "padding", "pool", "height"],
        0: ["unused label", "unused position"],
    }
    expected = {
        name: " ".join([str(status)] * 3) for status, names in kinds.items() for name in names
    }
    expected["label"] = "6 6 0"
    assert {name.rsplit(" ", 1)[0] for name, _ in found} == set(expected)
    for name, statuses in found:
        assert statuses == expected[name.rsplit(" ", 1)[0]], name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "real"),
    list(product(OTHERS, ("float", "double"))),
)
def test_compiler_and_processor_change_no_bit(
    other: tuple[str, ...],
    real: str,
    expected: Callable[[str], list[str]],
    build: Callable[..., str],
) -> None:
    name, *flags = other
    assert output_of(build(*flags, real=real, name=name)) == expected(real)


@pytest.mark.slow
def test_no_access_is_out_of_bounds_or_undefined_and_threads_do_not_race(
    expected: Callable[[str], list[str]], build: Callable[..., str]
) -> None:
    assert output_of(build(*SANITIZED)) == expected("double")
    runner = (
        ("setarch", "-R") if shutil.which("setarch") else ()
    )  # its shadow memory needs fixed addresses
    assert output_of(*runner, build("-O1", "-march=native", "-fsanitize=thread")) == expected(
        "double"
    )


ELEMENTARY = """
#include <stdio.h>
#include "elementary.h"
int main(void)
{
    for (int i = 0; i < 2000; i++) {
        real x = i * (real)(IS_FLOAT ? .05 : .36), y = 1 + i * i * (real)1e-3;
        printf("%.17g %.17g %.17g %.17g\\n", (double)-x, (double)exponential(-x), (double)y, (double)logarithm(y));
    }
    real nan = __builtin_nan(""), infinity = __builtin_inf();
    printf("%g %g %g %g\\n", (double)exponential(nan), (double)exponential(-infinity), (double)logarithm(nan), 0.);
}
"""


@pytest.mark.parametrize("real", ["float", "double"])
def test_exponential_and_logarithm_are_exact_to_one_unit(real: str, tmp_path: Path) -> None:
    program = str(tmp_path / "elementary")
    command = [
        compiler(),
        "-O2",
        f"-DREAL={real}",
        "-I",
        str(SOURCES),
        "-x",
        "c",
        "-",
        "-o",
        program,
        "-lm",
    ]
    subprocess.run(command, input=ELEMENTARY, check=True, text=True)
    *found, special = np.array([line.split() for line in output_of(program)], float)
    x, exponential, y, logarithm = np.transpose(found)
    kind = np.dtype("float32" if real == "float" else "float64").type
    for ours, exact in (
        (exponential, [math.exp(v) for v in x]),
        (logarithm, [math.log(v) for v in y]),
    ):
        assert (abs(ours - exact) <= np.spacing(np.asarray(exact, kind))).all()
    np.testing.assert_array_equal(special, [math.nan, 0, math.nan, 0])
