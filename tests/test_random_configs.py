"""Random configs: damaged ones are refused as mistakes of the config or the data, sound ones
compose and hash equally.

The short forms try the same few in each run, the long ones (`-m slow`) new ones every time.
"""

import signal
import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsim.config.compose import check_jobs, compose_jobs, search_path
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError, DataError
from fedsim.running.assembly import build
from tests.clocks import NEED_A_CLOCK

SECONDS = 5
"""Of a processor, for any config."""
TINY = (
    "tracker=files_only",
    "num_rounds=1",
    "local.epochs=null",
    "local.steps=1",
    "server.public_samples=20",
)
CHECKS = list(HealthCheck)
SHORT = settings(
    max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS
)
LONG = settings(SHORT, max_examples=500, derandomize=False)


def choices(group: str, *without: str) -> list[str]:
    return sorted({file.stem for file in (conf_dir() / group).glob("*.yaml")} - set(without))


# --- damaged ones -----------------------------------------------------------------------------------------------------

KEYS_TEXT = """
name seed partition_seed init_seed num_rounds num_clients cohort_size eval_every device overwrite checkpoint
checkpoint.every local local.epochs local.steps local.batch_size local.holdout_fraction local.evaluate_on server
server.validation_fraction server.public_samples dataset dataset.mean partition partition.shards_per_client
partition.pure partition.leftover availability model model.hidden model.dropout model._target_ optimizer
optimizer.lr optimizer.momentum optimizer.schedule optimizer/schedule selector selector.mode selector._target_
aggregator aggregator.weighting engine engine.compile engine.precision tracker scale preset cell hydra.callbacks
hydra.run.dir hydra/launcher hydra.mode nope selektor model.hiden ключ
"""
VALUES_TEXT = """
null true 0 -1 1e400 nan inf -.inf 1000000000 9223372036854775808 1000000000000000000000000000000 0.5 1e-30 []
{} [[]] [1,[2,[3]]] [nan] [-1] [1,null] {a:1} {a:{b:[1,{c:2}]}} {_target_:os.system} os.system builtins.open
!!python/object/apply:os.system '${oc.env:PATH}' ${nope} ${seed} ${.} ${oc.env:AWS_SECRET_ACCESS_KEY} ??? '???'
$ ${ ../../etc/passwd /etc/passwd a/b range(0,3) 1,2 choice(a,b) glob(*) interval(0,1) a=b 😀 ١٢٣ ﬀ '''
fedsim.selectors.random.Random fedsim.jobs.cli.run random small full auto lanes ${oc.create:{a:1}}
"""
KEYS = KEYS_TEXT.split()
MORE = (
    "",
    "'{_target_: os.system}'",
    "${oc.create:{a: 1}}",
    "x" * 5000,
    "[" * 200 + "]" * 200,
    '"\\n"',
)
VALUES = [*VALUES_TEXT.split(), *MORE, "'\u202eabc'", "'\u0000'", "'\ud7ff'"]
WORDS = st.builds(
    "{}{}={}".format,
    st.sampled_from(["", "", "", "+", "++", "~"]),
    st.sampled_from(KEYS) | st.text(string.ascii_letters + "._/@:-é ", min_size=1, max_size=12),
    st.sampled_from(VALUES) | st.text(max_size=20) | st.integers().map(str) | st.floats().map(str),
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=10)
    | st.sampled_from(VALUES)
)
NODES = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3)
)
TEXTS = (
    *(
        "a: !!python/object/apply:os.system [touch marker]",
        "!!set {a, b}",
        "a: !!binary aGk=",
        "a: &a [*a]",
    ),
    *(
        "? [a]\n: b",
        "a: *nope",
        "a: b: c",
        "\ta: 1",
        "- a\n- b",
        "a: 1\na: 2",
        "%YAML 9.9\n---\na: 1",
    ),
    *(
        "--- 1\n--- 2",
        "a: 0x_",
        "\x00",
        "_target_: [1]",
        "_target_: os.system",
        "\ufeffa: 1",
        "a: 2001-01-01",
    ),
    *(
        "defaults: 3",
        "defaults: [nope]",
        "defaults: [{a: b}]",
        "defaults: [_self_, _self_]",
        "defaults: [bad]",
    ),
    *("# @package ../x\na: 1", "# @package hydra.job\nname: x"),
    "_target_: fedsim.models.mlp.MLP\nhidden: .nan\ndropout: .inf",
    "_target_: fedsim.models.mlp.MLP\n1: 2\nnull: 3\ntrue: 4",
    "_target_: fedsim.models.mlp.MLP\nhidden: [1, 2]\ndropout: 0.0\n? {a: 1}\n: 2",
)
FILES = (
    st.sampled_from(TEXTS)
    | st.text(max_size=60)
    | st.binary(max_size=40)
    | NODES.map(lambda node: f"a: {node!r}")
)


@contextmanager
def limited_time() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def written_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != ".hypothesis"]


@pytest.fixture(scope="module", autouse=True)
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Imports take long, and only once."""
    with search_path():
        build(
            check_jobs(
                compose_jobs(
                    [*TINY, f"cache_dir={tmp_path_factory.mktemp('cache')}"], multirun=False
                )
            )[0]
        )


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, in which nothing may be written."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted")
    return tmp_path / "empty"


def damaged(empty: Path, case: tuple[list[str], bool, str | bytes | None]) -> None:
    """Any other exception than of a mistake in config or data is let through, and so is whatever
    takes too long."""
    words, multirun, file = case
    (empty.parent / "mine/model").mkdir(parents=True, exist_ok=True)
    if file is not None:
        content = file if isinstance(file, bytes) else file.encode("utf-8", "surrogatepass")
        (empty.parent / "mine/model/bad.yaml").write_bytes(content)
    told = "nothing"
    try:
        with limited_time():
            with search_path(None if file is None else str(empty.parent / "mine")):
                jobs = compose_jobs(["tracker=files_only", *words], multirun=multirun)
            plan = check_jobs(jobs)[0]
            if plan.config["dataset"]["_target_"] == "fedsim.data.digits.Digits":
                build(plan)
    except (ConfigError, DataError) as error:
        told = str(error)
    assert told
    assert "planted" not in told
    assert not written_in(empty)


OF_WORDS = st.tuples(st.lists(WORDS, min_size=1, max_size=3), st.booleans(), st.none())
OF_FILES = st.tuples(st.just(["model=bad"]), st.just(False), FILES)
DAMAGED = given(OF_WORDS | OF_FILES)
test_damaged_configs_are_refused = SHORT(DAMAGED(damaged))
test_five_hundred_damaged_configs_are_refused = pytest.mark.slow(LONG(DAMAGED(damaged)))


# --- sound ones -------------------------------------------------------------------------------------------------------


@st.composite
def sound(draw: st.DrawFn) -> list[str]:
    """The words of a config that can be run on the digits."""
    pick = lambda *values: draw(st.sampled_from(values))
    clients = draw(st.integers(10, 20))
    partitions = {
        "dirichlet_class": ["partition.min_size=0", f"partition.alpha={pick(0.1, 1.0, 10.0)}"],
        "dirichlet_qp": ["partition.retries=0", "partition.fallback=nnls"],
        "quantity_skew": [f"partition.skew={pick(0.1, 1.0)}"],
    }
    partition = pick(*choices("partition", "natural"))
    rules = {"trimmed_mean": ["aggregator.share=0.5"], "dp_fedavg": ["aggregator.denominator=10"]}
    aggregator = pick(*choices("aggregator"))
    schedule = pick(*choices("optimizer/schedule"))
    selector = pick(*choices("selector", "pncs_two"))
    system = pick(*choices("system", "trace", *(["none"] if selector in NEED_A_CLOCK else [])))
    return [
        *(
            f"cohort_size={draw(st.integers(5 if 'krum' in aggregator else 1, 10))}",
            f"num_clients={clients}",
        ),
        *(
            f"seed={draw(st.integers(0, 2**40))}",
            f"aggregator={aggregator}",
            *rules.get(aggregator, []),
        ),
        *(f"partition={partition}", *partitions.get(partition, [])),
        *(f"model={pick('logistic', 'mlp', 'mlp_64')}", f"selector={selector}", f"system={system}"),
        *(
            f"optimizer={pick('sgd', 'adam')}",
            f"optimizer/schedule={schedule}",
            f"optimizer.lr={pick(1e-4, 0.1)}",
        ),
        f"availability={pick(*choices('availability'))}",
        *(
            f"engine={pick('auto', 'batched', 'sequential')}",
            f"local.batch_size={draw(st.integers(1, 10**9))}",
        ),
        f"local.holdout_fraction={pick(0.0, 0.2)}",
    ]


def composed_twice(empty: Path, words: list[str]) -> None:
    with search_path():
        once = check_jobs(compose_jobs([*TINY, *words], multirun=False))[0]
        again = check_jobs(compose_jobs([*reversed(words), *TINY], multirun=False))[0]
    assert (once.config, once.choices, once.folder) == (again.config, again.choices, again.folder)
    if once.settings.seed % 4 == 0:
        assert np.isfinite(build(once).simulation.step().test_loss or 0.0)
    assert not written_in(empty)


test_sound_configs_compose_equally_and_run = SHORT(given(sound())(composed_twice))
test_five_hundred_sound_configs_compose_and_run = pytest.mark.slow(
    LONG(given(sound())(composed_twice))
)
