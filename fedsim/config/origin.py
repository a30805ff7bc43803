"""Which modules a config may have imported. An import runs a module, so it is as good as running a program.

The user's own modules are imported from where Python finds them (the working folder, PYTHONPATH), like any program of
the user's. Python's own and other people's installed packages are not, unless they say that they are made for fedsim.
"""

import sys
import sysconfig
from functools import cache
from importlib.metadata import packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "fedsim-selection"
REMEDY = f"own classes live in the working folder, on PYTHONPATH, or in a package that requires {DISTRIBUTION}"


def not_imported(module: str) -> str | None:
    """Why `module` is not imported for a config, or None if it may be. Imports nothing."""
    top, *rest = module.split(".")
    if top == "fedsim":
        return f"{module} is a program" if _is_program(rest) else None
    if top in sys.stdlib_module_names or top in ("test", "__main__"):
        return f"{top} belongs to Python, and is not imported for a config"
    if _is_program(rest):
        return f"{module} is a program, and is not imported for a config"
    if _is_installed(top) and not _extends_fedsim(top):
        return f"{top} is an installed package that does not require {DISTRIBUTION}, and is not imported for a config"
    return None


def find_in_working_folder() -> None:
    """Have Python look for modules in the working folder, too, after all other places.

    Called for a config that names a class of the user's, and not before: what fedsim's own imports look for in vain
    (optional modules of torch, say) must not be found among the files of the working folder.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def _is_program(parts: list[str]) -> bool:
    return "__main__" in parts


@cache
def _is_installed(package: str) -> bool:
    """Whether Python would find the top-level `package` among the installed ones."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    paths = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return any(in_installed_folder(Path(path)) for path in paths)


def in_installed_folder(path: Path) -> bool:
    """Whether `path` is in a folder of Python's own modules or of installed packages."""
    folders = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib", "platstdlib")}
    return not folders.isdisjoint(path.resolve().parents)


@cache
def _extends_fedsim(package: str) -> bool:
    found = packages_distributions().get(package, [])
    needed = [line for name in found for line in requires(name) or ()]
    return any(line.replace("_", "-").lower().startswith(DISTRIBUTION) for line in needed)
