"""`fedsim doctor`: check whether everything that a run needs is there.

Each check yields findings, one line each: about packages, the machine, the experiment, its folders
and data, and Weights & Biases. The command uses no network. It prints no secret: of the API key of
W&B it tells only whether it is there.
"""

import json
import netrc
import os
import platform
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
import torch
from packaging.requirements import Requirement

import fedsim
from fedsim.commands.layout import wrap
from fedsim.commands.sync import waiting
from fedsim.config.build import instantiate
from fedsim.config.command_line import place_flags, read_words
from fedsim.config.plan import Plan
from fedsim.config.user_modules import DISTRIBUTION
from fedsim.core.disk import existing_folder, reading_problem, space_problem
from fedsim.core.errors import ConfigError, DataError, Problem
from fedsim.core.text import command, spanned
from fedsim.data.base import Dataset
from fedsim.data.images import FromPath
from fedsim.engine.native.library import NotCompiledError, library
from fedsim.jobs.prepare import (
    BYTES_OF_RUN,
    by_source,
    check_all,
    compose_words,
    output_problems,
    prepare,
    source_problems,
)
from fedsim.jobs.sweep import plans_to_run
from fedsim.running.assembly import Divider
from fedsim.running.provenance import driver_version

MAX_BYTES = 200_000_000
"""Files of images and texts of more bytes are not decoded here to divide their labels."""


class Finding(NamedTuple):
    """The result of a check.

    `level`: `ok`, `warn` (something is missing, slow or ambiguous) or `fail` (the experiment cannot
    be run).
    """

    level: str
    text: str
    remedy: str = ""


Findings = Iterator[Finding]
ok = partial(Finding, "ok")
warn = partial(Finding, "warn")
fail = partial(Finding, "fail")


def packages() -> Findings:
    """Check that all packages are installed in versions that fedsim accepts."""
    place = Path(fedsim.__file__).parent
    yield ok(f"fedsim {fedsim.__version__} in {place}, Python {platform.python_version()}")
    num_packages = 0
    num_wrong = 0
    for line in metadata.requires(DISTRIBUTION) or []:
        needed = Requirement(line)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        num_packages += 1
        version = version_of(needed.name)
        if version is None or not needed.specifier.contains(version, prereleases=True):
            num_wrong += 1
            state = f"{version or 'nothing'} is installed, fedsim needs {needed.specifier}"
            yield fail(f"packages: {needed.name}: {state}", f"pip install '{needed}'")
    if num_wrong == 0:
        versions = f"torch {version_of('torch')}, numpy {version_of('numpy')}"
        yield ok(f"packages: all {num_packages} as needed ({versions})")


def version_of(name: str) -> str | None:
    """Return the version of a package that Python imports; None if it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def torchvision() -> Findings:
    """Check that torchvision fits torch."""
    try:
        import torchvision as imported
    except Exception as error:
        text = f"torchvision cannot be imported ({type(error).__name__})"
        remedy = "install the two together: pip install torch torchvision"
        yield warn(f"{text}: no data set or network of it can be used", remedy)
    else:
        yield ok(f"torchvision {imported.__version__} goes with torch {torch.__version__}")


def device() -> Findings:
    """Report the device that `device=auto` takes."""
    driver = driver_version()
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield ok(f"device: {names} (CUDA {torch.version.cuda}, driver {driver})")
    elif driver:
        text = f"NVIDIA's driver {driver} is here, but torch {torch.__version__} sees no GPU"
        remedy = "install a torch for a CUDA version that the driver has, or run with device=cpu"
        yield warn(f"device: CPU; {text}", remedy)
    else:
        yield ok("device: CPU (no NVIDIA GPU)")


def compiler() -> Findings:
    """Check that the C code of engine=native compiles, as the first long run would do."""
    try:
        library(torch.float32)
    except NotCompiledError as error:
        text = f"the code of engine=native cannot be compiled ({error})"
        remedy = (
            "install gcc or clang, or name a compiler in CC; "
            "long runs on a CPU are several times faster"
        )
        yield warn(f"C compiler: {text}; engine=auto trains in PyTorch", remedy)
    else:
        yield ok("C compiler: the code of engine=native is compiled")


def plans_of(args: Namespace) -> tuple[list[Plan], list[Finding]]:
    """Return the plans of all jobs, or no plans and one finding for each problem.

    The checks are those of `fedsim show`.
    """
    words = [*place_flags(args), *args.overrides]
    if args.multirun:
        words.insert(0, "-m")
    name = f"`{command('fedsim', *words)}`" if words else "the default experiment"
    try:
        jobs = compose_words(args)
        plans, _ = prepare(jobs)
        check_all(jobs, plans, with_files=False)
    except ConfigError as error:
        return [], [_finding(fail, "config", problem) for problem in error.problems]
    number = f", {len(plans)} jobs" if len(plans) > 1 else ""
    return plans, [ok(f"config: {name} is accepted{number}")]


def _finding(level: Callable[[str, str], Finding], topic: str, problem: Problem) -> Finding:
    """Return a problem as a finding of the `level` (`ok`, `warn` or `fail`)."""
    text = str(replace(problem, remedy=""))
    return level(f"{topic}: {text}", problem.remedy or "correct it")


def folders(plans: Sequence[Plan]) -> Findings:
    """Check that results and decoded data can be written, and report the room that is left."""
    problems = output_problems(plans_to_run(plans))
    for problem in problems:
        yield _finding(fail, "disk", problem)
    reported = {problem.value for problem in problems}
    outputs = {plan.settings.output_dir for plan in plans}
    places = [("output_dir", folder) for folder in sorted(outputs) if str(folder) not in reported]
    places += [("cache_dir", folder) for folder in sorted({plan.cache_dir for plan in plans})]
    for key, folder in places:
        if shortage := space_problem(key, folder, BYTES_OF_RUN):
            yield _finding(warn, "disk", shortage)
        else:
            free = shutil.disk_usage(existing_folder(folder)).free
            yield ok(f"disk: {key}={folder} can be written, {free / 1e9:.1f} GB free")


def data(plans: Sequence[Plan]) -> Findings:
    """Check that data_dir can be read, what is missing of the data sets of the experiment, and
    whether the data that are here can be divided among the clients."""
    for folder in dict.fromkeys(plan.data_dir for plan in plans):
        if unreadable := reading_problem("data_dir", folder):
            yield _finding(warn, "data", unreadable)
    plans_left = plans_to_run(plans)
    problems = list(source_problems(plans_left))
    lines: list[str] = []
    for plan in by_source(plans_left):
        problems += _data_problems(plan, lines)
    divider = Divider()
    if not problems:
        for plan in _by_division(plans_left):
            problems += _division_problems(plan, divider, lines)
    for problem in problems:
        yield _finding(fail, "data", problem)
    yield from map(ok, lines)


def _data_problems(plan: Plan, lines: list[str]) -> list[Problem]:
    """Return what is missing of the data set of a job, or wrong with its files.

    Lines that describe it are appended to `lines`.
    """
    name = f"data: {plan.choices['dataset']}"
    try:
        dataset = _dataset_of(plan)
        dataset.inspect()
        if dataset.source_problem() is None:
            where = f"data_dir={plan.data_dir}"
            if to_fetch := dataset.files_to_fetch():
                lines.append(f"{name}: the first run downloads {', '.join(to_fetch)} to {where}")
            else:
                lines.append(f"{name}: all that it needs is here ({where})")
            lines += [f"{name}: {line}" for line in dataset.describe()]
    except DataError as error:
        return [_problem_of(error)]
    return []


def _by_division(plans: Sequence[Plan]) -> list[Plan]:
    """Return one plan for each way to divide a data set among clients, that of the first seed."""
    divisions: dict[str, Plan] = {}
    for plan in plans:
        parts = [plan.config[key] for key in ("dataset", "partition", "num_clients", "server")]
        parts += [plan.local.holdout_fraction, plan.data_dir]
        divisions.setdefault(json.dumps(parts, default=str), plan)
    return list(divisions.values())


def _division_problems(plan: Plan, divider: Divider, lines: list[str]) -> list[Problem]:
    """Return why the data of a job cannot be divided among its clients.

    A line about the clients is appended to `lines`, or the reason why this is not checked.
    """
    dataset = _dataset_of(plan)
    choice = plan.choices.get("partition", "custom")
    partition = f"data: {plan.choices['dataset']}: partition={choice}"
    if not type(dataset).__module__.startswith("fedsim.") or dataset.files_to_fetch():
        return []  # `load` may use the network
    if isinstance(dataset, FromPath) and dataset.source_bytes() > MAX_BYTES:
        lines.append(f"{partition}: not checked, because the data would have to be decoded")
        return []
    try:
        sizes = np.sort(divider.division_of(plan).histograms.sum(1))
    except DataError as error:
        return [_problem_of(error)]
    except ConfigError as error:
        return list(error.problems)
    counts = spanned(sizes[0], sizes[-1])
    lines.append(f"{partition}: {len(sizes):,} clients with {counts} training samples")
    return []


def _dataset_of(plan: Plan) -> Dataset:
    node = plan.config["dataset"]
    return instantiate(node, Dataset, "dataset", plan.data_dir, plan.cache_dir)


def _problem_of(error: DataError) -> Problem:
    """Return an error of data as a problem: its key, text and remedy."""
    key, _, fault = str(error).partition(": ")
    text, _, remedy = fault.partition("; ")
    return Problem(key, ..., text, remedy)


def wandb(*output_dirs: Path) -> Findings:
    """Report what tracker.wandb.mode=auto does, and which runs are not at the server."""
    mode = os.environ.get("WANDB_MODE", "")
    has_key = _has_key()
    if mode in ("disabled", "offline"):
        state = f"WANDB_MODE={mode}"
    elif has_key:
        state = "there is an API key; runs are sent"
    else:
        state = "there is no API key: runs are logged offline"
    yield ok(f"W&B {metadata.version('wandb')}: {state}")
    if runs := waiting(output_dirs):
        names = list(map(str, output_dirs))
        count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
        remedy = f"`{command('fedsim', 'sync', *names)}`, with an API key"
        level = warn if has_key else ok
        yield level(f"W&B: {count} below {', '.join(names)} not sent", remedy)


def _has_key() -> bool:
    """Return whether W&B finds a key, in the environment or in netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    with suppress(OSError, netrc.NetrcParseError):
        return bool(netrc.netrc(os.environ.get("NETRC")).authenticators(host))
    return False


def run(words: Sequence[str]) -> int:
    """Print the findings. Return 0 if the experiment that the words describe can be run, else 1."""
    parser = ArgumentParser(
        prog="fedsim doctor",
        usage="fedsim doctor [words of a run: key=value ..., -m, --config-dir DIR]",
        description="Whether everything that a run needs is here: packages, device, folders, data. "
        "With the words of a run or a sweep, whether each of its jobs is accepted, as "
        "`fedsim show` judges it, and what is missing of its data. Nothing is run or downloaded.",
        allow_abbrev=False,
    )
    _, args = read_words(parser, words)
    num_failed = 0
    for finding in findings(args):
        num_failed += finding.level == "fail"
        print(wrap(f"{finding.level:<4}  {finding.text}", 0, 6), flush=True)
        if finding.remedy:
            print(wrap(finding.remedy, 8), flush=True)
    if num_failed:
        print("\nThis cannot run: see the lines that say fail.")
    else:
        print("\nThe experiment can be run.")
    return int(num_failed > 0)


def findings(args: Namespace) -> Findings:
    """Yield what the checks find about the words of a run, one check after another.

    A check that breaks is reported, and the next one follows.
    """
    for check in (packages, torchvision, device, compiler):
        yield from _run(check.__name__, check)
    plans, config_findings = plans_of(args)
    yield from config_findings
    if plans:
        output_dirs = dict.fromkeys(plan.settings.output_dir for plan in plans)
        yield from _run("disk", partial(folders, plans))
        yield from _run("data", partial(data, plans))
        yield from _run("W&B", partial(wandb, *output_dirs))


def _run(topic: str, check: Callable[[], Findings]) -> Findings:
    """Yield the findings of a check, and a warning if it raises an error."""
    try:
        yield from check()
    except Exception as error:
        yield warn(f"{topic}: could not be checked ({type(error).__name__}: {error})")
