"""Synthetic text by simulated speakers, for predicting the next character.

Results on it are not results on a language. A token is the number of a character. Shapes: n texts.
"""

from typing import Annotated

import numpy as np
import torch
from annotated_types import Interval
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.arrays import Floats
from fedsim.core.errors import at_most
from fedsim.core.exact import exp
from fedsim.core.parameters import Count, CountOrZero, Positive, Problems, parameters
from fedsim.data.base import Dataset, LoadedData, log_normal_sizes
from fedsim.data.cache import digest, load_or_generate

Tokens = NDArray[np.uint8]
ALPHABET = " abcdefghijklmnopqrstuvwxyz"
"""Characters; the position of one is its token, and its class."""
VOWELS = list("aeiou")
CONSONANTS = list("bcdfghjklmnpqrstvwxyz")
MAX_SYLLABLES = 3
MAX_CHARACTERS = 1_000_000_000
"""Maximum number of samples times their length, in either split (on average in training)."""
GENERATOR_VERSION = 1
"""Increase this when a change of the code gives other texts for the same parameters."""

_TOKEN_OF_BYTE = np.zeros(128, np.uint8)
_TOKEN_OF_BYTE[list(ALPHABET.encode())] = np.arange(len(ALPHABET))


@parameters
class TextGenerated(Dataset):
    """Texts of `length` characters, each with the character that follows; owners are the speakers.

    The language has `num_words` made-up words, whose frequencies follow Zipf's law. A speaker
    multiplies each frequency by exp(`style` times a standard normal number). It draws words
    independently by these products, which gives a stream of characters. Each position of the stream
    gives a sample. A speaker has a log-normal number of training samples. Its test samples come
    from a second stream.
    """

    num_speakers: Annotated[int, Interval(ge=1, le=100_000)]
    samples_per_speaker: Positive
    size_deviation: Annotated[float, Interval(ge=0, le=3)]
    num_words: Annotated[int, Interval(ge=1, le=5_000)]
    style: Annotated[float, Interval(ge=0, le=10)]
    length: Annotated[int, Interval(ge=1, le=10_000)]
    test_samples: Count
    seed: CountOrZero

    def problems(self) -> Problems:
        """Yield a problem for each size that exceeds its maximum."""
        max_samples = MAX_CHARACTERS // max(self.length, 1)
        max_per_speaker = max_samples // max(self.num_speakers, 1)
        yield at_most("samples_per_speaker", self.samples_per_speaker, max_per_speaker)
        yield at_most("test_samples", self.test_samples, max_samples)

    def load(self) -> LoadedData:
        """Return the data, generated or from the cache. Tokens are uint8 in the cache."""
        tensors = load_or_generate(self, "text_generated", GENERATOR_VERSION, self._build)
        fingerprint = f"text_generated {digest(tensors)}"
        tensors["train_x"] = tensors["train_x"].long()
        tensors["test_x"] = tensors["test_x"].long()
        num_tokens = len(ALPHABET)
        return LoadedData.of(tensors, num_tokens, None, None, fingerprint, vocabulary=num_tokens)

    def _build(self) -> dict[str, Tensor]:
        """Return texts, next characters and speakers of both splits, ordered by speaker."""
        rng = np.random.default_rng(self.seed)
        words = made_up_words(self.num_words, rng)
        zipf = 1 / (np.arange(self.num_words) + 1)
        frequencies = []
        for _ in range(self.num_speakers):
            factors = exp(self.style * rng.standard_normal(self.num_words))
            frequencies.append(zipf * factors)
        normal = rng.standard_normal(self.num_speakers)
        speakers = np.arange(self.num_speakers)
        test_speakers = np.arange(self.test_samples) % self.num_speakers
        counts_by_split = {
            "train": log_normal_sizes(self.samples_per_speaker, self.size_deviation, normal),
            "test": np.bincount(test_speakers, minlength=self.num_speakers),
        }
        tensors: dict[str, Tensor] = {}
        for split, counts in counts_by_split.items():
            texts = []
            next_tokens = []
            for weights, count in zip(frequencies, counts.tolist(), strict=True):
                stream = spoken(words, weights / weights.sum(), count + self.length, rng)
                x, y = windows(stream, self.length)
                texts.append(x)
                next_tokens.append(y)
            tensors[f"{split}_x"] = torch.as_tensor(np.concatenate(texts))
            tensors[f"{split}_y"] = torch.as_tensor(np.concatenate(next_tokens).astype(np.int64))
            tensors[f"{split}_owners"] = torch.as_tensor(np.repeat(speakers, counts))
        return tensors


def made_up_words(count: int, rng: np.random.Generator) -> list[str]:
    """Return `count` different words of one to three syllables.

    A syllable is a consonant and a vowel; half of the words end in another consonant.
    """
    words: dict[str, None] = {}  # a set that keeps its order
    while len(words) < count:
        word = ""
        for _ in range(rng.integers(1, MAX_SYLLABLES + 1)):
            word += str(rng.choice(CONSONANTS)) + str(rng.choice(VOWELS))
        if rng.random() < 0.5:
            word += str(rng.choice(CONSONANTS))
        words[word] = None
    return list(words)


def spoken(words: list[str], shares: Floats, count: int, rng: np.random.Generator) -> Tokens:
    """Return `count` tokens of words that are drawn by their `shares`, with spaces between."""
    shortest = min(map(len, words)) + 1  # with the space after it
    # as many words as are needed if all are the shortest
    word_numbers = rng.choice(len(words), count // shortest + 1, p=shares)
    text = " ".join(words[number] for number in word_numbers.tolist())[:count]
    return _TOKEN_OF_BYTE[np.frombuffer(text.encode(), np.uint8)]


def windows(tokens: Tokens, length: int) -> tuple[Tokens, Tokens]:
    """Return all texts [n, length] that a token follows, and these tokens [n].

    n is len(tokens) - length.
    """
    texts = np.lib.stride_tricks.sliding_window_view(tokens, length)[:-1]
    return texts, tokens[length:]
