"""Variables of the user's environment that change what fedsim does or prints: tests run without
them."""

import os
from collections.abc import MutableMapping

PREFIXES = ("FEDSIM_", "HYDRA_", "RAY_", "SLURM_", "SUBMITIT_", "UV_", "WANDB_")
NAMES = (
    *("UV", "VIRTUAL_ENV"),  # set by `uv run`: printed commands would begin with it
    *(
        "COLUMNS",
        "LINES",
        "NO_COLOR",
        "FORCE_COLOR",
        "CLICOLOR_FORCE",
        "TTY_COMPATIBLE",
        "TTY_INTERACTIVE",
    ),
    # set in hooks of git
    *(
        "GIT_DIR",
        "GIT_WORK_TREE",
        "GIT_COMMON_DIR",
        "GIT_INDEX_FILE",
        "GIT_OBJECT_DIRECTORY",
        "GIT_PREFIX",
    ),
    "MPLBACKEND",
)

ON_GPU = "TEST_ON_GPU" in os.environ
"""Whether tests/test_cuda_path.py runs on a real GPU, not the pretended one; no other test should
then run."""


def clear(variables: MutableMapping[str, str]) -> None:
    """Remove them from `variables`, and with them the user's key for W&B."""
    for name in [name for name in variables if name in NAMES or name.startswith(PREFIXES)]:
        del variables[name]
    variables["NETRC"] = os.devnull
    if not ON_GPU:
        variables["CUDA_VISIBLE_DEVICES"] = ""  # what tests expect is computed on a CPU
