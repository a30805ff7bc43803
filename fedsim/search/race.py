"""`fedsim race`: a sweep whose seeds are added step by step.

A method is a selector with its parameters. A setting is everything else but the seed. A look is a
comparison of the methods of a setting after a number of seeds. A method that is beaten at a look
gets no more seeds in this setting. The command gives `Race.batches` to
`fedsim.jobs.cli.run_jobs`, which runs the jobs up to each look before it continues the generator.

Maron and Moore, "Hoeffding races" (NIPS 1994), race models on the same samples. Birattari et al.,
"A racing algorithm for configuring metaheuristics" (GECCO 2002), race methods on the same instances
(F-race), and stop them by tests on ranks. Here, seeds are the instances. Methods are stopped by
paired t-tests, because tests on ranks reject nothing at few seeds. `stops` has the level of a test.
"""

import json
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
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
from fedsim.core.errors import Problem, ProblemCollector, at_least, check, rule
from fedsim.jobs.cli import run_jobs
from fedsim.jobs.prepare import compose_words
from fedsim.jobs.sweep import Attempts
from fedsim.results.labels import CEILING, CONTROL, REFERENCE
from fedsim.results.statistics import Difference
from fedsim.running.outcome import Outcome
from fedsim.search.own_keys import stop_at_problem, take_settings, with_own_keys
from fedsim.tracking.tables import CONSOLE, print_line

WAITS = "waits for a run that is not done"
"""The remark on a method, or on a selector of `fedsim tune`, of which a job has not ended."""


@dataclass(frozen=True, kw_only=True)
class RaceSettings:
    """The keys of the command line that belong to the race itself.

    The probability that the best method of any setting is stopped is at most `alpha` (`stops`).
    The first look is after `min_seeds` seeds, and the next ones after each `batch` more. The
    selectors in `keep` run at all seeds, as references. They are not stopped and stop no other
    method, because one of them may be an upper bound that beats all methods.
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
    """The stop of a method at the look after `seeds` seeds.

    The mean accuracy of the method `by` is higher by `lead`, with the p-value `p`. These names are
    keys in race.json.
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

    `accuracies` has the final accuracies of each method at the first seeds, in the same order of
    seeds. `looks` has the number of seeds of each look. A look compares the methods that are not
    stopped and have as many seeds. The leader is the method with the highest mean. Another method
    is stopped if the one-sided paired t-test, that the leader is better, has a p-value of at most
    `level`.

    Why `level` bounds the mistakes: let L be the number of looks, and k the number of methods in a
    setting. Fix a best method, one of the highest true mean. It is stopped only if, at one of the
    looks, one of the k - 1 others passes a test against it. The true mean of each is no higher, so
    that it passes a test with a probability of at most `level`. Let `level` be alpha divided by the
    sum of (k - 1) L over all settings. Then the best method of any setting is stopped with a
    probability of at most alpha (union bound), whichever method leads by chance. Paired differences
    are taken to be normal and independent between seeds, as everywhere in reports.
    """
    stopped: dict[str, Stop] = {}
    for num_seeds in looks:
        racing = {}
        for name, values in accuracies.items():
            if name not in stopped and len(values) >= num_seeds:
                racing[name] = values[:num_seeds]
        if not racing:
            continue
        leader = max(racing, key=lambda name: sum(racing[name]))  # all have equally many seeds
        for name, values in racing.items():
            if name == leader:
                continue
            differences = []
            for leader_value, value in zip(racing[leader], values, strict=True):
                differences.append(leader_value - value)
            lead = Difference(tuple(differences))
            p = lead.p_above(0.0)
            if p <= level:
                stopped[name] = Stop(num_seeds, leader, lead.mean, p)
    return stopped


@dataclass
class Method:
    """A method in a setting. Its fields are keys in race.json.

    - `kept`: whether its selector is in `RaceSettings.keep`.
    - `jobs`: the numbers of its jobs, in the order of the seeds.
    - `accuracies`: the final accuracies of its jobs up to the latest look, in the same order. If a
      job has failed, its accuracy is missing, and the method waits: it gets no more seeds, and no
      look compares it, before the same command has run that job again.
    - `stop`: why it gets no more seeds; None as long as it does.
    """

    kept: bool
    jobs: list[int] = field(default_factory=list)
    accuracies: Sequence[float] = ()
    stop: Stop | None = None


def methods_of(jobs: Sequence[ComposedJob], keep: Sequence[str]) -> dict[str, dict[str, Method]]:
    """Return the methods of `jobs` by setting and name, without results.

    Both are named by the overrides in which jobs differ: those of the selector name the method, and
    all others except the seeds name the setting. The selectors in `keep` are `kept`.
    """
    labels = [labels_of(job.overrides) for job in jobs]
    differing = [key for key in differing_keys(labels) if key not in (*SEED_KEYS, "selector")]
    methods: dict[str, dict[str, Method]] = {}
    for number, job in enumerate(jobs):
        choice = job.choices.get("selector", "")
        setting_words = []
        method_words = [choice]
        for key in differing:
            if key not in labels[number]:
                continue
            word = f"{key}={labels[number][key]}"
            if key.startswith(("selector.", "selector/")):
                method_words.append(word)
            else:
                setting_words.append(word)
        setting = " ".join(setting_words) or "the setting"
        name = " ".join(method_words)
        method = methods.setdefault(setting, {}).setdefault(name, Method(choice in keep))
        method.jobs.append(number)
    return methods


class Race:
    """The race of `jobs`.

    `methods` has the methods by setting and name. `looks` has the number of seeds of each look.
    `level` is the p-value at which a method is stopped. Raises `ConfigError` if no method could be
    stopped.
    """

    def __init__(self, jobs: Sequence[ComposedJob], settings: RaceSettings) -> None:
        self.methods = methods_of(jobs, settings.keep)
        self._all_methods: list[Method] = []
        num_rivals = 0  # the sum of k - 1 over all settings (`stops`)
        for methods in self.methods.values():
            self._all_methods += methods.values()
            num_compared = sum(not method.kept for method in methods.values())
            num_rivals += num_compared - 1
        self._all_methods.sort(key=lambda method: method.jobs[0])  # as in the sweep
        self.num_seeds = len(self._all_methods[0].jobs)
        # No look at the last seed: there is nothing left to stop.
        self.looks = range(settings.min_seeds, self.num_seeds, settings.batch)
        self._check(jobs, settings, num_rivals)
        self.level = settings.alpha / (num_rivals * len(self.looks))

    def _check(self, jobs: Sequence[ComposedJob], settings: RaceSettings, num_rivals: int) -> None:
        """Raise `ConfigError` if no method could be stopped, or `keep` names none of the race."""
        problems = []
        if not self.looks:
            fault = f"must be more than min_seeds={settings.min_seeds}"
            remedy = "sweep over more, for example seed='range(10)'"
            problems.append(Problem("seed", f"{self.num_seeds} of them", fault, remedy))
        choices = {job.choices.get("selector", "") for job in jobs}
        here = ",".join(sorted(choices))
        if self.looks and num_rivals <= 0:
            fault = "must be two that are not in keep"
            problems.append(Problem("selector", here, fault, "name more, or set keep=[]"))
        # Selectors that are kept by default need not be there.
        unknown = ",".join({*settings.keep} - {*choices, *RaceSettings.keep})
        if unknown:
            problems.append(Problem("keep", unknown, "is not raced", f"selectors here: {here}"))
        check(*problems)

    def batches(self, plans: Sequence[Plan], attempts: Attempts) -> Iterator[list[Plan]]:
        """Yield the jobs up to each look, of all settings together, and then the last ones.

        `plans` are those of the jobs. The caller runs the yielded jobs before it continues. Their
        outcomes in `attempts` decide which methods get more seeds.
        """
        looks = ", ".join(map(str, self.looks))
        print_line(
            f"{len(self.methods)} settings; after {looks} of {self.num_seeds} seeds, "
            f"p <= {self.level:.2g} stops a method"
        )
        for seeds_before, num_seeds in pairwise((0, *self.looks, self.num_seeds)):
            # 1. Run the next seeds of the methods that are not stopped and do not wait for a run.
            running = []
            batch = []
            for method in self._all_methods:
                if method.stop is None and len(method.accuracies) >= seeds_before:
                    running.append(method)
                    batch += [plans[job] for job in method.jobs[seeds_before:num_seeds]]
            yield batch
            # 2. Compare the methods. A method with a missing accuracy has fewer than `num_seeds`,
            #    so `stops` does not compare it here, and step 1 does not run it again.
            for method in running:
                finished_plans = [plans[job] for job in method.jobs[:num_seeds]]
                method.accuracies = accuracies_of(finished_plans, attempts)
            self._stop_methods(num_seeds)
            # 3. Cancel the other seeds of all methods that are stopped.
            for method in self._all_methods:
                if method.stop is not None:
                    for job in method.jobs[num_seeds:]:
                        attempts.cancel(plans[job])
            if attempts.screen is not None:
                self._write(attempts.screen.folder / "race.json")

    def _stop_methods(self, num_seeds: int) -> None:
        """Stop methods, and print those that are stopped at the look after `num_seeds` seeds.

        `stops` repeats all looks from the first one. It repeats their decisions, too, because the
        accuracies at the seeds of an earlier look stay the same.
        """
        lines = []
        for setting, methods in self.methods.items():
            accuracies = {}
            for name, method in methods.items():
                if not method.kept:
                    accuracies[name] = method.accuracies
            for name, stop in stops(accuracies, self.looks, self.level).items():
                methods[name].stop = stop
                if stop.seeds == num_seeds:
                    lines.append(f"{setting}: {name} is stopped, {stop}")
        if num_seeds in self.looks:
            for line in lines or ["no method is stopped"]:
                print_line(f"after {num_seeds} seeds · {line}")

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
        num_saved = 0
        for setting, methods in self.methods.items():
            for name, method in methods.items():
                num_done = len(method.accuracies)
                remark = "kept" if method.kept else ""
                if method.stop is not None:
                    remark = str(method.stop)
                    num_saved += self.num_seeds - num_done
                elif num_done < self.num_seeds:
                    remark = WAITS
                table.add_row(escape(setting), escape(name), str(num_done), escape(remark))
        CONSOLE.print(table)
        print_line(f"{num_saved} of {self.num_seeds * len(self._all_methods)} runs saved")


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
    """Return the final accuracies of the jobs that have one (`accuracy_of`), in order."""
    accuracies = []
    for plan in plans:
        accuracy = accuracy_of(attempts.ended.get(plan.folder))
        if accuracy is not None:
            accuracies.append(accuracy)
    return accuracies


def run(words: Sequence[str]) -> int:
    """Race as the command line says. Raises `FedsimError` before any work is done."""
    _, args = read_words(_parser(), words)
    args.multirun = True
    keys = [setting.name for setting in fields(RaceSettings)]
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
