"""Results are the same digits on every processor: rounds of the native engine, and the functions
around it."""

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
"""Variables that keep each library, and fedsim's own in C, from instructions of this processor."""
BUILDS = {
    "cc -march=x86-64": {"CC": "cc -march=x86-64"},  # fused multiply-adds in software
    "cc -march=x86-64-v4": {"CC": "cc -march=x86-64-v4"},
    "clang -march=x86-64-v3": {"CC": "clang -march=x86-64-v3"},
}
"""Compilers and instruction sets for fedsim's own library."""


def assert_recorded(folder: Path, names: list[str], limits: dict[str, str]) -> None:
    """Run the rounds `names` in a process with `limits`, and compare them with the record.

    Selectors that are not marked exact have no hashes.
    """
    file = folder / "rounds.json"
    command = [sys.executable, "-m", "tests.exact_rounds", str(file), *names]
    environment = os.environ | limits
    subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], check=True)
    for name, hashes in json.loads(file.read_text(encoding="utf-8")).items():
        if hashes:
            assert hashes == RECORDED[name], name


def test_some_selectors_are_not_exact() -> None:
    assert [name for name in KINDS if not RECORDED[name]] == ["fedcor", "fl_dp3s", "flips"]


def test_rounds_are_those_recorded_with_all_limits_at_once(tmp_path: Path) -> None:
    """The record was made on another processor, without limits."""
    limits: dict[str, str] = {}
    for limit in LIMITS.values():
        limits |= limit
    assert_recorded(tmp_path, KINDS, limits | LIMITS["torch"])


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["none", *LIMITS, *BUILDS])
def test_rounds_of_all_choices_are_those_recorded_with_each_limit(
    limit: str, tmp_path: Path
) -> None:
    """Those of Fashion-MNIST are included if the data are there."""
    if "v4" in limit and "avx512f" not in Path("/proc/cpuinfo").read_text("utf-8"):
        pytest.skip("this processor has no AVX-512")
    if "clang" in limit and not shutil.which("clang"):
        pytest.skip("there is no clang")
    names = [*SELECTORS, *MORE]
    if Path(os.environ.get("FEDSIM_DATA", ""), "FashionMNIST").is_dir():
        names += FASHION_MNIST
    assert_recorded(tmp_path, names, (LIMITS | BUILDS).get(limit, {}))


def units_off(values: Any, exact: list[Decimal]) -> float:
    """Return the largest error in units in the last place."""
    errors = []
    for value, expected in zip(values.tolist(), exact, strict=True):
        unit = Decimal(math.ulp(float(expected)))
        errors.append(abs(Decimal(value) - expected) / unit)
    return float(max(errors))


def numbers() -> Any:
    rng = np.random.default_rng(0)
    usual, all_sizes = rng.uniform(-30, 5, 400), rng.uniform(-745, 709, 200)
    return np.concatenate([usual, all_sizes, rng.normal(size=200) * 1e-3])


def test_exp_is_within_a_unit_in_the_last_place() -> None:
    x = numbers()
    assert units_off(exp(x), [Decimal(value).exp() for value in x.tolist()]) < 1.1


def test_log_is_within_a_unit_in_the_last_place() -> None:
    x = np.abs(numbers())
    assert units_off(log(x), [Decimal(value).ln() for value in x.tolist()]) < 1.1


def test_arccos_is_within_two_units_in_the_last_place() -> None:
    x = np.random.default_rng(0).uniform(-1, 1, 500)
    assert units_off(arccos(x), [Decimal(math.acos(value)) for value in x.tolist()]) < 2


@pytest.mark.parametrize("exponent", [0.5, 1, 1.5, 2, 7, 0.3, -0.7])
def test_powers_are_within_four_units_in_the_last_place(exponent: float) -> None:
    x = np.random.default_rng(0).uniform(0.2, 5, 200)
    exact = [Decimal(value) ** Decimal(exponent) for value in x.tolist()]
    assert units_off(power(x, exponent), exact) < 4


def test_elementary_functions_at_their_ends() -> None:
    inf, nan = math.inf, math.nan
    np.testing.assert_array_equal(exp([nan, inf, -inf, 0.0, 710, -746]), [nan, inf, 0, 1, inf, 0])
    np.testing.assert_array_equal(log([nan, inf, 0.0, -1, 1]), [nan, inf, -inf, nan, 0])
    np.testing.assert_array_equal(arccos([1.0, -1.0, 0.0]), [0, math.pi, math.pi / 2])
    np.testing.assert_array_equal(power([0.0, 1], 0.3), [0, 1])
    np.testing.assert_array_equal(power([0.0, 2, inf], 0), [1, 1, 1])
    np.testing.assert_array_equal(power([0.5, 2], inf), [0, inf])
    assert exp(0.0) == 1
    assert exp(np.empty((0, 3))).shape == (0, 3)


def products(left: Factors, right: Factors) -> torch.Tensor:
    table = torch.zeros(len(left._rows), len(right._rows), dtype=torch.float64)
    left.add_products(table, right)
    return table


def rows_of_many_sizes() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-20, 20, 7)[:, None]
    x = torch.randn(7, 3000, generator=generator, dtype=torch.float64) * sizes
    x[3] = 0
    return x


def test_products_of_factors_are_close_to_inner_products() -> None:
    x = rows_of_many_sizes()
    lengths = x.norm(dim=1)
    errors = (products(Factors(x), Factors(x)) - x @ x.T).abs()
    assert (errors <= 1e-11 * lengths[:, None] * lengths).all()


def test_products_of_factors_are_the_same_in_any_order_of_columns_and_rows() -> None:
    x = rows_of_many_sizes()
    table = products(Factors(x), Factors(x))
    assert torch.equal(table, table.T)
    shuffled = Factors(x[:, torch.randperm(3000)])
    assert torch.equal(products(shuffled, shuffled), table)
    part = products(Factors(x)[slice(2, None)], Factors(x[:3]))
    assert torch.equal(part, table[2:, :3])


def test_weighted_sums_add_rounded_products_one_after_another() -> None:
    rows, weights = torch.randn(5, 40000, 2), torch.rand(5)
    expected = torch.zeros(40000, 2)
    for row, weight in zip(rows, weights, strict=True):
        expected = expected + row * weight
    assert torch.equal(weighted_sum(rows, weights), expected)


def test_row_sums_are_numpys() -> None:
    rows = torch.randn(5, 80000)
    assert torch.equal(row_sums(rows), torch.from_numpy(rows.numpy().sum(1)))


def test_log_probabilities() -> None:
    logits = 5 * torch.randn(2500, 7)
    torch.testing.assert_close(
        log_softmax(logits), logits.double().log_softmax(1), rtol=0, atol=1e-14
    )
