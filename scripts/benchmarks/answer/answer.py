"""Everything that the pages of the benchmark say of the scored runs, computed once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd
from scipy import special

from fedsim.benchmark.rules import CONTROLS
from fedsim.results.labels import REFERENCE
from fedsim.results.statistics import ALPHA, POWER, holm, t_quantile
from scripts.benchmarks.answer import inference, scores, tuning
from scripts.benchmarks.answer.scores import NO_METHODS

NUM_CURVES = 3
"""Number of methods whose curves are drawn, next to a control."""
CURVE_SHARES = tuple(np.linspace(0.05, 1, 20).round(2))
BUDGETS = ("round", "bytes", "seconds")


@dataclass(frozen=True, eq=False)
class Answer:
    """The benchmark's answer from scored runs (`scores`).

    `server` has the accuracies of the server's samples alone (scripts/benchmarks/server_only.py),
    and `trials` those of tuning (`tuning.read_trials`). Both may be empty. `classes` has what each
    method asks of clients and needs at the server, and `sources` where it comes from, as its card
    says. Tests are over the sampled settings of `all_rounds`.
    """

    all_rounds: pd.DataFrame
    server: pd.DataFrame
    trials: pd.DataFrame = field(default_factory=pd.DataFrame)
    classes: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """The rows of the sampled settings."""
        return scores.sampled(self.all_rounds)

    @cached_property
    def finals(self) -> pd.Series:
        return scores.finals(self.rounds)

    @cached_property
    def gains(self) -> pd.DataFrame:
        return scores.gains(self.finals)

    @cached_property
    def intervals(self) -> pd.DataFrame:
        """Each method's gain in each regime (`inference.intervals`).

        `p_class` is corrected over the methods of the same class alone.
        """
        rows = inference.intervals(self.gains)
        tested = rows[rows["p_holm"].notna()]
        kinds = tested.index.get_level_values("method").map(self.class_of)
        corrected = tested.groupby(kinds)["p"].transform(lambda p: holm(p.tolist()))
        return rows.assign(p_class=corrected)

    @cached_property
    def overall(self) -> pd.DataFrame:
        """Each method's mean gain over regimes with its interval, the highest gain first."""
        return _mean_gains(self.gains).sort_values("gain", ascending=False)

    def overall_after(self, num_rounds: int) -> pd.DataFrame:
        """Return `overall` over the regimes with so many rounds. It is not tested."""
        gains = self.gains.xs(num_rounds, level="num_rounds", drop_level=False)
        return _mean_gains(gains).drop(columns="p_holm")

    def overall_in(self, settings: Sequence[str]) -> pd.DataFrame:
        """Return `overall` over some settings. It is not tested, because settings that were chosen
        with results known would make tests too favourable."""
        is_in = self.gains.index.get_level_values("setting").isin(settings)
        return _mean_gains(self.gains[is_in]).drop(columns="p_holm")

    @cached_property
    def overall_at(self) -> dict[str, pd.DataFrame]:
        """`overall` after as many rounds as random selection, at its simulated time and at its
        bytes."""
        return {
            "equal rounds": self.overall,
            "equal time": _mean_gains(self.budgets["equal time"]),
            "equal bytes": _mean_gains(self.budgets["equal bytes"]),
        }

    @property
    def methods(self) -> list[str]:
        """The methods that have run in all settings, by their mean gain. Controls are among them,
        and references if they have run everywhere."""
        return list(self.overall.index[self.overall["settings"] == len(self.settings)])

    @property
    def partial_methods(self) -> list[str]:
        """The methods and references that have run in some settings only, by their mean gain."""
        return list(self.overall.index[self.overall["settings"] < len(self.settings)])

    @property
    def rivals(self) -> list[str]:
        """The methods that have run in all settings, without controls and references."""
        return [name for name in self.methods if name not in (*CONTROLS, *NO_METHODS)]

    @property
    def settings(self) -> list[str]:
        """The sampled settings that have run, in the order of the page."""
        have_run = set(self.rounds["setting"])
        return [name for name in scores.FIRST_BLOCK if name in have_run]

    def class_of(self, method: str) -> str:
        return self.classes.get(method, "unknown")

    def significant(
        self, sign: int, p: str = "p_holm", gains: pd.DataFrame | None = None
    ) -> list[str]:
        """Return the methods that gain (1) or lose (-1) significantly in at least one row.

        `p` is the column of corrected p-values. `gains` are `intervals` if they are not given.
        """
        rows = self.intervals if gains is None else gains
        is_beyond = (rows[p] < ALPHA) & (np.sign(rows["gain"]) == sign)
        names = set(rows.index[is_beyond].get_level_values("method"))
        return [name for name in self.rivals if name in names]

    def needed(self, gains: pd.DataFrame) -> pd.Series:
        """Return the gains that are just significant, for each tested row of `gains`.

        `gains` are `intervals`, `overall` or those from the common baseline. A gain is
        significant if it exceeds its standard error times Student's quantile at Holm's first level,
        0.05 divided by the number of tests. The rows are those of the methods that have run in all
        settings.
        """
        tests, level = _tests_of_all_settings(gains)
        return tests["error"] * tests["df"].map(lambda df: t_quantile(level, df))

    def detectable(self, gains: pd.DataFrame) -> pd.Series:
        """Return the true gains whose estimate exceeds `needed` in 80 of 100 studies like this one,
        for the same rows. By the noncentral t distribution."""
        tests, level = _tests_of_all_settings(gains)

        def shift(df: float) -> float:
            return float(special.nctdtrinc(df, 1 - POWER, t_quantile(level, df)))

        return tests["error"] * tests["df"].map(shift)

    @cached_property
    def common_baseline_gains(self) -> pd.DataFrame:
        """The gains over the mean of random selection and the controls that have run."""
        controls = [name for name in CONTROLS if name in self.methods]
        return scores.gains(self.finals, (REFERENCE, *controls))

    @cached_property
    def common_baseline_intervals(self) -> pd.DataFrame:
        """`intervals` of `common_baseline_gains`."""
        return inference.intervals(self.common_baseline_gains)

    @cached_property
    def common_baseline_overall(self) -> pd.DataFrame:
        """`overall` of `common_baseline_gains`."""
        return _mean_gains(self.common_baseline_gains).sort_values("gain", ascending=False)

    @property
    def common_baseline_tests(self) -> pd.DataFrame:
        """The tests of `common_baseline_overall` and `common_baseline_intervals`, by method."""
        in_regimes = self.common_baseline_intervals.droplevel(scores.REGIME)
        return pd.concat([self.common_baseline_overall, in_regimes])

    @cached_property
    def effect_of_seeds(self) -> dict[str, float]:
        """The test of a common effect of seeds on mean gains (`inference.effect_of_seeds`)."""
        return self._effect_of_seeds(self.gains)

    @cached_property
    def effect_of_seeds_with_common_baseline(self) -> dict[str, float]:
        """`effect_of_seeds` on `common_baseline_gains`."""
        return self._effect_of_seeds(self.common_baseline_gains)

    def _effect_of_seeds(self, gains: pd.DataFrame) -> dict[str, float]:
        means = scores.over_regimes(gains)
        by_method = [means.loc[name].loc[self.settings].to_numpy() for name in self.rivals]
        return inference.effect_of_seeds(np.stack(by_method))

    @cached_property
    def ranks(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Mean ranks and their tests (`inference.ranks`)."""
        return inference.ranks(self.rounds)

    @cached_property
    def references(self) -> pd.DataFrame:
        """The gains of what is no method, as `intervals`: the schedule, and the server alone."""
        rows = [inference.intervals(table) for table in self._reference_gains]
        return pd.concat(rows).drop(columns="p_holm")

    @cached_property
    def overall_references(self) -> pd.DataFrame:
        """The mean gains of `references` over regimes, as `overall`. That of the schedule is over
        step and cosine."""
        rows = [_mean_gains(table) for table in self._reference_gains]
        return pd.concat(rows).drop(columns="p_holm")

    @cached_property
    def _reference_gains(self) -> list[pd.DataFrame]:
        of_schedule = scores.schedule_gains(self.finals)
        tables = [of_schedule.rename(index={REFERENCE: "schedule"}, level="method")]
        if len(self.server):
            server = self.server.assign(method="server").set_index(scores.KEYS)["accuracy"]
            of_random = self.finals.xs(REFERENCE, level="method", drop_level=False)
            tables.append(scores.gains(pd.concat([of_random, server])))
        return tables

    @cached_property
    def budgets(self) -> dict[str, pd.DataFrame]:
        """The gains at the bytes and at the simulated time of random selection, and of each run's
        best round."""
        return {
            "best round": scores.gains(scores.best_rounds(self.rounds)),
            "equal bytes": scores.gains(scores.at_budget(self.rounds, "bytes")),
            "equal time": scores.gains(scores.at_budget(self.rounds, "seconds")),
        }

    @cached_property
    def changes(self) -> pd.DataFrame:
        """The changes of each method's mean gain over regimes (`inference.what_changes`)."""
        others = {name: scores.over_regimes(table) for name, table in self.budgets.items()}
        return inference.what_changes(scores.over_regimes(self.gains), others)

    @cached_property
    def details(self) -> pd.DataFrame:
        """`intervals` and what changes them in each regime."""
        changes = inference.what_changes(self.gains, self.budgets)
        return self.intervals.join(changes.drop(columns=["settings", "gain"]))

    @cached_property
    def tuning(self) -> pd.DataFrame:
        """The choices of the trials in the settings of `rounds` (`tuning.summarise`)."""
        return tuning.summarise(self.trials[self.trials["setting"].isin(self.settings)])

    @cached_property
    def prices(self) -> dict[str, pd.Series]:
        """The cost of each run until random selection's final accuracy, by kind of cost."""
        return {cost: scores.price(self.rounds, cost) for cost in ("bytes", "seconds")}

    @cached_property
    def failures(self) -> pd.Series:
        """The number of runs of each method that diverged."""
        status = scores.all_runs(self.rounds)["status"]
        return (status != "done").groupby("method").sum()

    @cached_property
    def drawn(self) -> list[str]:
        """The methods whose curves are drawn: the ones of highest mean gain, and a control."""
        controls = [name for name in self.methods if name in CONTROLS]
        return [*self.rivals[:NUM_CURVES], *controls[:1]]

    @cached_property
    def curves(self) -> pd.DataFrame:
        """The gains of the drawn methods at shares of random selection's rounds, bytes and time.

        The columns are those of `intervals`, budget and share.
        """
        rounds = self.rounds[self.rounds["method"].isin([REFERENCE, *self.drawn])]
        rows = []
        for budget in BUDGETS:
            for share in CURVE_SHARES:
                table = scores.gains(scores.at_budget(rounds, budget, share))
                row = inference.intervals(table).reset_index()
                rows.append(row.assign(budget=budget, share=share))
        return pd.concat(rows, ignore_index=True)


def _mean_gains(gains: pd.DataFrame) -> pd.DataFrame:
    """Return each method's mean gain over regimes with its interval; a row for each method."""
    rows = inference.intervals(scores.over_regimes(gains))
    rows.index = rows.index.get_level_values("method")
    return rows


def _tests_of_all_settings(gains: pd.DataFrame) -> tuple[pd.DataFrame, float]:
    """Return the tested rows of methods that have run in all settings, and the share of Student's t
    below Holm's first level (two-sided, over all tested rows)."""
    tests = gains.dropna(subset=["half", "p_holm"])
    is_complete = tests["settings"] == tests["settings"].max()
    return tests[is_complete], 1 - ALPHA / 2 / len(tests)


def best_of_classes(answer: Answer) -> dict[str, str]:
    """Return the method of highest mean gain in each class, the best class first."""
    best: dict[str, str] = {}
    for name in answer.rivals:
        best.setdefault(answer.class_of(name), name)
    return best
