"""`fedsim race`: a sweep whose seeds are added step by step; a method that is beaten in a setting
gets no more there.

Maron and Moore, "Hoeffding races" (NIPS 1994), race models on the same samples; Birattari et al.,
"A racing algorithm for configuring metaheuristics" (GECCO 2002), methods on the same instances by
tests (F-race). Instances are seeds here; Student's test for pairs replaces that on ranks, which
rejects nothing at few seeds, and its level is the race's.
"""

import json
import re
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from operator import sub
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from fedsim.config.build import Gathered, construct
from fedsim.config.compose import search_path
from fedsim.config.overlay import Composed
from fedsim.config.plan import Plan
from fedsim.config.words import parse, read_words, typed_in
from fedsim.core.configs import SEED_KEYS
from fedsim.core.disk import write_atomically
from fedsim.core.errors import at_least, check, rule
from fedsim.jobs.cli import run_jobs
from fedsim.jobs.prepare import compose_words
from fedsim.jobs.sweep import Attempts
from fedsim.results.groups import CEILING, CONTROL, REFERENCE
from fedsim.results.statistics import Difference
from fedsim.running.outcome import Outcome
from fedsim.search.command import with_own_keys
from fedsim.tracking.tables import CONSOLE, differing_keys, print_line


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`alpha`: see `stops`. Looks are taken at `min_seeds` and after each `batch` more. `keep`:
    selectors that run at all seeds, as references: they are not stopped and stop no other, since
    one may be a bound, which beats them all."""

    alpha: float = 0.05
    batch: int = 2
    min_seeds: int = 4
    keep: Sequence[str] = (REFERENCE, CONTROL, CEILING)

    def __post_init__(self) -> None:
        positive = rule(
            0 < self.alpha < 0.5, "alpha", self.alpha, "must lie in (0, 0.5)", "0.05 is usual"
        )
        check(positive, at_least("batch", self.batch, 1), at_least("min_seeds", self.min_seeds, 2))


@dataclass(frozen=True)
class Stop:
    """Of a method at so many `seeds`: that of `by` is `lead` above its mean accuracy, with the
    p-value `p`."""

    seeds: int
    by: str
    lead: float
    p: float

    def __str__(self) -> str:
        return f"{100 * self.lead:.1f} points behind {self.by}, p = {self.p:.1g}"


def stops(
    accuracies: Mapping[str, Sequence[float]], looks: Sequence[int], level: float
) -> dict[str, Stop]:
    """The methods that are stopped in a setting, by their final accuracies at its first seeds.

    At each look, of the methods that go on and have all seeds of it, that of the highest mean
    leads; those are stopped whose one-sided paired t-test against it has a p-value of at most
    `level`.

    Fix a method of the highest true mean in each setting: it is stopped only if, at one of the L
    looks, one of the k - 1 others, whose true mean is no higher, passes a test against it, which
    each does with a probability of at most `level`. With `level` = alpha / (sum over settings of (k
    - 1) L) this happens in any setting with a probability of at most alpha (union bound), whoever
    leads by chance. Paired differences are taken to be normal and independent between seeds, as
    everywhere in reports.
    """
    found: dict[str, Stop] = {}
    for look in looks:
        racing = {
            name: one[:look]
            for name, one in accuracies.items()
            if name not in found and len(one) >= look
        }
        best = max(racing, key=lambda name: sum(racing[name]), default="")
        for name, values in racing.items():
            lead = Difference(tuple(map(sub, racing[best], values)))
            if name != best and (p := lead.p_above(0.0)) <= level:
                found[name] = Stop(look, best, lead.mean, p)
    return found


@dataclass
class Method:
    """`jobs`: the numbers of its jobs in a setting, in the order of the seeds. `accuracies`: of
    those that have ended; with a run that has failed it waits, and gets no more seeds before the
    same command has run that again."""

    kept: bool
    jobs: list[int] = field(default_factory=list)
    accuracies: Sequence[float] = ()
    stop: Stop | None = None


class Race:
    """The race of `jobs`, in settings: what is swept over but for selector and seeds. Raises
    `ConfigError` where no method could be stopped."""

    def __init__(self, jobs: Sequence[Composed], settings: Settings) -> None:
        self.methods: dict[str, dict[str, Method]] = {}
        labels = [
            {k.lstrip("+"): v for k, _, v in (word.partition("=") for word in job.overrides)}
            for job in jobs
        ]
        differing = [key for key in differing_keys(labels) if key not in (*SEED_KEYS, "selector")]
        choices = [job.choices.get("selector", "") for job in jobs]
        for number, (choice, words) in enumerate(zip(choices, labels, strict=True)):
            told = {key: f"{key}={words[key]}" for key in differing if key in words}
            name = " ".join(
                [choice, *(told.pop(key) for key in list(told) if re.match(r"selector\b", key))]
            )
            methods = self.methods.setdefault(" ".join(told.values()) or "the setting", {})
            methods.setdefault(name, Method(choice in settings.keep)).jobs.append(number)
        self.all = [method for methods in self.methods.values() for method in methods.values()]
        self.num_seeds, racing = len(self.all[0].jobs), sum(not method.kept for method in self.all)
        self.looks = range(settings.min_seeds, self.num_seeds, settings.batch)
        tests = len(self.looks) * (racing - len(self.methods))
        few, alone = (
            f"must be more than min_seeds={settings.min_seeds}",
            "must be two that are not in keep",
        )
        here, unknown = (
            ",".join(sorted({*choices})),
            ",".join({*settings.keep} - {*choices, *Settings.keep}),
        )
        check(
            rule(
                bool(self.looks),
                "seed",
                f"{self.num_seeds} of them",
                few,
                "sweep over more: seed='range(10)', say",
            ),
            rule(tests > 0 or not self.looks, "selector", here, alone, "name more, or set keep=[]"),
            rule(not unknown, "keep", unknown, "is not raced", f"selectors here: {here}"),
        )
        self.level = settings.alpha / tests

    def batches(self, plans: Sequence[Plan], attempts: Attempts) -> Iterator[list[Plan]]:
        """The jobs up to each look, of all settings together. What is decided follows from how they
        have ended."""
        at = f"after {', '.join(map(str, self.looks))} of {self.num_seeds} seeds"
        print_line(f"{len(self.methods)} settings; {at}, p <= {self.level:.2g} stops a method")
        for before, look in pairwise((0, *self.looks, self.num_seeds)):
            going_on = [
                method
                for method in self.all
                if method.stop is None and len(method.accuracies) >= before
            ]
            yield [plans[job] for method in going_on for job in method.jobs[before:look]]
            for method in going_on:
                ended = (
                    accuracy_of(attempts.ended.get(plans[job].folder)) for job in method.jobs[:look]
                )
                method.accuracies = [accuracy for accuracy in ended if accuracy is not None]
            self._decide(look)
            for plan in (
                plans[job] for method in self.all if method.stop for job in method.jobs[look:]
            ):
                attempts.progress.leaves(plan.folder)
                attempts.overwriting.forget(plan)
            if attempts.screen is not None:
                self._write(attempts.screen.folder / "race.json")

    def _decide(self, seeds: int) -> None:
        """Also say what was decided at so many seeds."""
        told = []
        for setting, methods in self.methods.items():
            accuracies = {
                name: method.accuracies for name, method in methods.items() if not method.kept
            }
            for name, stop in stops(accuracies, self.looks, self.level).items():
                methods[name].stop = stop
                told += [f"{setting}: {name} is stopped, {stop}"] if stop.seeds == seeds else []
        for line in (told or ["nobody is stopped"]) if seeds in self.looks else []:
            print_line(f"after {seeds} seeds · {line}")

    def _write(self, path: Path) -> None:
        found = {
            setting: {name: asdict(m) for name, m in methods.items()}
            for setting, methods in self.methods.items()
        }
        content = json.dumps(
            {"level": self.level, "looks": [*self.looks], "settings": found}, indent=1
        )
        with suppress(OSError):  # nothing reads it to go on
            write_atomically(path, content.encode(), alone=False)

    def tell(self) -> None:
        """A line for each method of each setting, and what was saved."""
        table, saved = Table("setting", "method", "seeds", "stopped", box=None, pad_edge=False), 0
        for setting, methods in self.methods.items():
            for name, method in methods.items():
                seeds, waits = len(method.accuracies), "waits for a run that is not done"
                ended = method.stop or ("kept" * method.kept if seeds == self.num_seeds else waits)
                table.add_row(escape(setting), escape(name), str(seeds), escape(str(ended)))
                saved += self.num_seeds - seeds if method.stop else 0
        CONSOLE.print(table)
        print_line(f"{saved} of {self.num_seeds * len(self.all)} runs saved")


def accuracy_of(outcome: Outcome | None) -> float | None:
    """The final accuracy of a run, 0 of one that has diverged and is of no use; None where it has
    not ended."""
    if outcome is None or not outcome.final:
        return None
    return float(outcome.summary.get("smoothed_accuracy") or 0) if outcome.status == "done" else 0.0


def run(words: Sequence[str]) -> int:
    """Race as the command line says. Raises `FedsimError` before any work is done."""
    _, args = read_words(_parser(), words)
    keys, own, found, args.multirun = [*Settings.__dataclass_fields__], {}, Gathered(), True
    with search_path(args.config_dir, args.config_path):
        for override in [one for one in parse(args.overrides) if one.key_or_group in keys]:
            args.overrides.remove(override.input_line)
            several = override.key_or_group == "keep" or override.is_sweep_override()
            own[override.key_or_group] = (
                re.findall(r"[^][,\s]+", typed_in(override)) if several else override.value()
            )
    settings = found.run(construct, Settings, own, "") or Settings()
    jobs = found.run(compose_words, args) or []
    check(*(with_own_keys(problem, keys, "race") for problem in found.problems))
    race = Race(jobs, settings)
    code = run_jobs(jobs, ["race", *words], race.batches)
    race.tell()
    return code


def _parser() -> ArgumentParser:
    return ArgumentParser(
        prog="fedsim race",
        usage="fedsim race KEY=VALUES ... [alpha=0.05] [min_seeds=4] [batch=2] [keep=NAMES] [--config-dir DIR]",
        description="A sweep whose seeds are added step by step. After 4 (`min_seeds`) and each 2 more (`batch`) a "
        "method is stopped in a setting if its final accuracy is below the leading one's, by paired t-tests at a level "
        "with which the best of any setting is stopped with a probability of at most `alpha` in all. A diverged run "
        "counts as accuracy 0. Selectors of `keep` (random, random_control, clairvoyant) run at all seeds, are not "
        "stopped and stop no other. The same command goes on where it was ended.",
        epilog="example: fedsim race partition=shards_1,iid selector=random,oort,gpfl seed='range(10)'",
        allow_abbrev=False,
    )
