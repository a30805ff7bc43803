"""The git commit of fedsim's own source code, which is recorded in the summary of every run."""

import functools
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import fedsim

PACKAGE = Path(fedsim.__file__).parent
TIMEOUT = 30.0
"""Seconds that each git command gets: `git status` may read every file of a checkout, which a busy disk slows."""
LOCATIONS = {"GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX"}
"""Environment variables that lead git to another repository than that of the current folder; it sets them for hooks."""


@functools.cache
def own_revision() -> dict[str, Any] | None:
    """`revision` of this package, read once per process: later changes of the checkout do not reach loaded modules."""
    return revision(PACKAGE)


def revision(package: Path) -> dict[str, Any] | None:
    """The commit that a package folder is checked out at, and whether the checkout differs from it.

    Args:
        package: folder with an `__init__.py`.

    Returns:
        `{"commit": <full hash>, "dirty": <bool or None>}`. `dirty` is true if any tracked file of the checkout differs
        from the commit, staged or not; untracked files do not count, as in `git describe --dirty`; None if only that
        comparison fails or takes longer than `TIMEOUT`. None in all if `__init__.py` is not tracked by a git repository
        (an installed wheel, also one below the working tree of another project), if the repository has no commit, or if
        git is missing, refuses or takes longer. Never raises.
    """
    try:
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(package, "rev-parse", "--verify", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None
    try:
        return {"commit": commit, "dirty": bool(_git(package, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": commit, "dirty": None}


def _trusted(folder: Path) -> list[str]:
    """Has git read a checkout that is another user's, such as in a container, where the package's own code, which this
    process runs already, is that user's, too."""
    root = folder.parent.resolve()
    own = (root / ".git").stat().st_uid == (folder / "__init__.py").stat().st_uid if (root / ".git").exists() else False
    return ["-c", f"safe.directory={root}"] if own else []


def _git(folder: Path, *words: str) -> str:
    """What `git words` prints in `folder`.

    It takes no lock and starts no file monitor. Output goes to a file because a pipe could be held open beyond the
    timeout by a process that git started.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LOCATIONS}
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *_trusted(folder), *words]
    with tempfile.TemporaryFile() as output:
        subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT,
            check=True,
        )
        output.seek(0)
        return output.read().decode(errors="replace").strip()
