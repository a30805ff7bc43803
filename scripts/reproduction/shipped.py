"""What docs/results holds of our runs, and the verdicts on the papers by all of them together."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.papers.judge import Judged, correct, examine_all
from fedsim.papers.published import Publication
from fedsim.results.archive import read_archive
from fedsim.results.frames import runs_frame

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PRESETS = RESULTS.parents[1] / "conf" / "preset"
SMALL = "_small"


@dataclass(frozen=True)
class Shipped:
    """The runs by folder. A folder's name is that of its preset, and of its size if it ends in
    _small."""

    frames: dict[Path, pd.DataFrame]

    @cached_property
    def judged(self) -> dict[Path, list[tuple[Publication, list[Judged]]]]:
        """The judgements by folder; tests of a family are corrected together, whichever folder they
        are of.

        Folders that are not of a preset hold runs in other settings, which claims are not about.
        """
        examined = {
            folder: examine_all(frame["run"])
            for folder, frame in self.frames.items()
            if _is_of_preset(folder)
        }
        found = iter(correct([one for some in examined.values() for one in some]))
        return {
            folder: list(itertools.islice(found, len(some))) for folder, some in examined.items()
        }

    @property
    def all_judged(self) -> list[tuple[Publication, list[Judged]]]:
        return [one for some in self.judged.values() for one in some]


def _is_of_preset(folder: Path) -> bool:
    return (PRESETS / f"{folder.name.removesuffix(SMALL)}.yaml").is_file()


def read_shipped(root: Path = RESULTS) -> Shipped:
    """All folders in docs/results that have a summary, with the runs in their archives."""
    return Shipped(
        {path.parent: read_frame(path.parent) for path in sorted(root.glob("*/summary.json"))}
    )


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write a summary.json of a folder without white space, which takes a quarter of the bytes."""
    text = json.dumps(summary, separators=(",", ":"))
    (folder / "summary.json").write_text(f"{text}\n", encoding="utf-8")


def read_frame(folder: Path) -> pd.DataFrame:
    return runs_frame(
        [run for path in sorted(folder.glob("*.parquet")) for run in read_archive(path)]
    )
