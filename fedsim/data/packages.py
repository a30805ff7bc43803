"""Files of Python packages as data sets, which are read without importing the packages."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fedsim.core.errors import DataError, Problem


@dataclass(frozen=True)
class Package:
    """A package on PyPI of which only files are read.

    `module` is its folder, and `requirement` its name and version. `extra` is the extra of fedsim
    that installs it, which is named like the data set.
    """

    module: str
    requirement: str
    extra: str

    def problem(self) -> Problem | None:
        """Return the problem of a package that is not installed; None if it is."""
        if find_spec(self.module) is not None:
            return None
        text = f"needs the files of {self.requirement}, which is not installed"
        remedy = (
            f"in a checkout: uv sync --extra {self.extra}; elsewhere: pip install --no-deps "
            f"{self.requirement} (the extra '{self.extra}' without the package's requirements)"
        )
        return Problem("dataset", self.extra, text, remedy)

    def folder(self) -> Path:
        """Return the package's folder. Raises `DataError` if it is not installed."""
        spec = find_spec(self.module)
        if spec is None or not spec.submodule_search_locations:
            raise DataError(str(self.problem()))
        return Path(spec.submodule_search_locations[0])
