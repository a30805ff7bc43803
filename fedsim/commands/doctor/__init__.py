"""`fedsim doctor`: whether everything that a run needs is here. Uses no network and prints no secret."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence

from fedsim.commands.doctor.finding import Finding, fail, warn
from fedsim.commands.text import wrap
from fedsim.errors import FedsimError

Check = Callable[[], Iterator[Finding]]


def run(words: Sequence[str]) -> int:
    """Print what was found; 0 if the experiment that the words describe could be run, 1 if not."""
    from fedsim.config import command_line

    _, args = command_line.read_words(_parser(), words)
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

    `args`: the words of a run (`fedsim.config.command_line.read`); None: the default experiment.
    """
    from fedsim.commands.doctor import packages, surroundings
    from fedsim.config.command_line import read

    yield from _run("Python", packages.python)
    yield from _run("packages", packages.required)
    yield from _run("packages", packages.installed_twice)
    yield from _run("torchvision", packages.torchvision)
    yield from _run("working folder", surroundings.shadows)
    yield from _run("working folder", surroundings.plugins)
    if broken := _not_importable():
        yield broken
        return
    from fedsim.commands.doctor import experiment, machine, wandb

    yield from _run("threads", machine.threads)
    yield from _run("device", machine.device)
    yield from _run("C compiler", machine.compiler)
    plans, found = experiment.plans_of(read([]) if args is None else args)
    yield from found
    if plans:
        output_dirs = dict.fromkeys(plan.settings.output_dir for plan in plans)
        yield from _run("disk", lambda: experiment.folders(plans))
        yield from _run("data", lambda: experiment.data(plans))
        yield from _run("W&B", lambda: wandb.state(*output_dirs))


def _run(topic: str, check: Check) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:
        yield warn(f"{topic}: could not be checked ({type(error).__name__}: {error})")


def _not_importable() -> Finding | None:
    """The library that fedsim cannot import, if there is one."""
    try:
        import fedsim.cli
        import fedsim.running.experiment  # noqa: F401
    except FedsimError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return fail(f"import: fedsim cannot be imported ({reason})", "see the lines above, or install it anew")
    return None
