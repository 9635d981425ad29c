"""The softmax over all items, from queries and item rows, compared with torch's ``cross_entropy`` of the same scores.

``python -m benchmarks.retrieval_losses``. Bench ``softmax``: forward and backward; the peer stores all scores at once.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.support.harness import interleave, line
from trainer.launch.worker import steady_memory
from trainer.models.retrieval_losses import RETRIEVAL, Shared, shared_loss

SIZES = (12_800, 3_418), (4_096, 18_357)
"""(targets of a batch, items of the catalogue) of MovieLens-1M and of amazon_sports."""
DIM = 64


def softmax(targets: int, items: int, iterations: int) -> dict[str, Any]:
    """Print and return the output line of one size."""
    generator = torch.Generator().manual_seed(0)
    whole = RETRIEVAL["softmax"]({}, items)

    def draw() -> Any:
        queries, rows = (torch.randn(size, DIM, generator=generator, requires_grad=True) for size in (targets, items))
        return queries, rows, torch.randint(items, (targets,), generator=generator)

    def ours(drawn: Any) -> tuple[torch.Tensor, ...]:
        queries, rows, own = drawn
        target = (queries * rows[own]).sum(1)
        return torch.autograd.grad(shared_loss(whole, queries, target, Shared(rows)).mean(), (queries, rows))

    def theirs(drawn: Any) -> tuple[torch.Tensor, ...]:
        queries, rows, own = drawn
        return torch.autograd.grad(cross_entropy(queries @ rows.T, own), (queries, rows))

    drawn = draw()
    for one, other in zip(ours(drawn), theirs(drawn), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-7)
    times = interleave(draw, ours, theirs, iterations=iterations)
    return line("softmax", f"{targets} targets, {items} items, D{DIM}", "torch_cross_entropy", times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=21)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with steady_memory():
        for targets, items in SIZES:
            softmax(targets, items, options.iterations)


if __name__ == "__main__":
    main()
