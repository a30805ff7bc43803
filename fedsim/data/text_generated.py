"""Synthetic text by simulated speakers, for the prediction of the next character. Results on it are
not results on a language."""

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

ALPHABET = " abcdefghijklmnopqrstuvwxyz"
"""Tokens and classes, by their numbers."""
VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnpqrstvwxyz"
MOST_SYLLABLES = 3
MAX_CHARACTERS = 1_000_000_000
"""Samples times their length, of the training set on average and of the test set."""
GENERATOR_VERSION = 1
"""To be increased whenever a change of the code gives other texts for the same parameters."""


@parameters
class TextGenerated(Dataset):
    """Texts of `length` characters and the character that follows, out of speakers' streams of
    words; owners are the speakers.

    The language has `num_words` made-up words of one to three syllables, whose frequencies follow
    Zipf's law. A speaker multiplies them by exp(`style` times a standard normal number) and draws
    words independently. A speaker has a log-normal number of samples, one at each character of a
    stream; the test set has samples of a stream of its own by every speaker. Tokens and classes are
    the space and the letters a to z.
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
        most = MAX_CHARACTERS // max(self.length, 1)
        yield at_most(
            "samples_per_speaker", self.samples_per_speaker, most // max(self.num_speakers, 1)
        )
        yield at_most("test_samples", self.test_samples, most)

    def load(self) -> LoadedData:
        tensors = load_or_generate(self, "text_generated", GENERATOR_VERSION, self._build)
        fingerprint = f"text_generated {digest(tensors)}"
        tensors |= {"train_x": tensors["train_x"].long(), "test_x": tensors["test_x"].long()}
        return LoadedData.of(
            tensors, len(ALPHABET), None, None, fingerprint, vocabulary=len(ALPHABET)
        )

    def _build(self) -> dict[str, Tensor]:
        """Texts, next characters and speakers of both splits, ordered by speaker."""
        rng = np.random.default_rng(self.seed)
        words = made_up_words(self.num_words, rng)
        common = 1 / (
            np.arange(self.num_words) + 1
        )  # Zipf's law; and each speaker has factors of its own
        speech = [
            common * exp(self.style * rng.standard_normal(self.num_words))
            for _ in range(self.num_speakers)
        ]
        normal = rng.standard_normal(self.num_speakers)
        counts = {
            "train": log_normal_sizes(self.samples_per_speaker, self.size_deviation, normal),
            "test": np.bincount(
                np.arange(self.test_samples) % self.num_speakers, minlength=self.num_speakers
            ),
        }
        tensors: dict[str, Tensor] = {}
        for split, own in counts.items():
            texts = [
                windows(
                    spoken(words, shares / shares.sum(), int(n) + self.length, rng), self.length
                )
                for shares, n in zip(speech, own, strict=True)
            ]
            tensors[f"{split}_x"] = torch.as_tensor(np.concatenate([x for x, _ in texts]))
            tensors[f"{split}_y"] = torch.as_tensor(
                np.concatenate([y for _, y in texts]).astype(np.int64)
            )
            tensors[f"{split}_owners"] = torch.as_tensor(
                np.repeat(np.arange(self.num_speakers), own)
            )
        return tensors


def made_up_words(count: int, rng: np.random.Generator) -> list[str]:
    """`count` different words of one to three syllables, each a consonant, a vowel and sometimes
    another consonant."""
    words: dict[str, None] = {}
    while len(words) < count:
        syllables = [
            str(rng.choice(list(CONSONANTS))) + str(rng.choice(list(VOWELS)))
            for _ in range(rng.integers(1, MOST_SYLLABLES + 1))
        ]
        words[
            "".join(syllables) + (str(rng.choice(list(CONSONANTS))) if rng.random() < 0.5 else "")
        ] = None
    return list(words)


def spoken(
    words: list[str], shares: Floats, count: int, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """The first `count` characters, as tokens, of words drawn by their `shares`, with spaces
    between them."""
    shortest = min(map(len, words)) + 1
    drawn = rng.choice(len(words), count // shortest + 1, p=shares)
    text = " ".join(words[number] for number in drawn.tolist())[:count]
    return _TOKENS[np.frombuffer(text.encode(), np.uint8)]


_TOKENS = np.zeros(128, np.uint8)
_TOKENS[list(ALPHABET.encode())] = np.arange(len(ALPHABET))


def windows(tokens: NDArray[np.uint8], length: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """All texts [n, length] in `tokens` that a token follows, and these tokens [n]; n = len(tokens)
    - length."""
    texts = np.lib.stride_tricks.sliding_window_view(tokens, length)[:-1]
    return texts, tokens[length:]
