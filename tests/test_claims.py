"""What is published is about runs that presets make; and presets that judge it, in detail."""

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsim.core.configs import leaves
from fedsim.core.rng import Streams
from fedsim.jobs.cli import run as fedsim_run
from fedsim.papers import published
from fedsim.papers.protocol import preset_settings
from fedsim.papers.published import Claim, Publication
from fedsim.results import measures
from fedsim.results.frames import is_equal, runs_frame
from fedsim.results.runs import read_runs
from fedsim.running.assembly import build_model
from tests.sweep_words import jobs_of
from tests.test_presets import plans_of

PUBLISHED = sorted(published.FOLDER.glob("*.yaml"))
FORMS = {"at_most", "at_least", "value", "gain", "not_worse_by", "level_with", "grows_with"}
KEYS = {field.name for field in fields(Claim)}


def measured(name: str) -> bool:
    head, _, argument = name.partition("@")
    return head in measures.MEASURES and (not argument or math.isfinite(float(argument)))


@cache
def runs_of(preset: str) -> list[dict[str, str]]:
    """Values of every run of a preset: those that it sweeps over; of a preset with one run all of
    its config."""
    jobs = [
        [word.partition("=") for word in job] for job in jobs_of([f"preset={preset}", "seed=0"])
    ]
    runs = [{key: str(yaml.safe_load(value)) for key, _, value in job} for job in jobs]
    if len(runs) > 1:
        return runs
    (plan,) = plans_of(preset)
    return [{**{key: str(value) for key, value in leaves(plan.config)}, **plan.choices}]


def is_run_of(run: Mapping[str, str], about: Mapping[str, str]) -> bool:
    return all(is_equal(str(run.get(key)), str(value)) for key, value in about.items())


def is_run(presets: Sequence[str], about: Mapping[str, str]) -> bool:
    return any(is_run_of(run, about) for preset in presets for run in runs_of(preset))


def wanted(claim: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """The runs that a claim compares."""
    along = claim.get("grows_with", claim.get("pooled_over"))
    for at in [{along: value} for value in claim.get("values", ())] or [{}]:
        yield {**claim["about"], **at}
        if "minus" in claim:
            yield {**claim["about"], **claim["minus"], **at}
        for other in claim.get("others", ()):
            yield {**claim["about"], **at, claim.get("among", "selector"): other}


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_all_that_is_published_is_about_runs_of_its_presets(path: Path) -> None:
    """Every method and value that is compared is run by a preset, and a claim has one form that is
    known."""
    assert not is_run(
        ["gpfl_fig6b", "gpfl_fig6"], {"selector": "fedabc"}
    )  # what no preset runs is found
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert values.get("claims") or values.get("tables")
    for claim in values.get("claims", ()):
        assert len(FORMS & set(claim)) == 1, claim["id"]
        assert set(claim) <= KEYS, claim["id"]
        assert measured(claim["measure"]), claim["measure"]
        assert ("grows_with" in claim or "pooled_over" in claim) == ("values" in claim)
        assert "tolerance" not in claim or "value" in claim or claim["gain"] > 0, claim["id"]
        assert "value" not in claim or claim["tolerance"] > 0, claim["id"]
        assert not (claim.get("added_after_runs") and claim.get("revised_after_runs")), claim["id"]
        for about in wanted(claim):
            assert is_run(values["presets"], about), (claim["id"], about)
    for table in values.get("tables", ()):
        assert set(table.get("rows_added_after_runs", ())) <= set(table["rows"])
        for choice, column in itertools.product(table["rows"], table["columns"]):
            assert measured(column["measure"])
            assert {**table, **column}["margin"] > 0, table["id"]
            assert is_run(values["presets"], {**column["about"], table["row"]: choice}), (
                table["id"],
                choice,
            )


@pytest.mark.slow
@pytest.mark.parametrize("publication", published.publications(), ids=lambda one: one.title)
def test_what_is_published_is_about_one_setting_of_a_preset(publication: Publication) -> None:
    """Some minutes of a core: where several settings of a preset fitted a number, any of them would
    be judged."""
    for preset in publication.presets:
        settings = preset_settings(preset, "full")
        assert settings
        for number in publication.numbers:
            fitting = [
                choices
                for choices, config in settings
                if is_run_of({**{k: str(v) for k, v in leaves(config)}, **choices}, number.about)
            ]
            assert len(fitting) <= 1, (preset, number.id, fitting)


def test_clients_with_models_of_their_own_through_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "-m",
        "selector=full",
        "init_seed=null,per_client",
        "num_rounds=2",
        "num_clients=3",
        "cohort_size=3",
    ]
    words += ["tracker=files_only", "partition.shards_per_client=4"]
    monkeypatch.setattr(sys, "argv", ["fedsim", *words])
    assert fedsim_run(words) == 0
    runs = {str(run.config["init_seed"]): run for run in read_runs(tmp_path / "outputs")}
    common, own = (runs[name].records[0] for name in ("None", "per_client"))
    assert own["test_accuracy"] != common["test_accuracy"]
    assert (
        runs["None"].summary["initial_accuracy"] == runs["per_client"].summary["initial_accuracy"]
    )
    assert all(own[key] == common[key] for key in ("trained", "uploaded", "bytes_up"))
    labels = [labels["init_seed"] for labels in runs_frame(runs.values())["labels"]]
    assert sorted(labels) == ["-", "per_client"]
    node = yaml.safe_load((Path(__file__).parents[1] / "conf/model/logistic.yaml").read_text())
    models = [build_model(node, (1, 8, 8), 10, Streams(0), client) for client in (None, 0, 1, 0)]
    server, first, second, again = (next(iter(model.parameters())) for model in models)
    assert not any(
        one.equal(other) for one, other in ((server, first), (server, second), (first, second))
    )
    assert again.equal(first)
