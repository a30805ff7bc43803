"""`fedsim submit`: check the runs of methods against the rules, and write the files of their
submissions.

    fedsim submit outputs/benchmark_v1 --method mine --author "A. Name" --source "a link"

A submission consists of three files: <method>.parquet with the scored runs, <method>.csv with the
trials, and <method>.yaml, the card. Settings of an earlier submission of the method stay, unless
they are submitted again. `digests.csv` has a row for each setting and seed, with the
partition and the data on which all methods ran. The first submission of a setting adds its rows.
Rows of other files of the same data are added by hand.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fedsim.benchmark.reader import DIGESTS, RESULTS
from fedsim.benchmark.rules import VERSION
from fedsim.benchmark.submission import Submission, gather, methods_in
from fedsim.config.choice_files import ChoiceFile
from fedsim.config.compose import search_path
from fedsim.config.sources import known_choices
from fedsim.config.yaml_files import head_of
from fedsim.core.disk import unwritable, user_path, write_files
from fedsim.core.errors import check, rule
from fedsim.results.archive import read_archive, write_archive
from fedsim.results.files import OutputError
from fedsim.results.ranking import class_of, seen_by_server
from fedsim.tracking.tables import print_line

CARD_OPTIONS = ("source", "author", "link")
ENVIRONMENT = ("device", "processor", "platform", "python", "torch", "numpy")
"""Facts about the machine that a card has."""


def arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=user_path, help="a folder with runs of `fedsim benchmark`")
    add("--method", help="only these methods, with commas between them")
    add("--setting", help="only these settings, with commas between them")
    add("--to", type=user_path, default=RESULTS, help=f"the folder to write to ({RESULTS})")
    add("--source", help="on the card: the paper (otherwise that of the selector's file)")
    add("--author", help="on the card: who submits it")
    add("--link", help="on the card: where its code is")
    add("--config-dir", help="a folder with selectors of your own")


def run(options: Namespace) -> int:
    """Write the submissions that violate no rule. Return 1 if one does. Raises `FedsimError`."""
    settings = options.setting.split(",") if options.setting else []
    num_faulty = 0
    with search_path(options.config_dir):
        methods = options.method.split(",") if options.method else methods_in(options.folder)
        fault, remedy = "has no run of the benchmark", "name a folder of `fedsim benchmark`"
        check(rule(bool(methods), str(options.folder), ..., fault, remedy))
        for method in methods:
            submission = gather(method, options.folder, settings)
            digests = _compare_digests(submission, options.to / DIGESTS)
            if not (submission.problems or submission.scored):
                submission.problems.append(f"no finished run of it in {options.folder}")
            earlier = _earlier_card(method, options.to)
            _keep_other_settings(submission, earlier, options.to)
            for problem in submission.problems:
                print_line(f"{method}: {problem}")
            if submission.problems:
                num_faulty += 1
            else:
                _write(submission, digests, earlier, options)
                print_line(_describe(submission, options.to))
    return int(num_faulty > 0)


def _describe(submission: Submission, folder: Path) -> str:
    """Return in a line what was written."""
    size = (folder / f"{submission.method}.parquet").stat().st_size / 1000
    num_settings, num_runs = len(submission.chosen), len(submission.scored)
    text = f"{submission.method}: settings {num_settings}, scored runs {num_runs}, {size:.0f} kB"
    return f"{text}, in {folder}"


def _compare_digests(submission: Submission, path: Path) -> pd.DataFrame:
    """Return the rows of `path` and those that the submission adds, a row for each setting and seed
    that it does not have. Add a problem for each other row that the submission does not share."""
    rows = pd.read_csv(path, dtype=str) if path.exists() else pd.DataFrame()
    known: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows.to_dict("records"):
        known.setdefault((row["setting"], row["seed"]), []).append(row)
    for row in submission.digests:
        place = row["setting"], row["seed"]
        accepted = known.setdefault(place, [row])
        if row not in accepted:
            differing = [
                f"{key} {value}, not {accepted[0][key]}"
                for key, value in row.items()
                if value != accepted[0][key]
            ]
            submission.problems.append(
                f"{place[0]}, seed {place[1]}: differs from other submissions in "
                f"{'; '.join(differing)} ({path})"
            )
    return pd.DataFrame([row for of_place in known.values() for row in of_place])


def _earlier_card(method: str, folder: Path) -> dict[str, Any]:
    """Return the card of the method's submission in a folder; an empty one if there is none."""
    path = folder / f"{method}.yaml"
    card: dict[str, Any] = yaml.safe_load(path.read_text("utf-8")) if path.exists() else {}
    return card


def _keep_other_settings(submission: Submission, earlier: Mapping[str, Any], folder: Path) -> None:
    """Add the settings of an earlier submission that this one lacks.

    Adds a problem if they are of another version of the rules. Raises `ReportError` if the earlier
    scored runs cannot be read.
    """
    of_setting: dict[str, Any] = earlier.get("settings", {})
    others = {name: of_setting[name] for name in of_setting if name not in submission.chosen}
    if not others or submission.problems:
        return
    path = folder / submission.method
    version = earlier.get("rules")
    if version != VERSION:
        submission.problems.append(
            f"{path}.yaml has {', '.join(others)} under rules {version}, and the rules are now "
            f"{VERSION}: submit all settings at once, or remove the three files"
        )
        return
    runs = read_archive(path.with_suffix(".parquet"))
    submission.scored = [run for run in runs if run.choices["cell"] in others] + submission.scored
    trials = pd.read_csv(path.with_suffix(".csv"), dtype=str, keep_default_na=False)
    kept_trials = trials[trials["setting"].isin(others)]
    submission.trials = kept_trials.to_dict("records") + submission.trials
    submission.chosen = others | submission.chosen


def _write(
    submission: Submission, digests: pd.DataFrame, earlier: Mapping[str, Any], options: Namespace
) -> None:
    """Write the files of a submission without problems. Raises `OutputError`.

    `earlier` is the card of the method's submission before (`_earlier_card`).
    """
    method, folder = submission.method, options.to
    write_archive(submission.scored, options.folder, folder / f"{method}.parquet", compact=True)
    trials = pd.DataFrame(submission.trials).to_csv(index=False)
    card = yaml.safe_dump(_card(submission, earlier, options), sort_keys=False, allow_unicode=True)
    texts = {
        f"{method}.csv": trials,
        f"{method}.yaml": card,
        DIGESTS: digests.sort_values(["setting", "seed"]).to_csv(index=False),
    }
    try:
        write_files(folder, {name: text.encode() for name, text in texts.items()})
    except OSError as error:
        raise OutputError(unwritable("--to", folder, error)) from error


def _card(submission: Submission, earlier: Mapping[str, Any], options: Namespace) -> dict[str, Any]:
    """Return the card of a submission: what the method is, what it needs, and where it was run.

    What `options` do not state is as on the earlier card.
    """
    runs = submission.scored
    first = runs[0]
    selector = first.choices["selector"]
    by_setting = [
        pd.DataFrame({"run": [run for run in runs if run.choices["cell"] == setting]})
        for setting in submission.chosen
    ]
    stated = {}
    for name in CARD_OPTIONS:
        value = getattr(options, name) or earlier.get(name)
        if value:
            stated[name] = value
    environments = []
    for run in runs:
        facts = {"engine": run.summary.get("engine")}
        facts |= {key: run.summary["environment"].get(key) for key in ENVIRONMENT}
        if facts not in environments:
            environments.append(facts)
    return {
        "method": submission.method,
        "rules": VERSION,
        "source": _source_of(known_choices().read("selector", selector)),
        **stated,
        "selector": first.config["selector"]["_target_"],
        "code": first.summary.get("code"),
        "class": class_of(by_setting),
        "asks": first.summary.get("asks"),
        "server_data": first.summary.get("server_data"),
        "server_sees": seen_by_server(first),
        "fedsim": sorted({run.summary["environment"]["fedsim"] for run in runs}),
        "commits": sorted({str(run.commit) for run in runs}),
        "environments": environments,
        "settings": submission.chosen,
    }


def _source_of(file: ChoiceFile) -> str:
    """Return the field `source` at the head of a selector's file, or of its base."""
    _, fields = head_of(file.text)
    if "source" in fields or not file.bases:
        return fields.get("source", "")
    return _source_of(file.bases[0])
