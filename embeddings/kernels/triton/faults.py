"""Reports of bad ids and offsets: the device finds them, and the host raises for them later, without waiting."""

from __future__ import annotations

from typing import NamedTuple

import torch

from embeddings.kernels.layout import Layout


class Lookup(NamedTuple):
    """A lookup whose ids the device may not have checked yet."""

    done: torch.cuda.Event
    indices: torch.Tensor
    offsets: torch.Tensor


class Faults:
    """The flag that bad lookups set on the device, and the inputs of lookups that are not yet known to be good.

    On a GPU a bad lookup may be found only after its backward was recorded. Every :meth:`check` raises for it until
    :meth:`forget` is called, so that no step applies it.

    Attributes:
        flag: int32 [1] in host memory; a GPU that finds a fault writes to it directly, so nothing must be copied.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.flag = torch.zeros(1, dtype=torch.int32, pin_memory=layout.device.type != "cpu")
        self._pending: list[Lookup] = []
        # Events are reused, because creating one takes longer than recording it.
        self._events: list[torch.cuda.Event] = []
        self._known: str | None = None

    def watch(self, indices: torch.Tensor, offsets: torch.Tensor) -> None:
        """Remember the lookup just started, for :meth:`check`; on the CPU, where it has ended, check it at once."""
        if self.layout.device.type == "cpu":
            if int(self.flag):
                self.flag.zero_()
                self._report(indices, offsets)
            return
        done = self._events.pop() if self._events else torch.cuda.Event()
        done.record()
        self._pending.append(Lookup(done, indices, offsets))
        while self._pending and self._pending[0].done.query():
            self._look_at_first()

    def check(self) -> None:
        """Wait for all lookups so far; raise ValueError if one had a bad id or offset."""
        if self._known is not None:
            raise ValueError(self._known)
        while self._pending:
            self._look_at_first()

    def forget(self) -> None:
        """Forget all lookups so far and their faults; their gradients must not be applied."""
        self._known = None
        self._clear()

    def _clear(self) -> None:
        for lookup in self._pending:
            # Wait, so that no earlier lookup sets the flag after it is cleared.
            lookup.done.synchronize()
        self._pending.clear()
        self.flag.zero_()

    def _look_at_first(self) -> None:
        lookup = self._pending.pop(0)
        lookup.done.synchronize()
        self._events.append(lookup.done)
        if not int(self.flag):
            return
        try:
            # If this lookup has no fault, a later one has set the flag.
            self._report(lookup.indices, lookup.offsets)
        except ValueError as error:
            self._known = str(error)
            self._clear()
            raise

    def _report(self, indices: torch.Tensor, offsets: torch.Tensor) -> None:
        """Raise ValueError for the first fault of a lookup, if it has any."""
        batch_size = (offsets.numel() - 1) // len(self.layout.descriptors)
        self.layout.check_lookup(indices.cpu(), offsets.cpu(), batch_size)
