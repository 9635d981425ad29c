"""Settings of the n-grams by which a feature of type text becomes a list of ids. Torch-free."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from trainer.spec.base import Spec

Length = Annotated[int, Field(ge=1, le=16)]
_USUAL_WORDS, _USUAL_CHARACTERS = 8.0, 48.0
"""Expected numbers of words and of characters in a title; characters include the marks at both ends of each word."""


class NGrams(Spec):
    """The n-grams of a text, each hashed into one of ``buckets`` ids (trainer.data.columns.ngrams).

    ``words``: lengths of the shortest and the longest n-gram of words; None: no n-grams of words. ``characters``: the
    same for n-grams of characters within a word. ``lowercase``: text is lowercased first. ``max_length``: number of
    characters that are read from a text.
    """

    words: tuple[Length, Length] | None = (1, 1)
    characters: tuple[Length, Length] | None = None
    buckets: int = Field(default=65536, ge=1, le=2**31 - 3)
    lowercase: bool = True
    max_length: int = Field(default=512, ge=1, le=65536)

    @model_validator(mode="after")
    def _in_order(self) -> NGrams:
        if self.words is None and self.characters is None:
            raise ValueError("neither words nor characters: give the shortest and the longest of one, such as [1, 2]")
        for name, bounds in (("words", self.words), ("characters", self.characters)):
            if bounds is not None and bounds[0] > bounds[1]:
                raise ValueError(f"{name}: {list(bounds)} has the longest first: write {[bounds[1], bounds[0]]}")
        return self

    @property
    def usual_number(self) -> float:
        """Number of n-grams of a typical title, to estimate the size of a batch before texts are read."""
        parts = ((self.words, _USUAL_WORDS), (self.characters, _USUAL_CHARACTERS))
        return sum((bounds[1] - bounds[0] + 1) * count for bounds, count in parts if bounds is not None)
