"""`fedsim show`: a dry run that prints the jobs of a command line, their states and their costs.

It takes no lock. It writes only a picture of who holds which labels, if the words choose data or a
partition. It estimates costs by the mean round of the jobs that are done.
"""

import json
import re
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.commands.catalogue import Choice
from fedsim.commands.layout import entries, wrap
from fedsim.config.command_line import read_words
from fedsim.config.job import ComposedJob
from fedsim.config.plan import Plan
from fedsim.core.arrays import Ints
from fedsim.core.disk import unwritable
from fedsim.core.errors import DataError
from fedsim.core.text import spanned
from fedsim.jobs.prepare import check_all, compose_words, prepare
from fedsim.results import files
from fedsim.results.reading import FINAL
from fedsim.running.checkpoint_file import checkpoint_content, header_of
from fedsim.running.outcome import outcome_on_file
from fedsim.tracking.tables import show_bytes, show_seconds

MAX_SHOWN = 120
"""Maximum number of jobs in the table without `--all`."""
DIVISION_GROUPS = {"dataset", "partition"}
"""Config groups of the division of data. The picture is drawn if one of them is in the words."""
PICTURE = "partitions"
"""The name of the picture's files, which `labels_plot` gives them."""
MAX_DIVISIONS = 6
"""Maximum number of panels in the picture."""
FOLDER_KEYS = ("dataset", "partition", "model", "selector", "seed", "preset", "scale", "name")
"""Keys that the name of a run's folder shows."""


@dataclass(frozen=True)
class JobStatus:
    """The state of a job, the `round` that it would resume from, and a `note` for the user.

    - `done`, `reached` (the accuracy `stop_at`), `diverged`: the job is not run again.
    - `changed`: the user's code has changed; the job is run again, and the old result is kept.
    - `running`: another process runs it.
    - `partial`: it resumes from a checkpoint.
    - `again` (by overwrite=true), `failed`, `interrupted`, `preempted`, `new`: it begins anew.
    """

    state: str
    round: int
    note: str = ""


@dataclass(frozen=True)
class ShownJob:
    """A job with its plan and its status.

    `overrides` are all its words, and `own_overrides` those that some other job does not have.
    """

    plan: Plan
    overrides: Sequence[str]
    own_overrides: Sequence[str]
    status: JobStatus

    @property
    def num_rounds(self) -> int:
        return self.plan.settings.num_rounds

    @property
    def has_ended(self) -> bool:
        """True if the job is not run again. It may have ended before its last round."""
        return self.status.state in FINAL


def status_of(plan: Plan) -> JobStatus:
    """Return the state of a job, from its lock and the files in its folder."""
    outcome = outcome_on_file(plan)
    if not files.is_free(plan.folder):
        return JobStatus("running", 0, files.holder_of(plan.folder) or "another process")
    if outcome.final and not plan.settings.overwrite:
        return JobStatus(outcome.status, int(outcome.summary["rounds"]))
    # A result that is to be overwritten stays until its replacement next to it is complete.
    folder = files.replacement_of(plan.folder) if outcome.final else plan.folder
    for name in (files.NEWEST, files.PREVIOUS):
        round = _round_of(folder / name, plan)
        if round > 0:
            return JobStatus("partial", round)
    if outcome.final:
        return JobStatus("again", 0)
    if not outcome.summary:
        return JobStatus("new", 0)
    return JobStatus(outcome.status, 0, str(outcome.summary.get("error") or ""))


def _round_of(path: Path, plan: Plan) -> int:
    """Return the round of a checkpoint that the job would resume from; 0 if there is none."""
    try:
        encoded = header_of(checkpoint_content(path))["content"]
        content = dict(encoded["dict"])  # a dictionary is encoded as its items
        if not content["overwrite"] and plan.settings.overwrite:
            return 0  # it is of the run that is to be overwritten
        state = dict(content["state"]["dict"])
        return int(state["round"])
    except Exception:  # a damaged file raises many exceptions; the run itself reports it
        return 0


def run(words: Sequence[str]) -> int:
    """Print what `fedsim WORDS` would do. Raises the errors that it would raise before round 1.

    The checks that take time come last, after the page and the picture. These are printed also if
    another part of the config, such as the model, is wrong.
    """
    options, args = read_words(_parser(), words)
    jobs = compose_words(args)
    plans, _ = prepare(jobs)
    common = set.intersection(*(set(job.overrides) for job in jobs))
    shown = []
    for job, plan in zip(jobs, plans, strict=True):
        own_overrides = [word for word in job.overrides if word not in common]
        shown.append(ShownJob(plan, job.overrides, own_overrides, status_of(plan)))
    if options.json:
        page = _json_page(shown)
    else:
        max_shown = len(shown) if options.all else MAX_SHOWN
        parts = [_preset(jobs[0]), _table(shown, max_shown), _totals(shown)]
        page = "\n\n".join(filter(None, parts))
    print(page, flush=True)
    if not options.json and any(_first_part(word) in DIVISION_GROUPS for word in args.overrides):
        try:
            _draw(shown)
        except Exception:
            check_all(jobs, plans)  # if configs are wrong, it raises all their mistakes at once
            raise
    check_all(jobs, plans)
    return 0


def _first_part(word: str) -> str:
    """Return the first part of the key of a word: `partition` of `partition.alpha=1`."""
    return re.split(r"[.=]", word)[0]


def _draw(shown: Sequence[ShownJob]) -> None:
    """Print and draw who holds which labels, with a panel for each division of the data.

    The title of a panel has the words of the first job with its division, without those that are
    the same for all panels. An earlier picture is deleted. Nothing is drawn if data cannot be read.
    """
    from fedsim.report.client_figures import labels_plot  # these import matplotlib
    from fedsim.report.drawing import save, style
    from fedsim.running.assembly import Divider, division_key  # imports PyTorch

    folder = shown[0].plan.folder.parent / "show"
    for file in folder.glob(f"{PICTURE}.*"):
        file.unlink()
    first_jobs: dict[str, ShownJob] = {}
    for job in shown:
        first_jobs.setdefault(division_key(job.plan), job)
    common = set.intersection(*(set(job.overrides) for job in first_jobs.values()))
    histograms: dict[str, Ints] = {}
    divider = Divider()
    for job in list(first_jobs.values())[:MAX_DIVISIONS]:
        title = " ".join(word for word in job.overrides if word not in common)
        try:
            histograms[title] = divider.division_of(job.plan).histograms
        except DataError as error:
            print(f"\n{wrap(f'no picture of who holds which labels: {error}')}")
            return
        text = _sizes_and_labels(histograms[title])
        print(f"\n{wrap(f'{title}: {text}' if title else text)}")
    try:
        with style():
            save([labels_plot(histograms)], folder)
    except OSError as error:
        raise files.OutputError(unwritable("output_dir", folder, error)) from error
    picture = folder / f"{PICTURE}.png"
    print(f"\n{wrap(f'who holds which labels: {picture} (also .pdf, .svg and .csv)')}")


def _sizes_and_labels(histograms: Ints) -> str:
    """Return in words how many samples and labels clients hold, by their `histograms` [N, C]."""
    sizes = np.sort(histograms.sum(1))
    labels = np.sort((histograms > 0).sum(1))
    return (
        f"{len(histograms)} clients hold {spanned(sizes[0], sizes[-1])} samples (median "
        f"{np.median(sizes):g}) of {spanned(labels[0], labels[-1])} labels"
    )


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="fedsim show",
        usage="fedsim show [--all] [--json] [words of a run: key=value ..., -m, --config-dir DIR]",
        description="The jobs that the words would run without `show`, what is there already, and "
        "an estimate of bytes and time. Nothing is run. If the words choose a data set or a "
        "partition, a picture shows who holds which labels.",
        allow_abbrev=False,
    )
    all_help = f"every job, where there are more than {MAX_SHOWN}"
    parser.add_argument("--all", action="store_true", help=all_help)
    parser.add_argument("--json", action="store_true", help="the jobs as JSON")
    return parser


def _json_page(shown: Sequence[ShownJob]) -> str:
    content = []
    for job in shown:
        row = {
            "folder": job.plan.folder,
            "overrides": job.overrides,
            "state": job.status.state,
            "round": job.status.round,
            "num_rounds": job.num_rounds,
        }
        content.append(row)
    return json.dumps(content, indent=1, default=str)


def _preset(job: ComposedJob) -> str:
    """Return the head of the job's preset: its text, costs and data; "" if it has none."""
    name = job.choices.get("preset")
    if name is None:
        return ""
    choice = Choice.of(job.files.read("preset", name))
    facts = [(key, choice.fields[key]) for key in ("cost", "data", "small") if key in choice.fields]
    lines = [f"preset={name}", wrap(choice.text, 2)]
    if facts:
        lines.append(entries(facts))
    return "\n".join(lines)


def _table(shown: Sequence[ShownJob], max_shown: int) -> str:
    """Return one row for each job: its state, its round and its folder.

    Lines above a row have the folder's parent, and the job's own words that the folder's name does
    not show. They are left out if they are also above the row before.
    """
    lines: list[str] = []
    heads_before: list[str] = []
    for job in shown[:max_shown]:
        heads = [wrap(f"in {job.plan.folder.parent}")]
        words = [word for word in job.own_overrides if word.partition("=")[0] not in FOLDER_KEYS]
        if words:
            heads.append(wrap(", ".join(words)))
        lines += [line for line in heads if line not in heads_before]
        heads_before = heads
        rounds = f"{job.status.round}/{job.num_rounds}"
        lines.append(f"{job.status.state:<11}  {rounds:>9}  {job.plan.folder.name}")
        if job.status.note:
            lines.append(wrap(job.status.note, 4))
    if len(shown) > max_shown:
        lines.append(f"and {len(shown) - max_shown} more (--all shows them)")
    return "\n".join(lines)


def _totals(shown: Sequence[ShownJob]) -> str:
    """Return the number of jobs by state, the rounds to run, and their estimated cost."""
    num_rounds = sum(job.num_rounds for job in shown)
    jobs_left = [job for job in shown if not job.has_ended]
    rounds_left = sum(max(job.num_rounds - job.status.round, 0) for job in jobs_left)
    states = Counter(job.status.state for job in shown)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    rows = [
        ("jobs", f"{len(shown)}: {counts}"),
        ("rounds", f"{rounds_left:,} to run of {num_rounds:,}"),
    ]
    if jobs_left:
        summaries = []
        for job in shown:
            if job.has_ended and job.status.round > 0:  # it is 0 if the run diverged in round 1
                summaries.append(outcome_on_file(job.plan).summary)
        text = "not known until one of the jobs is done"
        rows.append(("cost", _cost(summaries, rounds_left) if summaries else text))
    return entries(rows, indent=0)


def _cost(summaries: Sequence[Mapping[str, Any]], num_rounds: int) -> str:
    """Return what so many rounds cost if their mean is that of the runs with these `summaries`."""
    ratio = num_rounds / sum(summary["rounds"] for summary in summaries)
    down = ratio * sum(summary["totals"]["bytes_down"] for summary in summaries)
    up = ratio * sum(summary["totals"]["bytes_up"] for summary in summaries)
    seconds = ratio * sum(summary["wall_seconds"] for summary in summaries)
    text = f"about {show_bytes(down)} down, {show_bytes(up)} up, and {show_seconds(seconds)}"
    return f"{text} one after another, by the rounds of the jobs that are done"
