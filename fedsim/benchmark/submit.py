"""`fedsim submit`: check runs of the selection benchmark, and write the files of a submission.

    fedsim submit outputs/benchmark_v1 --method mine --author "A. Name" --link "a link"

A method's submission consists of three files in one folder: <method>.parquet with the scored runs,
<method>.csv with the trials that chose its values, and <method>.yaml, the card, which says what the
method is and where it was run. Settings that are submitted again replace those in the files; other
settings in the files are kept.

`digests.csv` in the same folder has hashes of the partition and the data of each setting and seed,
because all methods must run on the same. The first submission that has a setting and seed adds the
row. A maintainer may add further rows by hand, for example for another encoding of the same images.
"""

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fedsim.benchmark.reader import DIGESTS, RESULTS
from fedsim.benchmark.rules import VERSION
from fedsim.benchmark.study import method_words
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
from fedsim.results.reading import DamagedError
from fedsim.results.runs import Run
from fedsim.tracking.tables import print_line

KEPT_OPTIONS = ("author", "link")
"""Options whose values on an earlier card stay if they are not given again."""
ENVIRONMENT = ("device", "processor", "platform", "python", "torch", "numpy")
"""Facts about the machine and its software that are on a card."""
DIGEST_COLUMNS = ("setting", "seed", "num_classes", "config", "partition", "data")
"""Columns of digests.csv, the keys of `submission.shared_values`."""


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
    """Write the submission of each method that has no problem. Return 1 if one has a problem.

    Raises `FedsimError`, for example if a file of an earlier submission is damaged.
    """
    settings = options.setting.split(",") if options.setting else []
    num_faulty = 0
    with search_path(options.config_dir):
        methods = options.method.split(",") if options.method else methods_in(options.folder)
        fault, remedy = "has no run of the benchmark", "name a folder of `fedsim benchmark`"
        check(rule(bool(methods), str(options.folder), ..., fault, remedy))
        for method in methods:
            selector = method_words(method)[0].removeprefix("selector=")
            if not options.method and not known_choices().has("selector", selector):
                # The folder may also have runs of methods that the user does not submit.
                remedy = "if it is a file of yours, add --config-dir with its folder"
                print_line(f"{method}: there is no selector/{selector}.yaml; {remedy}")
                num_faulty += 1
                continue
            submission = gather(method, options.folder, settings)
            digests = _merge_digests(submission, options.to / DIGESTS)
            if not submission.problems and not submission.scored:
                submission.problems.append(f"no finished run of it in {options.folder}")
            on_file = _card_on_file(method, options.to)
            _check_link(submission, on_file, options)
            card = {}
            if not submission.problems:
                card = _card(submission, on_file, options)
                _keep_other_settings(submission, card, on_file, options.to)
            for problem in submission.problems:
                print_line(f"{method}: {problem}")
            if submission.problems:
                num_faulty += 1
            else:
                _write(submission, digests, card, options)
                print_line(_describe(submission, options.to))
    if num_faulty < len(methods):
        add = shlex.join(["git", "add", str(options.to)])
        print_line(f"next: {add}, and open a pull request (docs/benchmark_rules.md)")
    return int(num_faulty > 0)


def _describe(submission: Submission, folder: Path) -> str:
    """Return in a line what was written."""
    size = (folder / f"{submission.method}.parquet").stat().st_size / 1000
    num_settings, num_runs = len(submission.chosen), len(submission.scored)
    text = f"{submission.method}: settings {num_settings}, scored runs {num_runs}, {size:.0f} kB"
    return f"{text}, in {folder}"


def _merge_digests(submission: Submission, path: Path) -> pd.DataFrame:
    """Return the rows of the file `path`, and those of the submission for settings and seeds that
    the file lacks. Add a problem for each row of the submission that the file has otherwise, or
    that differs from an earlier row of the submission."""
    rows = _read_texts(path, DIGEST_COLUMNS) if path.exists() else pd.DataFrame()
    accepted_rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows.to_dict("records"):
        accepted_rows.setdefault((row["setting"], row["seed"]), []).append(row)
    on_file = set(accepted_rows)
    for row in submission.digests:
        setting, seed = row["setting"], row["seed"]
        accepted = accepted_rows.setdefault((setting, seed), [row])
        if row in accepted:
            continue
        differing = [
            f"{key} {value}, not {accepted[0][key]}"
            for key, value in row.items()
            if value != accepted[0][key]
        ]
        text = f"its runs differ in {'; '.join(differing)}"
        if (setting, seed) in on_file:
            text = f"differs from other submissions in {'; '.join(differing)} ({path})"
        submission.problems.append(f"{setting}, seed {seed}: {text}")
    merged = []
    for accepted in accepted_rows.values():
        merged += accepted
    return pd.DataFrame(merged)


def _read_texts(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Read a CSV file without converting its texts. Raises `DamagedError` if it cannot be read or
    lacks one of the `columns`."""
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path} is not a CSV file ({error}); restore it") from error
    missing = [name for name in columns if name not in table]
    if missing:
        raise DamagedError(f"{path} lacks the columns {', '.join(missing)}; restore it")
    return table


def _check_link(submission: Submission, on_file: Mapping[str, Any], options: Namespace) -> None:
    """Add a problem if others could not find the submission's code: a module is not part of fedsim,
    and neither `--link` nor the earlier card `on_file` leads to it."""
    if options.link or on_file.get("link") or not submission.scored:
        return
    code = submission.scored[0].summary.get("code")
    if code is not None:
        text = f"its code is not part of fedsim ({code}); add --link with the address of its module"
        submission.problems.append(text)


def _card(submission: Submission, on_file: Mapping[str, Any], options: Namespace) -> dict[str, Any]:
    """Return the card of a submission: what the method is, what it needs, and where it was run.

    `on_file` is its earlier card, of which `KEPT_OPTIONS` and further settings are kept.
    """
    first = submission.scored[0]
    selector = first.choices["selector"]
    card = {
        "method": submission.method,
        "rules": VERSION,
        "source": options.source or _source_of(known_choices().read("selector", selector)),
    }
    for name in KEPT_OPTIONS:
        value = getattr(options, name) or on_file.get(name)
        if value:
            card[name] = value
    card |= {
        "selector": first.config["selector"]["_target_"],
        "code": first.summary.get("code"),
        "asks": first.summary.get("asks"),
        "server_data": first.summary.get("server_data"),
        "server_sees": seen_by_server(first),
    }
    return card | _entries_of_all_runs(submission)


def _entries_of_all_runs(submission: Submission) -> dict[str, Any]:
    """Return the entries of a card that depend on all settings."""
    by_setting: dict[str, list[Run]] = {}
    environments = []
    for run in submission.scored:
        by_setting.setdefault(run.choices["cell"], []).append(run)
        facts = {"engine": run.summary.get("engine")}
        facts |= {key: run.summary["environment"].get(key) for key in ENVIRONMENT}
        if facts not in environments:
            environments.append(facts)
    return {
        "class": class_of([pd.DataFrame({"run": runs}) for runs in by_setting.values()]),
        "fedsim": sorted({run.summary["environment"]["fedsim"] for run in submission.scored}),
        "commits": sorted({str(run.commit) for run in submission.scored}),
        "environments": environments,
        "settings": submission.chosen,
    }


def _card_on_file(method: str, folder: Path) -> dict[str, Any]:
    """Return the card that a method has in a folder; an empty one if it has none. Raises
    `DamagedError`."""
    path = folder / f"{method}.yaml"
    if not path.exists():
        return {}
    try:
        card = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DamagedError(f"{path} is not YAML ({error}); restore it") from error
    if not isinstance(card, dict) or not isinstance(card.get("settings"), dict):
        raise DamagedError(f"{path} is not the card of a submission; restore it")
    return card


def _keep_other_settings(
    submission: Submission, card: dict[str, Any], on_file: Mapping[str, Any], folder: Path
) -> None:
    """Add the settings that are on file and not submitted again to a submission and its `card`.

    `on_file` is the method's earlier card, and `folder` has its other files. If the settings cannot
    stand next to the new ones, a problem is added instead. Raises `ReportError` or `DamagedError`
    if a file cannot be read.
    """
    method = submission.method
    kept_settings = {}
    for setting, chosen in on_file.get("settings", {}).items():
        if setting not in submission.chosen:
            kept_settings[setting] = chosen
    if not kept_settings:
        return
    for key, meaning in (("rules", "version of the rules"), ("code", "version of its class")):
        if on_file.get(key) != card[key]:
            submission.problems.append(
                f"{folder / method}.yaml has {', '.join(kept_settings)} with another {meaning} "
                f"({on_file.get(key)}, now {card[key]}): run them again, and submit all settings "
                "at once"
            )
            return
    runs = read_archive(folder / f"{method}.parquet")
    runs_to_keep = [run for run in runs if run.choices["cell"] in kept_settings]
    submission.scored = runs_to_keep + submission.scored
    trials = _read_texts(folder / f"{method}.csv", ["setting"])
    trials_to_keep = trials[trials["setting"].isin(kept_settings)]
    submission.trials = trials_to_keep.to_dict("records") + submission.trials
    submission.chosen = kept_settings | submission.chosen
    card |= _entries_of_all_runs(submission)


def _write(
    submission: Submission, digests: pd.DataFrame, card: Mapping[str, Any], options: Namespace
) -> None:
    """Write the files of a submission without problems. Raises `OutputError`."""
    method, folder = submission.method, options.to
    write_archive(submission.scored, options.folder, folder / f"{method}.parquet", compact=True)
    texts = {
        f"{method}.csv": pd.DataFrame(submission.trials).to_csv(index=False),
        f"{method}.yaml": yaml.safe_dump(card, sort_keys=False, allow_unicode=True),
        DIGESTS: digests.sort_values(["setting", "seed"]).to_csv(index=False),
    }
    try:
        write_files(folder, {name: text.encode() for name, text in texts.items()})
    except OSError as error:
        raise OutputError(unwritable("--to", folder, error)) from error


def _source_of(file: ChoiceFile) -> str:
    """Return the field `source` at the head of a selector's file, or of the file it is based on."""
    _, fields = head_of(file.text)
    if "source" in fields or not file.bases:
        return fields.get("source", "")
    return _source_of(file.bases[0])
