"""A word-level LSTM trained by any of dropout's methods (Wei, Kakade and Ma 2020, tables 1 and 3)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.papers.data.corpus import brown, stream, vocabulary
from trainer.spec.regularizers import DropoutMethod
from trainer.training.regularizers.adaptive_softmax import AdaptiveSoftmax
from trainer.training.regularizers.draws import GeneratorDraws
from trainer.training.regularizers.dropout import DropoutObjective
from trainer.training.regularizers.outputs import CrossEntropy

SPLITS = {"training": "train", "validation": "validation", "test": "test"}
"""Names of splits in reports."""
State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LstmSettings:
    """Data, model and training of a trial.

    ``method``: fields of :class:`trainer.spec.regularizers.DropoutMethod`; None: no dropout. ``l2``: s in the loss's
    term s |theta|^2 over all parameters. ``adaptive``: first words of an adaptive softmax's clusters; (): a full
    softmax.
    """

    num_training: int = 4
    num_held_out: int = 2
    num_words: int = 1000
    dim: int = 128
    num_layers: int = 2
    length: int = 20
    batch_size: int = 10
    epochs: int = 20
    learning_rate: float = 0.01
    clip: float = 1.0
    rate: float = 0.4
    method: dict[str, Any] | None = None
    l2: float = 0.0
    adaptive: tuple[int, ...] = ()


class WordLstm(nn.Module):
    """Embedding, layers of LSTM, and the logits of the next word (or, before an adaptive softmax, the states)."""

    def __init__(self, num_words: int, dim: int, num_layers: int, *, with_logits: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, dim)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        # One module for each layer, as dropout is applied between them.
        self.layers = nn.ModuleList(nn.LSTM(dim, dim, batch_first=True) for _ in range(num_layers))
        self.output = nn.Linear(dim, num_words) if with_logits else nn.Identity()

    @property
    def hidden(self) -> list[nn.Module]:
        """The modules whose outputs get dropout: the embedding and each layer."""
        return [self.words, *self.layers]

    def forward(self, words: Tensor, states: list[State]) -> tuple[Tensor, list[State]]:
        """Return outputs [b, t, c] of words [b, t], and the states after them."""
        at, after = self.words(words), []
        for layer, state in zip(self.layers, states, strict=True):
            at, new = layer(at, state)
            after.append(new)
        return self.output(at), after

    def zero_states(self, batch_size: int) -> list[State]:
        """Return the states before any word."""
        zeros = torch.zeros(1, batch_size, self.words.embedding_dim)
        return [(zeros, zeros) for _ in self.layers]


class Streams(NamedTuple):
    """Word ids by split, int64 [n]."""

    training: Tensor
    validation: Tensor
    test: Tensor


def train(settings: LstmSettings, path: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Train on the file of the Brown corpus; yield perplexities of each epoch and split, without dropout.

    The perplexity of the training split is over its first words, as many as the validation split has.
    """
    corpus = brown(path, settings.num_training, settings.num_held_out)
    rows = vocabulary(corpus.training, settings.num_words)
    yield from train_on(settings, Streams(*(stream(part, rows) for part in corpus)), seed)


def train_on(settings: LstmSettings, streams: Streams, seed: int) -> Iterator[dict[str, Any]]:
    """Train on streams of word ids; yield as :func:`train`.

    The state after a window of ``length`` words is the next one's, detached: that of the step's last forward pass.
    """
    torch.manual_seed(seed)
    model = WordLstm(settings.num_words, settings.dim, settings.num_layers, with_logits=not settings.adaptive)
    output: CrossEntropy | AdaptiveSoftmax = CrossEntropy()
    parameters = list(model.parameters())
    if settings.adaptive:
        head = nn.AdaptiveLogSoftmaxWithLoss(settings.dim, settings.num_words, list(settings.adaptive))
        output, parameters = AdaptiveSoftmax(head), [*parameters, *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=settings.learning_rate, weight_decay=2.0 * settings.l2)
    draws = GeneratorDraws(torch.Generator().manual_seed(seed))
    # Without dropout: Algorithm 2 with neither term.
    method = DropoutMethod(**({"masks": 0} if settings.method is None else settings.method))
    objective = DropoutObjective(model, model.hidden, settings.rate, method, output)
    for epoch in range(1, settings.epochs + 1):
        states = model.zero_states(settings.batch_size)
        for words, targets in windows(streams.training, settings.batch_size, settings.length):
            after: list[list[State]] = []

            def losses(
                words: Tensor = words,
                targets: Tensor = targets,
                states: list[State] = states,
                after: list[list[State]] = after,
            ) -> Tensor:
                outputs, new = model(words, states)
                after.append(new)
                return output.loss(outputs, targets)

            value = objective(losses, draws).value.mean() / words.shape[1]
            value.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            states = [(hidden.detach(), cell.detach()) for hidden, cell in after[-1]]
        held_out = len(streams.validation)
        for split, of in streams._replace(training=streams.training[:held_out])._asdict().items():
            figure = perplexity(model, output, of, settings)
            yield {"epoch": epoch, "split": SPLITS[split], "perplexity": figure}


def windows(words: Tensor, batch_size: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (words, the next words), [batch_size, up to length] each, of ``batch_size`` parts side by side."""
    size = (len(words) - 1) // batch_size
    inputs = words[: size * batch_size].view(batch_size, size)
    targets = words[1 : size * batch_size + 1].view(batch_size, size)
    for start in range(0, size, length):
        yield inputs[:, start : start + length], targets[:, start : start + length]


@torch.no_grad()
def perplexity(model: WordLstm, output: CrossEntropy | AdaptiveSoftmax, words: Tensor, settings: LstmSettings) -> float:
    """Return exp of the mean loss of a word."""
    states, total, count = model.zero_states(settings.batch_size), 0.0, 0
    for inputs, targets in windows(words, settings.batch_size, settings.length):
        outputs, states = model(inputs, states)
        total += float(output.loss(outputs, targets).sum())
        count += targets.numel()
    return math.exp(total / count)
