"""What papers print: numbers and claims, each with its source, and which of our runs they are about."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fedsim.report import measures
from fedsim.report.groups import Group, flat
from fedsim.report.measures import Measure

FOLDER = Path(__file__).parent / "published"


@dataclass(frozen=True)
class Number:
    """A number that a paper prints for one of its runs. `about`: the choices of our runs that it is about."""

    id: str
    where: str
    about: Mapping[str, str]
    measure: str
    value: float
    plus_minus: float | None = None


@dataclass(frozen=True)
class Claim:
    """A claim about the runs that made the choices `about`; one of these forms, told by the field that is given:

    - `at_most`, `at_least`: `measure` of each run is at most or at least a value.
    - `gain`: `measure` exceeds that of each of the `others`, which made these choices of `among` and are else the same,
      by about as much.
    - `level_with`: `measure` differs from that of each of the `others` by at most as much.
    - `grows_with`: `measure` rises along `values` of that config key or choice (`falls`: it falls); with `minus`, the
      difference to the runs that made those choices does.

    `any_size`: the claim is one about shares, which hold at a smaller size of the preset too. `added_after_runs`: it
    was written down after runs of the preset had been seen.
    """

    id: str
    where: str
    text: str
    about: Mapping[str, str]
    measure: str
    at_most: float | None = None
    at_least: float | None = None
    gain: float | None = None
    level_with: float | None = None
    grows_with: str | None = None
    falls: bool = False
    values: Sequence[str] = ()
    minus: Mapping[str, str] | None = None
    others: Sequence[str] = ()
    among: str = "selector"
    any_size: bool = False
    added_after_runs: bool = False


@dataclass(frozen=True)
class Publication:
    """A file of published/: the numbers and claims of a paper that runs of `presets` are about; those of `claims_only`
    are of another size, so that numbers cannot be compared.

    `substitutes`: choices of config groups that may take the place of the preset's (see `protocol`).
    """

    title: str
    source: str
    presets: Sequence[str]
    claims_only: Sequence[str]
    numbers: Sequence[Number]
    claims: Sequence[Claim]
    substitutes: Mapping[str, Sequence[str]] = field(default_factory=dict)


def publications() -> list[Publication]:
    """All that are shipped."""
    return [_read(path) for path in sorted(FOLDER.glob("*.yaml"))]


def about(preset: str, scale: str) -> list[Publication]:
    """Those that runs of a preset in that size are compared with."""
    if scale == "full":
        return [publication for publication in publications() if preset in publication.presets]
    return [publication for publication in publications() if f"{preset}_{scale}" in publication.claims_only]


def measure_of(text: str) -> Measure:
    """`accuracy@0.15` (after that share of the rounds), `final_accuracy` and so on as functions. Raises KeyError."""
    name, _, argument = text.partition("@")
    if argument:
        made: Measure = WITH_ARGUMENT[name](float(argument))
        return made
    return PLAIN[name]


PLAIN: Mapping[str, Measure] = {
    "final_accuracy": measures.final_accuracy(),
    "final_accuracy_10": measures.final_accuracy(10),
    "fluctuation": measures.fluctuation(),
    "steadiness": measures.steadiness(),
    "rounds_to_cover": measures.rounds_to_cover(),
    "participation": measures.mean_participation,
    "most_selections": measures.most_selections,
    "selection_gini": measures.selection_gini,
    "speed": measures.speed,
    "selection_overhead": measures.selection_overhead,
    "seconds_200": measures.seconds_200,
    "choosing_seconds_200": measures.choosing_seconds_200,
    "participation_rise": measures.participation_rise,
    "mean_selections": measures.mean_selections,
    "peak_selections": measures.peak_selections,
    "peak_height": measures.peak_height,
    "num_clients": measures.num_clients,
    "samples_total": measures.samples_total,
    "samples_mean": measures.samples_mean,
    "samples_deviation": measures.samples_deviation,
}
WITH_ARGUMENT: Mapping[str, Any] = {
    "accuracy": measures.accuracy_after,
    "accuracy_around": measures.accuracy_around,
    "gain_after": measures.gain_after,
    "rounds_to": measures.rounds_to,
    "bytes_to": measures.bytes_to,
    "peak_distance": measures.peak_distance,
}


def matches(group: Group, about: Mapping[str, str]) -> bool:
    """Whether a group made these choices, or has these values of the config (`partition.alpha`)."""
    values = {**{k: str(v) for k, v in flat(group.runs[0].config)}, **group.choices, **group.labels}
    return all(_same(values.get(name), str(wanted)) for name, wanted in about.items())


def _same(found: str | None, wanted: str) -> bool:
    """Whether two texts are the same, or the same number."""
    try:
        return found == wanted or (found is not None and float(found) == float(wanted))
    except ValueError:
        return False


def _read(path: Path) -> Publication:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return Publication(
        title=values["title"],
        source=values["source"],
        presets=values["presets"],
        claims_only=values.get("claims_only", ()),
        numbers=[number for table in values.get("tables", ()) for number in _numbers(table)],
        claims=[Claim(**claim) for claim in values.get("claims", ())],
        substitutes=values.get("substitutes", {}),
    )


def _numbers(table: Mapping[str, Any]) -> list[Number]:
    """A printed table: `rows` map a choice of the group `row` to one value for each of `columns`."""
    found = []
    for choice, values in table["rows"].items():
        for column, value in zip(table["columns"], values, strict=True):
            value, plus_minus = value if isinstance(value, list) else (value, None)
            found.append(
                Number(
                    id=f"{table['id']}/{choice}/{column['title']}",
                    where=table["where"],
                    about={**column["about"], table["row"]: choice},
                    measure=column["measure"],
                    value=value,
                    plus_minus=plus_minus,
                )
            )
    return found
