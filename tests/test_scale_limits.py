"""Methods that compare all pairs of clients are refused where their tables would not fit, before anything is run."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fedsim.config.build import instantiate
from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.plan import make_plan
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError
from fedsim.core.types import Population
from fedsim.selectors.base import Selector
from tests.test_size_limits import node_of

COMMON = ("num_clients=100000", "cohort_size=100", "model=logistic", "tracker=files_only", "system=lognormal")
SERVER = ("server.validation_fraction=0.1", "server.public_samples=20", "optimizer.momentum=0.9")
ALL_PAIRS = {
    *("clustered2", "divfl", "divfl_no_overhead", "fedabc", "hics", "hics_code", "lefl", "pair_study"),
    *("pncs", "pncs_each", "pncs_gradient", "pncs_q0", "pncs_q2", "pncs_q4", "pncs_q6", "pncs_two"),
}
"""Those whose tables of 100,000 x 100,000 numbers are refused; all others start."""


@pytest.fixture(scope="module", autouse=True)
def _conf() -> Iterator[None]:
    with search_path():
        yield


def refusal(choice: str, num_clients: int, **values: Any) -> str:
    """What a selector says of so many clients, "" if it takes them."""
    population = Population(np.ones(num_clients, np.int64), 100, 10)
    try:
        instantiate({**node_of("selector", choice), **values}, Selector, "selector", population)
    except ConfigError as error:
        return str(error)
    return ""


def test_all_choices_but_these_take_a_hundred_thousand_clients_and_these_name_size_bytes_and_remedy() -> None:
    names = [path.stem for path in (conf_dir() / "selector").glob("*.yaml")]
    few = {name for name in names if name.endswith("_d10")}  # which ask fewer clients than the 100 that they select
    told = {name: refusal(name, 100_000, **({"num_candidates": 100} if name in few else {})) for name in names}
    assert {name for name, text in told.items() if text} == ALL_PAIRS
    for name in ALL_PAIRS - {"pair_study"}:
        assert "selector: compares all pairs of num_clients=100000 clients, in tables of" in told[name]
        assert "must take at most 16 GiB, as they do up to num_clients=" in told[name]
        assert "lower num_clients" in told[name]
        assert not refusal(name, 10_000)


@pytest.mark.parametrize(
    ("choice", "num_clients", "values", "text"),
    [
        ("hics", 20_000, {"fallback": "never", "ward_on": "distances"}, ""),
        ("fedcor", 100_000, {}, ""),
        ("fedcor", 20_000, {"objective": "loo"}, "selector.kernel=linear selector.objective=mml is linear"),
        ("fedcor", 3_000, {"kernel": "se"}, ""),
        ("pncs_each", 23_170, {}, ""),
        ("pncs_each", 23_171, {}, "must take at most 16 GiB"),
        ("pair_study", 1_001, {}, "500,500 for num_clients=1001; must have at most 1000 clients"),
        ("pair_study", 1_000, {}, ""),
    ],
)
def test_what_decides_has_limits_of_its_own(choice: str, num_clients: int, values: dict[str, Any], text: str) -> None:
    found = refusal(choice, num_clients, **values)
    assert text in found if text else not found


def test_a_config_is_refused_before_its_data_are_read() -> None:
    (job,) = compose_jobs(["selector=pncs", *COMMON, *SERVER], multirun=False)
    with pytest.raises(ConfigError, match="compares all pairs of num_clients=100000 clients"):
        make_plan(job.config, job.choices)
    (job,) = compose_jobs(["selector=random", *COMMON, *SERVER], multirun=False)
    make_plan(job.config, job.choices)
