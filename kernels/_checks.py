# SPDX-License-Identifier: Apache-2.0
"""What attention and its planner refuse, each with expected, given and remedy."""

from __future__ import annotations

import math
import operator
from numbers import Integral
from typing import TYPE_CHECKING

import torch

from portable_backend.errors import bad_argument
from portable_backend.kernels.config import AttentionConfig

if TYPE_CHECKING:
    from portable_backend.kernels.attention import AttentionOptions, PagedBatch
    from portable_backend.kernels.plan import AttentionPlanner

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Masked scores must stay hugely negative after it, and all others well above them.
MIN_SCALE, MAX_SCALE = 1e-6, 1e6
MIN_SOFTCAP = 1e-3
MAX_PARAMETER = 4096  # of a config
MAX_WINDOW = 1 << 30  # positions and window are added in 32 bits


def check_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    options: AttentionOptions,
    out: torch.Tensor,
) -> None:
    """Raise ValueError unless a call of paged_attention can be served."""
    if query.dim() != 3:
        raise bad_argument(
            "query",
            "[num_tokens, num_query_heads, head_size]",
            list(query.shape),
            "reshape it",
        )
    if query.dtype not in DTYPES:
        raise bad_argument(
            "query", "float16, bfloat16 or float32", query.dtype, "convert it"
        )
    num_tokens, num_query_heads, head_size = query.shape
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        _check_cache(name, cache, query.dtype, head_size, query.device)
    if key_cache.shape != value_cache.shape:
        raise bad_argument(
            "value_cache",
            f"shaped like key_cache {list(key_cache.shape)}",
            list(value_cache.shape),
            "value heads of another size are not supported",
        )
    num_kv_heads = key_cache.shape[2]
    if num_kv_heads == 0 or num_query_heads % num_kv_heads:
        raise bad_argument(
            "query heads",
            f"a multiple of the {num_kv_heads} KV heads",
            num_query_heads,
            "check the tensor-parallel split",
        )
    if not 32 <= head_size <= 256:
        raise bad_argument(
            "head_size", "between 32 and 256", head_size, "use another back end"
        )
    if key_cache.shape[1] == 0 or key_cache.shape[1] % 16:
        raise bad_argument(
            "block_size",
            "a multiple of 16",
            key_cache.shape[1],
            "set --block-size to a multiple of 16",
        )
    if out.shape[1:] != query.shape[1:] or out.shape[0] < num_tokens:
        raise bad_argument(
            "out",
            f"shaped like query {list(query.shape)}",
            list(out.shape),
            "resize it",
        )
    if out.dtype != query.dtype:
        raise bad_argument(
            "out", f"of query's dtype {query.dtype}", out.dtype, "convert"
        )
    for name, tensor in (("query", query), ("out", out)):
        if tensor.stride(-1) != 1 and tensor.numel():
            raise bad_argument(
                name,
                "contiguous in its last axis",
                tensor.stride(),
                "call .contiguous()",
            )
        _check_reach(name, "heads", tensor.shape[1], tensor.stride(1))
    check_places("out", out)
    if out.device != query.device:
        raise bad_argument("out", f"on {query.device}", out.device, "move it there")
    check_batch(batch, query.device)
    _check_options(options, num_query_heads, query.device)


def _check_cache(
    name: str,
    cache: torch.Tensor,
    dtype: torch.dtype,
    head_size: int,
    device: torch.device,
) -> None:
    if cache.dim() != 4 or cache.shape[3] != head_size:
        raise bad_argument(
            name,
            f"[num_blocks, block_size, num_kv_heads, {head_size}]",
            list(cache.shape),
            "pass a 4-D view of the cache with query's head_size",
        )
    if cache.dtype != dtype:
        quantised = cache.dtype == torch.uint8 or "float8" in str(cache.dtype)
        raise bad_argument(
            name,
            f"of query's dtype {dtype}",
            cache.dtype,
            "fp8 KV caches are not supported yet, use --kv-cache-dtype auto"
            if quantised
            else "convert query or cache",
        )
    if cache.shape[0] == 0:
        raise bad_argument(
            name, "at least one block", list(cache.shape), "allocate the cache first"
        )
    if cache.stride(3) != 1:
        raise bad_argument(
            name,
            "contiguous in its last axis",
            cache.stride(),
            "keep head_size innermost",
        )
    if cache.device != device:
        raise bad_argument(
            name, f"on query's device {device}", cache.device, "move one of them"
        )
    _check_reach(name, "slots of a block", cache.shape[1], cache.stride(1))


def check_places(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor to be written whose elements share places."""
    if any(
        stride == 0 and size > 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise bad_argument(
            name, "one place for each element", tensor.stride(), "do not expand it"
        )


def _check_reach(name: str, what: str, count: int, stride: int) -> None:
    """Offsets within a block, and from head to head of a token, have 32 bits."""
    if (count - 1) * stride >= 2**31:
        raise bad_argument(
            name,
            f"less than 2**31 elements from the first to the last of its {count} "
            f"{what}",
            f"{count - 1} times {stride}",
            "keep them closer together: put that axis further in",
        )


def check_batch(batch: PagedBatch, device: torch.device) -> None:
    """Raise ValueError unless the kernels can read this batch."""
    num_seqs = batch.seq_lens.shape[0] if batch.seq_lens.dim() == 1 else -1
    if num_seqs < 0:
        raise bad_argument(
            "seq_lens", "int32 [num_seqs]", list(batch.seq_lens.shape), "reshape it"
        )
    for name, shape in (
        ("query_start_loc", (num_seqs + 1,)),
        ("seq_lens", (num_seqs,)),
        ("block_table", (num_seqs, None)),
    ):
        tensor: torch.Tensor = getattr(batch, name)
        fits = tensor.dim() == len(shape) and tensor.shape[0] == shape[0]
        if tensor.dtype != torch.int32 or not fits:
            axes = ", ".join("max_blocks" if n is None else str(n) for n in shape)
            raise bad_argument(
                name,
                f"int32 [{axes}]",
                f"{tensor.dtype} {list(tensor.shape)}",
                "call .to(torch.int32) or correct the shape",
            )
        if tensor.device != device:
            raise bad_argument(
                name, f"on query's device {device}", tensor.device, "move it there"
            )
        width = tensor.shape[-1]
        if name == "block_table" and width == 0 and num_seqs:
            raise bad_argument(
                name, "at least one column", list(tensor.shape), "widen the table"
            )
        if tensor.stride(-1) != 1 and width > 1:
            raise bad_argument(
                name,
                "contiguous in its last axis",
                tensor.stride(),
                "call .contiguous()",
            )


def check_contents(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    batch: PagedBatch,
    options: AttentionOptions,
) -> None:
    """What would make a kernel read or write out of bounds.

    For tensors on a CPU, where looking is cheap; numbers on a device are trusted.
    """
    if not batch.seq_lens.numel():
        return
    starts, seq_lens = batch.query_start_loc, batch.seq_lens
    query_lens = torch.diff(starts)
    if (
        int(starts[0]) != 0
        or int(query_lens.min()) < 0
        or int(starts[-1]) > query.shape[0]
    ):
        raise bad_argument(
            "query_start_loc",
            f"rising from 0 to at most query's {query.shape[0]} tokens",
            starts.tolist() if starts.numel() <= 20 else f"{starts.numel()} numbers",
            "pass the prefix sum of the query lengths",
        )
    if int(query_lens.max()) > batch.max_query_len:
        raise bad_argument(
            "max_query_len",
            f"at least {int(query_lens.max())}, as query_start_loc says",
            batch.max_query_len,
            "pass an upper bound",
        )
    if int(seq_lens.min()) < 0:
        raise bad_argument(
            "seq_lens", "at least 0", int(seq_lens.min()), "pass numbers of tokens"
        )
    num_blocks, block_size = key_cache.shape[:2]
    columns = batch.block_table.shape[1]
    if int(seq_lens.max()) > columns * block_size:
        raise bad_argument(
            "seq_lens",
            f"at most {columns * block_size}, as block_table has columns for",
            int(seq_lens.max()),
            "widen block_table",
        )
    # Only blocks with keys that some query may see are looked up.
    position = torch.arange(columns) * block_size
    used = position < seq_lens[:, None]
    if options.sliding_window is not None:
        first = seq_lens - query_lens - options.sliding_window + 1
        used &= position + block_size > first[:, None]
    ids = batch.block_table[used]
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_blocks:
        raise bad_argument(
            "block_table",
            f"block ids from 0 to {num_blocks - 1} for the tokens of seq_lens",
            f"{int(ids.min())} to {int(ids.max())}",
            "correct the table, or seq_lens",
        )


def _check_options(
    options: AttentionOptions, num_query_heads: int, device: torch.device
) -> None:
    if not MIN_SCALE <= options.scale <= MAX_SCALE:
        raise bad_argument(
            "scale",
            f"finite, from {MIN_SCALE:g} to {MAX_SCALE:g}",
            options.scale,
            "use head_size ** -0.5",
        )
    check_window(options.sliding_window)
    softcap = options.softcap
    if softcap and not MIN_SOFTCAP <= softcap < math.inf:
        raise bad_argument(
            "softcap",
            f"None, 0, or finite and at least {MIN_SOFTCAP:g}",
            options.softcap,
            "use None for no cap",
        )
    for name in ("alibi_slopes", "sinks"):
        tensor: torch.Tensor | None = getattr(options, name)
        if tensor is None:
            continue
        if tensor.shape != (num_query_heads,) or not tensor.is_floating_point():
            raise bad_argument(
                name,
                f"floating point [{num_query_heads}], one per query head",
                f"{tensor.dtype} {list(tensor.shape)}",
                "pass this rank's heads only",
            )
        if tensor.device != device:
            raise bad_argument(
                name, f"on query's device {device}", tensor.device, "move it there"
            )
        if tensor.stride(0) != 1 and num_query_heads > 1:
            raise bad_argument(
                name, "contiguous", tensor.stride(), "call .contiguous()"
            )


def check_plan(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    batch: PagedBatch,
    options: AttentionOptions,
    planner: AttentionPlanner,
) -> None:
    """Raise ValueError unless `planner` was made for such a call."""
    got = {
        "num_query_heads": query.shape[1],
        "num_kv_heads": key_cache.shape[2],
        "head_size": query.shape[2],
        "block_size": key_cache.shape[1],
        "dtype": query.dtype,
        "sliding_window": options.sliding_window,
        "causal": options.causal,
        "device": query.device,
    }
    for name, value in got.items():
        if getattr(planner, name) != value:
            raise bad_argument(
                f"batch.plan {name}",
                f"{value} as in the call",
                getattr(planner, name),
                "plan the batch with an AttentionPlanner made for these layers",
            )


def check_numbers(numbers: dict[str, tuple[int, int, int | None]]) -> None:
    """Raise ValueError unless each (value, least, most) is in its range."""
    for name, (value, least, most) in numbers.items():
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not is_whole or value < least or (most is not None and value > most):
            limits = f"at least {least}" if most is None else f"from {least} to {most}"
            limits = f"a whole number {limits}"
            raise bad_argument(name, limits, value, "correct it")


def check_window(window: int | None) -> None:
    """Raise ValueError unless `window` is None or a whole number of tokens."""
    if window is None:
        return
    if not isinstance(window, int) or not 1 <= window <= MAX_WINDOW:
        raise bad_argument(
            "sliding_window",
            f"None or an int from 1, the query's own position, to {MAX_WINDOW}",
            window,
            "use None for no window",
        )


def check_config(config: AttentionConfig) -> None:
    """Raise ValueError unless each kernel has its parameters."""
    for kernel, names in (
        ("prefill", ("BLOCK_M", "BLOCK_N", "PACK", "num_stages")),
        ("decode", ("BLOCK_N", "CTAS_PER_UNIT", "MIN_CHUNK", "num_stages")),
        ("merge", ("BLOCK_SPLITS",)),
    ):
        params = getattr(config, kernel)
        for name in names:
            value = params.get(name)
            tile = name in ("BLOCK_M", "BLOCK_N")  # sides of matrix instructions
            least = 16 if tile else 0 if name == "CTAS_PER_UNIT" else 1
            power = name.startswith("BLOCK_")
            whole = type(value) is int and least <= value <= MAX_PARAMETER
            if not whole or (power and value & (value - 1)):
                kind = "a power of two" if power else "an int"
                kind += f" from {least} to {MAX_PARAMETER}"
                raise bad_argument(
                    f"config.{kernel} {name}", kind, repr(value), "correct the config"
                )
    for kernel, name, kinds in (
        ("prefill", "LOAD", ("pointer", "descriptor", "new")),
        ("prefill", "REFERENCE", ("running", "diagonal")),
        ("prefill", "QUERY", ("shared", "registers")),
        ("prefill", "DELAY_PV", (False, True)),
        ("decode", "LOAD", ("pointer", "descriptor")),
        ("decode", "MERGE", ("kernel", "last", "captured")),
    ):
        kind = getattr(config, kernel).get(name)
        if kind not in kinds or type(kind) is not type(kinds[0]):
            raise bad_argument(
                f"config.{kernel} {name}",
                " or ".join(map(str, kinds)),
                repr(kind),
                "correct the config",
            )


def check_lengths(batch: PagedBatch, device: torch.device) -> int:
    """Number of requests, if both length tensors are fit to be read by the kernel."""
    lens, starts = batch.seq_lens, batch.query_start_loc
    num_seqs = lens.shape[0] if lens.dim() == 1 else -1
    # All at once first: this runs in every step.
    if (
        num_seqs >= 0
        and starts.shape == (num_seqs + 1,)
        and lens.dtype == starts.dtype == torch.int32
        and lens.device == starts.device == device
        and lens.is_contiguous()
        and starts.is_contiguous()
    ):
        return num_seqs
    for name, tensor, size in (
        ("seq_lens", lens, num_seqs),
        ("query_start_loc", starts, num_seqs + 1),
    ):
        right = tensor.dtype == torch.int32 and tensor.shape == (size,)
        if not right or (size > 1 and tensor.stride(0) != 1):
            raise bad_argument(
                name,
                f"int32 [{size if size >= 0 else 'num_seqs'}], contiguous",
                f"{tensor.dtype} {list(tensor.shape)} with stride {tensor.stride()}",
                "call .to(torch.int32) or .contiguous(), or correct the shape",
            )
        if tensor.device != device:
            raise bad_argument(
                name, f"on the planner's {device}", tensor.device, "move it there"
            )
    return num_seqs


def check_host_lengths(
    starts: torch.Tensor, batch: PagedBatch, num_seqs: int, num_tokens: int
) -> tuple[list[int], int]:
    """Query lengths and their sum, if what the host knows agrees with itself.

    On a CPU also with query_start_loc; elsewhere looking would wait for the device.
    A list, since each small operation of torch or NumPy costs the host a microsecond.

    Args:
        starts: batch.query_start_loc_cpu, or query_start_loc itself on a CPU.
    """
    given = starts is batch.query_start_loc_cpu
    name = "query_start_loc_cpu" if given else "query_start_loc"
    right = (
        isinstance(starts, torch.Tensor)
        and starts.shape == (num_seqs + 1,)
        and starts.dtype in (torch.int32, torch.int64)
        and starts.device.type == "cpu"
    )
    if not right:
        raise bad_argument(
            name,
            f"int32 [{num_seqs + 1}] on the CPU, or None",
            f"{starts.dtype} {list(starts.shape)} on {starts.device}"
            if isinstance(starts, torch.Tensor)
            else type(starts).__name__,
            "pass query_start_loc.cpu()",
        )
    if batch.query_start_loc.device.type == "cpu" and not torch.equal(
        starts.to(torch.int32), batch.query_start_loc
    ):
        raise bad_argument(
            name,
            "equal to query_start_loc",
            "other numbers",
            "pass query_start_loc.cpu()",
        )
    values = starts.numpy().tolist()
    lens = differences(values)
    if values[0] < 0 or min(lens, default=0) < 0:
        raise bad_argument(
            name,
            "rising from 0",
            values if num_seqs < 20 else f"{num_seqs + 1} numbers",
            "pass the prefix sum of the query lengths",
        )
    longest, total = max(lens, default=0), values[-1]
    if longest > batch.max_query_len or total > num_tokens:
        raise bad_argument(
            "batch.max_query_len and num_tokens",
            f"at least {longest} and {total}, as {name} says",
            f"{batch.max_query_len} and {num_tokens}",
            "pass upper bounds",
        )
    return lens, total


def differences(values: list[int]) -> list[int]:
    """From each to the next."""
    return list(map(operator.sub, values[1:], values))
