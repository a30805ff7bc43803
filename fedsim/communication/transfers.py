"""What crosses the network between the server and its clients about one version of the model, charged to a ledger."""

from collections.abc import Iterable

from torch import Tensor

from fedsim.communication.compression import Compressor, Identity
from fedsim.communication.ledger import SCALAR_BYTES, Ledger
from fedsim.types import Params


class Transfers:
    """Nothing is sent twice: a client downloads the model once, and uploads each tensor of its update once."""

    def __init__(self, ledger: Ledger, params: Params, compression_seed: int) -> None:
        self._ledger = ledger
        self._tensor_bytes = {name: t.numel() * t.element_size() for name, t in params.items()}
        self._seed = compression_seed
        self._downloaded: set[int] = set()
        self._uploaded: dict[int, set[str]] = {}
        self._collected: set[int] = set()

    def download(self, ids: Iterable[int]) -> None:
        """Each of `ids` receives the model, unless it has."""
        new = {int(i) for i in ids} - self._downloaded
        self._downloaded |= new
        self._ledger.contacted |= new
        self._ledger.bytes_down += len(new) * sum(self._tensor_bytes.values())

    def upload_numbers(self, count: int) -> None:
        """So many numbers of four bytes."""
        self._ledger.bytes_up += count * SCALAR_BYTES

    def upload_tensors(self, ids: Iterable[int], names: Iterable[str]) -> None:
        """The tensors `names` of the update of each of `ids`, but for those sent before."""
        for i in ids:
            sent = self._uploaded.setdefault(int(i), set())
            missing = set(names) - sent
            self._ledger.bytes_up += sum(self._tensor_bytes[name] for name in missing)
            sent |= missing

    def upload_updates(self, ids: Iterable[int], extra_numbers: int) -> None:
        """The whole update of each of `ids`, and so many numbers with it; they count as uploaded."""
        ids = [int(i) for i in ids]
        new = set(ids) - self._collected
        self._collected |= new
        self._ledger.uploaded.update(new)
        self.upload_numbers(len(new) * extra_numbers)
        self.upload_tensors(ids, self._tensor_bytes)

    def upload_vector(self, vector: Tensor, compressor: Compressor | None) -> Tensor:
        """What arrives at the server of a client's flat `vector` [D]."""
        used = compressor or Identity()
        self._ledger.bytes_up += used.num_bytes(len(vector))
        return used.compress(vector, self._seed)
