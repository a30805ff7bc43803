"""`fedsim show`: a dry run. All jobs that a command line would run, what is there of them, and what they would cost.

Nothing is written, no lock is kept. Costs are estimated by the mean of a round of finished runs with the same config
but for seed and number of rounds. Where there is none, bytes are those of K models down and K up, which every method
pays, and seconds are not known: a rate would depend on the machine, the engine and what else runs on it.
"""

import json
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from fedsim.commands.catalogue import Catalogue
from fedsim.commands.dispatch import entries, table, wrap
from fedsim.config.build import instantiate
from fedsim.config.compose import Composed
from fedsim.config.plan import Plan
from fedsim.config.words import read_words
from fedsim.core.configs import IRRELEVANT, SEEDS
from fedsim.data.base import Dataset
from fedsim.engine.model import initial
from fedsim.jobs.prepare import compose_words, prepare
from fedsim.results.files import (
    CONFIG,
    FINAL,
    NEWEST,
    PREVIOUS,
    SUMMARY,
    HeldError,
    is_free,
    json_ready,
    read_metrics,
    read_summary,
    replacement_of,
)
from fedsim.running.checkpoint import unpack
from fedsim.running.outcome import outcome_on_file
from fedsim.tracking.tables import show_bytes, show_seconds


@dataclass(frozen=True)
class JobStatus:
    """How far a job is: `state`, the `round` that it would go on from, and a `note` for people.

    `done` and `diverged` are not run again; `running` has another process, which is waited for; `partial` goes on from
    its checkpoint; `again` (by overwrite=true), `failed`, `interrupted` and `preempted` begin anew; so does `new`.
    """

    state: str
    round: int
    note: str = ""

    @property
    def ended(self) -> bool:
        return self.state in FINAL


def status_of(plan: Plan) -> JobStatus:
    """Look at the folder of a job."""
    found = outcome_on_file(plan)
    replacement = read_summary(replacement_of(plan.folder)) or {}
    if not is_free(plan.folder):
        return JobStatus("running", 0, str(HeldError(plan.folder).holder or "another process"))
    if replacement.get("status") in FINAL:  # complete, but for being put into its place
        return JobStatus(str(replacement["status"]), plan.settings.num_rounds)
    if found.final and not plan.settings.overwrite:
        return JobStatus(found.status, int(found.summary.get("rounds", plan.settings.num_rounds)))
    place = replacement_of(plan.folder) if found.final else plan.folder
    round = next(filter(None, (_round_of(place / name, plan) for name in (NEWEST, PREVIOUS))), 0)
    if round:
        return JobStatus("partial", round)
    if found.final:
        return JobStatus("again", 0)
    summary = read_summary(plan.folder)
    return JobStatus("new" if summary is None else str(summary["status"]), 0, str((summary or {}).get("error") or ""))


def _round_of(path: Path, plan: Plan) -> int:
    """The round of a checkpoint that the job would go on from, 0 if there is no such checkpoint."""
    try:
        header, _ = unpack(path.read_bytes())
        content = dict(header["content"]["dict"])  # a mapping as a checkpoint encodes it
        goes_on = bool(content["overwrite"]) or not plan.settings.overwrite
        return int(dict(content["state"]["dict"])["round"]) if goes_on else 0
    except Exception:  # damage shows itself in many ways; the run itself tells of it
        return 0


NOT_COMPARED = (*IRRELEVANT, *SEEDS, "num_rounds")
"""Top-level keys in which a run may differ whose rounds are taken for those of a job."""
MOST_READ = 20
"""Finished runs that are looked at, of each data set, partition, model and selector."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Estimate:
    """What a job would still take, or the mean of a round; None where that is not known.

    `measured`: by finished runs; else bytes are K models both ways.
    """

    bytes_down: float | None
    bytes_up: float | None
    seconds: float | None
    measured: bool

    def times(self, rounds: int) -> "Estimate":
        down, up, seconds = (
            None if one is None else rounds * one for one in (self.bytes_down, self.bytes_up, self.seconds)
        )
        return Estimate(down, up, seconds, self.measured)


def estimates(plans: Sequence[Plan], status: Sequence[JobStatus]) -> list[Estimate]:
    """One for each job, of the rounds that are still to come."""
    pairs = list(zip(plans, status, strict=True))
    known = _rates_on_file([plan for plan, found in pairs if not found.ended])

    def estimate(plan: Plan, found: JobStatus) -> Estimate:
        if found.ended:
            return Estimate(0.0, 0.0, 0.0, True)
        rate = known.get(_likeness(json_ready(plan.config))) or _rate_so_far(plan) or _least_rate(plan)
        return rate.times(plan.settings.num_rounds - found.round)

    return [estimate(plan, found) for plan, found in pairs]


def _rates_on_file(plans: Iterable[Plan]) -> dict[str, Estimate]:
    """The means over the finished runs beside `plans`, by what they have in common with other runs."""
    kinds = {(plan.folder.parent, _kind(plan.folder.name)) for plan in plans}
    places = [p for parent in {parent for parent, _ in kinds} for p in sorted(parent.glob(f"*/{SUMMARY}"))]
    read: Counter[tuple[Path, str]] = Counter()
    found: dict[str, list[Estimate]] = {}
    for folder in (place.parent for place in places):
        kind = (folder.parent, _kind(folder.name))
        read[kind] += 1
        if kind not in kinds or read[kind] > MOST_READ:
            continue
        with suppress(Exception):  # whatever a damaged record is like, it is no reason not to estimate
            config = yaml.load((folder / CONFIG).read_text(encoding="utf-8"), LOADER)
            summary = read_summary(folder) or {}
            if summary.get("status") == "done" and (rounds := summary.get("rounds")):
                down, up = (summary["totals"][name] / rounds for name in ("bytes_down", "bytes_up"))
                rate = Estimate(down, up, summary["wall_seconds"] / rounds, True)
                found.setdefault(_likeness(config), []).append(rate)
    return {key: _mean(rates) for key, rates in found.items()}


def _kind(name: str) -> str:
    """The part of a folder's name that does not depend on seed and hash."""
    return name.rpartition("-")[0].rpartition("-")[0]


def _likeness(config: Mapping[str, Any]) -> str:
    return json.dumps({k: v for k, v in config.items() if k not in NOT_COMPARED}, sort_keys=True, default=str)


def _rate_so_far(plan: Plan) -> Estimate | None:
    """Of the rounds that the job itself has run before it was interrupted."""
    with suppress(Exception):
        records = read_metrics(plan.folder)
        down, up = (sum(r[name] for r in records) / len(records) for name in ("bytes_down", "bytes_up"))
        return Estimate(down, up, records[-1]["wall_seconds"] / len(records), True)
    return None


def _mean(rates: Sequence[Estimate]) -> Estimate:
    names = ("bytes_down", "bytes_up", "seconds")
    down, up, seconds = (sum(getattr(rate, name) for rate in rates) / len(rates) for name in names)
    return Estimate(down, up, seconds, True)


def _least_rate(plan: Plan) -> Estimate:
    """K models down and up a round, where the size of the model is known without reading data."""
    key = json.dumps([plan.config["dataset"], plan.config["model"]], sort_keys=True, default=str)
    size = _model_bytes(key)
    selected = min(plan.settings.cohort_size, plan.settings.num_clients)
    total = None if size is None else size * selected
    return Estimate(total, total, None, False)


@cache
def _model_bytes(key: str) -> int | None:
    """Bytes of the model's parameters, without memory for them; None if its shape depends on files of the data set."""
    dataset_node, model_node = json.loads(key)
    with suppress(Exception):  # a user's class may raise anything
        form = instantiate(dataset_node, Dataset, "dataset", Path(), Path()).form()
        if form is not None:
            with torch.device("meta"):
                model = instantiate(model_node, nn.Module, "model", *form)
            return sum(t.numel() * t.element_size() for t in initial(model).values())
    return None


MOST_SHOWN = 120
"""Jobs in the table without `--all`."""
IN_FOLDER = ("dataset", "partition", "model", "selector", "seed", "preset", "scale", "name")
"""Keys that the name of a run's folder shows."""


def run(words: Sequence[str]) -> int:
    """Show what `fedsim WORDS` would do; the same checks, no work, nothing written. Raises as that would."""
    options, args = read_words(_parser(), words)
    jobs = compose_words(args)
    plans = prepare(jobs).plans
    status = [status_of(plan) for plan in plans]
    costs = estimates(plans, status)
    if options.json:
        found = [
            {
                "folder": plan.folder,
                "overrides": list(job.overrides),
                "state": now.state,
                "round": now.round,
                "num_rounds": plan.settings.num_rounds,
                "estimate": vars(cost),
            }
            for job, plan, now, cost in zip(jobs, plans, status, costs, strict=True)
        ]
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


def _preset(jobs: Sequence[Composed], own: Path | None) -> str:
    """What the chosen preset is, if there is one."""
    names = {job.choices.get("preset") for job in jobs}
    name = names.pop() if len(names) == 1 else None
    if name is None:
        return ""
    choice = Catalogue(own).group("preset").choices[name]
    facts = [(key, choice.fields[key]) for key in ("cost", "data", "small") if key in choice.fields]
    return "\n".join([f"preset={name}", wrap(choice.head.text, 2), *([entries(facts)] if facts else [])])


def _jobs(jobs: Sequence[Composed], plans: Sequence[Plan], found: Sequence[JobStatus], shown: int) -> str:
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


def _hidden(job: Composed, jobs: Sequence[Composed]) -> list[str]:
    """Words of a job that differ among the jobs and that its folder's name does not show."""
    common = set.intersection(*(set(other.overrides) for other in jobs))
    return [word for word in job.overrides if word not in common and word.partition("=")[0] not in IN_FOLDER]


def _totals(plans: Sequence[Plan], found: Sequence[JobStatus], costs: Sequence[Estimate]) -> str:
    rounds = [plan.settings.num_rounds for plan in plans]
    to_come = sum(n - min(p.round, n) for n, p in zip(rounds, found, strict=True))
    states = Counter(status.state for status in found)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    rows = [("jobs", f"{len(plans)}: {counts}"), ("rounds", f"{to_come:,} to run of {sum(rounds):,}")]
    if any(not status.ended for status in found):
        rows += [("bytes", _bytes(costs)), ("time", _seconds(costs))]
    return entries(rows, indent=0)


def _bytes(costs: Sequence[Estimate]) -> str:
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


def _seconds(costs: Sequence[Estimate]) -> str:
    known = [cost.seconds for cost in costs if cost.seconds is not None]
    missing = len(costs) - len(known)
    if missing == len([cost for cost in costs if cost.seconds != 0.0]):
        return "not known until a run of each config has finished"
    text = f"about {show_seconds(sum(known))} one after another, at the speed of finished rounds of the same configs"
    return f"{text}, and {missing} jobs of configs of which none has run" if missing else text
