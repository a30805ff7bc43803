"""The file of a choice that its group does not have: `--config-dir` was forgotten, or it is in another folder."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedsim.config.shipped import conf_dir

USUAL = (Path(), Path("conf"))
"""Where users put their folders of choices, from the working folder."""


def stray_file(group: str, choice: str, folders: Sequence[Path]) -> str | None:
    """What to do so that `choice` is found, whose file lies near, but not in `group` of `folders`, which are searched.

    None where there is no such file, or it is a choice of another group.
    """
    name, own = f"{choice}.yaml", [folder for folder in folders if folder.resolve() != conf_dir().resolve()]
    beside = [folder for folder in USUAL if (folder / group / name).is_file()]
    if beside and not own:
        return f"{beside[0] / group / name} is there: add --config-dir {beside[0]}"
    near = [*(folder / group / name for folder in beside), *_near(name, own)]
    if not near:
        return None
    place = Path(_as_typed(own[0]) if own else USUAL[1], group, name)
    return f"{_as_typed(near[0])} is there: move it to {place}" + ("" if own else f", and add --config-dir {USUAL[1]}")


def _near(name: str, own: Sequence[Path]) -> Iterator[Path]:
    """Files named `name` above the groups' folders, and in folders beside these that are of no group."""
    yield from (path for folder in (*own, *USUAL) if (path := folder / name).is_file())
    yield from (path for folder in own for path in folder.glob(f"*/{name}") if not _is_group(path.parent.name))


def _is_group(name: str) -> bool:
    return (conf_dir() / name).is_dir()


def _as_typed(path: Path) -> Path:
    """`path` from the working folder, where it is below that."""
    here = Path.cwd()
    return path.resolve().relative_to(here) if path.resolve().is_relative_to(here) else path
