# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode as serving runs them: planned ahead, over a paged cache."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from portable_backend.bench.inputs import Inputs, make_inputs, oracle
from portable_backend.bench.results import ERROR_LIMITS
from portable_backend.bench.shapes import AttentionShape
from portable_backend.bench.timing import (
    MAX_CALLS,
    Call,
    Contestant,
    num_copies,
    relative_error,
)
from portable_backend.device import DeviceInfo
from portable_backend.errors import bad_argument
from portable_backend.kernels import AttentionPlanner, paged_attention
from portable_backend.kernels.config import AttentionConfig, KernelConfig
from portable_backend.kernels.plan import StepKind, default_config
from portable_backend.kernels.reference import paged_attention_reference
from portable_backend.warmup.gate import (
    DISTRIBUTIONS,
    NAN,
    SENTINEL,
    Check,
    Distribution,
    draw_lengths,
    judge,
    precise_dtype,
    untouched,
    worst_of,
)
from portable_backend.warmup.kernel_specs import DTYPES, prefill_kind
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.roofs import roof_us

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_MAX_DECODE_QUERY_LEN = 8  # the planner's default
_SPARE_ROWS = 5
# What the oracle does in some milliseconds: cases of a check, requests of a case, and
# their tokens: all of a decode, new and cached ones of a prefill.
_CASES = {"cpu": 2, "cuda": len(DISTRIBUTIONS)}
_REQUESTS = {"cpu": 3, "cuda": 5}
_SEQ_LEN = {"cpu": 80, "cuda": 4096}
_QUERY_LEN = {"cpu": 40, "cuda": 300}
_CONTEXT_LEN = {"cpu": 80, "cuda": 1000}
# Keys that a window has left cost nothing, but memory.
_MOST_BEFORE_WINDOW = 4096
# Of the device's free memory: the oracle needs some, too.
_MEMORY_SHARE = 0.5


class AttentionWorkload:
    """A `Workload` of the kernels "prefill" and "decode".

    Args:
        key: whose other kernels' configs stay at their defaults.
        device: where to run.

    Raises:
        ValueError: a size does not lead to the key's kernel.
        MemoryError: the device cannot hold the cache.
    """

    def __init__(self, key: TuningKey, device: torch.device) -> None:
        self.key, self.device = key, device
        self.fields: dict[str, Any] = key.to_dict()
        self.shape = _timing_shape(key)
        self._base = self._default_configs()
        self.default: KernelConfig = getattr(self._base, key.kernel)
        self.error_limit = ERROR_LIMITS[self.shape.dtype]
        self.roof_us = roof_us(
            device,
            num_bytes=self.shape.num_bytes,
            # fp32 products run elsewhere.
            flops=0.0 if self.shape.dtype == "fp32" else self.shape.flops,
        )
        self.inputs = make_inputs(self.shape, device, num_layers=self._num_layers())
        self.reference = oracle(self.inputs)
        self.inputs.fill_unused(NAN)
        # Of each layer: a call that writes nothing must not pass for another's.
        self.outs = [torch.empty_like(self.inputs.query) for _ in self.inputs.caches]

    def check(self, config: KernelConfig, seed: int) -> Check:
        """Run several cases of `seed`, each of another distribution and lengths."""
        full = self._with(config)
        cases = _CASES[self.device.type]
        return worst_of(
            check
            for i in range(cases)
            for check in self._check_case(
                full,
                DISTRIBUTIONS[(seed * cases + i) % len(DISTRIBUTIONS)],
                random.Random(f"{self.key} {seed} {i}"),
            )
        )

    def contestant(self, config: KernelConfig) -> Contestant:
        inputs = self.inputs
        planner = self._planner(self._with(config), self.shape)
        batch = inputs.batch(lengths_on_host=self.device.type == "cpu")
        step = planner.plan(batch, self.shape.num_tokens)
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
            for caches, out in zip(inputs.caches, self.outs, strict=True)
        ]

        def refill() -> None:
            for tensor in (*self.outs, planner.partial, planner.lse):
                tensor.fill_(NAN)

        def recheck() -> float:
            errors = [relative_error(out, self.reference) for out in self.outs]
            return float(torch.tensor(errors).max())  # keeps a NaN

        def verify() -> float:
            refill()
            calls[0]()
            return relative_error(self.outs[0], self.reference)

        return Contestant(calls, verify, refill, recheck)

    def _default_configs(self) -> AttentionConfig:
        fields, is_prefill = self.fields, self.key.kernel == "prefill"
        if is_prefill:
            kind = prefill_kind(self.key)
        else:
            kind = StepKind.of(fields["num_seqs"], no_context=False, has_prefill=False)
        return default_config(
            num_queries_per_kv=fields["num_queries_per_kv"],
            num_kv_heads=fields["num_kv_heads"],
            head_size=fields["head_size"],
            dtype=DTYPES[fields["dtype"]],
            block_size=fields["block_size"],
            device=DeviceInfo.detect(self.device),
            kind=kind,
            has_window=bool(fields["sliding_window"]),
        )

    def _with(self, config: KernelConfig) -> AttentionConfig:
        if self.key.kernel == "prefill":
            return replace(self._base, prefill=config)
        return replace(self._base, decode=config)

    def _num_layers(self) -> int:
        """Copies of the cache: so many that none is found in the L2 cache."""
        shape = self.shape
        copies = num_copies(int(shape.num_bytes), self.device, small_too=True)
        if self.device.type != "cuda":
            return copies
        tokens = sum(shape.seq_lens)
        row_bytes = DTYPES[self.fields["dtype"]].itemsize * shape.head_size
        cache_bytes = 2 * tokens * shape.heads[1] * row_bytes
        # Queries, results, and the oracle's in fp32.
        rows = shape.num_tokens * shape.heads[0] * (2 * row_bytes + 4 * shape.head_size)
        each, (free, total) = cache_bytes + rows, torch.cuda.mem_get_info(self.device)
        share = torch.cuda.get_per_process_memory_fraction(self.device)
        free = min(free, int(share * total))
        fitting = int(_MEMORY_SHARE * free) // each
        if not fitting:
            raise MemoryError(
                f"inputs need {each >> 20} MiB, more than {_MEMORY_SHARE:.0%} of the "
                f"{free >> 20} MiB that are free"
            )
        return min(copies, fitting, MAX_CALLS)

    def _planner(
        self, config: AttentionConfig, shape: AttentionShape, spare_rows: int = 0
    ) -> AttentionPlanner:
        return AttentionPlanner(
            num_query_heads=shape.heads[0],
            num_kv_heads=shape.heads[1],
            head_size=shape.head_size,
            dtype=DTYPES[self.fields["dtype"]],
            block_size=shape.block_size,
            max_num_seqs=len(shape.seq_lens),
            max_num_tokens=shape.num_tokens + spare_rows,
            sliding_window=shape.sliding_window,
            device=self.device,
            config=config,
        )

    def _check_case(
        self, config: AttentionConfig, distribution: Distribution, rng: random.Random
    ) -> Iterator[Check]:
        shape = self._draw_shape(rng)
        label = f"{distribution.name} inputs, lengths {shape.seq_lens}"
        inputs = make_inputs(shape, self.device, seed=rng.getrandbits(32))
        _redistribute(inputs, distribution)
        _poison(inputs)
        keys, values = inputs.caches[0]
        batch = inputs.batch(lengths_on_host=self.device.type == "cpu")
        given = (inputs.query, keys, values, batch, inputs.options)
        dtype = inputs.query.dtype
        precise = paged_attention_reference(*given, dtype=precise_dtype(dtype))
        same_dtype = paged_attention_reference(*given, dtype=dtype)

        query, key, value = map(_padded, (inputs.query, inputs.key, inputs.value))
        assert query is not None
        out = torch.full_like(query, NAN)
        out[shape.num_tokens :] = SENTINEL
        planner = self._planner(config, shape, _SPARE_ROWS)
        planner.partial.fill_(NAN)
        planner.lse.fill_(NAN)
        before = keys.clone(), values.clone()
        step = planner.plan(batch, query.shape[0])
        paged_attention(
            query, keys, values, step, inputs.options, out=out, key=key, value=value
        )
        yield judge(out[: shape.num_tokens], precise, same_dtype, label)
        spare = out[shape.num_tokens :]
        yield untouched(spare, torch.full_like(spare, SENTINEL), f"padding, {label}")
        yield untouched(keys, before[0], f"key cache, {label}")
        yield untouched(values, before[1], f"value cache, {label}")

    def _draw_shape(self, rng: random.Random) -> AttentionShape:
        """Lengths of the bucket, not those that are timed."""
        fields, kind = self.fields, self.device.type
        num_seqs = min(fields["num_seqs"], _REQUESTS[kind])
        if self.key.kernel == "decode":
            seq_lens = draw_lengths(rng, num_seqs, fields["seq_len"], _SEQ_LEN[kind])
            longest = fields["query_len"]
            query_lens = [longest, *(rng.randint(1, longest) for _ in seq_lens[1:])]
        else:
            drawn = draw_lengths(rng, num_seqs, fields["query_len"], _QUERY_LEN[kind])
            # Shorter ones are decodes, and mixed steps another binary.
            query_lens = [max(_MAX_DECODE_QUERY_LEN + 1, n) for n in drawn]
            seq_lens = query_lens
            if fields["context_len"]:
                contexts = draw_lengths(
                    rng, num_seqs, fields["context_len"], _CONTEXT_LEN[kind]
                )
                seq_lens = [q + c for q, c in zip(query_lens, contexts, strict=True)]
        seq_lens = [max(q, s) for q, s in zip(query_lens, seq_lens, strict=True)]
        order = rng.sample(range(num_seqs), num_seqs)
        return replace(
            self.shape,
            query_lens=tuple(query_lens[i] for i in order),
            seq_lens=tuple(seq_lens[i] for i in order),
        )


def _timing_shape(key: TuningKey) -> AttentionShape:
    fields: dict[str, Any] = key.to_dict()
    query_len, num_seqs = fields["query_len"], fields["num_seqs"]
    is_decode = query_len <= _MAX_DECODE_QUERY_LEN
    if is_decode != (key.kernel == "decode") or not query_len:
        limit = _MAX_DECODE_QUERY_LEN
        raise bad_argument(
            f"query_len of a {key.kernel} key",
            f"1 to {limit}" if key.kernel == "decode" else f"above {limit}",
            query_len,
            "make a key of the other kernel",
        )
    if key.kernel == "decode":
        seq_len = fields["seq_len"]
    else:
        seq_len = query_len + fields["context_len"]
        if fields["no_context"] != (not fields["context_len"]):
            raise bad_argument(
                "no_context",
                "1 where context_len is 0, else 0",
                fields["no_context"],
                "correct the key",
            )
    window = fields["sliding_window"] or None
    if window is not None:
        reach = max(_MOST_BEFORE_WINDOW, 2 * window)
        seq_len = min(seq_len, reach + query_len)
    num_kv_heads = fields["num_kv_heads"]
    return AttentionShape(
        name=str(key),
        group=key.kernel,
        query_lens=(query_len,) * num_seqs,
        seq_lens=(max(seq_len, query_len),) * num_seqs,
        heads=(num_kv_heads * fields["num_queries_per_kv"], num_kv_heads),
        head_size=fields["head_size"],
        block_size=fields["block_size"],
        dtype=SHORT_DTYPES[fields["dtype"]],
        sliding_window=window,
    )


def _redistribute(inputs: Inputs, distribution: Distribution) -> None:
    keys, values = inputs.caches[0]
    for tensor, change in (
        (inputs.query, distribution.query),
        (keys, distribution.rows),
        (inputs.key, distribution.rows),
        (values, distribution.value),
        (inputs.value, distribution.value),
    ):
        assert tensor is not None
        tensor.copy_(change(tensor))


def _poison(inputs: Inputs) -> None:
    """NaN in every cache slot that no query row may see."""
    inputs.fill_unused(NAN)
    shape, window = inputs.shape, inputs.shape.sliding_window
    if window is None:
        return
    for i, (query_len, seq_len) in enumerate(
        zip(shape.query_lens, shape.seq_lens, strict=True)
    ):
        first = max(0, seq_len - query_len - window + 1)
        position = torch.arange(first, device=inputs.query.device)
        blocks = inputs.block_table[i, position // shape.block_size].long()
        for cache in inputs.caches[0]:
            cache[blocks, position % shape.block_size] = NAN


def _padded(rows: torch.Tensor | None) -> torch.Tensor | None:
    """With padding rows of NaN."""
    if rows is None:
        return None
    spare = rows.new_full((_SPARE_ROWS, *rows.shape[1:]), NAN)
    return torch.cat((rows, spare))
