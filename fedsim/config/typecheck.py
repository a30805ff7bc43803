"""What a config may name and hold: modules that it may have imported, and values that fit a
constructor's annotations.

An import runs a module. The user's own modules are imported from where Python finds them (the
working folder, PYTHONPATH); Python's own and installed packages are not, unless they say that they
are made for fedsim.

Annotations are just those that hyper-parameters use. pydantic does not do instead: even its strict
mode takes true and 1.0 for `Literal[1]`.
"""

import sys
import sysconfig
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from fedsim.core.disk import user_path

PASSED: Mapping[str, tuple[str, ...]] = {
    "dataset": ("data_dir", "cache_dir"),
    "model": ("input_shape", "num_classes"),
    "engine": ("workload",),
    "selector": ("population",),
    "aggregator": ("buffers",),
    "clients": ("num_clients", "num_classes", "streams"),
}
"""What fedsim passes to the classes of a group, by position; to all others nothing."""
DISTRIBUTION = "fedsim-selection"
REMEDY = f"own classes live in the working folder, on PYTHONPATH, or in a package that requires {DISTRIBUTION}"


def not_imported(module: str) -> str | None:
    """Why `module` is not imported for a config, or None if it may be. Imports nothing."""
    top, *rest = module.split(".")
    if "__main__" in rest:
        return f"{module} is a program, and is not imported for a config"
    if top in sys.stdlib_module_names or top in ("test", "__main__"):
        return f"{top} belongs to Python, and is not imported for a config"
    if top != "fedsim" and _is_installed(top) and not _extends_fedsim(top):
        return f"{top} is an installed package that does not require {DISTRIBUTION}, and is not imported for a config"
    return None


def find_in_working_folder() -> None:
    """Have Python look for modules in the working folder, too, after all other places: for a class
    of the user's, and not before, as what fedsim's own imports look for in vain must not be found
    there."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


@cache
def _is_installed(package: str) -> bool:
    """Whether Python would find the top-level `package` among the installed ones."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return False
    places = (
        ()
        if spec is None
        else [spec.origin]
        if spec.origin
        else spec.submodule_search_locations or ()
    )
    return any(in_installed_folder(Path(place)) for place in places)


def in_installed_folder(path: Path) -> bool:
    """Whether `path` is in a folder of Python's own modules or of installed packages."""
    return not _installed_folders().isdisjoint(path.resolve().parents)


@cache
def _installed_folders() -> frozenset[Path]:
    names = ("purelib", "platlib", "stdlib", "platstdlib")
    return frozenset(Path(sysconfig.get_path(name)).resolve() for name in names)


@cache
def _extends_fedsim(package: str) -> bool:
    found = packages_distributions().get(package, [])
    needed = [line for name in found for line in requires(name) or ()]
    return any(line.replace("_", "-").lower().startswith(DISTRIBUTION) for line in needed)


LARGEST_INTEGER = 2**63 - 1
"""NumPy and torch count in 64 bits."""
UNIONS = (Union, types.UnionType)
_NAMES: Mapping[Any, str] = {
    **{
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a string",
        type(None): "null",
    },
    **{dict: "a mapping", Path: "a path (~ and $HOME are known, other names are not)"},
}


def conform(value: Any, hint: Any) -> Any:
    """`value` as `hint` wants it (an int where a float is asked for becomes one); TypeError if it
    does not fit."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in UNIONS:
        for one in args:
            with suppress(TypeError):
                return conform(value, one)
    if origin is Literal and any(value == a and type(value) is type(a) for a in args):
        return value
    if (
        origin in (list, tuple, Sequence)
        and isinstance(value, Sequence)
        and not isinstance(value, str)
    ):
        each = args if origin is tuple and args[-1] is not ... else [args[0]] * len(value)
        if len(each) != len(value):
            raise TypeError
        items = [conform(v, a) for v, a in zip(value, each, strict=True)]
        return tuple(items) if origin is tuple else items
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {conform(k, args[0]): conform(v, args[1]) for k, v in value.items()}
    if hint is Any or (origin is None and _is_plain(value, hint)):
        if hint is Path:
            value = user_path(value)
            if str(value).startswith(("~", "$")):
                raise TypeError
        return hint(value) if hint is float else value
    raise TypeError


def _is_plain(value: Any, hint: Any) -> bool:
    if hint in (int, float) and isinstance(value, int):
        return not (isinstance(value, bool) or is_long(value))
    return isinstance(hint, type) and isinstance(value, (hint, str) if hint is Path else hint)


def is_long(value: Any) -> bool:
    """Whether it is an integer of more than 64 bits."""
    return isinstance(value, int) and abs(value) > LARGEST_INTEGER


def describe(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in UNIONS:
        return " or ".join(describe(a) for a in args)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is tuple and args[-1] is not ...:
        return f"a list of {len(args)} items: {', '.join(map(describe, args))}"
    if origin in (list, tuple, Sequence):
        return f"a list, each item {describe(args[0])}"
    if origin in (dict, Mapping):
        return "a mapping"
    return _NAMES.get(hint, getattr(hint, "__name__", str(hint)))
