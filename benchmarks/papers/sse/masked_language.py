"""A small masked language model like BERT, with SSE-SE on input and output words (Wu et al. 2019, section 4.4)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from benchmarks.papers.data.corpus import NUM_RESERVED, brown, stream, vocabulary
from embeddings.kernels.swap import swap_any
from embeddings.sse import StochasticSharedEmbedding
from embeddings.sse.config import SSEConfig

MASKED_SHARE, MASK_SHARE, RANDOM_SHARE = 0.15, 0.8, 0.1
"""Share of words to predict; shares of these that are read as the mask, and as a random word."""
EVALUATION_BATCH = 128


@dataclass(frozen=True)
class PretrainingSettings:
    """Settings of text, encoder and pre-training.

    ``swaps``: the probability of SSE-SE, for words that are read and for words to predict.
    """

    num_training: int = 60
    num_held_out: int = 15
    num_words: int = 3000
    dim: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_positions: int = 64
    length: int = 32
    batch_size: int = 64
    epochs: int = 3
    learning_rate: float = 0.003
    dropout: float = 0.1
    swaps: float = 0.0


class MaskedEncoder(nn.Module):
    """A transformer over words and their positions; the output layer shares the rows of the word embedding.

    Rows ``num_words`` and ``num_words + 1`` of the embedding are the mask and the padding. Positions start as zeros,
    since positions beyond the windows of pre-training are learnt only in fine-tuning.
    """

    def __init__(self, settings: PretrainingSettings, swaps: float, seed: int) -> None:
        super().__init__()
        dim, self.num_words = settings.dim, settings.num_words
        self.mask, self.padding = self.num_words, self.num_words + 1
        self.words = StochasticSharedEmbedding(
            self.num_words + 2, dim, padding_idx=self.padding, probability=swaps, seed=seed
        )
        nn.init.normal_(self.words.weight, std=dim**-0.5)
        self.positions = nn.Parameter(torch.zeros(settings.num_positions, dim))
        layer = nn.TransformerEncoderLayer(
            dim, settings.num_heads, 4 * dim, settings.dropout, "gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(dim)
        self.layers = nn.TransformerEncoder(layer, settings.num_layers, norm, enable_nested_tensor=False)
        self.bias = nn.Parameter(torch.zeros(self.num_words))

    def forward(self, words: Tensor) -> Tensor:
        """Return states [b, t, dim] of words [b, t]; padding is not attended to."""
        rows = self.words(words) + self.positions[: words.shape[1]]
        states: Tensor = self.layers(rows, src_key_padding_mask=words == self.padding)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [n, num_words] of states [n, dim]."""
        return linear(states, self.words.weight[: self.num_words], self.bias)


class Pretrained(NamedTuple):
    """Perplexities of masked words by epoch, in the form of records, and the encoder's state."""

    figures: tuple[dict[str, float | str], ...]
    state: dict[str, Tensor]


@lru_cache(maxsize=1)
def read_windows(settings: PretrainingSettings, path: Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Return the row of each word of the training documents, and windows int64 [n, length] by split.

    Raises:
        ValueError: the file does not exist, or has too few documents.
    """
    corpus = brown(path, settings.num_training, settings.num_held_out)
    rows = vocabulary(corpus.training, settings.num_words)
    windows = {}
    for split, sentences in corpus._asdict().items():
        words = stream(sentences, rows)
        windows[split] = words[: len(words) // settings.length * settings.length].view(-1, settings.length)
    return rows, windows


def masked(words: Tensor, num_words: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return words [b, t] with masks, and which of them to predict, bool [b, t]; only known words are predicted.

    Most of these are read as the mask (row ``num_words``), some as a random word, some unchanged.
    """
    told = (torch.rand(words.shape, generator=draws) < MASKED_SHARE) & (words >= NUM_RESERVED)
    how = torch.rand(words.shape, generator=draws)
    others = torch.randint(NUM_RESERVED, num_words, words.shape, generator=draws)
    read = torch.where(told & (how < MASK_SHARE), num_words, words)
    return torch.where(told & (how >= 1.0 - RANDOM_SHARE), others, read), told


def swapped_targets(targets: Tensor, num_words: int, probability: float, seed: int, step: int) -> Tensor:
    """Return the words to predict [n] after SSE-SE on outputs: each may be swapped for any other word."""
    config = SSEConfig(probability)
    return swap_any(
        targets, num_words, config, seed=seed, step=step, name="targets", first_live_row=NUM_RESERVED
    )  # fmt: skip


@cache
def pretrained(settings: PretrainingSettings, path: Path, seed: int) -> Pretrained:
    """Return a pre-trained encoder; cached in the process, since several trials are fine-tuned from it.

    Raises:
        ValueError: the file does not exist, or has too few documents.
    """
    _, windows = read_windows(settings, path)
    torch.manual_seed(seed)
    encoder = MaskedEncoder(settings, settings.swaps, seed)
    figures = tuple(pretrain(encoder, settings, windows, seed))
    return Pretrained(figures, encoder.state_dict())


def pretrain(
    encoder: MaskedEncoder, settings: PretrainingSettings, windows: dict[str, Tensor], seed: int
) -> Iterator[dict[str, float | str]]:
    """Train an encoder to predict masked words; yield the perplexity of each epoch and held-out split.

    Words are masked anew in each epoch. The learning rate falls to zero along half a cosine.
    """
    draws = torch.Generator().manual_seed(seed)
    training = windows["training"]
    num_steps = settings.epochs * math.ceil(len(training) / settings.batch_size)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    step = 0
    for epoch in range(1, settings.epochs + 1):
        encoder.train()
        for batch in training[torch.randperm(len(training), generator=draws)].split(settings.batch_size):
            step += 1
            read, told = masked(batch, settings.num_words, draws)
            targets = swapped_targets(batch[told], settings.num_words, settings.swaps, seed, step)
            loss = cross_entropy(encoder.logits(encoder(read)[told]), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        for split in ("validation", "test"):
            yield {"epoch": epoch, "split": split, "perplexity": perplexity(encoder, windows[split])}


@torch.no_grad()
def perplexity(encoder: MaskedEncoder, windows: Tensor) -> float:
    """Return exp of the mean loss of masked words; the same words are masked each time, for every seed."""
    encoder.eval()
    draws, total, count = torch.Generator().manual_seed(0), 0.0, 0
    for batch in windows.split(EVALUATION_BATCH):
        read, told = masked(batch, encoder.num_words, draws)
        total += float(cross_entropy(encoder.logits(encoder(read)[told]), batch[told], reduction="sum"))
        count += int(told.sum())
    return math.exp(total / count)
