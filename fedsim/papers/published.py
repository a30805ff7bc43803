"""Numbers and claims printed in papers, each with the runs of ours that it is about, and in words the rules by which
they are judged. `examine` has the same rules as code; their error rates are simulated in tests/test_report_errors.py.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from fedsim.results.statistics import LEVEL, MIN_SEEDS

Verdict = Literal[
    "reproduced", "direction only", "consistent with", "too wide to tell", "not reproduced", "undecided", "not judged"
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

ALPHA = round(1 - LEVEL, 10)
MAJORITY = 0.5
"""A bound on every run is judged by whether it holds for more than this share of runs."""

RULES = {
    "judged": (
        "Only runs that follow the preset in every key that can matter are judged, by their configs; claims about"
        " others need the runs of all of them. At another size than the paper's, numbers and absolute values are not"
        " judged, and printed gains by their sign alone: direction only at best."
    ),
    "number": (
        "A number that a paper prints for one run is taken as one draw. It is reproduced if our mean is equivalent to"
        " it: within the margin of its table by two one-sided tests. It is not reproduced if it is no draw from the"
        " distribution of our runs: it lies outside of the 95 % prediction interval of one more run, and stays so"
        " after correction. If it lies inside of that interval without being shown to be close, it is consistent with"
        " our runs where the interval reaches no further than the margin to each side; where it does, it is too wide to"
        f" tell. Else, and with fewer than {MIN_SEEDS} finished seeds, it is undecided."
    ),
    "value": (
        "A claim that something is about a value is judged as a number, with a tolerance that we give to the word: the"
        " mean lies within it, or the printed run is no draw of ours even with the tolerance. The first round in which"
        " something happens may never come (a censored value, known to be later than the last round): such claims are"
        " about the median, by sign tests: five seeds can say reproduced, it takes six to say not reproduced."
    ),
    "bound": (
        "A claim that every run is at most, or at least, a value is about the share of runs for which it holds."
        " It is reproduced if the exact 95 % interval of that share lies above one half, not reproduced if it lies"
        " below, else undecided. Six seeds that agree are the fewest that decide it, if it is alone in its family; it"
        " takes seven in one of two or three such tests, eight of up to six, ten of up to 25. A run that never gets"
        " there counts as later than its last round; one that ends before the bound says nothing."
    ),
    "gain": (
        "A claim that a method exceeds others is about the smallest of its true mean differences to each of them,"
        " paired at equal seeds (t intervals). All others are compared simultaneously: for the claim each must be"
        " exceeded; against it one comparison is enough, corrected for their number. It is reproduced if the 95 %"
        " interval excludes 0 and holds the printed gain (where one is printed), direction only if it excludes 0 and"
        " does not hold the printed gain, not reproduced if it lies below the printed gain and does not exclude 0"
        " (below 0, where none is printed), else undecided. Claims over several settings are about the mean of the"
        " settings' differences, taken at each seed first, so that seeds are what is counted."
    ),
    "level": (
        "Methods are level with each other if all differences lie within the stated margin (two one-sided tests, that"
        " is, 90 % intervals), and not level if one lies outside of it. A method is not worse than others if the lower"
        " end of the 95 % interval of each difference lies above minus the margin."
    ),
    "trend": "A trend is the mean over seeds of the least-squares slope along the parameter, by its 95 % t interval.",
    "holm": (
        "A family of tests is what a paper says in one place of one quantity: the judged numbers, or the judged claims,"
        " with the same place and measure, over all presets of this report; rows that were written after runs had been"
        " seen are a family by themselves, so that they cannot change the others. In each family the tests for and"
        " those against are corrected by Holm's method, each by themselves: the chance of any false 'reproduced' or"
        " 'direction only' in it is 5 % at most, and so is that of any false 'not reproduced'. Over the paper: the"
        " verdict of the stricter reading, in which all tests of a paper are one family (before and after runs apart)."
    ),
}


FOLDER = Path(__file__).parent / "numbers"


@dataclass(frozen=True)
class Number:
    """A number that a paper prints for one of its runs.

    `about`: the choices of config groups, or config values, that identify our runs; `measure`: the name of the measure
    (see `fedsim.results.measures`); `where`: the place in the paper; `plus_minus`: the printed deviation;
    `margin`: how close our mean has to be for the number to be reproduced. `added_after_runs`: as of a `Claim`.
    """

    id: str
    where: str
    about: Mapping[str, str]
    measure: str
    value: float
    margin: float
    plus_minus: float | None = None
    added_after_runs: bool = False
    statement: Hashable = None
    """What of the paper it is: equal for readings of a method and presets that are about the same printed number."""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper about the runs identified by `about`. Which of these fields is given determines its form:

    - `at_most`, `at_least`: the `measure` of each run is at most, or at least, this value.
    - `value`: the `measure` is about this value, that is, within `tolerance` of it.
    - `gain`: the `measure` exceeds that of each of the `others`, by this value +- `tolerance` unless it is 0. The
      `others` are choices of the config group `among`; their runs have everything else in common.
    - `not_worse_by`: the `measure` does not fall short of that of each of the `others` by this value or more.
    - `level_with`: the `measure` differs from that of each of the `others` by at most this value; with `all_pairs`,
      that of any two of all these methods does.
    - `grows_with`: the `measure` increases along the `values` of this config key or group (with `falls` it decreases).
      With `minus`, this is about the difference to the runs that made the choices `minus`.

    A comparison that is `pooled_over` a config key or group is about the mean of its differences at these `values`.

    `any_size`: the claim is about shares and therefore also holds at a smaller size of the preset. `added_after_runs`:
    the claim was written down after results of the preset had been seen. `revised_after_runs`: its form or wording was
    changed then, its thresholds were not. `note` is shown with the verdict.
    """

    id: str
    where: str
    text: str
    about: Mapping[str, str]
    measure: str
    at_most: float | None = None
    at_least: float | None = None
    value: float | None = None
    tolerance: float = 0.0
    gain: float | None = None
    not_worse_by: float | None = None
    level_with: float | None = None
    all_pairs: bool = False
    grows_with: str | None = None
    falls: bool = False
    values: Sequence[str] = ()
    minus: Mapping[str, str] | None = None
    pooled_over: str | None = None
    others: Sequence[str] = ()
    among: str = "selector"
    any_size: bool = False
    added_after_runs: bool = False
    revised_after_runs: bool = False
    note: str = ""

    @property
    def statement(self) -> Hashable:
        """What of the paper it is: equal where only the name of our method, or the preset, differs in the words."""
        return self.where, self.text.replace(self.about.get("selector", "\0"), "")

    @property
    def is_bound(self) -> bool:
        return self.at_most is not None or self.at_least is not None


@dataclass(frozen=True)
class Publication:
    """A file of published/: the numbers and claims of a paper that are compared with runs of `presets`.

    Runs of the presets in `claims_only` have another size than the paper's, so that only claims can be compared.
    `substitutes`: choices of config groups that may replace those of the preset (see `protocol`). `paper`: its short
    name; what is corrected together is said in `rules`.
    """

    paper: str
    title: str
    source: str
    presets: Sequence[str]
    claims_only: Sequence[str]
    numbers: Sequence[Number]
    claims: Sequence[Claim]
    substitutes: Mapping[str, Sequence[str]] = field(default_factory=dict)


def publications() -> list[Publication]:
    """All publications in published/."""
    return [_read(path) for path in sorted(FOLDER.glob("*.yaml"))]


def publications_about(preset: str, scale: str) -> list[Publication]:
    """The publications that runs of a preset at this scale are compared with."""
    full = scale == "full"
    return [p for p in publications() if (preset in p.presets if full else f"{preset}_{scale}" in p.claims_only)]


def _read(path: Path) -> Publication:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return Publication(
        paper=values["paper"],
        title=values["title"],
        source=values["source"],
        presets=values["presets"],
        claims_only=values.get("claims_only", ()),
        numbers=[number for table in values.get("tables", ()) for number in _numbers(table)],
        claims=[Claim(**claim) for claim in values.get("claims", ())],
        substitutes=values.get("substitutes", {}),
    )


def _numbers(table: Mapping[str, Any]) -> list[Number]:
    """The numbers of a printed table, whose `rows` map choices of the config group `row` to one value per column.

    `margin` is given for the table or for a column; `rows_added_after_runs` names those of the rows. Rows with equal
    values are one row of the paper, to which several of ours are compared.
    """
    numbers = []
    for choice, values in table["rows"].items():
        for index, (column, printed) in enumerate(zip(table["columns"], values, strict=True)):
            alike: list[Any] = []  # the different rows with this value in the column
            for row in table["rows"].values():
                alike += [row] if row[index] == printed and row not in alike else []
            value, plus_minus = printed if isinstance(printed, list) else (printed, None)
            number = Number(
                id=f"{table['id']}/{choice}/{column['title']}",
                where=table["where"],
                about={**column["about"], table["row"]: choice},
                measure=column["measure"],
                value=value,
                margin={**table, **column}["margin"],
                plus_minus=plus_minus,
                added_after_runs=choice in table.get("rows_added_after_runs", ()),
                statement=(table["where"], column["title"], value, alike.index(values)),
            )
            numbers.append(number)
    return numbers
