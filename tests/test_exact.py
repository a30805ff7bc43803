"""The same digits on every processor: what is computed around the C engine."""

import json
import math
import os
import shutil
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy._core._multiarray_umath import __cpu_dispatch__ as NUMPY_FEATURES

from fedsim.core.exact import arccos, exp, log, log_softmax, power, row_sums, weighted_sum
from fedsim.core.factors import Factors
from tests.exact_rounds import FASHION_MNIST, FILE, KINDS, MORE
from tests.goldens import SELECTORS

RECORDED = json.loads(FILE.read_text(encoding="utf-8"))
LIMITS = {
    "torch": {"ATEN_CPU_CAPABILITY": "default"},
    "torch avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "mkl": {"MKL_CBWR": "COMPATIBLE"},
    "openblas": {"OPENBLAS_CORETYPE": "Nehalem"},
    "numpy": {"NPY_DISABLE_CPU_FEATURES": " ".join(NUMPY_FEATURES)},
    "libm": {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F"},
    "threads": {"OMP_NUM_THREADS": "1"},
    "engine": {"CC": "cc -march=x86-64-v3"},
}
"""What keeps each library, and fedsim's own in C, from the instructions that this processor has."""
BUILDS = {
    name: {"CC": name}
    for name in ("cc -march=x86-64", "cc -march=x86-64-v4", "clang -march=x86-64-v3")
}
"""Of fedsim's own library; the first has fused multiply-adds in software."""


def start(folder: Path, names: list[str], **limits: str) -> tuple[subprocess.Popen[bytes], Path]:
    file = folder / f"{'-'.join(limits)}.json"
    command = [sys.executable, "-m", "tests.exact_rounds", str(file), *names]
    return subprocess.Popen(
        command, env={**os.environ, **limits}, cwd=Path(__file__).parents[1]
    ), file


def assert_recorded(process: subprocess.Popen[bytes], file: Path) -> None:
    """What the process has written is what was recorded, but of selectors that are not marked
    exact."""
    assert not process.wait()
    for name, found in json.loads(file.read_text(encoding="utf-8")).items():
        assert found == (RECORDED[name] if found else {}), name


def test_rounds_are_those_recorded_whatever_instructions_the_libraries_take(tmp_path: Path) -> None:
    """On this processor, with all limits at once; the record was made on another, without."""
    everything = {key: value for limit in LIMITS.values() for key, value in limit.items()}
    assert [name for name in KINDS if not RECORDED[name]] == ["fedcor", "fl_dp3s"]
    assert_recorded(*start(tmp_path, KINDS, **everything | LIMITS["torch"]))


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["none", *LIMITS, *BUILDS])
def test_rounds_of_all_choices_are_those_recorded_under_each_limit(
    limit: str, tmp_path: Path
) -> None:
    """With those of Fashion-MNIST where it is found."""
    lacks_avx512 = "v4" in limit and "avx512f" not in Path("/proc/cpuinfo").read_text("utf-8")
    if lacks_avx512 or ("clang" in limit and not shutil.which("clang")):
        pytest.skip("there is no such processor or compiler")
    real = FASHION_MNIST if Path(os.environ.get("FEDSIM_DATA", ""), "FashionMNIST").is_dir() else {}
    assert_recorded(
        *start(tmp_path, [*SELECTORS, *MORE, *real], **(LIMITS | BUILDS).get(limit, {}))
    )


def test_elementary_functions_are_right_within_two_units_in_the_last_place() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.uniform(-30, 5, 400), rng.uniform(-745, 709, 200), rng.normal(size=200) * 1e-3]
    )
    assert units_off(exp(x), [Decimal(v).exp() for v in x.tolist()]) < 1.1
    assert units_off(log(np.abs(x)), [abs(Decimal(v)).ln() for v in x.tolist()]) < 1.1
    x = rng.uniform(-1, 1, 500)
    assert units_off(arccos(x), [Decimal(math.acos(v)) for v in x.tolist()]) < 2
    for exponent in (0.5, 1, 1.5, 2, 7, 0.3, -0.7):
        x = rng.uniform(0.2, 5, 200)
        assert (
            units_off(power(x, exponent), [Decimal(v) ** Decimal(exponent) for v in x.tolist()]) < 4
        )


def units_off(found: np.ndarray[Any, np.dtype[np.float64]], right: list[Decimal]) -> float:
    units = (
        abs(Decimal(f) - r) / Decimal(math.ulp(float(r)))
        for f, r in zip(found.tolist(), right, strict=True)
    )
    return float(max(units))


def test_elementary_functions_at_their_ends() -> None:
    inf, nan = math.inf, math.nan
    np.testing.assert_array_equal(exp([nan, inf, -inf, 0.0, 710, -746]), [nan, inf, 0, 1, inf, 0])
    np.testing.assert_array_equal(log([nan, inf, 0.0, -1, 1]), [nan, inf, -inf, nan, 0])
    np.testing.assert_array_equal(arccos([1.0, -1.0, 0.0]), [0, math.pi, math.pi / 2])
    np.testing.assert_array_equal(power([0.0, 1], 0.3), [0, 1])
    assert exp(0.0) == 1
    assert exp(np.empty((0, 3))).shape == (0, 3)


def products(left: Factors, right: Factors) -> torch.Tensor:
    table = torch.zeros(len(left._rows), len(right._rows), dtype=torch.float64)
    left.add_products(table, right)
    return table


def test_products_of_factors_are_the_same_in_any_order_of_the_columns() -> None:
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn(7, 3000, generator=generator, dtype=torch.float64)
        * torch.logspace(-20, 20, 7)[:, None]
    )
    x[3] = 0
    order = torch.randperm(3000, generator=generator)
    found = products(Factors(x), Factors(x))
    assert torch.equal(found, found.T)
    assert torch.equal(found, products(Factors(x[:, order]), Factors(x[:, order])))
    assert torch.equal(found[2:, :3], products(Factors(x)[slice(2, None)], Factors(x[:3])))
    lengths = x.norm(dim=1)
    assert ((found - x @ x.T).abs() <= 1e-11 * lengths[:, None] * lengths).all()


def test_sums_are_of_rounded_products_one_after_another() -> None:
    rows, weights = torch.randn(5, 40000, 2), torch.rand(5)
    expected = torch.zeros(40000, 2)
    for row, weight in zip(rows, weights, strict=True):
        expected = expected + row * weight
    assert torch.equal(weighted_sum(rows, weights), expected)
    assert torch.equal(row_sums(rows.flatten(1)), torch.from_numpy(rows.flatten(1).numpy().sum(1)))


def test_log_probabilities() -> None:
    logits = 5 * torch.randn(2500, 7)
    torch.testing.assert_close(
        log_softmax(logits), logits.double().log_softmax(1), rtol=0, atol=1e-14
    )
