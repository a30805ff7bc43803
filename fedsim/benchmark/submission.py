"""Gather the runs of a method for `fedsim submit`, and check them against the benchmark's rules.

A user submits a method of selection with its runs in some settings. For each setting, this module
composes the runs that the rules demand, and looks for each of them among the runs in the user's
folder. A run is found if its config has the same values in all keys except `FREE_KEYS`: those that
cannot change a result, and the device. What is missing, damaged or against a rule is described in
`Submission.problems`.

See `fedsim.benchmark.study` for the terms: setting, trial, point, phase, group and words.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsim.benchmark.reader import method_of
from fedsim.benchmark.rules import CONTROLS, FREE_KEYS, PRESET
from fedsim.benchmark.study import Key, Study, method_words, name_problem
from fedsim.config.compose import compose_jobs, outlined
from fedsim.config.plan import Plan, hash_config
from fedsim.config.user_code import changed_since
from fedsim.core.configs import canonical, leaves
from fedsim.core.record import mean_of_last
from fedsim.results.reading import FINAL, DamagedError, read_config, read_summary
from fedsim.results.runs import ReportError, Run, read_runs
from fedsim.results.wholeness import fault_of

KEYS_OF_RUN = (
    "selector",
    "optimizer.lr",
    "optimizer.schedule",
    "num_rounds",
    "seed",
    "test_on",
    "local.holdout_fraction",
)
"""Config keys in which the runs of a setting differ, besides `FREE_KEYS`."""
MOST_DIFFERENCES = 4
"""A message about a missing run mentions the most similar run, unless it differs in more values."""


@dataclass
class Submission:
    """The runs of a method, and what is wrong with them.

    `trials` has a row for each trial. `chosen` has the rates and the point of each setting.
    `digests` has the distinct rows of `shared_values`: one for each setting and seed, if all is
    well. `problems` are texts for the user.
    """

    method: str
    scored: list[Run] = field(default_factory=list)
    trials: list[dict[str, Any]] = field(default_factory=list)
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    digests: list[dict[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def methods_in(folder: Path) -> list[str]:
    """Return the names of the methods that have runs of the benchmark below a folder."""
    methods: dict[str, None] = {}
    for path in sorted(folder.rglob("summary.json")):
        choices = (read_summary(path.parent) or {}).get("choices", {})
        if choices.get("preset") == PRESET:
            with suppress(DamagedError):  # another run of the method leads to it, which reports it
                methods[method_of(choices["selector"], read_config(path.parent))] = None
    return list(methods)


def gather(method: str, folder: Path, settings: Sequence[str]) -> Submission:
    """Return the submission of a method from the runs below a folder.

    `settings` are those to submit. If none are given, all in which the method has runs are
    submitted. Must be called inside `fedsim.config.compose.search_path`, so that selectors of the
    user's own are found. Raises `ConfigError` if the method or a setting does not exist.
    """
    submission = Submission(method)
    if problem := name_problem(method):
        submission.problems.append(f"{problem.rule}; {problem.remedy}, and run it again")
    runs: dict[str, list[Run]] = {setting: [] for setting in settings}
    words = [f"cell={','.join(runs)}"] if settings else []
    # Raises if a name does not exist.
    compose_jobs([f"preset={PRESET}", *words, *method_words(method)], multirun=True)
    for run in _read(method, folder, submission.problems):
        setting = run.choices["cell"]
        if not settings or setting in settings:
            runs.setdefault(setting, []).append(run)
    for setting, of_setting in runs.items():
        # For a control, there may be settings in which only random selection has run.
        has_run = any(name_of(run) == method for run in of_setting)
        if has_run:
            _add_setting(submission, setting, of_setting)
        elif settings:
            command = f"fedsim benchmark cell={setting} selector={method}"
            submission.problems.append(f"no finished run in {setting}; `{command}` makes them")
    return submission


def name_of(run: Run) -> str:
    """Return the name of a run's method."""
    return method_of(run.choices["selector"], run.config)


def _read(method: str, folder: Path, problems: list[str]) -> Iterator[Run]:
    """Yield the finished runs of a method, and for a control also those of random selection, whose
    rates it has.

    Damaged runs are added to `problems`.
    """
    methods = [method, "random"] if method in CONTROLS else [method]
    for name in methods:
        selector = method_words(name)[0].removeprefix("selector=")
        try:
            runs = read_runs(folder, problems, f"*-{Path(selector).name}-s*")
        except ReportError:  # no runs: they are reported as missing
            runs = []
        for run in runs:
            # fedsim sets a run aside if the user has changed the selector's code since.
            is_set_aside = "-code-" in run.folder.name
            is_of_benchmark = {"cell", "preset"} <= run.choices.keys() and not is_set_aside
            if is_of_benchmark and name_of(run) == name and run.status in FINAL:
                yield run


class _RunsByConfig:
    """The runs of a setting by the hashes of their configs.

    `twins` are runs whose config another run has, too. `unused` are the runs that `take` has not
    returned so far.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._by_hash: dict[str, Run] = {}
        self.twins: list[Run] = []
        for run in runs:
            config_hash = _config_hash(run.config)
            if config_hash in self._by_hash:
                self.twins.append(run)
            else:
                self._by_hash[config_hash] = run
        self.unused = dict(self._by_hash)

    def take(self, plan: Plan) -> Run | None:
        """Return the run of a plan, which is used from now on; None if there is none."""
        config_hash = _config_hash(plan.config)
        self.unused.pop(config_hash, None)
        return self._by_hash.get(config_hash)

    def summary_of(self, plan: Plan) -> Mapping[str, Any]:
        """Return the summary of the run of a plan, which must be there."""
        return self._by_hash[_config_hash(plan.config)].summary

    def describe_nearest(self, plan: Plan) -> str:
        """Return in words how the unused run at the same seed that is most like a missing run
        differs from it; an empty text if there is no such run."""
        expected = _relevant_values(plan.config)
        fewest = MOST_DIFFERENCES + 1
        text = ""
        for run in self.unused.values():
            values = _relevant_values(run.config)
            all_keys = dict.fromkeys([*expected, *values])
            keys = [key for key in all_keys if expected.get(key) != values.get(key)]
            if run.seed == plan.settings.seed and len(keys) < fewest:
                fewest = len(keys)
                differences = [f"{key}={values.get(key)} for {expected.get(key)}" for key in keys]
                text = f"{run.folder} has {', '.join(differences)}"
        return text


def _add_setting(submission: Submission, setting: str, runs: Sequence[Run]) -> None:
    """Add the runs of a setting to a submission, and a problem for each violated rule.

    A phase of the study depends on the results of those before it. So the check ends with the first
    phase that lacks a run.
    """
    by_config = _RunsByConfig(runs)
    for twin in by_config.twins:
        text = "has the config of another run, except perhaps the device; keep one of them"
        submission.problems.append(f"{twin.folder}: {text}")
    study = Study(setting, [submission.method], [])
    trials: dict[Path, dict[str, Any]] = {}
    faulty_folders: dict[str, list[Path]] = {}
    is_complete = True
    for phase in study.phases(by_config.summary_of):
        for key, jobs in phase.groups.items():
            missing = []
            for plan in outlined(jobs):
                run = by_config.take(plan)
                if run is None:
                    missing.append(plan)
                    continue
                for fault in _faults(run):
                    faulty_folders.setdefault(fault, []).append(run.folder)
                shared = shared_values(run)
                if shared not in submission.digests:
                    submission.digests.append(shared)
                if phase.kind == "scored":
                    submission.scored.append(run)
                elif run.folder not in trials:  # a trial of the defaults belongs to two phases
                    trials[run.folder] = _row_of_trial(setting, study.point_of(phase, key), run)
            if missing:
                is_complete = False
                nearest = by_config.describe_nearest(missing[0])
                submission.problems.append(_describe_missing(setting, key, missing, nearest))
        if not is_complete:
            break
    if is_complete:
        submission.chosen[setting] = study.chosen(submission.method)
    submission.trials += trials.values()
    for fault, folders in faulty_folders.items():
        others = f" and {len(folders) - 1} more" if len(folders) > 1 else ""
        submission.problems.append(f"{folders[0]}{others}: {fault}")


def _describe_missing(setting: str, key: Key, plans: Sequence[Plan], nearest: str) -> str:
    """Return in words which runs of a group are missing. They differ only in their seeds.

    `nearest` describes a run that the user may take for one of them.
    """
    rate = plans[0].config["optimizer"]["lr"]
    seeds = ", ".join(str(plan.settings.seed) for plan in plans)
    text = f"{setting}, {' '.join(key)}: no finished run with optimizer.lr={rate} at seed {seeds}"
    return f"{text}; {nearest}" if nearest else text


def _faults(run: Run) -> Iterator[str]:
    """Yield what is wrong with a run by itself."""
    if fault := fault_of(run.folder, run.config, run.summary):
        yield fault
    final_accuracy = mean_of_last(run.columns["test_accuracy"].tolist(), run.final_window)
    if final_accuracy != run.summary["final_accuracy"]:
        yield f"its records have a final accuracy of {final_accuracy}, and its summary another"
    if hash_config(run.config) != run.summary.get("config_hash"):
        yield "config.yaml does not fit the hash of the config in summary.json"
    if changed_since(run.summary, run.config) or run.summary.get("earlier_code"):
        yield "the code of its class has changed since; run it again"
    if run.histograms is None:
        yield "partition.npz is missing or damaged"
    revision = run.summary.get("revision") or {}
    if not revision.get("commit") or revision.get("dirty"):
        yield "was not run by a committed version of fedsim; run it in a checkout without changes"


def _row_of_trial(setting: str, words: Sequence[str], run: Run) -> dict[str, Any]:
    """Return the row of a trial. `words` are those of its point."""
    diverged = run.status == "diverged"
    return {
        "setting": setting,
        "schedule": run.choices["optimizer/schedule"],
        "num_rounds": run.config["num_rounds"],
        "point": " ".join(words),
        "learning_rate": run.config["optimizer"]["lr"],
        "seed": run.seed,
        "final_accuracy": "diverged" if diverged else run.summary["final_accuracy"],
    }


def shared_values(run: Run) -> dict[str, str]:
    """Return what must be the same in all runs of a setting and seed, whatever their method."""
    histograms = run.histograms  # label counts of the clients [N, C]
    return {
        "setting": run.choices["cell"],
        "seed": str(run.seed),
        "num_classes": "unknown" if histograms is None else str(histograms.shape[1]),
        "config": hash_config(_relevant_values(run.config, KEYS_OF_RUN))[:16],
        "partition": str(run.summary.get("partition_hash"))[:16],
        "data": str((run.summary.get("data") or {}).get("fingerprint")),
    }


def _config_hash(config: Mapping[str, Any]) -> str:
    return hash_config(_relevant_values(config))


def _relevant_values(config: Mapping[str, Any], left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values of a config by dotted key, without `FREE_KEYS` and those `left_out`.

    Without a key, all keys below it are left out, too: "optimizer" stands for "optimizer.lr".
    """
    values = {}
    for key, value in leaves(canonical(config)):
        is_left_out = any(f"{key}.".startswith(f"{name}.") for name in (*FREE_KEYS, *left_out))
        if not is_left_out:
            values[key] = value
    return values
