"""The tables of a report: results, accuracy by client, paired differences, times and traffic, the
simulated clock."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import yaml

from fedsim.core.record import CLIENT_ACCURACY, CLIENT_ACCURACY_MEASURES, FINAL_WINDOW, PHASES
from fedsim.results import measures
from fedsim.results.curves import is_recorded
from fedsim.results.groups import AT_SERVER, REFERENCE, Group, Panel
from fedsim.results.measures import (
    BYTES,
    PHASE_SECONDS,
    SAMPLES,
    SIMULATED,
    SPENT,
    Measure,
    finals,
    measured,
    preferences,
    values_by_seed,
)
from fedsim.results.ranking import EQUAL, WHOLE, Comparison, mean_cost, rank_tests, wins
from fedsim.results.statistics import (
    UNIT,
    Difference,
    Estimate,
    half_width_in_sd,
    holm,
    paired_values,
    pooled,
    pooled_values,
    sign_flip_test,
)
from fedsim.results.table import (
    Cell,
    Format,
    Table,
    median_reached,
    number,
    show_estimate,
    show_interval,
    show_median_reached,
    show_p,
    show_values,
)
from fedsim.tracking.tables import show_bytes, show_seconds

Column = tuple[str | Measure, Format] | Callable[[Group], str]
"""Of a table with a row a group: a measure, named or given, and its form as of `show_values`; or
what makes a cell."""

LEVEL_MARGIN = 0.02
"""Within which methods are told to be level with each other."""
MORE = 0.02
"""The second target over settings: so much above random selection's final accuracy."""
FILLED = {
    "window": FINAL_WINDOW,
    "margin": LEVEL_MARGIN,
    "equal": EQUAL,
    "more": MORE,
    "whole": WHOLE,
} | {name: half_width_in_sd(num) for name, num in (("three", 3), ("five", 5), ("ten", 10))}
"""The numbers in the texts below tables."""
TEXTS = yaml.safe_load(
    (Path(__file__).parent / "assets" / "tables.yaml").read_text(encoding="utf-8")
)


def _table(name: str, header: Sequence[str], rows: Sequence[Sequence[str]], **filled: str) -> Table:
    return Table(
        name, TEXTS[name]["title"], header, rows, TEXTS[name]["note"].format(**FILLED, **filled)
    )


FINAL, LAST = f"final accuracy (last {FINAL_WINDOW})", "last round"
"""What tables call the two: the mean of the last rounds, which everything is compared by, and the
last one alone."""


def _seeds(group: Group) -> str:
    diverged = f", {group.num_diverged} diverged" if group.num_diverged else ""
    return Cell(f"{len(group.complete)}{diverged}", len(group.complete))


BY_GROUP: Mapping[str, Mapping[str, Column]] = {
    "results": {
        "seeds": _seeds,
        FINAL: ("final_accuracy", "accuracy"),
        "part.": ("participation", ".3f"),
        "time": (partial(measures.total_cost, names=PHASE_SECONDS), show_seconds),
        "simulated": (partial(measures.total_cost, names=SIMULATED), show_seconds),
        "down": ("bytes_down", show_bytes),
        "up": ("bytes_up", show_bytes),
    },
    "overview": {
        "seeds": _seeds,
        FINAL: ("final_accuracy", "accuracy"),
        LAST: ("last_accuracy", "accuracy"),
        "fluct.": ("fluctuation", ".3f"),
        "covered after": ("rounds_to_cover", "reached"),
        "Gini": ("selection_gini", ".3f"),
        "part.": ("participation", ".3f"),
        "down": ("bytes_down", show_bytes),
        "up": ("bytes_up", show_bytes),
    },
    "checkpoints": {
        "seeds": _seeds,
        "15 %": ("accuracy@0.15", "accuracy"),
        "around 15 %": ("accuracy_around@0.15", "accuracy"),
        "50 %": ("accuracy@0.5", "accuracy"),
        "around 50 %": ("accuracy_around@0.5", "accuracy"),
        FINAL: ("final_accuracy", "accuracy"),
        LAST: ("last_accuracy", "accuracy"),
    },
    "selections": {
        "covered after": ("rounds_to_cover", "reached"),
        "never": ("never_selected", ".3g"),
        "min": ("fewest_selections", ".3g"),
        "median": ("median_selections", ".3g"),
        "max": ("most_selections", ".3g"),
        "Gini": ("selection_gini", ".3f"),
    },
    "clients": {
        "seeds": _seeds,
        "measured on": lambda group: str(group.runs[0].config[CLIENT_ACCURACY]),
        **{
            name.replace("_", " "): (f"{CLIENT_ACCURACY}_{name}", "accuracy")
            for name in CLIENT_ACCURACY_MEASURES
        },
        "clients never selected": ("never_selected", ".3g"),
    },
    "costs": {
        "rounds": ("num_rounds", ".0f"),
        "start-up rounds": ("start_up_rounds", ".0f"),
        "time": (partial(measures.total_cost, names=PHASE_SECONDS), show_seconds),
        "simulated": (partial(measures.total_cost, names=SIMULATED), show_seconds),
        "down": (partial(measures.total_cost, names=["bytes_down"]), show_bytes),
        "up": (partial(measures.total_cost, names=["bytes_up"]), show_bytes),
        "samples": (partial(measures.total_cost, names=SAMPLES), ",.0f"),
        "start-up bytes": (partial(measures.start_up_cost, names=BYTES), show_bytes),
        "start-up time": (partial(measures.start_up_cost, names=PHASE_SECONDS), show_seconds),
        "bytes a round": (partial(measures.cost_a_round, names=BYTES), show_bytes),
        "time a round": (partial(measures.cost_a_round, names=PHASE_SECONDS), show_seconds),
        "simulated a round": (partial(measures.cost_a_round, names=SIMULATED), show_seconds),
    },
    "times": {
        "rounds": ("num_rounds", ".0f"),
        "time": (partial(measures.total_cost, names=PHASE_SECONDS), show_seconds),
        **{
            phase: (partial(measures.total_cost, names=[f"seconds_{phase}"]), show_seconds)
            for phase in PHASES
        },
        "longest select": (
            lambda run: max(run.columns.get("seconds_select", ()), default=None),
            show_seconds,
        ),
        "simulated": (partial(measures.total_cost, names=SIMULATED), show_seconds),
        "simulated ask": (
            partial(measures.total_cost, names=["simulated_seconds_ask"]),
            show_seconds,
        ),
        "simulated train": (
            partial(measures.total_cost, names=["simulated_seconds_train"]),
            show_seconds,
        ),
        "late a round": ("late_a_round", ".2f"),
    },
}
"""The columns of tables with a row a group, after its name: means over seeds."""


def by_group(name: str, groups: Sequence[Group]) -> Table:
    """The table of `BY_GROUP` with this name."""
    columns = BY_GROUP[name]
    return _table(
        name,
        ["run", *columns],
        [[group.name, *_cells(group, columns.values())] for group in groups],
    )


def _cells(group: Group, columns: Iterable[Column]) -> Iterator[str]:
    for column in columns:
        yield (
            column(group)
            if callable(column)
            else show_values(measured(group, [column[0]])[0], column[1])
        )


P_HEADER = ["p", "p (Holm)", "level", "pairs", "detectable"]


def to_references(
    panels: Sequence[Panel],
) -> list[tuple[Panel, str, str, Difference | None, float]]:
    """Panel, line, its reference, paired difference and p-value, by Holm's correction over all of
    them."""
    compared = [
        (panel, line, panel.name_of(reference), measures.final_lead(group, reference))
        for panel in panels
        for line, group in panel.lines.items()
        if (reference := _reference(panel, group)) is not group
    ]
    corrected_p = holm(
        [math.nan if difference is None else difference.p_value for *_, difference in compared]
    )
    return [(*one, after) for one, after in zip(compared, corrected_p, strict=True)]


def pairs(panels: Sequence[Panel]) -> Table:
    """Paired differences of every line of a panel to its reference."""
    rows: list[list[str]] = []
    for panel, line, reference, difference, after in (compared := to_references(panels)):
        cells = ["-"] + [""] * (2 + len(P_HEADER))
        if difference is not None:
            flips = show_p(sign_flip_test(difference.values))
            cells = [*show_interval(difference), flips, *_p_cells(difference, after)]
        rows.append([panel.title, f"{line} - {reference}", *cells])
    if all(
        difference is None for *_, difference, _ in compared
    ):  # nothing to pair, as with one seed
        rows = []
    header = [
        "",
        "difference of final accuracy",
        "mean",
        "95 % interval",
        "p (sign flips)",
        *P_HEADER,
    ]
    return _table("pairs", header, rows)


def _reference(panel: Panel, group: Group) -> Group:
    """What a line of a panel is compared with: random selection in its setting, or else the first
    line, as where all lines are random selection."""
    nothing_else = all(line.choices.get("selector") == REFERENCE for line in panel.lines.values())
    return (None if nothing_else else panel.reference_of(group, REFERENCE)) or panel.reference


def pooled_pairs(panels: Sequence[Panel]) -> Table:
    """Differences to the reference, pooled over the divisions of the data at each seed: for lines
    that all have."""
    settings: dict[str, list[Panel]] = {}
    for panel in panels:
        settings.setdefault(panel.besides_partition, []).append(panel)
    compared = [
        (title, *found)
        for title, some in settings.items()
        if len(some) > 1
        for found in _pooled(some)
    ]
    corrected_p = holm([difference.p_value for _, _, difference in compared])
    rows = [
        [
            title,
            name,
            number(difference.strata),
            *show_interval(difference),
            *_p_cells(difference, after),
        ]
        for (title, name, difference), after in zip(compared, corrected_p, strict=True)
    ]
    header = ["", "difference of final accuracy", "settings", "mean", "95 % interval", *P_HEADER]
    return _table("pooled", header, rows)


def _pooled(panels: Sequence[Panel]) -> Iterator[tuple[str, Difference]]:
    """The differences of lines that all panels have, where they are to the same line everywhere."""
    for line in panels[0].lines:
        if all(line in panel.lines for panel in panels):
            references = [_reference(panel, panel.lines[line]) for panel in panels]
            names = {
                panel.name_of(reference)
                for panel, reference in zip(panels, references, strict=True)
            }
            own = [panel.lines[line] for panel in panels]
            strata = [
                paired_values(finals(one), finals(other))
                for one, other in zip(own, references, strict=True)
            ]
            difference = pooled(strata)
            if len(names) == 1 and line not in names and difference is not None:
                yield f"{line} - {names.pop()}", difference


def _p_cells(difference: Difference, corrected: float) -> list[str]:
    p_values = [
        show_p(p) for p in (difference.p_value, corrected, difference.p_equivalent(LEVEL_MARGIN))
    ]
    return [*p_values, number(difference.num), number(difference.detectable, ".4f")]


def imperfect(panels: Sequence[Panel]) -> Table:
    """How often each line chose imperfect clients."""
    rows = []
    for setting, line, choices, clients, p_value, corrected in preferences(panels):
        shares = (
            number(clients, ".3f"),
            show_estimate(choices),
            number(choices.mean / clients, ".2f"),
        )
        rows.append(
            [setting, line, number(choices.num), *shares, *map(show_p, (p_value, corrected))]
        )
    header = [
        "",
        "run",
        "seeds",
        "of the clients",
        "of the choices",
        "times as often",
        "p",
        "p (Holm)",
    ]
    return _table("imperfect", header, rows)


LEVELS = (0.9, 0.95, 1.0)
"""Targets as shares of the reference's mean final accuracy."""
REACHED = ("rounds_to", "bytes_to", "simulated_seconds_to")


def targets(panels: Sequence[Panel]) -> Table:
    """Rounds, bytes and simulated time until a run first reaches shares of the reference's mean
    final accuracy."""
    rows = []
    for panel in panels:
        level = measures.mean_final(panel.reference)
        for share, target in [] if level is None else [(share, share * level) for share in LEVELS]:
            until = [f"{name}@{target!r}" for name in REACHED]
            *_, slowest = map(median_reached, measured(panel.reference, until))
            for line, group in panel.lines.items():
                rounds, volume, seconds = measured(group, until)
                reached = [
                    show_median_reached(rounds),
                    show_median_reached(volume, show_bytes),
                    "-",
                    "-",
                ]
                own = median_reached(seconds)
                if own and is_recorded(group.complete, SIMULATED):
                    speed_up = slowest / own if slowest and max(own, slowest) < math.inf else None
                    reached[2:] = (
                        show_median_reached(seconds, show_seconds),
                        number(speed_up, ".2f"),
                    )
                rows.append(
                    [panel.title, line, number(target, ".4f"), number(share, ".0%"), *reached]
                )
    header = [
        "",
        "run",
        "target",
        "of the reference's final",
        "rounds",
        "bytes both ways",
        "simulated time",
    ]
    return _table("targets", [*header, "times as fast"], rows)


FEW = 10
"""With fewer settings the distribution of Friedman's statistic is not yet that of chi squared."""
IF_CLASS = {
    "nothing": "nothing can be asked of clients",
    "losses": "losses are cheap",
    "label counts": "clients may tell their label counts",
    "updates": "updates or gradients of everybody are cheap",
    "speeds": "clients tell how fast they are",
}
"""When methods of a class can be used, beside those that ask nothing."""
MOST_ADVISED = 3


def _over_settings(found: Comparison) -> Table:
    rows = []
    for method, ranks in found.ranks.items():
        cells = ["reference", *[""] * 7]
        if verdict := found.verdicts.get(method):
            own = verdict.difference
            lead = ["-", "", "", ""]
            if own is not None:
                lead = [number(own.num), *show_interval(own), show_p(own.p_value)]
            p_values = show_p(verdict.p_value), show_p(verdict.p_equal)
            cells = [str(verdict), *lead, *p_values, _show_ratio(found.possible(method))]
        told = [method, found.classes[method], *(number(rank, ".2f") for rank in ranks), *cells]
        rows.append([*told, show_median_reached(found.spent(method, BYTES), "{:.2f}".format)])
    header = [
        "method",
        "asks for",
        "rank",
        "in its class",
        "verdict",
        "seeds",
        "to random",
        "95 % interval",
    ]
    header += ["p", "p (Holm)", "p equal (Holm)", "of possible gain", "bytes"]
    p_value, difference = rank_tests(found.means)
    few = (
        f"; {len(found.panels)} settings are too few to rely on it"
        if len(found.panels) < FEW
        else ""
    )
    told_p = f"p {show_p(p_value) or 'not defined'}{few}"
    return _table("settings", header, rows, friedman=told_p, difference=f"{difference:.2f}")


def _show_ratio(value: tuple[float, float, float] | None) -> str:
    if value is None:
        return "-"
    return (
        "not defined"
        if math.isnan(value[0])
        else Cell("{:+.2f} [{:+.2f}, {:+.2f}]".format(*value), value[0])
    )


def _wins(found: Comparison) -> Table:
    seeds = sorted({block.shape[1] for block in found.blocks})
    if not seeds[0]:
        return _table("wins", [], [], seeds="0")
    shares, (chances, lows, highs) = wins(found.blocks)
    places = {method: found.methods.index(method) for method in found.ranks}

    def cell(*at: int) -> str:
        return Cell(
            f"{shares[at]:.2f}; {chances[at]:.2f} [{lows[at]:.2f}, {highs[at]:.2f}]", chances[at]
        )

    rows = [
        [row, *("" if i == j else cell(i, j) for j in places.values())] for row, i in places.items()
    ]
    return _table(
        "wins",
        ["method", *places],
        rows,
        seeds=" to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1])))),
    )


def _possible(found: Comparison) -> Table:
    settings = {panel.title: slice(at, at + 1) for at, panel in enumerate(found.panels)} | {
        "all": slice(None)
    }
    methods = found.verdicts if found.ceiling else ()
    rows = [
        [method, *(_show_ratio(found.possible(method, at)) for at in settings.values())]
        for method in methods
    ]
    return _table("possible", ["method", *settings], rows)


def _costs(found: Comparison) -> Table:
    rows = []
    for method in found.ranks:
        spent = [
            found.spent(method, names, more) for names in SPENT.values() for more in (0.0, MORE)
        ]
        pairs = [(own, mean_cost(reference, BYTES)) for own, reference in found.pairs(method)]
        area = [
            values_by_seed(own, partial(measures.accuracy_by_bytes, budget=budget))
            for own, budget in pairs
        ]
        worst = [values_by_seed(own, f"{CLIENT_ACCURACY}_worst_tenth") for own, _ in pairs]
        by_seed = [tuple(pooled_values(one).values()) for one in (area, worst)]
        means = [show_estimate(Estimate(values, UNIT) if values else None) for values in by_seed]
        rows.append(
            [
                method,
                found.classes[method],
                *(show_median_reached(s, "{:.2f}".format) for s in spent),
                *means,
            ]
        )
    targets = [
        f"{kind} to {target}" for kind in SPENT for target in ("random's final", f"{MORE:g} more")
    ]
    return _table(
        "settings_costs", ["method", "asks for", *targets, "area over bytes", "worst tenth"], rows
    )


def _advice(found: Comparison) -> Table:
    none = f"{found.reference}: none is better beyond chance"
    rows = [
        [case, ", ".join(names[:MOST_ADVISED]) or none, by] for case, names, by in _cases(found)
    ]
    return _table("advice", ["if", "use", "by"], rows)


def _cases(found: Comparison) -> Iterator[tuple[str, list[str], str]]:
    """What is known or cheap, the methods that the corrected tests support then, and what they are
    sorted by."""
    for asked, case in IF_CLASS.items():
        for name in sorted(
            name for name in set(found.classes.values()) if name.partition(AT_SERVER)[0] == asked
        ):
            told = name.replace(asked, case).replace(AT_SERVER, "; the server holds ")
            yield (
                told,
                [one for one in found.better if found.classes[one] in ("nothing", name)],
                "mean rank",
            )
    for kind, case in (("bytes", "traffic is dear"), ("simulated time", "devices are slow")):
        if found.spent(
            found.reference, SPENT[kind]
        ):  # which is the answer, too, where the better ones spend more
            spent = {
                one: median_reached(found.spent(one, SPENT[kind]))
                for one in (found.reference, *found.better)
            }
            least = min(spent, key=lambda one: spent[one] or math.inf)
            yield case, [least] if found.better else [], f"least {kind} to random's final accuracy"
    for some in found.imperfect():
        yield (
            "labels are noisy, or clients otherwise imperfect",
            some.better,
            "mean rank in such settings",
        )


def all_tables(
    groups: Sequence[Group], panels: Sequence[Panel], over: Comparison | None = None
) -> list[Table]:
    """All of these tables but `results`. `over`: the comparison of methods over settings, if there
    is one."""
    finished = [group for group in groups if group.complete]
    by_client = [group for group in finished if group.runs[0].config.get(CLIENT_ACCURACY)]
    found = (
        []
        if over is None
        else [make(over) for make in (_over_settings, _advice, _wins, _possible, _costs)]
    )
    found += [by_group(name, groups) for name in ("overview", "checkpoints")]
    found += [table(panels) for table in (pairs, pooled_pairs, targets)]
    found += [by_group("selections", finished), imperfect(panels), by_group("clients", by_client)]
    return [*found, *(by_group(name, finished) for name in ("costs", "times"))]
