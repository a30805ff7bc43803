"""The experiment that is meant: its config, its folders, and the data sets that are there."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from fedsim.commands.catalogue.choices import Catalogue
from fedsim.commands.doctor.finding import Finding, fail, ok, warn
from fedsim.config.build import instantiate
from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.plan import Plan, make_plan
from fedsim.data.base import Dataset
from fedsim.disk import existing_folder, reading_problem, room_problem
from fedsim.errors import FedsimError, Problem
from fedsim.jobs.room import BYTES_OF_RUN

LITTLE = 1e9
"""Free bytes below which a folder is soon full."""


def plan_of(overrides: Sequence[str]) -> tuple[Plan | None, Finding]:
    """The plan of one job with `overrides`, and whether it can be made."""
    what = f"`fedsim {' '.join(overrides)}`" if overrides else "the default experiment"
    try:
        with search_path():
            (job, *_) = compose_jobs(overrides, multirun=False)
        return make_plan(job.config, job.choices), ok(f"config: {what} is accepted")
    except FedsimError as error:
        return None, fail(f"config: {what} is refused: {' '.join(str(error).split())}", "`fedsim` with it tells more")


def folders(plan: Plan) -> Iterator[Finding]:
    """Whether results and decoded data can be written, and how much room there is."""
    for key, folder, level in (("output_dir", plan.settings.output_dir, fail), ("cache_dir", plan.cache_dir, warn)):
        if problem := room_problem(key, folder, BYTES_OF_RUN):
            yield level(*_told(problem))
            continue
        free = shutil.disk_usage(existing_folder(folder)).free
        text = f"disk: {key}={folder} can be written, {free / 1e9:.1f} GB free"
        yield warn(text, f"make room there, or choose another {key}") if free < LITTLE else ok(text)


def _told(problem: Problem) -> tuple[str, str]:
    return f"disk: {problem.key}={problem.value}: {problem.rule}", problem.remedy


def data(plan: Plan) -> Iterator[Finding]:
    """Which data sets of conf/ are in data_dir, and whether that of the experiment is among them."""
    if problem := reading_problem("data_dir", plan.data_dir):
        yield warn(*_told(problem))
    nodes = {name: choice.values for name, choice in Catalogue().group("dataset").choices.items()}
    there: list[str] = []
    absent: list[str] = []
    without: list[str] = []
    for name, node in nodes.items():
        with suppress(FedsimError):  # those that need a path are the user's own
            found = instantiate(node, Dataset, "dataset", plan.data_dir, plan.cache_dir)
            empty = instantiate(node, Dataset, "dataset", Path("/nonexistent"), plan.cache_dir)
            kind = absent if found.missing() else there if empty.missing() else without
            kind.append(name)
    parts = {"there": there, "fetched at first use": absent, "without files": without}
    listed = "; ".join(f"{title}: {', '.join(names)}" for title, names in parts.items() if names)
    yield ok(f"data: data_dir={plan.data_dir}: {listed}")
    chosen = instantiate(plan.config["dataset"], Dataset, "dataset", plan.data_dir, plan.cache_dir)
    if problem := chosen.source_problem():
        yield fail(*_told(problem))
