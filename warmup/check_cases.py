# SPDX-License-Identifier: Apache-2.0
"""Cases of the gate that several configs are checked on, one after the other.

To draw a case and compute what is right takes ten times as long as to run a config on
it. So cases are kept for some checks, and each check draws one of them anew.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from portable_backend.warmup.gate import bits

# Of the memory that is spare beside the inputs that are timed.
_KEPT_SHARE = 0.1
_KEPT_ON_CPU = 64 << 20


class Case(Protocol):
    """Inputs and what is right for them; a config gets copies of these, never them."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """All that must stay as it is."""


_Case = TypeVar("_Case", bound=Case)


class KeptCases(Generic[_Case]):
    """Cases by slot, of which each check replaces another one.

    Args:
        slots: cases of a check.
        limit_bytes: of all that is kept; what does not fit is drawn for each check.
    """

    def __init__(self, slots: int, limit_bytes: int) -> None:
        self.slots, self.limit_bytes = slots, limit_bytes
        self._checks = 0
        self._kept: dict[int, tuple[_Case, int, list[int]]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size, _ in self._kept.values())

    def take(self, draw: Callable[[int], _Case]) -> Iterator[tuple[_Case, bool]]:
        """The cases of one check, and which of them no check has had before.

        A case that is no longer as it was drawn is drawn anew as well.

        Args:
            draw: makes a case of a slot.
        """
        self._kept.pop(self._checks % self.slots, None)
        self._checks += 1
        for slot in range(self.slots):
            case, _, sums = self._kept.get(slot, (None, 0, []))
            if case is not None and fingerprint(case.tensors) == sums:
                yield case, False
                continue
            self._kept.pop(slot, None)
            case = draw(slot)
            self._keep(slot, case)
            yield case, True

    def fill(self, draw: Callable[[int], _Case]) -> None:
        """Draw ahead what the next check would, but for the one that it has anew."""
        for slot in range(self.slots):
            if slot != self._checks % self.slots and slot not in self._kept:
                self._keep(slot, draw(slot))

    def _keep(self, slot: int, case: _Case) -> None:
        size = sum(t.numel() * t.element_size() for t in case.tensors)
        if self.num_bytes + size <= self.limit_bytes:
            self._kept[slot] = case, size, fingerprint(case.tensors)


def fingerprint(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Sums of the tensors' bits, in one look at the device."""
    return torch.stack([bits(t).sum(dtype=torch.int64) for t in tensors]).tolist()


def kept_limit(device: torch.device) -> int:
    """Bytes that cases may take, once the inputs to be timed are there."""
    if device.type != "cuda":
        return _KEPT_ON_CPU
    return int(_KEPT_SHARE * spare_bytes(device))


def spare_bytes(device: torch.device) -> int:
    """What this process can still allocate on a GPU, within its share of the memory."""
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    allocated = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - allocated
    return max(0, min(free + cached, int(share * total) - allocated))
