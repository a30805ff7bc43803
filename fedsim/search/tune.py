"""`fedsim tune`: every selector in the search space that its own file declares, with one budget for
all of them.

A space is a line `tune:` at the head of conf/selector/<name>.yaml: words of a sweep, at most three.
A selector's default and so many points of a Sobol sequence run in the same settings at the same
seeds, as jobs of one sweep.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from fedsim.config.build import Gathered, construct
from fedsim.config.choice_files import head_of, read_text
from fedsim.config.compose import compose_jobs, search_path
from fedsim.config.overlay import Composed
from fedsim.config.plan import Plan
from fedsim.config.sources import on_search_path
from fedsim.config.words import key_of, parse, read_words, values_of
from fedsim.core.disk import write_atomically
from fedsim.core.errors import at_least, check, rule
from fedsim.jobs.cli import run_jobs
from fedsim.jobs.sweep import Attempts
from fedsim.search.command import with_own_keys
from fedsim.search.race import accuracy_of
from fedsim.tracking.tables import CONSOLE, print_line

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

MOST_PARAMETERS, MOST_POINTS = 3, 63


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`points`: of the Sobol sequence, beside the default. Equal ones, as of a choice of three, are
    run once."""

    points: int = 8

    def __post_init__(self) -> None:
        most = rule(
            self.points <= MOST_POINTS, "points", self.points, f"must be at most {MOST_POINTS}"
        )
        check(at_least("points", self.points, 1), most)


@dataclass
class Point:
    """`words`: beside those of the command, none for the default; `accuracy`: the mean over its
    jobs, None before all have ended."""

    words: Sequence[str]
    accuracy: float | None = None


@dataclass
class Tuned:
    """A selector's points, the default first. `jobs`: the numbers of each point's."""

    points: list[Point] = field(default_factory=list)
    jobs: list[list[int]] = field(default_factory=list)

    def add(self, point: Point, jobs: Sequence[Composed], all_jobs: list[Composed]) -> None:
        """A point with its `jobs`, which go to `all_jobs`, unless they are those of another: its
        words may give the default."""
        if any(all_jobs[numbers[0]].config == jobs[0].config for numbers in self.jobs):
            return
        self.points.append(point)
        self.jobs.append([*range(len(all_jobs), len(all_jobs) + len(jobs))])
        all_jobs += jobs

    @property
    def best(self) -> Point | None:
        """Of equal ones the first, so that the default stays where nothing is better; None before
        all have ended."""
        if any(point.accuracy is None for point in self.points):
            return None
        return max(self.points, key=lambda point: point.accuracy or 0.0)


def space_of(selector: str) -> "list[Override]":
    """The search space that the file of a selector declares; none where it has no line `tune:`.
    Raises `ConfigError`."""
    path = on_search_path().read("selector", selector).path
    words = head_of(read_text(path))[1].get("tune", "").split()
    told = f"at most {MOST_PARAMETERS} parameters are tuned"
    check(rule(len(words) <= MOST_PARAMETERS, f"{path.name}: tune", " ".join(words), told))
    return parse(words)


def points_of(space: "Sequence[Override]", count: int) -> list[Point]:
    """The default, and the first `count` points of the Sobol sequence behind its zero, without
    those that repeat."""
    from scipy.stats.qmc import Sobol

    sequence = Sobol(len(space), scramble=False).random_base2(int(count).bit_length())[
        1 : count + 1
    ]
    words = [
        tuple(word_at(one, share) for one, share in zip(space, row, strict=True))
        for row in sequence
    ]
    return [Point(chosen) for chosen in dict.fromkeys([(), *words])]


def word_at(override: "Override", share: float) -> str:
    """The word at a `share` in [0, 1) of an axis: of the way between the ends of an interval, on a
    logarithmic scale with tag(log, ...), in three digits; of the values of a choice or range, the
    one at this place."""
    value: Any = override.value()
    if override.is_discrete_sweep():
        words = [*values_of(override)]
        return words[int(share * len(words))]
    low, high = float(value.start), float(value.end)
    log = "log" in value.tags
    at = low * (high / low) ** share if log else low + share * (high - low)
    return f"{key_of(override)}={float(f'{at:.3g}')}"


class Tuning:
    """What is run of each selector that a command line names. Raises `ConfigError` where none
    declares a space."""

    def __init__(self, args: Namespace, settings: Settings) -> None:
        self.tuned: dict[str, Tuned] = {}
        self.jobs: list[Composed] = []
        compose = partial(compose_jobs, multirun=True, config_name=args.config_name or "config")
        given = [word for word in args.overrides if word.partition("=")[0] != "selector"]
        with search_path(args.config_dir, args.config_path):
            names = dict.fromkeys(job.choices["selector"] for job in compose(args.overrides))
            spaces = {name: space_of(name) for name in names}
            self.without = [name for name, space in spaces.items() if not space]
            remedy = "a line `tune:` at the head of a selector's file does (docs/benchmark.md)"
            some = len(self.without) < len(spaces)
            check(rule(some, "selector", ",".join(spaces), "declare no search space", remedy))
            for name in [name for name in names if spaces[name]]:
                self.tuned[name] = tuned = Tuned()
                for point in points_of(spaces[name], settings.points):
                    tuned.add(point, compose([*given, f"selector={name}", *point.words]), self.jobs)

    def batches(self, plans: Sequence[Plan], attempts: Attempts) -> Iterator[list[Plan]]:
        """The jobs of one selector after another, all points of it together."""
        for name, tuned in self.tuned.items():
            yield [plans[job] for jobs in tuned.jobs for job in jobs]
            for point, jobs in zip(tuned.points, tuned.jobs, strict=True):
                ended = [accuracy_of(attempts.ended.get(plans[job].folder)) for job in jobs]
                known = [accuracy for accuracy in ended if accuracy is not None]
                point.accuracy = float(np.mean(known)) if len(known) == len(jobs) else None
            print_line(f"{name}: {_told(tuned)}")
            if attempts.screen is not None:
                self._write(attempts.screen.folder / "tuning.json")

    def _write(self, path: Path) -> None:
        found = {
            name: [asdict(point) for point in tuned.points] for name, tuned in self.tuned.items()
        }
        with suppress(OSError):  # nothing reads it to go on
            write_atomically(path, json.dumps(found, indent=1).encode(), alone=False)

    def tell(self) -> None:
        """A line for each selector."""
        table = Table("selector", "default %", "best %", "with", box=None, pad_edge=False)
        for name, tuned in self.tuned.items():
            best = tuned.best
            if best is None:
                table.add_row(escape(name), "", "", "waits for a run that is not done")
                continue
            accuracies = (
                f"{100 * (point.accuracy or 0.0):.2f}" for point in (tuned.points[0], best)
            )
            table.add_row(escape(name), *accuracies, escape(" ".join(best.words) or "its default"))
        CONSOLE.print(table)
        if self.without:
            print_line(f"without a search space: {', '.join(self.without)}")
        print_line("the best of several points looks better than it is: compare it at other seeds")


def _told(tuned: Tuned) -> str:
    best = tuned.best
    if best is None:
        return "waits for a run that is not done"
    return f"default {100 * (tuned.points[0].accuracy or 0.0):.2f} %, best {100 * (best.accuracy or 0.0):.2f} %"


def run(words: Sequence[str]) -> int:
    """Tune as the command line says. Raises `FedsimError` before any work is done."""
    _, args = read_words(_parser(), words)
    keys, found, args.multirun = [*Settings.__dataclass_fields__], Gathered(), True
    with search_path(args.config_dir, args.config_path):
        own = [one for one in parse(args.overrides) if one.key_or_group in keys]
    args.overrides = [
        word for word in args.overrides if word not in [one.input_line for one in own]
    ]
    settings = (
        found.run(construct, Settings, {one.key_or_group: one.value() for one in own}, "")
        or Settings()
    )
    tuning = found.run(Tuning, args, settings)
    check(*(with_own_keys(problem, keys, "tune") for problem in found.problems))
    assert tuning is not None
    code = run_jobs(tuning.jobs, ["tune", *words], tuning.batches)
    tuning.tell()
    return code


def _parser() -> ArgumentParser:
    return ArgumentParser(
        prog="fedsim tune",
        usage="fedsim tune selector=NAMES KEY=VALUES ... [points=8] [--config-dir DIR]",
        description="Runs each selector with its defaults and at 8 (`points`) points of the search space that its "
        "file declares (line `tune:`; `fedsim list NAME` shows it), in all settings and at all seeds of the sweep, and "
        "tells which values have the highest mean final accuracy. A diverged run counts as accuracy 0. Selectors that "
        "declare no space are left out. The same command goes on where it was ended.",
        epilog="example: fedsim tune selector=oort,power_of_choice partition=shards_1,iid seed=0,1",
        allow_abbrev=False,
    )
