"""`fedsim race`: a sweep whose seeds are added step by step.

A method is a selector with its parameters. A setting is everything else but the seed. A look is a
number of seeds at which the methods of a setting are compared: a method that is beaten there gets
no more seeds in this setting. The command gives `Race.batches` to `fedsim.jobs.cli.run_jobs`, which
runs the jobs up to each look and then goes on with the generator.

Maron and Moore, "Hoeffding races"
(NIPS 1994), race models on the same samples. Birattari et al., "A racing algorithm for configuring
metaheuristics" (GECCO 2002), race methods on the same instances by tests (F-race). Instances are
seeds here. Student's test for pairs replaces the test on ranks, which rejects nothing at few seeds,
and its level is the race's.
"""

import json
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from fedsim.config.build import construct
from fedsim.config.command_line import read_words
from fedsim.config.compose import search_path
from fedsim.config.job import ComposedJob
from fedsim.config.plan import Plan
from fedsim.core.configs import SEED_KEYS, differing_keys, labels_of
from fedsim.core.disk import write_atomically
from fedsim.core.errors import ProblemCollector, at_least, check, rule
from fedsim.jobs.cli import run_jobs
from fedsim.jobs.prepare import compose_words
from fedsim.jobs.sweep import Attempts
from fedsim.results.labels import CEILING, CONTROL, REFERENCE
from fedsim.results.statistics import Difference
from fedsim.running.outcome import Outcome
from fedsim.search.own_keys import stop_at_problem, take_settings, with_own_keys
from fedsim.tracking.tables import CONSOLE, print_line


@dataclass(frozen=True, kw_only=True)
class RaceSettings:
    """The keys of the command line that belong to the race itself.

    With the probability `alpha` at most, the best method of any setting is stopped (`stops`).
    Methods are compared at `min_seeds` seeds and after each `batch` more. The selectors in `keep`
    run at all seeds, as references. They are not stopped and stop no other, because one of them may
    be an upper bound that beats all methods.
    """

    alpha: float = 0.05
    batch: int = 2
    min_seeds: int = 4
    keep: Sequence[str] = (REFERENCE, CONTROL, CEILING)

    def __post_init__(self) -> None:
        is_level = 0 < self.alpha < 0.5
        check(
            rule(is_level, "alpha", self.alpha, "must lie in (0, 0.5)", "0.05 is usual"),
            at_least("batch", self.batch, 1),
            at_least("min_seeds", self.min_seeds, 2),
        )


@dataclass(frozen=True)
class Stop:
    """The stop of a method at the look of `seeds` seeds.

    The mean accuracy of the method `by` is higher by `lead`, with the p-value `p`. race.json has
    these names.
    """

    seeds: int
    by: str
    lead: float
    p: float

    def __str__(self) -> str:
        return f"{self.lead:.4f} behind {self.by}, p = {self.p:.1g}"


def stops(
    accuracies: Mapping[str, Sequence[float]], looks: Sequence[int], level: float
) -> dict[str, Stop]:
    """Return the stops of one setting by method.

    `accuracies` has the final accuracies of each method at the first seeds, in the same order. At
    each look, the methods are compared that are not stopped and have all seeds of the look. The
    leader is the one with the highest mean. Another one is stopped if its one-sided paired t-test
    against the leader has a p-value of at most `level`.

    Why `level` bounds the mistakes: let L be the number of looks, and k the number of methods in a
    setting. Fix a best method, one of the highest true mean. It is stopped only if, at one of the
    looks, one of the k - 1 others passes a test against it. The true mean of each is no higher, so
    that it passes a test with a probability of at most `level`. Let `level` be alpha divided by the
    sum of (k - 1) L over all settings. Then the best method of any setting is stopped with a
    probability of at most alpha (union bound), whichever method leads by chance. Paired differences
    are taken to be normal and independent between seeds, as everywhere in reports.
    """
    stopped: dict[str, Stop] = {}
    for look in looks:
        racing = {}
        for name, values in accuracies.items():
            if name not in stopped and len(values) >= look:
                racing[name] = values[:look]
        if not racing:
            continue
        leader = max(racing, key=lambda name: sum(racing[name]))  # all have equally many seeds
        for name, values in racing.items():
            pairs = zip(racing[leader], values, strict=True)
            lead = Difference(tuple(leader_value - value for leader_value, value in pairs))
            p = lead.p_above(0.0)
            if name != leader and p <= level:
                stopped[name] = Stop(look, leader, lead.mean, p)
    return stopped


@dataclass
class Method:
    """A method in a setting.

    - `kept`: its selector is in `RaceSettings.keep`.
    - `jobs`: the numbers of its jobs, in the order of the seeds.
    - `accuracies`: the final accuracies of its jobs that have ended for good. If one has failed,
      the method waits: it gets no more seeds before the same command has run that job again.
    - `stop`: why it gets no more seeds, None if it goes on.
    """

    kept: bool
    jobs: list[int] = field(default_factory=list)
    accuracies: Sequence[float] = ()
    stop: Stop | None = None


class Race:
    """The race of `jobs`.

    `methods` has the methods by setting and name, and `all` the same methods in one list. `level`
    is the p-value at which a method is stopped. Raises `ConfigError` if none could be stopped.
    """

    def __init__(self, jobs: Sequence[ComposedJob], settings: RaceSettings) -> None:
        self.methods: dict[str, dict[str, Method]] = {}
        self.all: list[Method] = []
        self._group(jobs, settings.keep)
        self.num_seeds = len(self.all[0].jobs)
        # No look at the last seed: there is nothing left to stop.
        self.looks = range(settings.min_seeds, self.num_seeds, settings.batch)
        # The sum of (k - 1) L over settings (`stops`); len(self.methods) is the number of settings.
        num_racing = sum(not method.kept for method in self.all)
        num_tests = len(self.looks) * (num_racing - len(self.methods))
        self._check(jobs, settings, num_tests)
        self.level = settings.alpha / num_tests

    def _group(self, jobs: Sequence[ComposedJob], keep: Sequence[str]) -> None:
        """Assign each job to its setting and method, named by the keys in which jobs differ.

        Keys of the selector name the method, and all others except the seeds name the setting.
        """
        labels = [labels_of(job.overrides) for job in jobs]
        differing = [key for key in differing_keys(labels) if key not in (*SEED_KEYS, "selector")]
        for number, job in enumerate(jobs):
            choice = job.choices.get("selector", "")
            setting_words: list[str] = []
            method_words = [choice]
            for key in differing:
                if key not in labels[number]:
                    continue
                word = f"{key}={labels[number][key]}"
                if key.startswith(("selector.", "selector/")):
                    method_words.append(word)
                else:
                    setting_words.append(word)
            methods = self.methods.setdefault(" ".join(setting_words) or "the setting", {})
            name = " ".join(method_words)
            if name not in methods:
                methods[name] = Method(choice in keep)
                self.all.append(methods[name])
            methods[name].jobs.append(number)

    def _check(self, jobs: Sequence[ComposedJob], settings: RaceSettings, num_tests: int) -> None:
        """Raise `ConfigError` if no method could be stopped, or `keep` names none of the race."""
        choices = {job.choices.get("selector", "") for job in jobs}
        here = ",".join(sorted(choices))
        # Selectors that are kept by default need not be there.
        unknown = ",".join({*settings.keep} - {*choices, *RaceSettings.keep})
        has_looks = bool(self.looks)
        check(
            rule(
                has_looks,
                "seed",
                f"{self.num_seeds} of them",
                f"must be more than min_seeds={settings.min_seeds}",
                "sweep over more, for example seed='range(10)'",
            ),
            rule(
                num_tests > 0 or not has_looks,
                "selector",
                here,
                "must be two that are not in keep",
                "name more, or set keep=[]",
            ),
            rule(not unknown, "keep", unknown, "is not raced", f"selectors here: {here}"),
        )

    def batches(self, plans: Sequence[Plan], attempts: Attempts) -> Iterator[list[Plan]]:
        """Yield the jobs up to each look, of all settings together, and then the last ones.

        The caller runs the jobs that are yielded before it goes on. Their outcomes in `attempts`
        decide which methods go on.
        """
        looks = ", ".join(map(str, self.looks))
        rule_text = f"after {looks} of {self.num_seeds} seeds, p <= {self.level:.2g} stops a method"
        print_line(f"{len(self.methods)} settings; {rule_text}")
        for before, look in pairwise((0, *self.looks, self.num_seeds)):
            # 1. Run the next seeds of the methods that go on: not stopped, and not waiting for a
            #    run that is not done.
            racing = []
            batch = []
            for method in self.all:
                if method.stop is None and len(method.accuracies) >= before:
                    racing.append(method)
                    batch += [plans[job] for job in method.jobs[before:look]]
            yield batch
            # 2. Compare them.
            for method in racing:
                method.accuracies = accuracies_of(
                    [plans[job] for job in method.jobs[:look]], attempts
                )
            self._decide(look)
            # 3. Cancel the other seeds of methods that are stopped.
            for method in self.all:
                if method.stop is not None:
                    for job in method.jobs[look:]:
                        attempts.progress.job_ended(plans[job].folder)
                        attempts.overwriting.leave_out(plans[job])
            if attempts.screen is not None:
                self._write(attempts.screen.folder / "race.json")

    def _decide(self, seeds: int) -> None:
        """Stop methods, and print those that are stopped at the look of `seeds` seeds.

        Everything is decided anew from the first look on. Seeds of a method that is stopped do not
        change, so that earlier decisions stay.
        """
        lines = []
        for setting, methods in self.methods.items():
            racing = {}
            for name, method in methods.items():
                if not method.kept:
                    racing[name] = method.accuracies
            for name, stop in stops(racing, self.looks, self.level).items():
                methods[name].stop = stop
                if stop.seeds == seeds:
                    lines.append(f"{setting}: {name} is stopped, {stop}")
        if seeds in self.looks:
            for line in lines or ["no method is stopped"]:
                print_line(f"after {seeds} seeds · {line}")

    def _write(self, path: Path) -> None:
        """Write race.json: the state of the race, for users."""
        settings: dict[str, dict[str, object]] = {}
        for setting, methods in self.methods.items():
            settings[setting] = {name: asdict(method) for name, method in methods.items()}
        content = {"level": self.level, "looks": list(self.looks), "settings": settings}
        with suppress(OSError):  # nothing needs the file
            write_atomically(path, json.dumps(content, indent=1).encode(), alone=False)

    def print_table(self) -> None:
        """Print a line for each method of each setting, and how many runs were not needed."""
        table = Table("setting", "method", "seeds", "stopped", box=None, pad_edge=False)
        saved = 0
        for setting, methods in self.methods.items():
            for name, method in methods.items():
                seeds = len(method.accuracies)
                end = "kept" if method.kept else ""
                if method.stop is not None:
                    end = str(method.stop)
                    saved += self.num_seeds - seeds
                elif seeds < self.num_seeds:
                    end = "waits for a run that is not done"
                table.add_row(escape(setting), escape(name), str(seeds), escape(end))
        CONSOLE.print(table)
        print_line(f"{saved} of {self.num_seeds * len(self.all)} runs saved")


def accuracy_of(outcome: Outcome | None) -> float | None:
    """Return the final accuracy of a run, and 0 if it has diverged.

    Returns None if it has not ended, or if no round was evaluated.
    """
    if outcome is None or not outcome.final:
        return None
    if outcome.status == "diverged":
        return 0.0
    accuracy: float | None = outcome.summary.get("final_accuracy")
    return accuracy


def accuracies_of(plans: Sequence[Plan], attempts: Attempts) -> list[float]:
    """Return the final accuracies of those jobs that have ended for good."""
    accuracies = [accuracy_of(attempts.ended.get(plan.folder)) for plan in plans]
    return [accuracy for accuracy in accuracies if accuracy is not None]


def run(words: Sequence[str]) -> int:
    """Race as the command line says. Raises `FedsimError` before any work is done."""
    _, args = read_words(_parser(), words)
    args.multirun = True
    keys = list(RaceSettings.__dataclass_fields__)
    with search_path(args.config_dir, args.config_path):
        values = take_settings(args, keys)
    if isinstance(values.get("keep"), str):
        values["keep"] = [values["keep"]]
    checks = ProblemCollector()
    settings = checks.run(construct, RaceSettings, values, "") or RaceSettings()
    jobs = checks.run(compose_words, args) or []
    check(*(with_own_keys(problem, keys, "race") for problem in checks.problems))
    check(stop_at_problem(job.config for job in jobs))
    race = Race(jobs, settings)
    code = run_jobs(jobs, ["race", *words], race.batches)
    race.print_table()
    return code


def _parser() -> ArgumentParser:
    return ArgumentParser(
        prog="fedsim race",
        usage="fedsim race KEY=VALUES ... [alpha=0.05] [min_seeds=4] [batch=2] [keep=NAMES] "
        "[--config-dir DIR]",
        description="A sweep whose seeds are added step by step. After 4 (`min_seeds`) and each "
        "2 more (`batch`) a method is stopped in a setting if its final accuracy is below the "
        "leading one's, by paired t-tests at a level with which the best of any setting is stopped "
        "with a probability of at most `alpha` in all. A diverged run counts as accuracy 0. "
        "Selectors of `keep` (random, random_control, clairvoyant) run at all seeds, are not "
        "stopped and stop no other. The same command resumes the race.",
        epilog="example: fedsim race partition=shards_1,iid selector=random,oort,gpfl "
        "seed='range(10)'",
        allow_abbrev=False,
    )
