"""`fedsim replay`: what many selectors choose on the models of one run, whom they prefer, and how
good that is."""

import json
import re
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import yaml
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import pdist, squareform
from scipy.stats import hypergeom, kendalltau, spearmanr

from fedsim.config.command_line import read_words
from fedsim.config.compose import check_jobs, make_plan
from fedsim.config.job import ComposedJob
from fedsim.config.plan import Plan
from fedsim.core.arrays import Floats
from fedsim.core.configs import leaves
from fedsim.core.disk import conf_dir, unwritable, write_files
from fedsim.core.errors import Problem, at_least, check, rule
from fedsim.jobs.prepare import compose_words, require_room
from fedsim.report.table import Table, make_frame, table_files
from fedsim.results.files import OutputError
from fedsim.results.statistics import MIN_SEEDS, UNBOUNDED, Estimate
from fedsim.running.outcome import outcome_on_file
from fedsim.running.process import STOP
from fedsim.tracking.tables import CONSOLE, print_line, show_share

LEAD, MIN_METHODS, RESAMPLES = "random", 4, 1000
REGRET = """Regret: (L - best) / (worst - best) of a round's random cohorts, L the validation loss of the model that the
choice makes, with its own weights. Percentile: how many of them are better. Seconds of selecting, and bytes of
questions. Means over rounds."""
PREFERENCES = """Spearman's rank correlation with how often a client is chosen. Loss: at the lead's models, the mean
over rounds. Imperfect: 1 for these clients. Speed: samples a second."""
BOUNDS = {"regret": UNBOUNDED, "loss": UNBOUNDED, "percentile": (0.0, 100.0)}
MEASURED = ("loss", "percentile", "clients", "seconds_select", "bytes_asked")


def run(words: Sequence[str]) -> int:
    """Replay the jobs of the command line. Raises `FedsimError`, with all mistakes before any work
    is done."""
    options, args = read_words(_parser(), words)
    check(at_least("--cohorts", options.cohorts, 1))
    args.multirun = True
    jobs = compose_words(args)
    plans = check_jobs(jobs)
    check(*_problems(jobs, plans))
    require_room(plans)
    seeds: dict[int, dict[str, Plan]] = {}
    for name, plan in zip(method_names(jobs), plans, strict=True):
        seeds.setdefault(plan.settings.seed, {})[name] = plan
    with STOP.working():
        _play_all(seeds, options.cohorts)
    return 0


def _parser() -> ArgumentParser:
    usage = "fedsim replay [--cohorts M] selector=A,B,... [words of a run: key=value ..., --config-dir DIR]"
    told = "What the selectors of a sweep choose on the models of one run of random selection, and how good that is."
    parser = ArgumentParser("fedsim replay", usage, told, allow_abbrev=False)
    parser.add_argument(
        "--cohorts",
        type=int,
        default=50,
        metavar="M",
        help="random cohorts a round to compare with (50)",
    )
    return parser


def _problems(jobs: Sequence[ComposedJob], plans: Sequence[Plan]) -> Iterator[Problem | None]:
    configs = [
        dict(leaves({k: v for k, v in plan.config.items() if k not in ("selector", "seed")}))
        for plan in plans
    ]
    text, remedy = (
        "differs between jobs, and a replay has one setting",
        "sweep over selector and seed alone",
    )
    for key in dict.fromkeys(key for one in configs for key in one):
        yield rule(len({str(one.get(key)) for one in configs}) == 1, key, ..., text, remedy)
    share, text = (
        plans[0].server.validation_fraction,
        "must be > 0 for a replay, which compares losses on that split",
    )
    yield rule(share > 0, "server.validation_fraction", share, text, "set it to 0.05, say")
    launcher, text = (
        str(jobs[0].launcher.get("_target_")),
        "must be basic for a replay, which is one process",
    )
    yield rule(not launcher.startswith("fedsim."), "hydra/launcher", launcher, text)


def method_names(jobs: Sequence[ComposedJob]) -> list[str]:
    """The selector of each job, and the values about selectors that it does not share with all
    others."""
    own = [
        [word for word in job.overrides if word.lstrip("+").startswith(("selector.", "selector/"))]
        for job in jobs
    ]
    shared = set.intersection(*map(set, own))
    told = [
        [re.sub(r"^[^=]*[./]", "", word) for word in words if word not in shared] for words in own
    ]
    return [
        ", ".join([job.choices["selector"], *words]) for job, words in zip(jobs, told, strict=True)
    ]


def lead_of(plan: Plan) -> Plan:
    """The ordinary run of `plan` with random selection."""
    node = yaml.safe_load((conf_dir() / "selector" / f"{LEAD}.yaml").read_text("utf-8"))
    choices = {
        group: choice for group, choice in plan.choices.items() if not group.startswith("selector/")
    }
    return make_plan({**plan.config, "selector": node}, {**choices, "selector": LEAD})


def _play_all(seeds: Mapping[int, Mapping[str, Plan]], num_cohorts: int) -> None:
    """Play seed after seed. At the end of each, all files are written, before a signal ends the
    process."""
    from fedsim.report.figures import save  # here: matplotlib and PyTorch take time to import
    from fedsim.running.replay import Replay

    first, rows, clients = (
        next(iter(seeds.values())),
        list[dict[str, Any]](),
        list[dict[str, Floats]](),
    )
    plan = next(iter(first.values()))
    settings, folder, real = plan.settings, plan.folder.parent / "replay", real_accuracies(seeds)
    told, num = (
        f"{len(first)} methods, {len(seeds)} seeds, {settings.num_rounds} rounds",
        settings.num_clients,
    )
    print_line(
        f"replay: {told}; all {num} clients train once a round, {num / settings.cohort_size:.3g} times a run's"
    )
    print_line(
        "files are written at the end of each seed; there is no going on with one that is broken off"
    )
    for seed, methods in seeds.items():
        replay = Replay(lead_of(next(iter(methods.values()))), methods, num_cohorts)
        for _ in range(settings.num_rounds):
            chosen, lead = replay.play()
            rows += [{"seed": seed, **row} for row in chosen]
            told = f"lead's test accuracy {show_share(lead.test_accuracy)}"
            print_line(f"  seed {seed}  round {lead.round}/{settings.num_rounds}  {told}")
        clients.append(replay.clients())
        choices = Choices(list(first), rows, clients)
        lines, plots, tables = (
            [json.dumps(row) + "\n" for row in rows],
            choices.plots(),
            choices.tables(real),
        )
        try:
            with STOP.deferred():
                write_files(
                    folder, {"choices.jsonl": "".join(lines).encode(), **table_files(tables)}
                )
                save(plots, folder)
        except OSError as error:
            raise OutputError(unwritable("output_dir", folder, error)) from error
        STOP.raise_if_asked()
    CONSOLE.print(*(table.rich() for table in tables[:2]))
    print_line(f"replay in {folder}")


def real_accuracies(seeds: Mapping[int, Mapping[str, Plan]]) -> dict[str, list[float]]:
    """The final accuracies of those of the plans that are done as ordinary runs, by method."""
    found: dict[str, list[float]] = {}
    for name, plan in (job for methods in seeds.values() for job in methods.items()):
        outcome = outcome_on_file(plan)
        if (
            outcome.status == "done"
            and (accuracy := outcome.summary.get("smoothed_accuracy")) is not None
        ):
            found.setdefault(name, []).append(accuracy)
    return found


class Choices:
    """What a replay says of methods, in arrays [seeds, methods] by name: `measured`, `preferences`;
    `apart`, 1 - the mean Jaccard index of their choices, as `pdist` orders pairs; `chance`, that
    index expected of random ones."""

    def __init__(
        self, methods: Sequence[str], rows: Sequence[Any], clients: Sequence[Mapping[str, Floats]]
    ) -> None:
        """`rows` (fedsim.running.replay) by seed, round and method; what the `clients` are like
        [N], seed by seed."""
        seeds, num, self.methods = len(clients), len(methods), methods
        numbers = {
            n: np.array([row[n] for row in rows]).reshape(seeds, -1, num)
            for n in (*MEASURED, "best", "worst")
        }
        loss, best, worst = (numbers[name] for name in ("loss", "best", "worst"))
        regret = np.divide(loss - best, worst - best, out=np.zeros_like(loss), where=worst > best)
        self.measured = {
            "regret": regret.mean(1),
            **{name: numbers[name].mean(1) for name in MEASURED},
        }
        self.order = [int(at) for at in np.argsort(regret.mean((0, 1)), kind="stable")]
        apart, counts = [], np.zeros((seeds, num, len(clients[0]["size"])))
        for start in range(0, len(rows), num):
            is_in = np.zeros(counts.shape[1:], np.bool_)
            for method, row in enumerate(rows[start : start + num]):
                is_in[method, row["chosen"]] = True
            counts[start * seeds // len(rows)] += is_in
            apart.append(pdist(is_in, "jaccard"))
        self.apart, drawn = (
            np.mean(apart, axis=0),
            [(row["available"], row["drawn"]) for row in rows[::num]],
        )
        self.chance = float(
            np.mean(
                [hypergeom(n, k, k).expect(lambda j, k=k: j / (2 * k - j)) for n, k in drawn if k]
            )
        )
        seen = [*zip(counts, clients, strict=True)]
        self.preferences = {
            k: np.array([[rank_correlation(o, c[k]) for o in s] for s, c in seen])
            for k in clients[0]
        }

    def tables(self, real: Mapping[str, Sequence[float]]) -> list[Table]:
        """With the `verdict` on the accuracies of real runs, by method, of those that there are
        of."""
        accuracy = {
            "real accuracy": np.array([[np.mean(real.get(name, np.nan)) for name in self.methods]])
        }
        liked = self.preferences
        agreement = {self.methods[at]: 1 - squareform(self.apart)[None, :, at] for at in self.order}
        known = [at for at, name in enumerate(self.methods) if name in real]
        told = verdict(self.measured["regret"].mean(0)[known], accuracy["real accuracy"][0, known])
        tables: list[
            tuple[str, str, Mapping[str, Floats], str, Mapping[str, tuple[float, float]]]
        ] = [
            ("choices", "Choices", self.measured | accuracy, f"{REGRET}\n{told}", BOUNDS),
            (
                "preferences",
                "Whom they prefer",
                liked,
                PREFERENCES,
                dict.fromkeys(liked, (-1.0, 1.0)),
            ),
            (
                "agreement",
                "Mean Jaccard index",
                agreement,
                f"Two random choices: {self.chance:.3f}.",
                {},
            ),
        ]
        made = []
        for name, title, columns, note, ends in tables:
            own = {
                column.split("_")[0]: (values, ends.get(column))
                for column, values in columns.items()
            }
            rows = [
                [self.methods[n], *(shown(each[:, n], end) for each, end in own.values())]
                for n in self.order
            ]
            frame = make_frame(["method", *own], rows)
            made.append(Table(name, title, frame, dict.fromkeys(own, ".4g"), note))
        return made

    def plots(self) -> list[Any]:
        """Of fedsim.report.figures; in that of agreement, methods are in the order of average
        linkage."""
        from matplotlib.figure import Figure

        from fedsim.report.figures import COLUMN, Plot, style

        near = leaves_list(linkage(self.apart, "average")) if len(self.methods) > 1 else [0]
        names, alike = ([self.methods[at] for at in order] for order in (self.order, near))
        likes = np.array([values.mean(0)[self.order] for values in self.preferences.values()]).T
        close, most = (
            1 - squareform(self.apart)[np.ix_(near, near)],
            max([2 * self.chance, *(1 - self.apart)]),
        )
        maps = {
            "agreement": (
                close,
                alike,
                alike,
                "viridis",
                (0, most),
                "mean Jaccard index (red: by chance)",
            )
        }
        maps["preferences"] = (
            likes,
            names,
            list(self.preferences),
            "RdBu_r",
            (-1, 1),
            "rank correlation",
        )
        size = COLUMN + 0.1 * len(names), 1.6 + 0.17 * len(names)
        with style():
            plots = [Plot(name, "", Figure(figsize=size)) for name in (*maps, "regret")]
            *axes, ax = [plot.figure.subplots() for plot in plots]
            for its, (values, rows, columns, colours, ends, label) in zip(
                axes, maps.values(), strict=True
            ):
                image = its.imshow(values, colours, vmin=ends[0], vmax=ends[1], aspect="auto")
                its.figure.colorbar(image, ax=its, label=label)
                its.set_yticks(range(len(rows)), rows)
                its.set_xticks(range(len(columns)), columns, rotation=90)
            plots[0].figure.axes[1].axhline(self.chance, color="red")
            seeds = [Estimate(tuple(values)) for values in self.measured["regret"][:, self.order].T]
            reach = [one.half_width for one in seeds] if seeds[0].num >= MIN_SEEDS else None
            ax.errorbar(
                [one.mean for one in seeds], range(len(seeds)), xerr=reach, fmt="o", capsize=2
            )
            ax.set_yticks(range(len(names)), names)
            ax.set(ylim=(len(names) - 0.5, -0.5), xlabel="regret (0 best, 1 worst random cohort)")
        return plots


def verdict(regrets: Floats, accuracies: Floats) -> str:
    """A sentence on Kendall's tau between the ranks of methods by regret, the least first, and by
    real accuracy, the highest first, with its 95 % interval by the percentile bootstrap over
    methods, which are the sample here."""
    if (num := len(regrets)) < MIN_METHODS:
        return f"Whether regret predicts real accuracy is open: {MIN_METHODS} methods with runs are needed, not {num}."
    draws = [np.arange(num), *np.random.default_rng(0).integers(num, size=(RESAMPLES, num))]
    taus = [kendalltau(-regrets[draw], accuracies[draw]).statistic for draw in draws]
    low, high = np.nanquantile(taus[1:], [0.025, 0.975])
    does = (
        "ranks methods as real accuracy does"
        if low > 0
        else "does not predict the ranks by real accuracy"
    )
    return f"Regret {does}: Kendall's tau {taus[0]:.2f} [{low:.2f}, {high:.2f}] over {num} methods."


def rank_correlation(one: Floats, other: Floats) -> float:
    """Spearman's, over what is known of both; nan where one of them is the same for all."""
    known = np.isfinite(one) & np.isfinite(other)
    varies = known.any() and np.ptp(one[known]) > 0 and np.ptp(other[known]) > 0
    return float(spearmanr(one[known], other[known]).statistic) if varies else float("nan")


def shown(values: Floats, bounds: tuple[float, float] | None) -> Estimate | float | None:
    """Return the mean over seeds, within `bounds` with its interval if there are enough of them."""
    known = tuple(map(float, values[np.isfinite(values)]))
    if bounds and len(known) >= MIN_SEEDS:
        return Estimate(known, bounds)
    return float(np.mean(known)) if known else None
