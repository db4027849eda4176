"""Find problems of a training set that are also in an evaluation set, perhaps with other words or another layout.

Texts are compared as sets of shingles: runs of three consecutive words or numbers, without LaTeX's layout commands and
without punctuation. The evaluation set is small, so an index of its shingles gives the exact overlap. Approximations
such as MinHash are not needed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

SHINGLE = 3
"""Number of consecutive words in a shingle."""


_LAYOUT = re.compile(
    r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|text\w*|math(?:rm|bf|it|cal)|quad|qquad)"
    r"(?![a-zA-Z])|\[asy\].*?\[/asy\]",
    re.DOTALL,
)
"""LaTeX's commands of layout, and drawings in Asymptote."""


_WORD = re.compile(r"[a-z]+|\d+|[^\W\d_]")
"""A word of the letters a to z, a number, or one other letter, such as a Chinese character."""


class NearDuplicate(NamedTuple):
    """Positions of two similar problems.

    ``similarity``: number of shingles that both have / number of shingles that at least one has (Jaccard index).
    """

    similarity: float
    training: int
    evaluation: int


def shingles(text: str) -> set[tuple[str, ...]]:
    """Return the runs of ``SHINGLE`` words in ``text``; for a shorter text, one run of all its words."""
    tokens = _WORD.findall(_LAYOUT.sub(" ", text).lower())
    count = max(1, len(tokens) - SHINGLE + 1)
    if tokens:
        return {tuple(tokens[i : i + SHINGLE]) for i in range(count)}
    return set()


def near_duplicates(
    training: Sequence[str], evaluation: Sequence[str], at_least: float
) -> list[NearDuplicate]:
    """Return every pair with a similarity of ``at_least`` or more, the most similar first.

    17,000 training problems and 30 evaluation problems take one or two seconds.
    """
    sizes = []
    # Shingle -> positions of the evaluation problems that contain it.
    index: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for position, text in enumerate(evaluation):
        evaluation_shingles = shingles(text)
        sizes.append(len(evaluation_shingles))
        for shingle in evaluation_shingles:
            index[shingle].append(position)
    pairs = []
    for row, text in enumerate(training):
        training_shingles = shingles(text)
        shared_counts = Counter[int]()
        for shingle in training_shingles:
            shared_counts.update(index.get(shingle, ()))
        for position, count in shared_counts.items():
            union_size = len(training_shingles) + sizes[position] - count
            similarity = count / union_size
            if similarity >= at_least:
                pairs.append(NearDuplicate(similarity, row, position))
    return sorted(pairs, key=lambda pair: (-pair.similarity, pair.training, pair.evaluation))
