"""Decide which modules a config may have imported.

An import runs a module, and a config may come from a stranger. So a config may name classes of
fedsim, the user's own modules (in the working folder or on PYTHONPATH), and installed packages that
require fedsim. It may not name Python's own modules or any other installed package.
"""

import re
import sys
import sysconfig
from functools import cache
from importlib.metadata import packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "fedsim-selection"
"""The name under which fedsim is installed."""
REMEDY = (
    "own classes live in the working folder, on PYTHONPATH, or in a package that requires "
    f"{DISTRIBUTION}"
)


def not_imported(module: str) -> str | None:
    """Return why fedsim does not import `module` for a config; None if it does. Imports nothing."""
    top, *below = module.split(".")
    refusal = "and is not imported for a config"
    if "__main__" in below:
        return f"{module} is a program, {refusal}"
    if top in sys.stdlib_module_names or top in ("test", "__main__"):
        return f"{top} belongs to Python, {refusal}"
    if top != "fedsim" and is_installed(top) and not _requires_fedsim(top):
        return f"{top} is an installed package that does not require {DISTRIBUTION}, {refusal}"
    return None


def is_user_module(module: str) -> bool:
    """Return whether a module is the user's, or of an installed package that requires fedsim."""
    return module.partition(".")[0] != "fedsim" and not_imported(module) is None


def find_in_working_folder() -> None:
    """Let Python find modules in the working folder, after all other places.

    Called just before a class of the user's is imported. Before that, a file in the working folder
    could take the place of an optional module that some package looks for in vain.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)


@cache
def is_installed(package: str) -> bool:
    """Return whether Python finds the top-level `package` among the installed ones."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.origin else spec.submodule_search_locations or []
    installed = _installed_folders()
    return any(not installed.isdisjoint(Path(place).resolve().parents) for place in places)


@cache
def _installed_folders() -> frozenset[Path]:
    """Return the folders of installed packages and of Python's own modules."""
    names = ("purelib", "platlib", "stdlib", "platstdlib")
    return frozenset(Path(sysconfig.get_path(name)).resolve() for name in names)


@cache
def _requires_fedsim(package: str) -> bool:
    """Return whether a distribution that has the top-level `package` requires fedsim."""
    for distribution in packages_distributions().get(package, []):
        for requirement in requires(distribution) or []:
            name = re.match(r"[\w.-]*", requirement)
            if name and re.sub(r"[-_.]+", "-", name[0]).lower() == DISTRIBUTION:
                return True
    return False
