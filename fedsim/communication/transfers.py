"""What crosses the network between the server and its clients about one version of the model, charged to exchanges."""

import functools
from collections.abc import Collection, Iterable

from torch import Tensor

from fedsim.communication.compression import Compressor, Identity
from fedsim.communication.ledger import SCALAR_BYTES, Exchange, Ledger
from fedsim.types import Ids, Params


class Transfers:
    """Nothing is sent twice: a client downloads the model once, and uploads each tensor of its update once."""

    def __init__(self, ledger: Ledger, params: Params, compression_seed: int) -> None:
        self._ledger = ledger
        self._tensor_bytes = {name: t.numel() * t.element_size() for name, t in params.items()}
        self._seed = compression_seed
        self._downloaded: set[int] = set()
        self._uploaded: dict[int, frozenset[str]] = {}
        self._bytes_of = functools.cache(self._total_bytes)  # of many clients that send the same
        self._collected: set[int] = set()

    @property
    def model_bytes(self) -> int:
        return sum(self._tensor_bytes.values())

    def download(self, exchange: Exchange, ids: Iterable[int]) -> None:
        """Each of `ids` receives the model, unless it has."""
        new = {int(i) for i in ids} - self._downloaded
        self._downloaded |= new
        self._ledger.contacted |= new
        exchange.charge("bytes_down", new, self.model_bytes)

    def upload_numbers(self, exchange: Exchange, ids: Iterable[int], each: int) -> None:
        """So many numbers of four bytes from each of `ids`."""
        exchange.charge("bytes_up", ids, each * SCALAR_BYTES)

    def upload_tensors(self, exchange: Exchange, ids: Iterable[int], names: Collection[str]) -> None:
        """The tensors `names` of the update of each of `ids`, but for those sent before."""
        wanted, asked = [int(i) for i in ids], frozenset(names)
        exchange.charge("bytes_up", wanted, [self._bytes_to_send(i, asked) for i in wanted])

    def _bytes_to_send(self, client: int, names: frozenset[str]) -> int:
        sent = self._uploaded.get(client)
        missing = names if sent is None else names - sent
        self._uploaded[client] = names if sent is None else sent | names
        return self._bytes_of(missing)

    def _total_bytes(self, names: frozenset[str]) -> int:
        return sum(self._tensor_bytes[name] for name in names)

    def upload_updates(self, exchange: Exchange, ids: Ids, extra_numbers: int) -> None:
        """The whole update of each of `ids`, and so many numbers with it; they count as uploaded."""
        new = {int(i) for i in ids} - self._collected
        self._collected |= new
        self._ledger.uploaded.update(new)
        self.upload_numbers(exchange, new, extra_numbers)
        self.upload_tensors(exchange, ids, self._tensor_bytes)

    def upload_vector(self, exchange: Exchange, client: int, vector: Tensor, compressor: Compressor | None) -> Tensor:
        """What arrives at the server of a client's flat `vector` [D]."""
        used = compressor or Identity()
        exchange.charge("bytes_up", [client], used.num_bytes(len(vector)))
        return used.compress(vector, self._seed)
