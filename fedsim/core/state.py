"""The state of components, which an exact resume restores."""

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

from fedsim.core.errors import FedsimError


class Stateful:
    """A component with attributes that persist between rounds."""

    state: ClassVar[tuple[str, ...]] = ()
    """Names of these attributes: everything that an exact resume has to restore."""

    def __init_subclass__(cls) -> None:
        """Raise `TypeError` for a `state` that is a text: ("counts") is not a tuple."""
        super().__init_subclass__()
        state: object = cls.state
        if isinstance(state, str):
            raise TypeError(
                f"{cls.__name__}.state must be a tuple of names, not a text: write "
                f"state = ({state!r},)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return a deep copy of the attributes named in `state`. Raises `FedsimError` for one that
        is missing or cannot be copied."""
        path = f"{type(self).__module__}.{type(self).__qualname__}"
        copies = {}
        for name in self.state:
            if not hasattr(self, name):
                raise FedsimError(
                    f"{path} has no attribute `{name}`, which `state` names; set it in "
                    "__post_init__, and do not delete it"
                )
            try:
                copies[name] = copy.deepcopy(getattr(self, name))
            except Exception as error:
                raise FedsimError(
                    f"{path}.{name}, which `state` names, cannot be copied into a checkpoint "
                    f"({type(error).__name__}: {error}); store numbers, strings, lists, dicts, "
                    "arrays or tensors, and make other objects from them"
                ) from error
        return copies

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        for name in self.state:
            setattr(self, name, copy.deepcopy(state[name]))
