"""Compression of the vectors that clients send."""

from abc import ABC, abstractmethod
from functools import lru_cache

import torch
from torch import Tensor

from fedsim.core.errors import FedsimError
from fedsim.core.parameters import Count, parameters

NUMBER = 4
"""Bytes of a number that a client sends."""
LARGEST_PROJECTION = 2**28
"""Maximum number of entries of a projection: 1 GiB."""


class Compressor(ABC):
    """A way to compress a flat vector [D]. All clients of a round use the same `seed`."""

    @abstractmethod
    def compress(self, vector: Tensor, seed: int) -> Tensor:
        """Return what the server receives of `vector`. Vectors of equal length have results of
        equal length."""

    @abstractmethod
    def num_bytes(self, length: int) -> int:
        """Return the bytes that are sent for a vector of `length`."""


class Identity(Compressor):
    """No compression: the vector itself."""

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        return vector

    def num_bytes(self, length: int) -> int:
        return NUMBER * length


@parameters
class _Sized(Compressor):
    """Compression to m = `size` numbers. The bytes are never more than those of the whole
    vector."""

    bytes_per_entry = NUMBER

    size: Count

    def num_bytes(self, length: int) -> int:
        return min(self.bytes_per_entry * self.size, NUMBER * length)

    def num_entries(self, vector: Tensor) -> int:
        """Return m, at most the length of `vector`."""
        return min(self.size, len(vector))


class TopK(_Sized):
    """The m entries of largest magnitude and their positions; the others count as zero [D]."""

    bytes_per_entry = 2 * NUMBER

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        largest = vector.abs().topk(self.num_entries(vector)).indices
        return torch.zeros_like(vector).index_copy_(0, largest, vector[largest])


class Coordinates(_Sized):
    """The same m random coordinates of every client's vector [m]. Sums over coordinates are
    unbiased up to the factor D / m."""

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        coordinates = _coordinates(len(vector), self.num_entries(vector), seed)
        return vector[coordinates.to(vector.device)]


class Gaussian(_Sized):
    """m random projections [m] (Johnson and Lindenstrauss). They preserve inner products, but no
    other powers. Projections of more than 1 GiB are rejected."""

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        size = self.num_entries(vector)
        if size * len(vector) > LARGEST_PROJECTION:
            gibibytes = NUMBER * size * len(vector) / 2**30
            raise FedsimError(
                f"selector.sketch.size={self.size}: a projection that takes {gibibytes:.1f} GiB "
                "(at most 1); use selector/sketch=countsketch"
            )
        return vector @ _projection(len(vector), size, seed).to(vector)


class CountSketch(_Sized):
    """Entries with random signs, summed into m random buckets [m] (Charikar et al. 2002). They
    preserve inner products."""

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        size = self.num_entries(vector)
        buckets, signs = _buckets(len(vector), size, seed)
        signed = vector * signs.to(vector)
        return vector.new_zeros(size).index_add_(0, buckets.to(vector.device), signed)


class Int8(Compressor):
    """Each entry as one of 255 steps of the largest one. The scale is not sent; of all selectors,
    only PNCS' `polar` depends on it."""

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        scale = vector.abs().max().clamp(min=torch.finfo(vector.dtype).tiny)
        return (vector / scale * 127).round()

    def num_bytes(self, length: int) -> int:
        return length


@lru_cache(maxsize=1)
def _coordinates(length: int, size: int, seed: int) -> Tensor:
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    return order[:size].sort().values


@lru_cache(maxsize=1)
def _projection(length: int, size: int, seed: int) -> Tensor:
    return torch.randn(length, size, generator=torch.Generator().manual_seed(seed)) / size**0.5


@lru_cache(maxsize=1)
def _buckets(length: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    buckets = torch.randint(size, (length,), generator=generator)
    signs = torch.randint(2, (length,), generator=generator) * 2 - 1
    return buckets, signs
