"""`fedsim show`: a dry run. All jobs that a command line would run, what is there of them, and what they would cost."""

import json
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.commands.text import entries, table, wrap

if TYPE_CHECKING:
    from fedsim.commands.estimate import Estimate
    from fedsim.commands.job_status import JobStatus
    from fedsim.config.compose import Composed
    from fedsim.config.plan import Plan

MOST_SHOWN = 120
"""Jobs in the table without `--all`."""
IN_FOLDER = ("dataset", "partition", "model", "selector", "seed", "preset", "scale", "name")
"""Keys that the name of a run's folder shows."""


def run(words: Sequence[str]) -> int:
    """Show what `fedsim WORDS` would do; the same checks, no work, nothing written. Raises as that would."""
    from fedsim.commands.estimate import estimates
    from fedsim.commands.job_status import status_of
    from fedsim.config import command_line
    from fedsim.config.check import check_jobs
    from fedsim.config.compose import compose_jobs, search_path
    from fedsim.jobs.launchers import own_launcher
    from fedsim.jobs.overwriting import Overwriting
    from fedsim.jobs.room import require_room

    options, args = command_line.read_words(_parser(), words)
    with search_path(args.config_dir, args.config_path):
        jobs = compose_jobs(args.overrides, multirun=args.multirun, config_name=args.config_name or "config")
    plans = check_jobs(jobs)
    own_launcher(jobs[0].launcher)
    plans = [*map(Overwriting(plans).as_found, plans)]
    require_room(plans)
    status = [status_of(plan) for plan in plans]
    costs = estimates(plans, status)
    if options.json:
        found = [_as_json(*one) for one in zip(jobs, plans, status, costs, strict=True)]
        print(json.dumps(found, indent=1, default=str))
        return 0
    own = None if args.config_dir is None else Path(args.config_dir)
    shown = len(plans) if options.all else MOST_SHOWN
    parts = [_preset(jobs, own), _jobs(jobs, plans, status, shown), _totals(plans, status, costs)]
    print("\n\n".join(filter(None, parts)))
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="fedsim show",
        usage="fedsim show [--all] [--json] [words of a run: key=value ..., -m, --config-dir DIR]",
        description="The jobs that the words would run without `show`, what is there already, and estimates of bytes "
        "and time. Nothing is run or written.",
        allow_abbrev=False,
    )
    parser.add_argument("--all", action="store_true", help=f"every job, where there are more than {MOST_SHOWN}")
    parser.add_argument("--json", action="store_true", help="the jobs as JSON")
    return parser


def _preset(jobs: "Sequence[Composed]", own: Path | None) -> str:
    """What the chosen preset is, if there is one."""
    from fedsim.commands.catalogue.choices import Catalogue

    names = {job.choices.get("preset") for job in jobs}
    name = names.pop() if len(names) == 1 else None
    if name is None:
        return ""
    choice = Catalogue(own).group("preset").choices[name]
    facts = [(key, choice.fields[key]) for key in ("cost", "data", "small") if key in choice.fields]
    return "\n".join([f"preset={name}", wrap(choice.head.text, 2), *([entries(facts)] if facts else [])])


def _jobs(jobs: "Sequence[Composed]", plans: "Sequence[Plan]", found: "Sequence[JobStatus]", shown: int) -> str:
    """One row a job: how far it is, and its folder; before them, where that changes, what the name does not show."""
    all_of_them = list(zip(jobs, plans, found, strict=True))
    lines: list[str] = []
    for parent in dict.fromkeys(plan.folder.parent for plan in plans):
        inside = [one for one in all_of_them if one[1].folder.parent == parent]
        lines.append(wrap(f"{len(inside)} job{'s' if len(inside) > 1 else ''} in {parent}"))
        rows = [[p.state, f"{p.round}/{plan.settings.num_rounds}", plan.folder.name] for _, plan, p in inside[:shown]]
        head, rule, *body = table(["state", "rounds", "folder"], rows, right=[1]).splitlines()
        lines += [head, rule]
        before = ""
        for (job, _, status), line in zip(inside, body, strict=False):
            words = ", ".join(_hidden(job, jobs))
            lines += [wrap(words)] if words != before else []
            lines += [line, *([wrap(status.note, 4)] if status.note else [])]
            before = words
        lines += [f"and {len(inside) - shown} more (--all shows them)"] if len(inside) > shown else []
    return "\n".join(lines)


def _hidden(job: "Composed", jobs: "Sequence[Composed]") -> list[str]:
    """Words of a job that differ among the jobs and that its folder's name does not show."""
    common = set.intersection(*(set(other.overrides) for other in jobs))
    return [word for word in job.overrides if word not in common and word.partition("=")[0] not in IN_FOLDER]


def _totals(plans: "Sequence[Plan]", found: "Sequence[JobStatus]", costs: "Sequence[Estimate]") -> str:
    from fedsim.commands.job_status import counts

    rounds = [plan.settings.num_rounds for plan in plans]
    to_come = sum(n - min(p.round, n) for n, p in zip(rounds, found, strict=True))
    rows = [
        ("jobs", f"{len(plans)}: {counts(found)}"),
        ("rounds", f"{to_come:,} to run of {sum(rounds):,}"),
    ]
    if any(not status.ended for status in found):
        rows += [("bytes", _bytes(costs)), ("time", _seconds(costs))]
    return entries(rows, indent=0)


def _bytes(costs: "Sequence[Estimate]") -> str:
    from fedsim.tracking.tables import show_bytes

    known = [cost for cost in costs if cost.bytes_down is not None]
    down, up = sum(c.bytes_down or 0 for c in known), sum(c.bytes_up or 0 for c in known)
    text = f"about {show_bytes(down)} down, {show_bytes(up)} up"
    guessed = sum(not cost.measured for cost in known)
    if len(known) < len(costs):
        unknown = f"{len(costs) - len(known)} jobs whose model's size is known only from their data"
        return f"{text}, without {unknown}" if known else f"not known before {unknown} have begun"
    if not guessed:
        return f"{text}, by finished rounds of the same configs"
    return (
        f"{text}: K models down and up a round for {guessed} job{'s' if guessed > 1 else ''}; what a selector asks of "
        "clients is not in it (fedsim list selectors)"
    )


def _seconds(costs: "Sequence[Estimate]") -> str:
    from fedsim.tracking.tables import show_seconds

    known = [cost.seconds for cost in costs if cost.seconds is not None]
    missing = len(costs) - len(known)
    if missing == len([cost for cost in costs if cost.seconds != 0.0]):
        return "not known until a run of each config has finished"
    text = f"about {show_seconds(sum(known))} one after another, at the speed of finished rounds of the same configs"
    return f"{text}, and {missing} jobs of configs of which none has run" if missing else text


def _as_json(job: "Composed", plan: "Plan", status: "JobStatus", cost: "Estimate") -> Mapping[str, Any]:
    return {
        "folder": plan.folder,
        "overrides": list(job.overrides),
        "state": status.state,
        "round": status.round,
        "num_rounds": plan.settings.num_rounds,
        "estimate": vars(cost),
    }
