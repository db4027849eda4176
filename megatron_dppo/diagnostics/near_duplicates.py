"""Problems of a training set that are also in an evaluation set, perhaps with other words or another layout.

Texts are compared as sets of three words or numbers in a row, without LaTeX's layout and punctuation. The overlap is
exact: an index of the evaluation set, which is small, takes the place of sketches such as MinHash.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

SHINGLE = 3
"""Words in a row."""


_LAYOUT = re.compile(
    r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|text\w*|math(?:rm|bf|it|cal)|quad|qquad)"
    r"(?![a-zA-Z])|\[asy\].*?\[/asy\]",
    re.DOTALL,
)


_WORD = re.compile(r"[a-z]+|\d+|[^\W\d_]")


class NearDuplicate(NamedTuple):
    """Positions of two alike problems. ``similarity``: shared shingles over all of both (Jaccard)."""

    similarity: float
    training: int
    evaluation: int


def shingles(text: str) -> set[tuple[str, ...]]:
    """The sets that texts are compared by: ``SHINGLE`` words in a row; all of a shorter text."""
    tokens = _WORD.findall(_LAYOUT.sub(" ", text).lower())
    count = max(1, len(tokens) - SHINGLE + 1)
    if tokens:
        return {tuple(tokens[i : i + SHINGLE]) for i in range(count)}
    return set()


def near_duplicates(
    training: Sequence[str],
    evaluation: Sequence[str],
    at_least: float,
) -> list[NearDuplicate]:
    """Every pair that is at least so similar, the most similar first. 17,000 x 30: a second or two."""
    sizes = []
    index: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for position, text in enumerate(evaluation):
        of_text = shingles(text)
        sizes.append(len(of_text))
        for shingle in of_text:
            index[shingle].append(position)
    pairs = []
    for row, text in enumerate(training):
        of_text = shingles(text)
        shared_counts = Counter[int]()
        for shingle in of_text:
            shared_counts.update(index.get(shingle, ()))
        for position, count in shared_counts.items():
            similarity = count / (len(of_text) + sizes[position] - count)
            if similarity >= at_least:
                pairs.append(NearDuplicate(similarity, row, position))
    return sorted(pairs, key=lambda pair: (-pair.similarity, pair.training, pair.evaluation))
