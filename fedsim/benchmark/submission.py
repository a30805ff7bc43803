"""Gather the runs of a method, and check them against the rules of the benchmark.

The study of a setting (`fedsim.benchmark.study`) composes the runs that there must be, and chooses
rates and points from their trials. A finished run is one of these if its config has the same
values. Only the device may differ, and keys that cannot change a result.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsim.benchmark.reader import method_of
from fedsim.benchmark.rules import CONTROLS, FREE_KEYS, PRESET
from fedsim.benchmark.study import Key, Study, method_words
from fedsim.config.compose import outlined
from fedsim.config.plan import Plan, hash_config
from fedsim.config.user_code import changed_since
from fedsim.core.configs import canonical, leaves
from fedsim.core.record import mean_of_last
from fedsim.results.reading import FINAL, DamagedError, read_config, read_summary
from fedsim.results.runs import ReportError, Run, read_runs
from fedsim.results.wholeness import fault_of

KEYS_OF_METHOD = (
    "selector",
    "optimizer.lr",
    "optimizer.schedule",
    "num_rounds",
    "seed",
    "test_on",
    "local.holdout_fraction",
)
"""Further config keys in which the runs of a setting differ."""
MOST_DIFFERENCES = 4
"""A run that differs from a missing one in more values is not mentioned."""


@dataclass
class Submission:
    """The runs of a method, and what is wrong with them.

    `trials` has a row for each trial. `chosen` has the rates and the point of each setting.
    `digests` has a row (`digest_of`) for each setting and seed. `problems` are texts.
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
            with suppress(DamagedError):  # it is reported with the other runs of the method
                methods[method_of(choices["selector"], read_config(path.parent))] = None
    return list(methods)


def gather(method: str, folder: Path, settings: Sequence[str]) -> Submission:
    """Return the submission of a method from the runs below a folder.

    `settings` are those to submit; if there are none, all that occur. Must be called inside
    `search_path`.
    """
    submission = Submission(method)
    runs: dict[str, list[Run]] = {setting: [] for setting in settings}
    for run in _read(method, folder, submission.problems):
        setting = run.choices["cell"]
        if not settings or setting in settings:
            runs.setdefault(setting, []).append(run)
    for setting, of_setting in runs.items():
        if settings or method in map(name_of, of_setting):
            _add_setting(submission, setting, of_setting)
    return submission


def name_of(run: Run) -> str:
    """Return the name of a run's method."""
    return method_of(run.choices["selector"], run.config)


def _read(method: str, folder: Path, problems: list[str]) -> Iterator[Run]:
    """Yield the finished runs of a method, and of the method whose rates it has.

    Damaged runs are added to `problems`.
    """
    for name in (method, "random") if method in CONTROLS else (method,):
        selector = method_words(name)[0].partition("=")[2]
        try:
            runs = read_runs(folder, problems, f"*-{Path(selector).name}-s*")
        except ReportError:  # no runs: they are reported as missing
            runs = []
        for run in runs:
            is_set_aside = "-code-" in run.folder.name  # a result of other code of the user's
            is_of_benchmark = {"cell", "preset"} <= run.choices.keys() and not is_set_aside
            if is_of_benchmark and name_of(run) == name and run.status in FINAL:
                yield run


class _Runs:
    """The runs of a setting, found by their configs. `unused` are those that nobody looked for."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.by_digest = {_digest(run.config): run for run in runs}
        self.unused = dict(self.by_digest)

    def find(self, plan: Plan) -> Run | None:
        """Return the run of a plan; None if there is none."""
        digest = _digest(plan.config)
        self.unused.pop(digest, None)
        return self.by_digest.get(digest)

    def summary_of(self, plan: Plan) -> Mapping[str, Any]:
        """Return the summary of the run of a plan, which must be there."""
        return self.by_digest[_digest(plan.config)].summary

    def nearest(self, plan: Plan) -> str:
        """Return in words which unused run at the same seed is most like a missing one, if any."""
        expected = _values(plan.config)
        texts = []
        for run in self.unused.values():
            values = _values(run.config)
            keys = [key for key in expected | values if expected.get(key) != values.get(key)]
            differences = [f"{key}={values.get(key)} for {expected.get(key)}" for key in keys]
            if run.seed == plan.settings.seed and len(keys) <= MOST_DIFFERENCES:
                texts.append((len(keys), f"; {run.folder} has {', '.join(differences)}"))
        return min(texts, default=(0, ""))[1]


def _add_setting(submission: Submission, setting: str, runs: Sequence[Run]) -> None:
    """Add the runs of a setting to a submission, and a problem for each violated rule."""
    found = _Runs(runs)
    for twin in set(runs) - set(found.by_digest.values()):
        text = "has the config of another run, but perhaps for the device; keep one of them"
        submission.problems.append(f"{twin.folder}: {text}")
    study = Study(setting, [submission.method], [])
    trials: dict[Path, dict[str, Any]] = {}
    faulty: dict[str, list[Path]] = {}
    for phase in study.phases(found.summary_of):
        missing: dict[Key, list[Plan]] = {}
        for key, jobs in phase.groups.items():
            for plan in outlined(jobs):
                run = found.find(plan)
                if run is None:
                    missing.setdefault(key, []).append(plan)
                    continue
                for fault in _faults(run):
                    faulty.setdefault(fault, []).append(run.folder)
                digest = digest_of(run)
                if digest not in submission.digests:
                    submission.digests.append(digest)
                if phase.kind == "scored":
                    submission.scored.append(run)
                else:  # a trial of the defaults belongs to two phases
                    trials.setdefault(run.folder, _trial(setting, study.point_of(phase, key), run))
        for key, plans in missing.items():
            text = f"no finished run with optimizer.lr={plans[0].config['optimizer']['lr']}"
            seeds = ", ".join(str(plan.settings.seed) for plan in plans)
            nearest = found.nearest(plans[0])
            submission.problems.append(
                f"{setting}, {' '.join(key)}: {text} at seed {seeds}{nearest}"
            )
        if missing:
            break  # without them nothing can be chosen
    else:
        submission.chosen[setting] = study.chosen(submission.method)
    submission.trials += trials.values()
    for fault, folders in faulty.items():
        others = f" and {len(folders) - 1} more" if len(folders) > 1 else ""
        submission.problems.append(f"{folders[0]}{others}: {fault}")


def _faults(run: Run) -> Iterator[str]:
    """Yield what is wrong with a run by itself."""
    if fault := fault_of(run.folder, run.config, run.summary):
        yield fault
    final_accuracy = mean_of_last(run.columns["test_accuracy"].tolist(), run.final_window)
    if final_accuracy != run.summary["final_accuracy"]:
        yield f"its records have a final accuracy of {final_accuracy}, and its summary another"
    if hash_config(run.config) != run.summary.get("config_hash"):
        yield "its config is not the one that it was run with"
    if changed_since(run.summary, run.config) or run.summary.get("earlier_code"):
        yield "the code of its class has changed since; run it again"
    if run.histograms is None:
        yield "partition.npz is missing or damaged"
    revision = run.summary.get("revision") or {}
    if not revision.get("commit") or revision.get("dirty"):
        yield "was not run by a commit of fedsim; run it in a checkout without changes"


def _trial(setting: str, words: Sequence[str], run: Run) -> dict[str, Any]:
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


def digest_of(run: Run) -> dict[str, str]:
    """Return what all runs of a setting and seed have in common, whatever their method."""
    histograms = run.histograms
    return {
        "setting": run.choices["cell"],
        "seed": str(run.seed),
        "num_classes": "unknown" if histograms is None else str(histograms.shape[1]),
        "config": hash_config(_values(run.config, KEYS_OF_METHOD))[:16],
        "partition": str(run.summary.get("partition_hash"))[:16],
        "data": str((run.summary.get("data") or {}).get("fingerprint")),
    }


def _digest(config: Mapping[str, Any]) -> str:
    return hash_config(_values(config))


def _values(config: Mapping[str, Any], left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values of a config by dotted key, without `FREE_KEYS` and those `left_out`."""
    values = {}
    for key, value in leaves(canonical(config)):
        is_left_out = any(f"{key}.".startswith(f"{name}.") for name in (*FREE_KEYS, *left_out))
        if not is_left_out:
            values[key] = value
    return values
