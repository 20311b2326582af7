# SPDX-License-Identifier: Apache-2.0
"""One decision for all ranks of a tensor-parallel group: the first one's.

Ranks may see other files, in other caches, on other hosts. So the first rank alone
decides, and the others take what it sends: one broadcast for each decision, whatever
anybody finds. It carries JSON, never objects that another process has pickled.
"""

import contextlib
import datetime
import json
import logging
import zlib
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger("vllm.portable_backend.ranks")
# Of one message, the same for all. Some 30 kinds of steps take 1 KiB, compressed.
_CAPACITY = 1 << 16
_LENGTH_BYTES = 8
# Messages that nobody waits for any longer; they may still arrive.
_abandoned: list[torch.Tensor] = []


def decides() -> bool:
    """Whether this rank's own decisions count."""
    group = _group()
    return group is None or group.rank_in_group == 0


def from_first_rank(decide: Callable[[], Any], limit_s: float) -> Any:
    """What the first rank of the tensor-parallel group decides.

    All ranks of the group must call it equally often and in the same order. Where there
    is no group, or one rank only, it is no collective.

    Args:
        decide: called on the first rank alone; gives what JSON can hold, never raises.
        limit_s: how long to wait for it, and for the others to take it.

    Returns:
        The decision; None, with a warning, on a rank that did not get it in time.
    """
    group = _group()
    if group is None:
        return decide()
    is_first = group.rank_in_group == 0
    decision = decide() if is_first else None
    message = torch.zeros(_CAPACITY, dtype=torch.uint8, device="cpu")
    if is_first:
        _write(message, decision)
    try:
        work = group.cpu_group.broadcast(message, 0)
        work.wait(datetime.timedelta(seconds=limit_s))
    except RuntimeError as error:  # out of time, or a rank is gone
        _abandoned.append(message)
        logger.warning(
            "tensor-parallel ranks may run different configs, which costs speed: the "
            "first rank's choice was not passed on within %.0f s: %s",
            limit_s,
            str(error).partition("\n")[0],
        )
        return decision
    return decision if is_first else _read(message)


def _group() -> Any:
    """vLLM's tensor-parallel group; None where it is missing or of one rank."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None
    group = parallel_state.get_tp_group()
    return None if group.world_size == 1 else group


def _write(message: torch.Tensor, decision: Any) -> None:
    data = zlib.compress(json.dumps(decision).encode())
    if len(data) > _CAPACITY - _LENGTH_BYTES:
        raise AssertionError(f"a decision of {len(data)} bytes has no room")
    data = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _read(message: torch.Tensor) -> Any:
    data = bytes(message.numpy())
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    with contextlib.suppress(ValueError, zlib.error):
        return json.loads(zlib.decompress(data[_LENGTH_BYTES:][:length]))
    logger.warning("the first rank's choice of configs cannot be read")
    return None
