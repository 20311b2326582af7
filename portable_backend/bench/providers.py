# SPDX-License-Identifier: Apache-2.0
"""Attention implementations behind one interface, each called as its back end does.

vLLM is imported here only, inside the functions: without it the rest still runs.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton

from portable_backend.bench.inputs import Inputs
from portable_backend.bench.results import OURS
from portable_backend.bench.timing import FAILURES, Call
from portable_backend.errors import UnsupportedError
from portable_backend.kernels import AttentionPlanner, paged_attention

# vLLM's largest captured step, and what its back end then passes as split limit.
_CAPTURED_TOKENS = 512
_CAPTURED_SPLITS = 32


@dataclass
class Prepared:
    """An implementation bound to inputs and an output, its plan made.

    Attributes:
        calls: attention of each layer.
        plan: what a step does once for all layers, or None.
    """

    calls: list[Call]
    plan: Call | None


def portable(inputs: Inputs, out: torch.Tensor, *, exact: bool = False) -> Prepared:
    """Ours. On a GPU the back end plans without knowing lengths on the host.

    Args:
        inputs: without caches only the plan is made.
        out: like inputs.query.
        exact: let the host know the lengths, for grids without spare programs.
    """
    shape = inputs.shape
    planner = AttentionPlanner(
        num_query_heads=shape.heads[0],
        num_kv_heads=shape.heads[1],
        head_size=shape.head_size,
        dtype=inputs.query.dtype,
        block_size=shape.block_size,
        max_num_seqs=len(shape.seq_lens),
        max_num_tokens=shape.num_tokens,
        sliding_window=shape.sliding_window,
        device=inputs.query.device,
    )
    on_host = exact or inputs.query.device.type == "cpu"
    batch = inputs.batch(lengths_on_host=on_host)
    plan = partial(planner.plan, batch, shape.num_tokens)
    step = plan()
    calls: list[Call] = [
        partial(
            paged_attention,
            inputs.query,
            *caches,
            step,
            inputs.options,
            out=out,
            key=inputs.key,
            value=inputs.value,
        )
        for caches in inputs.caches
    ]
    return Prepared(calls, plan)


def fa3(inputs: Inputs, out: torch.Tensor, *, metadata: bool = True) -> Prepared:
    """FlashAttention-3 as vLLM's FLASH_ATTN calls it, metadata made once per step.

    Args:
        inputs, out: as for `portable`.
        metadata: False leaves the scheduling to each call, as vLLM does not.

    Raises:
        UnsupportedError: this GPU or shape is not FlashAttention-3's.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata
    from vllm.vllm_flash_attn.flash_attn_interface import (
        fa_version_unsupported_reason,
        is_fa_version_supported,
    )

    shape, options = inputs.shape, inputs.options
    if not is_fa_version_supported(3):
        raise UnsupportedError(str(fa_version_unsupported_reason(3)))
    if options.alibi_slopes is not None:
        raise UnsupportedError("FlashAttention-3 has no ALiBi")
    num_seqs, window = len(shape.seq_lens), _window(inputs)
    plan = partial(
        get_scheduler_metadata,
        batch_size=num_seqs,
        max_seqlen_q=inputs.max_query_len,
        max_seqlen_k=inputs.max_seq_len,
        num_heads_q=shape.heads[0],
        num_heads_kv=shape.heads[1],
        headdim=shape.head_size,
        cache_seqlens=inputs.seq_lens,
        qkv_dtype=inputs.query.dtype,
        cu_seqlens_q=inputs.query_start_loc,
        page_size=shape.block_size,
        causal=True,
        window_size=window,
        num_splits=_num_splits(inputs) if metadata else 0,
    )
    # vLLM passes the layer's scales whatever the cache's dtype is.
    one = torch.ones((), dtype=torch.float32, device=out.device)
    scale = one.expand(num_seqs, shape.heads[1])
    call = partial(
        flash_attn_varlen_func,
        q=inputs.query,
        out=out,
        cu_seqlens_q=inputs.query_start_loc,
        max_seqlen_q=inputs.max_query_len,
        seqused_k=inputs.seq_lens,
        max_seqlen_k=inputs.max_seq_len,
        softmax_scale=options.scale,
        causal=True,
        window_size=list(window),
        block_table=inputs.block_table,
        softcap=options.softcap or 0.0,
        scheduler_metadata=plan() if metadata else None,
        fa_version=3,
        q_descale=scale,
        k_descale=scale,
        v_descale=scale,
        num_splits=_num_splits(inputs) if metadata else 0,
        s_aux=options.sinks,
    )
    calls: list[Call] = [
        partial(call, k=_for_tma(keys), v=_for_tma(values))
        for keys, values in inputs.caches
    ]
    return Prepared(calls, plan if metadata else None)


def vllm_triton(inputs: Inputs, out: torch.Tensor) -> Prepared:
    """vLLM's Triton kernel as its TRITON_ATTN back end calls it; it has no plan."""
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    shape, options = inputs.shape, inputs.options
    num_query_heads, num_kv_heads = shape.heads
    segments = triton_attn.NUM_PAR_SOFTMAX_SEGMENTS
    # Fewer requests than this are split; vLLM takes the nearest captured size.
    threshold = triton_attn.MIN_LAUNCH_GRID_SIZE_2D // num_kv_heads
    threshold = min((1, 2, 4, *range(8, 257, 8)), key=lambda n: abs(n - threshold))

    def floats(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.float32, device=out.device)

    one = torch.ones((), dtype=torch.float32, device=out.device)
    scale = one.expand(len(shape.seq_lens), num_kv_heads)
    padded = triton.next_power_of_2(shape.head_size)
    call = partial(
        unified_attention,
        q=inputs.query,
        out=out,
        cu_seqlens_q=inputs.query_start_loc,
        max_seqlen_q=inputs.max_query_len,
        seqused_k=inputs.seq_lens,
        max_seqlen_k=inputs.max_seq_len,
        softmax_scale=options.scale,
        causal=True,
        alibi_slopes=options.alibi_slopes,
        window_size=_window(inputs),
        block_table=inputs.block_table,
        softcap=options.softcap or 0,
        q_descale=None,
        k_descale=scale,
        v_descale=scale,
        seq_threshold_3D=threshold,
        num_par_softmax_segments=segments,
        softmax_segm_output=floats(threshold, num_query_heads, segments, padded),
        softmax_segm_max=floats(threshold, num_query_heads, segments),
        softmax_segm_expsum=floats(threshold, num_query_heads, segments),
        sinks=options.sinks,
    )
    calls: list[Call] = [
        partial(call, k=keys, v=values) for keys, values in inputs.caches
    ]
    return Prepared(calls, None)


def _window(inputs: Inputs) -> tuple[int, int]:
    window = inputs.options.sliding_window
    return (-1, -1) if window is None else (window - 1, 0)


def _num_splits(inputs: Inputs) -> int:
    """What vLLM passes: a limit in steps it captures, 0 (FA3's choice) in others."""
    captured = inputs.shape.num_tokens <= _CAPTURED_TOKENS
    return _CAPTURED_SPLITS if captured else 0


def _for_tma(cache: torch.Tensor) -> torch.Tensor:
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

    fixed: torch.Tensor = canonicalize_singleton_dim_strides(cache)
    return fixed


ATTENTION: dict[str, Callable[[Inputs, torch.Tensor], Prepared]] = {
    "fa3": fa3,
    "fa3_plain": partial(fa3, metadata=False),
    "vllm_triton": vllm_triton,
    OURS: portable,
    "portable_exact": partial(portable, exact=True),
}
# Run only when named: how else the same kernels can be called.
ON_REQUEST = ("fa3_plain", "portable_exact")
NEED_VLLM = ("fa3", "fa3_plain", "vllm_triton", "vllm")
NEED_GPU = (*NEED_VLLM, "torch_compile")
IMPLEMENTATIONS = (*ATTENTION, "vllm", "torch_compile", "copy")


def absent_here(device: torch.device) -> dict[str, str]:
    """Implementations that cannot take part on this machine, and why."""
    if device.type != "cuda":
        return dict.fromkeys(NEED_GPU, "needs a GPU")
    if importlib.util.find_spec("vllm") is None:
        return dict.fromkeys(NEED_VLLM, "vLLM is not installed")
    try:
        import vllm._custom_ops  # noqa: F401  loads the compiled operators
    except FAILURES as error:
        reason = f"vLLM cannot be imported: {type(error).__name__}: {error}"
        return dict.fromkeys(NEED_VLLM, reason[:200])
    return {}
