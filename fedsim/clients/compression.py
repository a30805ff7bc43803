"""Compression of the vectors (gradients and updates) that clients send to be compared.

A selector passes a `Compressor` to `Clients.updates` or `Clients.gradients`. D is the length of a
vector, m the number of entries after compression.
"""

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
    """The interface of compressors of flat vectors [D].

    All clients of a round use the same `seed`, so that their results can be compared.
    """

    @abstractmethod
    def compress(self, vector: Tensor, seed: int) -> Tensor:
        """Return what the server receives in place of `vector`. Vectors of equal length have
        results of equal length."""

    @abstractmethod
    def num_bytes(self, length: int) -> int:
        """Return the bytes that a client sends for a vector of `length` entries."""


class Identity(Compressor):
    """No compression: the vector itself."""

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        """Return `vector` itself."""
        return vector

    def num_bytes(self, length: int) -> int:
        """Return the bytes of all entries."""
        return NUMBER * length


@parameters
class _Sized(Compressor):
    """The base class of compressors to m = `size` entries.

    A client never sends more bytes than the whole vector has.
    """

    bytes_per_entry = NUMBER

    size: Count

    def num_bytes(self, length: int) -> int:
        """Return the bytes of m entries, or of the whole vector if that is less."""
        return min(self.bytes_per_entry * self.size, NUMBER * length)

    def num_entries(self, vector: Tensor) -> int:
        """Return m, at most the length of `vector`."""
        return min(self.size, len(vector))


class TopK(_Sized):
    """A client sends the m entries of largest magnitude with their positions; the server sets the
    others to zero [D]."""

    bytes_per_entry = 2 * NUMBER  # an entry and its position

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        """Return the vector with zeros in place of its smaller entries [D]."""
        largest = vector.abs().topk(self.num_entries(vector)).indices
        return torch.zeros_like(vector).index_copy_(0, largest, vector[largest])


class Coordinates(_Sized):
    """Every client sends the same m random coordinates of its vector [m]. Sums over coordinates,
    such as inner products, are unbiased after multiplication by D / m."""

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        """Return the entries at the round's coordinates [m]."""
        coordinates = _coordinates(len(vector), self.num_entries(vector), seed)
        return vector[coordinates.to(vector.device)]


class Gaussian(_Sized):
    """A client sends m random projections of its vector [m] (Johnson and Lindenstrauss).

    They preserve inner products on average, but not sums of other powers of the entries. fedsim
    rejects projections whose matrix [D, m] takes more than 1 GiB.
    """

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        """Return the projections [m]. Raises `FedsimError` if their matrix is too large."""
        size = self.num_entries(vector)
        if size * len(vector) > LARGEST_PROJECTION:
            gibibytes = NUMBER * size * len(vector) / 2**30
            raise FedsimError(
                f"selector.sketch.size={self.size}: a projection that takes {gibibytes:.1f} GiB "
                "(at most 1); use selector/sketch=countsketch"
            )
        return vector @ _projection(len(vector), size, seed).to(vector)


class CountSketch(_Sized):
    """A client gives its entries random signs and sends their sums in m random buckets [m]
    (Charikar et al. 2002). These preserve inner products on average."""

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        """Return the sums [m]."""
        size = self.num_entries(vector)
        buckets, signs = _buckets(len(vector), size, seed)
        signed = vector * signs.to(vector)
        return vector.new_zeros(size).index_add_(0, buckets.to(vector.device), signed)


class Int8(Compressor):
    """A client sends each entry as one byte: an integer in -127..127, in units of the vector's
    largest magnitude / 127.

    The unit is not sent; of all selectors, only PNCS' `polar` depends on it.
    """

    def compress(self, vector: Tensor, seed: int) -> Tensor:
        """Return the integers [D], in the type of `vector`."""
        # the smallest positive number in place of 0, for a vector of zeros
        scale = vector.abs().max().clamp(min=torch.finfo(vector.dtype).tiny)
        return (vector / scale * 127).round()

    def num_bytes(self, length: int) -> int:
        """Return one byte for each entry."""
        return length


# The caches hold one result: the clients of a round share the seed, and compress one by one.


@lru_cache(maxsize=1)
def _coordinates(length: int, size: int, seed: int) -> Tensor:
    """Return `size` random coordinates out of `length`, ascending."""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    return order[:size].sort().values


@lru_cache(maxsize=1)
def _projection(length: int, size: int, seed: int) -> Tensor:
    """Return a random matrix [length, size] of normal numbers with variance 1 / size."""
    return torch.randn(length, size, generator=torch.Generator().manual_seed(seed)) / size**0.5


@lru_cache(maxsize=1)
def _buckets(length: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return a random bucket and a random sign for each entry, both [length]."""
    generator = torch.Generator().manual_seed(seed)
    buckets = torch.randint(size, (length,), generator=generator)
    signs = torch.randint(2, (length,), generator=generator) * 2 - 1
    return buckets, signs
