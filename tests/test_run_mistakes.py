"""Bad input to the command line: one clear message, nothing written."""

from pathlib import Path
from typing import Any

import pytest

from fedsim.core.errors import ConfigError, FedsimError
from fedsim.running.process import tell
from tests.run_toys import Run, refused, shell


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cohort_size=30"], "cohort_size=30: must lie in [1, num_clients=20]"),
        (["cohort_size=0"], "cohort_size=0: must be >= 1"),
        (["num_rounds=0"], "num_rounds=0: must be >= 1"),
        (["seed=-1"], "seed=-1: must be >= 0"),
        (["local.batch_size=0"], "local.batch_size=0: must be >= 1"),
        (["optimizer.lr=nan"], "optimizer.lr=nan: must be finite and > 0"),
        (["optimizer.lr=-1"], "optimizer.lr=-1.0: must be > 0"),
        (["partition=dirichlet_qp", "partition.alpha=0"], "partition.alpha=0.0: must be > 0"),
        (["selector=power_of_choice", "selector.num_candidates=4"], "selector.num_candidates=4: must lie in"),
        (["local.evaluate_on=holdout"], "local.evaluate_on='holdout': needs samples that are held out"),
        (["selector=fedabc"], "server.public_samples=0: must be > 0 for FedABC"),
        (["selector=gpfl", "server.validation_fraction=0"], "server.validation_fraction=0: must be > 0 for GPFL"),
        (["local.epochs=null"], "one of local.epochs and local.steps must be given"),
        (["local.steps=5", "local.epochs=2"], "local.epochs='2': has no effect while local.steps=5"),
        (["num_round=3"], "num_round: is not a known key\n    did you mean num_rounds?"),
        (["+num_round=3"], "num_round: is not a known key\n    did you mean num_rounds?"),
        (["++optimizer.learning_rate=3"], "optimizer.learning_rate: is not a known key"),
        (["optimizer.momentun=3"], "optimizer.momentun: is not a known key\n    did you mean optimizer.momentum?"),
        (["+local.step=3"], "local.step: is not a known key\n    did you mean local.steps?"),
        (["~local.batch_size"], "local.batch_size: is missing"),
        (["selector=randon"], "selector='randon': is not a choice of conf/selector/\n    did you mean random?"),
        (["optimizer/schedule=stepp"], "optimizer/schedule='stepp': is not a choice"),
        (["dataset=../../etc"], "dataset='../../etc': must not lead out of conf/"),
        (["num_rounds=many"], "num_rounds='many': must be an integer"),
        (["num_rounds"], "num_rounds: is neither a command nor key=value"),
        (["optimizer._target_=os.system"], "optimizer._target_='os.system': must be the dotted path of a subclass"),
        (["optimizer.schedule._target_=subprocess.Popen"], "optimizer.schedule._target_='subprocess.Popen'"),
        (["tracker.console._target_=builtins.open"], "tracker.console._target_='builtins.open'"),
        (["device=tpu"], "device='tpu': must be one of auto, cpu, cuda or cuda:<number>"),
        (["name=../evil"], "name='../evil': must be usable as a folder's name"),
        (["name=" + "x" * 300], "xxx': must be usable as a folder's name\n    1 to 255 bytes"),
        (["optimizer.lr=1e39"], "optimizer.lr=1e+39: must be finite in float32 and > 0"),
        (['partition_seed="${oc.create:{a: 1}}"'], "partition_seed: Unsupported interpolation type oc.create"),
        (["scale=small"], "scale='small': has no effect here: no preset is chosen"),
        (["scale=smal"], "scale='smal': must be one of full, small, debug"),
        (["-m", "seed=range(10000000)"], "must have at most 10000 jobs"),
        (["+a={b:{b:1}}"], "a: is not a known key"),
        (["+a=" + "{b:" * 900 + "1" + "}" * 900], "nested too deeply"),
        (["+a=" + "[" * 1900 + "]" * 1900], "nested too deeply"),
        (["name=${oc.env:NO_SUCH_VARIABLE}"], "NO_SUCH_VARIABLE"),
        (["server=2"], "server=2: must be a mapping of keys to values"),
        (["num_clients=1000000000"], "num_clients=1000000000: must be at most 1000000"),
        ([f"num_clients={2**63}"], "must be an integer of at most 64 bits"),
        (["--info", "all", "selector=nope"], "selector='nope': is not a choice"),
        (["--cfg", "job", "sede=1"], "sede: is not a"),
    ],
)
def test_a_mistake_is_told_with_key_value_rule_and_remedy(
    fedsim: Run, tmp_path: Path, words: list[str], message: str
) -> None:
    words = [*words, "tracker=default"] if words[0].startswith("tracker.") else words
    assert message in refused(fedsim, tmp_path, *words)


def test_all_mistakes_are_told_at_once(fedsim: Run, tmp_path: Path) -> None:
    text = refused(fedsim, tmp_path, "cohort_size=30", "optimizer.lr=0", "+selector.foo=1", "local.batch_size=-2")
    for part in ("cohort_size=30", "optimizer.lr=0", "selector.foo", "local.batch_size=-2"):
        assert part in text
    text = refused(fedsim, tmp_path, "num_round=3", "sede=1")
    assert "did you mean num_rounds?" in text
    assert "did you mean seed?" in text


def test_mistakes_of_any_job_stop_a_sweep_before_its_first_job(fedsim: Run, tmp_path: Path) -> None:
    assert "cohort_size=21" in refused(fedsim, tmp_path, "-m", "cohort_size=2,21", "seed=0,1")
    assert "selector='rondom'" in refused(fedsim, tmp_path, "-m", "selector=random,rondom")


def test_a_hostile_target_is_not_called(fedsim: Run, tmp_path: Path) -> None:
    marker = tmp_path.parent / "marker"
    refused(fedsim, tmp_path, "selector._target_=os.system", f"+selector.command='touch {marker}'")
    assert not marker.exists()


def test_absent_data_are_exit_code_3_and_leave_nothing(
    fedsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("fedsim.data.torchvision_sets._fetch", offline)
    with pytest.raises(FedsimError, match="FEDSIM_DATA") as caught:
        fedsim("dataset=mnist", "data_dir=data")
    assert caught.value.exit_code == 3
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_data_set_that_does_not_fit_the_model_is_refused(fedsim: Run, tmp_path: Path) -> None:
    assert "model: model=cnn needs images" in refused(fedsim, tmp_path, "model=cnn")


def test_an_error_is_one_screen_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    from fedsim.core.errors import Problem

    tell(ConfigError([Problem("a.b", 3, "must be > 4", "try 5")]))
    assert capsys.readouterr().err == (
        "fedsim: 1 problem in the config; nothing was run\n  a.b=3: must be > 4\n    try 5\n"
    )


def test_config_mistakes_exit_with_2_and_a_traceback_only_on_demand(tmp_path: Path) -> None:
    result = shell(tmp_path, "cohort_size=99")
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    assert "Traceback" in shell(tmp_path, "cohort_size=99", FEDSIM_DEBUG="1").stderr
    assert not list(tmp_path.iterdir())
