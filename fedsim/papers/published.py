"""Numbers and claims printed in papers, read from the files of numbers/.

A file is a `Publication`: what one paper prints about the runs of some presets. Each number and
claim names, in `about`, the runs of ours that it is compared with. The rules of judging are here in
words (`RULES`), and in `evidence` and `examine` as code. tests/test_report_rules.py simulates their
error rates.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from fedsim.core.configs import YAML_LOADER
from fedsim.results.statistics import MIN_SEEDS

Verdict = Literal[
    "reproduced",
    "direction only",
    "consistent with",
    "too wide to tell",
    "not reproduced",
    "undecided",
    "not judged",
]
"""The possible results of judging a number or claim; `RULES` say what they mean."""
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

MAJORITY = 0.5
"""A claim that all runs are within a bound is reproduced if it holds for more than this share."""

HERE = Path(__file__).parent
FOLDER = HERE / "numbers"


def _read_yaml(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), YAML_LOADER)


RULES: Mapping[str, str] = {
    name: text.format(min_seeds=MIN_SEEDS) for name, text in _read_yaml(HERE / "rules.yaml").items()
}
"""The rules in words, shown with verdicts."""


@dataclass(frozen=True)
class Number:
    """A number that a paper prints for one of its runs.

    `about` has the choices of config groups, or config values, that identify our runs. `measure` is
    one of `fedsim.results.measures`, and `where` the place in the paper. `plus_minus` is the
    printed deviation. Our mean must be within `margin` for the number to be reproduced.
    `added_after_runs` is as in a `Claim`.

    Several of our runs may be compared with one printed number: runs of two readings of a method,
    or of two presets. `statement` is the same for these, and differs for other printed numbers.
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


@dataclass(frozen=True)
class Claim:
    """A claim of a paper about the runs identified by `about`.

    A claim gives exactly one of these fields, which determines its form (tests/test_claims.py):

    - `at_most`, `at_least`: the `measure` of each run is at most, or at least, this value.
    - `value`: the `measure` is about this value, that is, within `tolerance` of it.
    - `gain`: the `measure` exceeds that of each of the `others`, by this value +- `tolerance`
      unless it is 0. The `others` are choices of the config group `among`; their runs have
      everything else in common.
    - `not_worse_by`: the `measure` does not fall short of that of each of the `others` by this
      value or more.
    - `level_with`: the `measure` differs from that of each of the `others` by at most this value;
      with `all_pairs`, the measures of any two of all these methods do.
    - `grows_with`: the `measure` increases along the `values` of this config key or group (with
      `falls` it decreases). With `minus`, the claim is about the difference to the runs that made
      the choices `minus`.

    A comparison with `others` that is `pooled_over` a config key or group is about the mean of the
    differences at these `values`.

    Claims of all forms have these fields:

    - `any_size`: the claim is about shares, so that it also holds at a smaller size of the preset.
    - `added_after_runs`: the claim was written down after results of the preset had been seen.
    - `revised_after_runs`: its form, its wording or a bound was changed after that.
    - `note`: a remark that is shown with the verdict.
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
        """A key of the printed claim, as in a `Number`: the name of our method does not count."""
        method = self.about.get("selector")
        return self.where, self.text.replace(method, "") if method else self.text

    @property
    def is_bound(self) -> bool:
        """True if the claim is about a bound that each run keeps."""
        return self.at_most is not None or self.at_least is not None


@dataclass(frozen=True)
class Publication:
    """A file of numbers/: the numbers and claims of a paper that are compared with runs of
    `presets`.

    `paper` is the paper's short name. An item of `claims_only` names a preset and a scale, such as
    fedabc_fig2_small. Its runs have another size than the paper's, so that only claims can be
    compared. `substitutes` are choices of config groups that may replace those of the preset.
    """

    paper: str
    title: str
    source: str
    presets: Sequence[str]
    claims_only: Sequence[str]
    numbers: Sequence[Number]
    claims: Sequence[Claim]
    substitutes: Mapping[str, Sequence[str]] = field(default_factory=dict)


@cache
def publications() -> Sequence[Publication]:
    """Return all publications in numbers/."""
    return [_read(path) for path in sorted(FOLDER.glob("*.yaml"))]


def publications_about(preset: str, scale: str) -> list[Publication]:
    """Return the publications that runs of a preset at this scale are compared with."""
    if scale == "full":
        return [publication for publication in publications() if preset in publication.presets]
    name = f"{preset}_{scale}"
    return [publication for publication in publications() if name in publication.claims_only]


def _read(path: Path) -> Publication:
    """Return the publication in a YAML file, whose keys are the fields of `Publication`."""
    values = {"claims_only": (), **_read_yaml(path)}
    numbers = []
    for table in values.pop("tables", ()):
        numbers += _numbers(table)
    claims = [Claim(**claim) for claim in values.pop("claims", ())]
    return Publication(**values, numbers=numbers, claims=claims)


def _numbers(table: Mapping[str, Any]) -> list[Number]:
    """Return the numbers of a printed table, whose `rows` map choices of the config group `row` to
    one value for each column.

    `margin` is given for the table or for a column, and `rows_added_after_runs` names rows. Rows
    with equal values are one row of the paper, with which several of ours are compared.
    """
    printed_rows: list[Any] = []
    for row in table["rows"].values():
        if row not in printed_rows:
            printed_rows.append(row)
    numbers = []
    for choice, row in table["rows"].items():
        for index, (column, cell) in enumerate(zip(table["columns"], row, strict=True)):
            value, plus_minus = cell if isinstance(cell, list) else (cell, None)
            # The paper may print this value in several rows of the column.
            same_value = [printed for printed in printed_rows if printed[index] == cell]
            number = Number(
                id=f"{table['id']}/{choice}/{column['title']}",
                where=table["where"],
                about={**column["about"], table["row"]: choice},
                measure=column["measure"],
                value=value,
                margin=column.get("margin", table.get("margin")),
                plus_minus=plus_minus,
                added_after_runs=choice in table.get("rows_added_after_runs", ()),
                statement=(table["where"], column["title"], value, same_value.index(row)),
            )
            numbers.append(number)
    return numbers
