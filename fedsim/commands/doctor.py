"""`fedsim doctor`: whether everything that a run needs is here. Uses no network and prints no secret.

Each check yields findings, one line each: on Python and packages, the machine, the working folder, the experiment that
is meant, its folders and data, and Weights & Biases, of whose key nothing is read but that it is there.
"""

import netrc
import os
import platform
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from importlib.metadata import version
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import fedsim
from fedsim.commands.catalogue import Catalogue
from fedsim.commands.dispatch import wrap
from fedsim.commands.sync import waiting
from fedsim.config.build import instantiate
from fedsim.config.plan import Plan
from fedsim.config.typecheck import DISTRIBUTION
from fedsim.config.words import for_hydra, read, read_words
from fedsim.core.disk import existing_folder, reading_problem, room_problem
from fedsim.core.errors import ConfigError, FedsimError, Problem, command
from fedsim.data.base import Dataset
from fedsim.engine.native.library import NotCompiledError, library
from fedsim.jobs.prepare import compose_words, prepare
from fedsim.jobs.sweep import BYTES_OF_RUN, by_source, output_problems, source_problems
from fedsim.running.outcome import outcome_on_file
from fedsim.running.provenance import driver_version


@dataclass(frozen=True)
class Finding:
    """`fail`: the experiment cannot be run; `warn`: something is missing, slow or ambiguous; with what to do."""

    level: Literal["ok", "warn", "fail"]
    text: str
    remedy: str = ""


ok, warn, fail = partial(Finding, "ok"), partial(Finding, "warn"), partial(Finding, "fail")


def threads() -> Iterator[Finding]:
    """Cores and torch's threads, with the variables that decide about them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    used = torch.get_num_threads()
    chosen = [f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY") if name in os.environ]
    text = f"threads: torch uses {used} on {cores} core{'s' if cores > 1 else ''}"
    text += f" ({', '.join(chosen)})" if chosen else ""
    if used > cores:
        yield warn(text, "more threads than cores wait for each other: set OMP_NUM_THREADS to the number of cores")
    else:
        yield ok(text)


def device() -> Iterator[Finding]:
    """What `device=auto` takes."""
    driver = driver_version()
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield ok(f"device: {names} (CUDA {torch.version.cuda}, driver {driver})")
    elif driver:
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        text = f"device: CPU; NVIDIA's driver {driver} is here, but torch {torch.__version__} sees no GPU and {built}"
        yield warn(text, "install a torch for a CUDA version that the driver has, or run with device=cpu")
    else:
        yield ok("device: CPU (no NVIDIA GPU)")


def compiler() -> Iterator[Finding]:
    """Whether the C code of engine=native can be compiled, as the first long run would do."""
    try:
        library(torch.float32)
    except NotCompiledError as error:
        text = f"C compiler: the code of engine=native cannot be compiled ({error}); engine=auto trains in PyTorch"
        yield warn(text, "install gcc or clang, or name a compiler in CC; long runs on a CPU are several times faster")
    else:
        yield ok("C compiler: the code of engine=native is compiled")


SHOWN = ("torch", "torchvision", "numpy", "hydra-core", "omegaconf", "wandb")
"""Packages whose versions are told also where all is well."""


def python() -> Iterator[Finding]:
    """The version of Python, and where fedsim is."""
    found, needed = platform.python_version(), None
    with suppress(metadata.PackageNotFoundError):
        needed = metadata.metadata(DISTRIBUTION)["Requires-Python"]
    if needed and not Requirement(f"python{needed}").specifier.contains(found, prereleases=True):
        yield fail(f"Python {found}: fedsim needs {needed}", "make an environment with another Python")
    else:
        yield ok(f"fedsim {fedsim.__version__} in {Path(fedsim.__file__).parent}, Python {found}")


def required() -> Iterator[Finding]:
    """Whether all packages are here, in versions that fedsim takes."""
    wanted = needed()
    if not wanted:
        yield warn(f"packages: {DISTRIBUTION} is not installed, so that versions cannot be compared", "uv sync")
        return
    versions = {one: version_of(one.name) for one in wanted}
    wrong = [one for one, v in versions.items() if v is None or not one.specifier.contains(v, prereleases=True)]
    for one in wrong:
        state = f"{versions[one]} is installed" if versions[one] else "is not installed"
        yield fail(f"packages: {one.name} {state}, fedsim needs {one.specifier}", f"pip install '{one}'")
    shown = ", ".join(f"{name} {version_of(name)}" for name in SHOWN if version_of(name))
    if not wrong:
        yield ok(f"packages: all {len(wanted)} as needed ({shown})")


def needed() -> list[Requirement]:
    """What fedsim needs, by its own record; nothing if it runs without being installed."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    return [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate({"extra": ""})]


def version_of(name: str) -> str | None:
    """The installed version of a package, the one that Python takes."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def installed_twice() -> Iterator[Finding]:
    """Packages that several folders of Python's path have: which one is imported depends on their order."""
    places: dict[str, set[Path]] = defaultdict(set)
    ours = {canonicalize_name(one.name) for one in needed()}
    for found in metadata.distributions():
        name = canonicalize_name(found.metadata["Name"] or "")
        if name in ours:
            places[name].add(Path(str(found.locate_file(""))).resolve())
    for package, folders in sorted(places.items()):
        if len(folders) > 1:
            listed = ", ".join(sorted(map(str, folders)))
            yield warn(f"packages: {package} is installed {len(folders)} times ({listed})", "uninstall all but one")


def torchvision() -> Iterator[Finding]:
    """Whether torchvision goes with torch: by what it says, and by importing it."""
    torch_version = version_of("torch")
    together = "install the two together: pip install torch torchvision"
    for one in map(Requirement, metadata.requires("torchvision") or []):
        fits = torch_version is None or one.specifier.contains(Version(torch_version).public, prereleases=True)
        if canonicalize_name(one.name) == "torch" and not fits:
            text = f"torchvision {version_of('torchvision')} needs torch{one.specifier}, installed is {torch_version}"
            yield warn(text, together)
            return
    try:
        import torchvision as imported
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        yield warn(f"torchvision cannot be imported ({reason}): no data set or network of it can be used", together)
    else:
        yield ok(f"torchvision {imported.__version__} goes with torch {torch_version}")


LIBRARIES = ("torch", "torchvision", "numpy", "scipy", "hydra", "omegaconf", "yaml", "wandb", "sklearn", "rich")


def shadows() -> Iterator[Finding]:
    """Modules of the working folder with the name of another; other copies of fedsim."""
    here = Path.cwd()
    own = Path(fedsim.__file__).parent.resolve()
    folders = [here, *map(Path, filter(None, sys.path))]
    copies = [folder / "fedsim" for folder in folders if (folder / "fedsim" / "__init__.py").is_file()]
    copies += [folder / "fedsim.py" for folder in folders if (folder / "fedsim.py").is_file()]
    others = {path.resolve() for path in copies} - {own}
    for other in sorted(others):
        text = f"another fedsim is in {other}; this one is {own}"
        yield warn(text, "delete one, or leave its folder: see PYTHONPATH")
    names = {*sys.stdlib_module_names, *LIBRARIES}
    modules = [path.name for path in sorted(here.glob("*.py")) if path.stem in names]
    modules += [f"{path.parent.name}/" for path in sorted(here.glob("*/__init__.py")) if path.parent.name in names]
    if modules:
        text = f"working folder: {', '.join(modules)} would be taken for Python's or a library's by `python -m fedsim`"
        yield warn(text, "rename it, or use the command `fedsim`, which looks there last")
    if not others and not modules:
        yield ok("working folder: nothing in it is taken for another module")


def plugins() -> Iterator[Finding]:
    """A folder that Hydra would import by itself."""
    if (Path.cwd() / "hydra_plugins").is_dir():
        text = "working folder: hydra_plugins/ is left alone, as anything in it would be run by every command"
        yield warn(text, "to use it, name the working folder in PYTHONPATH")


HOST = "https://api.wandb.ai"


def state(*output_dirs: Path) -> Iterator[Finding]:
    """What tracker.wandb.mode=auto does, and which runs are not at the server."""
    mode, key = os.environ.get("WANDB_MODE", ""), _key()
    if mode in ("disabled", "offline"):
        yield ok(f"W&B {version('wandb')}: WANDB_MODE={mode}")
    elif key:
        yield ok(f"W&B {version('wandb')}: an API key is in {key}; runs are sent")
    else:
        places = "WANDB_API_KEY and netrc have no API key"
        yield ok(f"W&B {version('wandb')}: {places}: runs are logged offline (`wandb login` changes that)")
    found = waiting(output_dirs)
    if not found:
        return
    folders = list(map(str, output_dirs))
    text = f"W&B: {len(found)} run{'s' if len(found) > 1 else ''} below {', '.join(folders)} not sent"
    if key:
        yield warn(text, f"`{command('fedsim', 'sync', *folders)}`")
    else:
        yield ok(f"{text}; with a key, `fedsim sync` sends them")


def _key() -> str | None:
    """Where W&B finds a key, or None."""
    if os.environ.get("WANDB_API_KEY"):
        return "the environment"
    host = urlsplit(os.environ.get("WANDB_BASE_URL", HOST)).netloc
    chosen = os.environ.get("NETRC")
    files = [Path(chosen).expanduser()] if chosen else [Path.home() / ".netrc", Path.home() / "_netrc"]
    path = next((p for p in files if p.is_file()), None)
    try:
        return str(path) if path is not None and netrc.netrc(path).authenticators(host) else None
    except (OSError, netrc.NetrcParseError):
        return None


LITTLE = 1e9
"""Free bytes below which a folder is soon full."""


def plans_of(args: Namespace) -> tuple[list[Plan], list[Finding]]:
    """The plans of all jobs, and whether they can be made: as `fedsim show` judges them, one line a problem."""
    words = for_hydra(args)
    what = f"`{command('fedsim', *words)}`" if words else "the default experiment"
    try:
        plans = prepare(compose_words(args), room=False).plans
    except ConfigError as error:
        return [], [_found(fail, "config", problem) for problem in error.problems]
    except FedsimError as error:
        return [], [fail(f"config: {what} is refused: {' '.join(str(error).split())}", "`fedsim` with it tells more")]
    return plans, [ok(f"config: {what} is accepted{f', {len(plans)} jobs' if len(plans) > 1 else ''}")]


def _found(kind: Callable[[str, str], Finding], topic: str, problem: Problem) -> Finding:
    """A problem of the config as a finding."""
    return kind(f"{topic}: {replace(problem, remedy='')}", problem.remedy or "correct it")


def _to_come(plans: Sequence[Plan]) -> list[Plan]:
    return [plan for plan in plans if plan.settings.overwrite or not outcome_on_file(plan).final]


def folders(plans: Sequence[Plan]) -> Iterator[Finding]:
    """Whether results and decoded data can be written, and how much room there is."""
    problems = output_problems(_to_come(plans))
    yield from (_found(fail, "disk", problem) for problem in problems)
    told = {str(problem.value) for problem in problems}
    for folder in dict.fromkeys(plan.settings.output_dir for plan in plans):
        if str(folder) not in told:
            yield _room("output_dir", folder)
    for folder in dict.fromkeys(plan.cache_dir for plan in plans):
        yield _room("cache_dir", folder)


def _room(key: str, folder: Path) -> Finding:
    if problem := room_problem(key, folder, BYTES_OF_RUN):
        return _found(warn, "disk", problem)
    free = shutil.disk_usage(existing_folder(folder)).free
    text = f"disk: {key}={folder} can be written, {free / 1e9:.1f} GB free"
    return warn(text, f"make room there, or choose another {key}") if free < LITTLE else ok(text)


def data(plans: Sequence[Plan]) -> Iterator[Finding]:
    """Which data sets of conf/ are in data_dir, and what is missing of those of the experiment."""
    for plan in {plan.data_dir: plan for plan in plans}.values():
        if problem := reading_problem("data_dir", plan.data_dir):
            yield _found(warn, "data", problem)
        yield _there(plan)
    problems = [*source_problems(_to_come(plans)), *filter(None, map(_absent, by_source(_to_come(plans))))]
    yield from (_found(fail, "data", problem) for problem in problems)


def _there(plan: Plan) -> Finding:
    """The data sets of conf/: those that are in data_dir, those that are fetched, and those without files."""
    parts: dict[str, list[str]] = {"there": [], "fetched at first use": [], "without files": []}
    for name, choice in Catalogue().group("dataset").choices.items():
        with suppress(FedsimError):  # those that need a path are the user's own
            found = instantiate(choice.values, Dataset, "dataset", plan.data_dir, plan.cache_dir)
            empty = instantiate(choice.values, Dataset, "dataset", Path("/nonexistent"), plan.cache_dir)
            kind = "fetched at first use" if found.missing() else "there" if empty.missing() else "without files"
            parts[kind].append(name)
    listed = "; ".join(f"{title}: {', '.join(names)}" for title, names in parts.items() if names)
    return ok(f"data: data_dir={plan.data_dir}: {listed}")


def _absent(plan: Plan) -> Problem | None:
    """What is not on disk of the data set of a job."""
    node = plan.config["dataset"]
    absent = instantiate(node, Dataset, "dataset", plan.data_dir, plan.cache_dir).absent()
    if not absent:
        return None
    path = node.get("path")
    key, value = ("data_dir", str(plan.data_dir)) if path is None else ("dataset.path", path)
    elsewhere = f"point data_dir or FEDSIM_DATA to the folder that has it (data_dir={plan.data_dir})"
    remedy = "correct it, or set FEDSIM_DATA" if path is None else f"correct it, or {elsewhere}"
    return Problem(key, value, f"is missing {', '.join(absent)}", remedy)


def run(words: Sequence[str]) -> int:
    """Print what was found; 0 if the experiment that the words describe could be run, 1 if not."""
    _, args = read_words(_parser(), words)
    failed = 0
    for found in findings(args):
        failed += found.level == "fail"
        print(wrap(f"{found.level:<4}  {found.text}", 0, 6), flush=True)
        if found.remedy:
            print(wrap(found.remedy, 8), flush=True)
    print("\nThis cannot run: see the lines that say fail." if failed else "\nThe experiment can be run.")
    return int(failed > 0)


def _parser() -> ArgumentParser:
    return ArgumentParser(
        prog="fedsim doctor",
        usage="fedsim doctor [words of a run: key=value ..., -m, --config-dir DIR]",
        description="Whether everything that a run needs is here: packages, device, folders, data. With the words of a "
        "run or a sweep, whether each of its jobs is accepted, as `fedsim show` judges it, and what is missing of its "
        "data. Nothing is run or downloaded.",
        allow_abbrev=False,
    )


def findings(args: Namespace | None = None) -> Iterator[Finding]:
    """What the checks find, one after another. One that breaks is told, and the others go on.

    `args`: the words of a run (`fedsim.config.words.read`); None: the default experiment.
    """
    yield from _run("Python", python)
    yield from _run("packages", required)
    yield from _run("packages", installed_twice)
    yield from _run("torchvision", torchvision)
    yield from _run("working folder", shadows)
    yield from _run("working folder", plugins)
    if broken := _not_importable():
        yield broken
        return

    yield from _run("threads", threads)
    yield from _run("device", device)
    yield from _run("C compiler", compiler)
    plans, found = plans_of(read([]) if args is None else args)
    yield from found
    if plans:
        output_dirs = dict.fromkeys(plan.settings.output_dir for plan in plans)
        yield from _run("disk", lambda: folders(plans))
        yield from _run("data", lambda: data(plans))
        yield from _run("W&B", lambda: state(*output_dirs))


def _run(topic: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:
        yield warn(f"{topic}: could not be checked ({type(error).__name__}: {error})")


def _not_importable() -> Finding | None:
    """The library that fedsim cannot import, if there is one."""
    try:
        import fedsim.jobs.cli
        import fedsim.running.experiment  # noqa: F401
    except FedsimError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return fail(f"import: fedsim cannot be imported ({reason})", "see the lines above, or install it anew")
    return None
