"""`fedsim replay`: what many selectors choose on the models of one run, whom they prefer, and how good that is."""

import io
import json
import re
import time
from argparse import ArgumentParser
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from fedsim.config.compose import Composed, check_jobs
from fedsim.config.plan import Plan, make_plan
from fedsim.config.words import read_words
from fedsim.core.configs import flat
from fedsim.core.disk import conf_dir, unwritable, write_files
from fedsim.core.errors import Problem, check, rule
from fedsim.jobs.prepare import compose_words
from fedsim.jobs.sweep import require_room
from fedsim.results.files import OutputError
from fedsim.results.groups import relevant
from fedsim.results.measures import final_accuracy
from fedsim.results.runs import Floats, ReportError, read_runs
from fedsim.results.table import table_files
from fedsim.running.process import STOP
from fedsim.tracking.tables import CONSOLE, show_seconds, show_share, tell_line

LEAD = "random"
Row = Mapping[str, Any]


def run(words: Sequence[str]) -> int:
    """Replay the jobs of the command line. Raises `FedsimError`, with all mistakes before any work is done."""
    options, args = read_words(_parser(), words)
    check(rule(options.cohorts >= 0, "--cohorts", options.cohorts, "must be >= 0"))
    args.multirun = True
    jobs = compose_words(args)
    plans = check_jobs(jobs)
    check(*_problems(jobs, plans))
    seeds: dict[int, dict[str, Plan]] = {}
    for name, plan in zip(method_names(jobs), plans, strict=True):
        seeds.setdefault(plan.settings.seed, {})[name] = plan
    require_room(plans)
    _announce(seeds, options.cohorts)
    with STOP.working():
        _play_all(seeds, options.cohorts)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="fedsim replay",
        usage="fedsim replay [--cohorts M] selector=A,B,... [words of a run: key=value ..., --config-dir DIR]",
        description="Lets every selector of a sweep choose, round after round, on the models of one run of random "
        "selection at each seed; each client trains once a round for all of them. Tells how far they agree, which "
        "clients each prefers, and how the model made of its choice compares with those of random cohorts, by the loss "
        "on the server's validation split. Written to outputs/<name>/replay at the end of each seed; there is no resume.",
        allow_abbrev=False,
    )
    told = "random cohorts a round to compare with (50), all if there are few; 0: none, and not everybody trains"
    parser.add_argument("--cohorts", type=int, default=50, metavar="M", help=told)
    return parser


def _problems(jobs: Sequence[Composed], plans: Sequence[Plan]) -> Iterator[Problem | None]:
    configs = [{k: v for k, v in plan.config.items() if k not in ("selector", "seed")} for plan in plans]
    values = [{key: str(value) for key, value in flat(config)} for config in configs]
    text, remedy = "differs between jobs, which a replay compares at one setting", "sweep over selector and seed alone"
    for key in dict.fromkeys(key for one in values for key in one):
        yield rule(len({one.get(key) for one in values}) == 1, key, ..., text, remedy)
    share = plans[0].server.validation_fraction
    text = "must be > 0: the models of a replay are compared by their loss on the validation split"
    yield rule(share > 0, "server.validation_fraction", share, text, "set it to 0.05, say")
    launcher = str(jobs[0].launcher.get("_target_"))
    text = "must be basic: a replay is one process"
    yield rule(not launcher.startswith("fedsim."), "hydra/launcher", launcher, text, "leave it out")


def method_names(jobs: Sequence[Composed]) -> list[str]:
    """The selector of each job, and the values about selectors that it does not share with all others."""
    own = [[word for word in job.overrides if word.lstrip("+").startswith(("selector.", "selector/"))] for job in jobs]
    shared = set.intersection(*map(set, own))
    told = [[re.sub(r"^[^=]*[./]", "", word) for word in words if word not in shared] for words in own]
    return [", ".join([job.choices["selector"], *words]) for job, words in zip(jobs, told, strict=True)]


def lead_of(plan: Plan) -> Plan:
    """The ordinary run of `plan` with random selection."""
    node = yaml.safe_load((conf_dir() / "selector" / f"{LEAD}.yaml").read_text("utf-8"))
    choices = {group: choice for group, choice in plan.choices.items() if not group.startswith("selector/")}
    return make_plan({**plan.config, "selector": node}, {**choices, "selector": LEAD})


def _announce(seeds: Mapping[int, Mapping[str, Plan]], cohorts: int) -> None:
    methods = next(iter(seeds.values()))
    settings = next(iter(methods.values())).settings
    told = f"replay: {len(methods)} methods on the models of {LEAD} selection, {len(seeds)} seeds, "
    tell_line(f"{told}{settings.num_rounds} rounds, {settings.num_clients} clients")
    price = settings.num_clients / settings.cohort_size
    everybody = (
        f"everybody trains once a round, {price:.3g} times the training of a run; {cohorts} random cohorts are tried"
    )
    tell_line(everybody if cohorts else "who is asked to train does so once a round; no regret without --cohorts")
    tell_line("files are written at the end of each seed; there is no resume")


def _play_all(seeds: Mapping[int, Mapping[str, Plan]], cohorts: int) -> None:
    from fedsim.report.replay import Choices  # here: SciPy's statistics and matplotlib take time to import

    any_seed = next(iter(seeds.values()))
    some, names = next(iter(any_seed.values())), list(any_seed)
    folder, rows, leads, clients = some.folder.parent / "replay", [], [], []
    real = real_accuracies(any_seed, set(seeds), some.folder.parent)
    for seed, methods in seeds.items():
        found = play(seed, methods, cohorts)
        rows, leads, clients = [*rows, *found[0]], [*leads, *found[1]], [*clients, found[2]]
        choices = Choices(names, some.settings.cohort_size, rows, clients, real)
        file, lines = io.BytesIO(), [json.dumps(one) + "\n" for one in leads]
        pq.write_table(pa.Table.from_pylist(rows), file, compression="zstd")
        tables, pictures = choices.tables(), choices.pictures()
        files = {"choices.parquet": file.getvalue(), "lead.jsonl": "".join(lines).encode()}
        try:
            with STOP.deferred():  # not between two files
                write_files(folder, files | table_files(tables) | pictures)
        except OSError as error:
            raise OutputError(unwritable("output_dir", folder, error)) from error
        STOP.raise_if_asked()
    CONSOLE.print(*(table.rich() for table in tables))
    tell_line(f"replay in {folder}")


def play(seed: int, methods: Mapping[str, Plan], cohorts: int) -> tuple[list[Row], list[Row], dict[str, Floats]]:
    """The choices of a seed's methods, the lead's records, and what the clients are like [N] by name."""
    from fedsim.running.replay import Replay

    some = next(iter(methods.values()))
    replay, rows, leads = Replay(lead_of(some), methods, cohorts), [], []
    for _ in range(some.settings.num_rounds):
        begun = time.perf_counter()
        chosen, lead = replay.play()
        rows += [{"seed": seed, **row} for row in chosen]
        leads.append({"seed": seed, **lead.as_dict()})
        told, took = show_share(lead.test_accuracy), show_seconds(time.perf_counter() - begun)
        tell_line(f"  seed {seed}  round {lead.round}/{some.settings.num_rounds}  lead's test accuracy {told}  {took}")
    return rows, leads, replay.clients()


def real_accuracies(methods: Mapping[str, Plan], seeds: Container[int], folder: Path) -> dict[str, list[float]]:
    """The final accuracies of finished runs below `folder` of the same configs at these seeds, by method."""
    names = {_identity(plan.config): name for name, plan in methods.items()}
    found: dict[str, list[float]] = {}
    with suppress(ReportError):  # there are none
        for run in read_runs(folder):
            name, accuracy = names.get(_identity(run.config)), final_accuracy(run)
            if name and run.status == "done" and run.seed in seeds and accuracy is not None:
                found.setdefault(name, []).append(accuracy)
    return found


def _identity(config: Mapping[str, Any]) -> str:
    return json.dumps(relevant(config), sort_keys=True, default=str)
