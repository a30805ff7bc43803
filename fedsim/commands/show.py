"""`fedsim show`: a dry run. All jobs that a command line would run, what is there of them, and what
they would cost.

Nothing is written, no lock is kept. Costs are estimated by the mean round of those that are done.
"""

import json
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.commands.catalogue import Catalogue
from fedsim.commands.dispatch import entries, wrap
from fedsim.config.command_line import read_words
from fedsim.config.job import ComposedJob
from fedsim.config.plan import Plan
from fedsim.jobs.prepare import check_all, compose_words, prepare
from fedsim.results import files
from fedsim.results.files import is_free
from fedsim.running.checkpoint_file import checkpoint_content, header_of
from fedsim.running.outcome import outcome_on_file
from fedsim.tracking.tables import show_bytes, show_seconds


@dataclass(frozen=True)
class JobStatus:
    """How far a job is: `state`, the `round` that it would go on from, and a `note` for people.

    `done` and `diverged` are not run again; `changed` is, as the user's code has changed since, and
    the result that is there is kept under another name; `running` has another process, which is
    waited for; `partial` goes on from its checkpoint; `again` (by overwrite=true), `failed`,
    `interrupted` and `preempted` begin anew; so does `new`.
    """

    state: str
    round: int
    note: str = ""


def status_of(plan: Plan) -> JobStatus:
    found = outcome_on_file(plan)
    if not is_free(plan.folder):
        return JobStatus("running", 0, files.HeldError(plan.folder).holder or "another process")
    if found.final and not plan.settings.overwrite:
        return JobStatus(found.status, int(found.summary["rounds"]))
    place = files.replacement_of(plan.folder) if found.final else plan.folder
    if round := next(
        filter(None, (_round_of(place / name, plan) for name in (files.NEWEST, files.PREVIOUS))), 0
    ):
        return JobStatus("partial", round)
    if found.final or not found.summary:
        return JobStatus("again" if found.final else "new", 0)
    return JobStatus(found.status, 0, str(found.summary.get("error") or ""))


def _round_of(path: Path, plan: Plan) -> int:
    """The round of a checkpoint that the job would go on from, 0 if there is no such checkpoint."""
    try:
        content = dict(
            header_of(checkpoint_content(path))["content"]["dict"]
        )  # a mapping as a checkpoint encodes it
        goes_on = bool(content["overwrite"]) or not plan.settings.overwrite
        return int(dict(content["state"]["dict"])["round"]) if goes_on else 0
    except Exception:  # damage shows itself in many ways; the run itself tells of it
        return 0


MOST_SHOWN = 120
"""Jobs in the table without `--all`."""
IN_FOLDER = ("dataset", "partition", "model", "selector", "seed", "preset", "scale", "name")
"""Keys that the name of a run's folder shows."""


def run(words: Sequence[str]) -> int:
    """Show what `fedsim WORDS` would do; the same checks, those that take time last, no work,
    nothing written. Raises as that would."""
    options, args = read_words(_parser(), words)
    jobs = compose_words(args)
    plans, _ = prepare(jobs)
    status = [status_of(plan) for plan in plans]
    if options.json:
        page = _as_json(jobs, plans, status)
    else:
        shown = len(plans) if options.all else MOST_SHOWN
        parts = [
            _preset(jobs, args.config_dir),
            _jobs(jobs, plans, status, shown),
            _totals(plans, status),
        ]
        page = "\n\n".join(filter(None, parts))
    print(page, flush=True)  # before what takes time
    check_all(jobs, plans)
    return 0


def _as_json(
    jobs: Sequence[ComposedJob], plans: Sequence[Plan], status: Sequence[JobStatus]
) -> str:
    found = [
        {
            **{
                "folder": plan.folder,
                "overrides": list(job.overrides),
                "state": now.state,
                "round": now.round,
            },
            "num_rounds": plan.settings.num_rounds,
        }
        for job, plan, now in zip(jobs, plans, status, strict=True)
    ]
    return json.dumps(found, indent=1, default=str)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="fedsim show",
        usage="fedsim show [--all] [--json] [words of a run: key=value ..., -m, --config-dir DIR]",
        description="The jobs that the words would run without `show`, what is there already, and an estimate of bytes "
        "and time. Nothing is run or written.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--all", action="store_true", help=f"every job, where there are more than {MOST_SHOWN}"
    )
    parser.add_argument("--json", action="store_true", help="the jobs as JSON")
    return parser


def _preset(jobs: Sequence[ComposedJob], own: str | None) -> str:
    """What the preset of the first job is, if it has one."""
    name = jobs[0].choices.get("preset")
    if name is None:
        return ""
    choice = Catalogue(Path(own) if own else None).group("preset").choices[name]
    facts = [(key, choice.fields[key]) for key in ("cost", "data", "small") if key in choice.fields]
    return "\n".join([f"preset={name}", wrap(choice.text, 2), *filter(None, [entries(facts)])])


def _jobs(
    jobs: Sequence[ComposedJob], plans: Sequence[Plan], status: Sequence[JobStatus], shown: int
) -> str:
    """One row a job: how far it is, and its folder; before them, where that changes, what the name
    does not show."""
    everywhere = set.intersection(*(set(job.overrides) for job in jobs))
    lines: list[str] = []
    before: list[str] = []
    for job, plan, now in list(zip(jobs, plans, status, strict=True))[:shown]:
        own = [
            word
            for word in job.overrides
            if word not in everywhere and word.partition("=")[0] not in IN_FOLDER
        ]
        place = [wrap(f"in {plan.folder.parent}"), *filter(None, [wrap(", ".join(own))])]
        lines += [line for line in place if line not in before]
        lines.append(
            f"{now.state:<11}  {f'{now.round}/{plan.settings.num_rounds}':>9}  {plan.folder.name}"
        )
        lines += [wrap(now.note, 4)] if now.note else []
        before = place
    return "\n".join(
        lines + ([f"and {len(jobs) - shown} more (--all shows them)"] if len(jobs) > shown else [])
    )


def _totals(plans: Sequence[Plan], status: Sequence[JobStatus]) -> str:
    rounds = sum(plan.settings.num_rounds for plan in plans)
    left = rounds - sum(
        min(now.round, plan.settings.num_rounds) for plan, now in zip(plans, status, strict=True)
    )
    counts = ", ".join(
        f"{count} {state}" for state, count in Counter(now.state for now in status).items()
    )
    rows = [("jobs", f"{len(plans)}: {counts}"), ("rounds", f"{left:,} to run of {rounds:,}")]
    done = [
        outcome_on_file(plan).summary
        for plan, now in zip(plans, status, strict=True)
        if now.state == "done"
    ]
    if len(done) < len(plans):
        rows.append(
            ("cost", _cost(done, left) if done else "not known until one of the jobs is done")
        )
    return entries(rows, indent=0)


def _cost(done: Sequence[Mapping[str, Any]], left: int) -> str:
    """Of so many rounds that are `left`, if they are as those of the jobs that are `done`, by their
    summaries."""
    share = left / sum(summary["rounds"] for summary in done)
    down, up = (
        share * sum(summary["totals"][f"bytes_{way}"] for summary in done) for way in ("down", "up")
    )
    seconds = share * sum(summary["wall_seconds"] for summary in done)
    text = f"about {show_bytes(down)} down, {show_bytes(up)} up, and {show_seconds(seconds)} one after another"
    return f"{text}, by the rounds of the jobs that are done"
