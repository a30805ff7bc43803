"""The server's model as a selector receives it: a copy, so that nothing that is done to it reaches the server's own."""

import torch

from fedsim.types import Params


class LentParams:
    """`params` are copied when they are first asked for, which most selectors never do."""

    def __init__(self, params: Params) -> None:
        self._own = params
        self._copy: Params | None = None

    def get(self) -> Params:
        """The copy, the same one every time."""
        if self._copy is None:
            self._copy = {name: value.clone() for name, value in self._own.items()}
        return self._copy

    @property
    def modified(self) -> list[str]:
        """Names of tensors in which the copy has come to differ from the server's own model."""
        if self._copy is None:
            return []
        kept = self._copy
        alike = [n for n, own in self._own.items() if n in kept and kept[n].shape == own.shape]
        differs = torch.stack([(kept[n] != self._own[n]).any() for n in alike]).tolist() if alike else []
        same = {n for n, differ in zip(alike, differs, strict=True) if not differ}
        return [n for n in self._own if n not in same] + [n for n in kept if n not in self._own]
