"""`fedsim replay`: let many selectors choose on the models of one run, and compare their
choices."""

import hashlib
import json
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedsim.commands.replay_analysis import ReplayAnalysis
from fedsim.config.command_line import read_words
from fedsim.config.compose import check_jobs, make_plan
from fedsim.config.job import ComposedJob
from fedsim.config.plan import Plan
from fedsim.config.words import dotted_key
from fedsim.core.arrays import Floats
from fedsim.core.configs import leaves
from fedsim.core.disk import conf_dir, unwritable, write_files
from fedsim.core.errors import Problem, at_least, check, rule
from fedsim.jobs.prepare import check_files, compose_words
from fedsim.report.table import Table, table_files
from fedsim.results.files import OutputError
from fedsim.results.reading import FINISHED
from fedsim.running.outcome import outcome_on_file
from fedsim.running.process import STOP
from fedsim.tracking.tables import CONSOLE, print_line, show_share

LEAD_SELECTOR = "random"
"""The selector of the lead, the run whose models all methods choose on."""
CHOICES = "choices.jsonl"
"""The file of all choices of a replay, one a line."""
PlansBySeed = Mapping[int, Mapping[str, Plan]]
"""The plans of a replay by seed and method: `{0: {"gpfl": <plan>, "pncs": <plan>}, 1: ...}`. All
seeds have the same methods."""


def run(words: Sequence[str]) -> int:
    """Replay the jobs of the command line.

    Raises `FedsimError`, with all mistakes before any work is done.
    """
    options, args = read_words(_parser(), words)
    check(at_least("--cohorts", options.cohorts, 1))
    args.multirun = True
    jobs = compose_words(args)
    plans = check_jobs(jobs)
    check(*_problems(jobs, plans))
    check_files(plans)
    plans_by_seed: dict[int, dict[str, Plan]] = {}
    for name, plan in zip(method_names(jobs), plans, strict=True):
        plans_by_seed.setdefault(plan.settings.seed, {})[name] = plan
    with STOP.working():
        _play_all(plans_by_seed, options.cohorts)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="fedsim replay",
        usage="fedsim replay [--cohorts M] selector=A,B,... "
        "[words of a run: key=value ..., --config-dir DIR]",
        description="What the selectors of a sweep choose on the models of one run of random "
        "selection, and how good that is.",
        allow_abbrev=False,
    )
    cohorts_help = "random cohorts a round to compare with (50)"
    parser.add_argument("--cohorts", type=int, default=50, metavar="M", help=cohorts_help)
    return parser


def _problems(jobs: Sequence[ComposedJob], plans: Sequence[Plan]) -> Iterator[Problem | None]:
    """Yield the problems of jobs that cannot be replayed, and None for each rule that they keep."""
    values_by_key: dict[str, set[str]] = {}
    for plan in plans:
        config = {key: plan.config[key] for key in plan.config if key not in ("selector", "seed")}
        for key, value in leaves(config):
            values_by_key.setdefault(key, set()).add(str(value))
    text = "differs between jobs, and a replay has one setting"
    for key, values in values_by_key.items():
        yield rule(len(values) == 1, key, ..., text, "sweep over selector and seed alone")
    share = plans[0].server.validation_fraction
    text = "must be > 0 for a replay, which compares losses on that split"
    yield rule(share > 0, "server.validation_fraction", share, text, "set it to 0.05, say")
    launcher = str(jobs[0].launcher.get("_target_"))
    text = "must be basic for a replay, which is one process"
    yield rule(not launcher.startswith("fedsim."), "hydra/launcher", launcher, text)


def method_names(jobs: Sequence[ComposedJob]) -> list[str]:
    """Return the name of each job's method: its selector, and the values that not all jobs share.

    The jobs of `selector=gpfl selector.rho=1,2 selector.metric=dot` are `gpfl, rho=1` and
    `gpfl, rho=2`.
    """
    words_by_job = []
    for job in jobs:
        words = [word for word in job.overrides if dotted_key(word).startswith("selector.")]
        words_by_job.append(words)
    common = set.intersection(*map(set, words_by_job))
    names = []
    for job, words in zip(jobs, words_by_job, strict=True):
        parts = [job.names["selector"]]
        for word in words:
            if word not in common:
                last_name = dotted_key(word).rpartition(".")[2]
                parts.append(f"{last_name}={word.partition('=')[2]}")
        names.append(", ".join(parts))
    return names


def lead_of(plan: Plan) -> Plan:
    """Return the plan of the same run with random selection."""
    text = (conf_dir() / "selector" / f"{LEAD_SELECTOR}.yaml").read_text("utf-8")
    config = dict(plan.config, selector=yaml.safe_load(text))
    choices = {key: plan.choices[key] for key in plan.choices if not key.startswith("selector/")}
    choices["selector"] = LEAD_SELECTOR
    return make_plan(config, choices)


def first_of(plans_by_seed: PlansBySeed) -> Mapping[str, Plan]:
    """Return the plans of the first seed by method."""
    return next(iter(plans_by_seed.values()))


def folder_of(plans_by_seed: PlansBySeed, num_cohorts: int) -> Path:
    """Return the folder of a replay, next to the folders of its runs.

    Its name has a hash of everything that decides the replay, so that no other replay has this
    folder.
    """
    jobs = []
    for seed, plans in plans_by_seed.items():
        for method, plan in plans.items():
            jobs.append([seed, method, plan.config_hash])
    replayed = json.dumps([num_cohorts, jobs])
    digits = hashlib.sha256(replayed.encode()).hexdigest()[:8]
    plan, *_ = first_of(plans_by_seed).values()
    return plan.folder.parent / f"replay-{digits}"


def num_choices_in(folder: Path) -> int:
    """Return the number of choices that an earlier replay has left in its folder."""
    path = folder / CHOICES
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _play_all(plans_by_seed: PlansBySeed, num_cohorts: int) -> None:
    """Play seed after seed, and write the files of all seeds so far after each of them.

    Files that the same command has left before stay until this replay has as many choices.
    """
    folder = folder_of(plans_by_seed, num_cohorts)
    num_earlier_choices = num_choices_in(folder)
    accuracies = real_accuracies(plans_by_seed)
    _print_beginning(plans_by_seed)
    if num_earlier_choices:
        print_line(f"{folder} has results of this replay; they stay until this one has as many")

    rows: list[dict[str, Any]] = []
    clients: list[dict[str, Floats]] = []
    for seed, plans in plans_by_seed.items():
        new_rows, properties = _play_seed(seed, plans, num_cohorts)
        rows += new_rows
        clients.append(properties)
        analysis = ReplayAnalysis(list(plans), rows, clients)
        tables = analysis.tables(accuracies)
        if len(rows) >= num_earlier_choices:
            _write(folder, rows, analysis, tables)
        STOP.raise_if_asked()
    CONSOLE.print(*tables[:2])
    print_line(f"replay in {folder}")


def _print_beginning(plans_by_seed: PlansBySeed) -> None:
    """Print how much work the replay is."""
    first_plans = first_of(plans_by_seed)
    plan, *_ = first_plans.values()
    settings = plan.settings
    cost = f"{settings.num_clients / settings.cohort_size:.3g} times a run's"
    print_line(
        f"replay: {len(first_plans)} methods, {len(plans_by_seed)} seeds, "
        f"{settings.num_rounds} rounds; "
        f"all {settings.num_clients} clients train once a round, {cost}"
    )
    print_line("files are written at the end of each seed; a replay that is stopped cannot resume")


def _play_seed(
    seed: int, plans: Mapping[str, Plan], num_cohorts: int
) -> tuple[list[dict[str, Any]], dict[str, Floats]]:
    """Play all rounds of a seed. Return its rows of choices.jsonl, and properties of the clients.

    The rows are in the order of rounds, then of methods (`Replay.play`). The properties are arrays
    by name (`Replay.clients`).
    """
    from fedsim.running.replay import Replay  # imports PyTorch

    plan, *_ = plans.values()
    num_rounds = plan.settings.num_rounds
    replay = Replay(lead_of(plan), plans, num_cohorts)
    rows = []
    for _ in range(num_rounds):
        choices, lead_record = replay.play()
        for choice in choices:
            rows.append({"seed": seed} | choice)
        accuracy = f"lead's test accuracy {show_share(lead_record.test_accuracy)}"
        print_line(f"  seed {seed}  round {lead_record.round}/{num_rounds}  {accuracy}")
    return rows, replay.clients()


def _write(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    analysis: ReplayAnalysis,
    tables: Sequence[Table],
) -> None:
    """Write all files of a replay. A signal ends the process only after the last one."""
    from fedsim.commands.replay_plots import plots  # imports matplotlib
    from fedsim.report.drawing import save, style

    figures = plots(analysis)
    files = table_files(tables)
    files[CHOICES] = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    try:
        with STOP.deferred(), style():
            write_files(folder, files)
            save(figures, folder)
    except OSError as error:
        raise OutputError(unwritable("output_dir", folder, error)) from error


def real_accuracies(plans_by_seed: PlansBySeed) -> dict[str, list[float]]:
    """Return the final accuracies of ordinary runs by method: `{"gpfl": [0.91, 0.93]}`.

    Methods without a finished run are left out, and so are seeds at which one of the other methods
    has no such run.
    """
    accuracies: dict[str, dict[int, float]] = {}
    for seed, plans in plans_by_seed.items():
        for name, plan in plans.items():
            outcome = outcome_on_file(plan)
            accuracy = outcome.summary.get("final_accuracy")
            if outcome.status in FINISHED and accuracy is not None:
                accuracies.setdefault(name, {})[seed] = accuracy
    common = [seed for seed in plans_by_seed if all(seed in runs for runs in accuracies.values())]
    if not common:
        return {}
    return {name: [runs[seed] for seed in common] for name, runs in accuracies.items()}
