"""Bad ids and offsets, found by the device, reported by the host, without making it wait."""

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
    """The flag that lookups raise, and what they looked up, until it is known that the flag was not raised.

    On a GPU a bad lookup is found after its backward may have been recorded: every :meth:`check` raises for it until it
    is forgotten, so that no step applies it.

    Attributes:
        flag: int32 [1], in memory of the host, to which a GPU writes where it finds a fault: so nothing is copied.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.flag = torch.zeros(1, dtype=torch.int32, pin_memory=layout.device.type != "cpu")
        self._pending: list[Lookup] = []
        # Making one takes longer than recording it.
        self._events: list[torch.cuda.Event] = []
        self._known: str | None = None

    def watch(self, indices: torch.Tensor, offsets: torch.Tensor) -> None:
        """Watch the lookup that was just started; on the CPU, where it is over, raise what :meth:`check` does."""
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
        """Wait for the lookups until now; raise ValueError for an id or an offset that was bad."""
        if self._known is not None:
            raise ValueError(self._known)
        while self._pending:
            self._look_at_first()

    def forget(self) -> None:
        """Forget the lookups until now: they will not be applied."""
        self._known = None
        self._clear()

    def _clear(self) -> None:
        for lookup in self._pending:
            # None of them is to raise the flag afterwards.
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
            # Where it finds nothing, a later lookup has raised the flag.
            self._report(lookup.indices, lookup.offsets)
        except ValueError as error:
            self._known = str(error)
            self._clear()
            raise

    def _report(self, indices: torch.Tensor, offsets: torch.Tensor) -> None:
        """Raise ValueError for the first fault of a lookup, if it has one."""
        batch_size = (offsets.numel() - 1) // len(self.layout.descriptors)
        self.layout.check_lookup(indices.cpu(), offsets.cpu(), batch_size)
