from abc import ABC, abstractmethod
from functools import lru_cache

import torch
from torch import Tensor

from fedsim.core.errors import FedsimError
from fedsim.core.parameters import Count, parameters

NUMBER = 4  # bytes of a number that a client sends
LARGEST_PROJECTION = 2**28  # entries, 1 GiB


class Compressor(ABC):
    """Compression of a flat vector [D] that clients send; all use the same `seed` in a round."""

    @abstractmethod
    def compress(self, vector: Tensor, seed: int) -> Tensor:
        """What the server has of `vector`; vectors of one length give results of one length."""

    @abstractmethod
    def num_bytes(self, length: int) -> int:
        """Bytes sent for a vector of `length`."""


class Identity(Compressor):
    """The vector itself."""

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        return vector

    def num_bytes(self, length: int) -> int:
        return NUMBER * length


@parameters
class _Sized(Compressor):
    """Compression to `size` m numbers; no more bytes are sent than the whole vector has."""

    bytes_per_entry = NUMBER

    size: Count

    def num_bytes(self, length: int) -> int:
        return min(self.bytes_per_entry * self.size, NUMBER * length)


class TopK(_Sized):
    """The m entries of largest magnitude and where they are; the others count as zero [D]."""

    bytes_per_entry = 2 * NUMBER

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        kept = vector.abs().topk(min(self.size, len(vector))).indices
        return torch.zeros_like(vector).index_copy_(0, kept, vector[kept])


class Coordinates(_Sized):
    """The same m random coordinates of every client's vector [m]: all sums over coordinates are
    unbiased up to D/m."""

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        return vector[
            _coordinates(len(vector), min(self.size, len(vector)), seed).to(vector.device)
        ]


class Gaussian(_Sized):
    """m random projections [m] (Johnson and Lindenstrauss): inner products survive, other powers do
    not. Refused beyond 1 GiB."""

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        size = min(self.size, len(vector))
        if size * len(vector) > LARGEST_PROJECTION:
            told = (
                f"a projection that takes {NUMBER * size * len(vector) / 2**30:.1f} GiB (at most 1)"
            )
            raise FedsimError(
                f"selector.sketch.size={self.size}: {told}; use selector/sketch=countsketch"
            )
        return vector @ _projection(len(vector), size, seed).to(vector)


class CountSketch(_Sized):
    """Entries with random signs summed into m random buckets [m] (Charikar et al. 2002): inner
    products survive."""

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        buckets, signs = _buckets(len(vector), min(self.size, len(vector)), seed)
        empty = vector.new_zeros(min(self.size, len(vector)))
        return empty.index_add_(0, buckets.to(vector.device), vector * signs.to(vector))


class Int8(Compressor):
    """Each entry as one of 255 steps of the largest one, without the scale, on which only PNCS'
    `polar` depends."""

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        scale = vector.abs().max().clamp(min=torch.finfo(vector.dtype).tiny)
        return (vector / scale * 127).round()

    def num_bytes(self, length: int) -> int:
        return length


@lru_cache(maxsize=1)
def _coordinates(length: int, size: int, seed: int) -> Tensor:
    return (
        torch.randperm(length, generator=torch.Generator().manual_seed(seed))[:size].sort().values
    )


@lru_cache(maxsize=1)
def _projection(length: int, size: int, seed: int) -> Tensor:
    return torch.randn(length, size, generator=torch.Generator().manual_seed(seed)) / size**0.5


@lru_cache(maxsize=1)
def _buckets(length: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    buckets = torch.randint(size, (length,), generator=generator)
    return buckets, torch.randint(2, (length,), generator=generator) * 2 - 1
