"""`fedsim doctor`: whether everything that a run needs is here. Uses no network and prints no
secret.

Each check yields findings, one line each: on packages, the machine, the experiment that is meant,
its folders and data, and Weights & Biases, of whose key nothing is told but that it is there.
"""

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

import torch
from packaging.requirements import Requirement

import fedsim
from fedsim.commands.dispatch import wrap
from fedsim.commands.sync import waiting
from fedsim.config.build import instantiate
from fedsim.config.command_line import place_flags, read_words
from fedsim.config.plan import Plan
from fedsim.config.user_modules import DISTRIBUTION
from fedsim.core.disk import existing_folder, reading_problem, space_problem
from fedsim.core.errors import ConfigError, DataError, Problem
from fedsim.core.text import command
from fedsim.data.base import Dataset
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
from fedsim.jobs.sweep import to_come
from fedsim.running.provenance import driver_version


class Finding(NamedTuple):
    """`level`: `ok`, `warn` (something is missing, slow or ambiguous) or `fail` (the experiment
    cannot be run)."""

    level: str
    text: str
    remedy: str = ""


ok, warn, fail = partial(Finding, "ok"), partial(Finding, "warn"), partial(Finding, "fail")


def packages() -> Iterator[Finding]:
    """Whether all packages are here, in versions that fedsim takes."""
    yield ok(
        f"fedsim {fedsim.__version__} in {Path(fedsim.__file__).parent}, Python {platform.python_version()}"
    )
    lines = map(Requirement, metadata.requires(DISTRIBUTION) or [])
    wanted = [one for one in lines if one.marker is None or one.marker.evaluate({"extra": ""})]
    versions = {one: version_of(one.name) for one in wanted}
    wrong = [
        one
        for one, v in versions.items()
        if v is None or not one.specifier.contains(v, prereleases=True)
    ]
    for one in wrong:
        state = f"{versions[one] or 'nothing'} is installed, fedsim needs {one.specifier}"
        yield fail(f"packages: {one.name}: {state}", f"pip install '{one}'")
    if not wrong:
        yield ok(
            f"packages: all {len(wanted)} as needed (torch {version_of('torch')}, numpy {version_of('numpy')})"
        )


def version_of(name: str) -> str | None:
    """The installed version of a package, the one that Python takes."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def torchvision() -> Iterator[Finding]:
    """Whether torchvision goes with torch."""
    try:
        import torchvision as imported
    except Exception as error:
        text = f"torchvision cannot be imported ({type(error).__name__}): no data set or network of it can be used"
        yield warn(text, "install the two together: pip install torch torchvision")
    else:
        yield ok(f"torchvision {imported.__version__} goes with torch {torch.__version__}")


def device() -> Iterator[Finding]:
    """What `device=auto` takes."""
    driver = driver_version()
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield ok(f"device: {names} (CUDA {torch.version.cuda}, driver {driver})")
    elif driver:
        text = f"device: CPU; NVIDIA's driver {driver} is here, but torch {torch.__version__} sees no GPU"
        yield warn(
            text, "install a torch for a CUDA version that the driver has, or run with device=cpu"
        )
    else:
        yield ok("device: CPU (no NVIDIA GPU)")


def compiler() -> Iterator[Finding]:
    """Whether the C code of engine=native can be compiled, as the first long run would do."""
    try:
        library(torch.float32)
    except NotCompiledError as error:
        text = f"C compiler: the code of engine=native cannot be compiled ({error}); engine=auto trains in PyTorch"
        yield warn(
            text,
            "install gcc or clang, or name a compiler in CC; long runs on a CPU are several times faster",
        )
    else:
        yield ok("C compiler: the code of engine=native is compiled")


def plans_of(args: Namespace) -> tuple[list[Plan], list[Finding]]:
    """The plans of all jobs, and whether they can be made: as `fedsim show` judges them, one line a
    problem."""
    words = [*place_flags(args), *(["-m"] if args.multirun else []), *args.overrides]
    what = f"`{command('fedsim', *words)}`" if words else "the default experiment"
    try:
        jobs = compose_words(args)
        plans, _ = prepare(jobs)
        check_all(jobs, plans, room=False)
    except ConfigError as error:
        return [], [_found(fail, "config", problem) for problem in error.problems]
    return plans, [
        ok(f"config: {what} is accepted{f', {len(plans)} jobs' if len(plans) > 1 else ''}")
    ]


def _found(kind: Callable[[str, str], Finding], topic: str, problem: Problem) -> Finding:
    return kind(f"{topic}: {replace(problem, remedy='')}", problem.remedy or "correct it")


def folders(plans: Sequence[Plan]) -> Iterator[Finding]:
    """Whether results and decoded data can be written, and how much room there is."""
    problems = output_problems(to_come(plans))
    yield from (_found(fail, "disk", problem) for problem in problems)
    told = {problem.value for problem in problems}
    used = {
        ("output_dir", plan.settings.output_dir)
        for plan in plans
        if str(plan.settings.output_dir) not in told
    }
    for key, folder in sorted(used) + sorted({("cache_dir", plan.cache_dir) for plan in plans}):
        if problem := space_problem(key, folder, BYTES_OF_RUN):
            yield _found(warn, "disk", problem)
        else:
            free = shutil.disk_usage(existing_folder(folder)).free
            yield ok(f"disk: {key}={folder} can be written, {free / 1e9:.1f} GB free")


def data(plans: Sequence[Plan]) -> Iterator[Finding]:
    """Whether data_dir can be read, and what is missing of the data sets of the experiment."""
    for folder in dict.fromkeys(plan.data_dir for plan in plans):
        if problem := reading_problem("data_dir", folder):
            yield _found(warn, "data", problem)
    left = to_come(plans)
    problems = [*source_problems(left), *filter(None, map(_unfit, by_source(left)))]
    yield from (_found(fail, "data", problem) for problem in problems)
    if not problems:
        names = sorted({str(plan.choices["dataset"]) for plan in plans})
        yield ok(
            f"data: {', '.join(names)}: nothing is missing that is not fetched (data_dir={plans[0].data_dir})"
        )


def _unfit(plan: Plan) -> Problem | None:
    """Return what is missing of the data set of a job, or wrong with its files."""
    node = plan.config["dataset"]
    try:
        instantiate(node, Dataset, "dataset", plan.data_dir, plan.cache_dir).inspect()
    except DataError as error:
        key, _, fault = str(error).partition(": ")
        text, _, remedy = fault.partition("; ")
        return Problem(key, ..., text, remedy)
    return None


def wandb(*output_dirs: Path) -> Iterator[Finding]:
    """What tracker.wandb.mode=auto does, and which runs are not at the server."""
    mode, key = os.environ.get("WANDB_MODE", ""), _has_key()
    state = (
        "there is an API key; runs are sent"
        if key
        else "there is no API key: runs are logged offline"
    )
    yield ok(
        f"W&B {metadata.version('wandb')}: {f'WANDB_MODE={mode}' if mode in ('disabled', 'offline') else state}"
    )
    if found := waiting(output_dirs):
        folders = list(map(str, output_dirs))
        text = f"W&B: {len(found)} run{'s' if len(found) > 1 else ''} below {', '.join(folders)} not sent"
        yield (warn if key else ok)(
            text, f"`{command('fedsim', 'sync', *folders)}`, with an API key"
        )


def _has_key() -> bool:
    """Whether W&B finds a key, in the environment or in netrc."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    with suppress(OSError, netrc.NetrcParseError):
        return bool(
            os.environ.get("WANDB_API_KEY")
            or netrc.netrc(os.environ.get("NETRC")).authenticators(host)
        )
    return False


def run(words: Sequence[str]) -> int:
    """Print what was found; 0 if the experiment that the words describe could be run, 1 if not."""
    parser = ArgumentParser(
        prog="fedsim doctor",
        usage="fedsim doctor [words of a run: key=value ..., -m, --config-dir DIR]",
        description="Whether everything that a run needs is here: packages, device, folders, data. With the words of a "
        "run or a sweep, whether each of its jobs is accepted, as `fedsim show` judges it, and what is missing of its "
        "data. Nothing is run or downloaded.",
        allow_abbrev=False,
    )
    _, args = read_words(parser, words)
    failed = 0
    for found in findings(args):
        failed += found.level == "fail"
        print(wrap(f"{found.level:<4}  {found.text}", 0, 6), flush=True)
        if found.remedy:
            print(wrap(found.remedy, 8), flush=True)
    print(
        "\nThis cannot run: see the lines that say fail."
        if failed
        else "\nThe experiment can be run."
    )
    return int(failed > 0)


def findings(args: Namespace) -> Iterator[Finding]:
    """What the checks find, one after another, about the words of a run
    (`fedsim.config.words.read`). One that breaks is told, and the others go on."""
    for check in (packages, torchvision, device, compiler):
        yield from _run(check.__name__, check)
    plans, found = plans_of(args)
    yield from found
    if plans:
        output_dirs = dict.fromkeys(plan.settings.output_dir for plan in plans)
        yield from _run("disk", partial(folders, plans))
        yield from _run("data", partial(data, plans))
        yield from _run("W&B", partial(wandb, *output_dirs))


def _run(topic: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:
        yield warn(f"{topic}: could not be checked ({type(error).__name__}: {error})")
