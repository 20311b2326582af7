# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode as serving runs them: planned ahead, over a paged cache."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from portable_backend.bench.inputs import Inputs, make_cache, make_inputs, oracle
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
from portable_backend.kernels import AttentionPlanner, PagedBatch, paged_attention
from portable_backend.kernels.config import AttentionConfig, KernelConfig
from portable_backend.kernels.plan import StepKind, default_config
from portable_backend.kernels.reference import paged_attention_reference
from portable_backend.warmup.check_cases import KeptCases, kept_limit, spare_bytes
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


@dataclass(frozen=True)
class _Case:
    """A step of the gate's, and what is right for it.

    Attributes:
        label: for messages.
        inputs: poisoned, with rows of padding.
        precise, same_dtype: what the oracle and plain torch make of it.
    """

    label: str
    inputs: Inputs
    precise: torch.Tensor
    same_dtype: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        inputs = self.inputs
        assert inputs.key is not None
        assert inputs.value is not None
        rows = inputs.query, inputs.key, inputs.value, *inputs.caches[0]
        lengths = inputs.query_start_loc, inputs.seq_lens, inputs.block_table
        return *rows, *lengths, self.precise, self.same_dtype

    def copy(self, sign: float) -> Inputs:
        """For a config to read, and maybe to spoil.

        Args:
            sign: of the values, and so of what is right: other inputs of these lengths.
        """
        inputs = self.inputs
        keys, values = inputs.caches[0]
        num_blocks, block_size, heads, size = keys.shape
        _, (new_keys, new_values) = make_cache(
            "split", num_blocks, block_size, heads, size, keys
        )
        new_keys.copy_(keys)
        new_values.copy_(sign * values if sign < 0 else values)
        assert inputs.key is not None
        assert inputs.value is not None
        return replace(
            inputs,
            query=inputs.query.clone(),
            key=inputs.key.clone(),
            value=sign * inputs.value,
            caches=[(new_keys, new_values)],
            query_start_loc=inputs.query_start_loc.clone(),
            seq_lens=inputs.seq_lens.clone(),
            block_table=inputs.block_table.clone(),
        )


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
        slots = _CASES[device.type]
        self._cases: KeptCases[_Case] = KeptCases(slots, kept_limit(device))

    def check(self, config: KernelConfig, seed: int, *, reuse: bool = False) -> Check:
        """Run several cases of `seed`, each of another distribution and lengths.

        One that is new is run twice, the second time with values of the other sign:
        what the first run gave is wrong then. Of those that are not new the config
        before had the values with the other sign.
        """
        full = self._with(config)

        def checks() -> Iterator[Check]:
            kept = self._cases
            cases = kept if reuse else KeptCases[_Case](kept.slots, 0)
            sign = -1.0 if seed % 2 else 1.0
            twice = True
            for case, is_new in cases.take(partial(self._draw_case, seed)):
                yield from self._run_case(full, case, sign)
                if is_new and twice:
                    twice = False
                    yield from self._run_case(full, case, -sign)

        return worst_of(checks())

    def draw_ahead(self) -> None:
        self._cases.fill(partial(self._draw_case, 0))

    def contestant(self, config: KernelConfig) -> Contestant:
        inputs = self.inputs
        planner = self._planner(self._with(config), self.shape)
        step = planner.plan(self._batch(inputs), self.shape.num_tokens)
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
        each, free = cache_bytes + rows, spare_bytes(self.device)
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

    def _draw_case(self, seed: int, slot: int) -> _Case:
        number = seed * self._cases.slots + slot
        distribution = DISTRIBUTIONS[number % len(DISTRIBUTIONS)]
        rng = random.Random(f"{self.key} {seed} {slot}")
        shape = self._draw_shape(rng)
        inputs = make_inputs(shape, self.device, seed=rng.getrandbits(32))
        _redistribute(inputs, distribution)
        _poison(inputs)
        given = (inputs.query, *inputs.caches[0], self._batch(inputs), inputs.options)
        dtype = inputs.query.dtype
        precise = paged_attention_reference(*given, dtype=precise_dtype(dtype))
        same_dtype = paged_attention_reference(*given, dtype=dtype)
        query, key, value = map(_padded, (inputs.query, inputs.key, inputs.value))
        assert query is not None
        padded = replace(inputs, query=query, key=key, value=value)
        label = f"{distribution.name} inputs, lengths {shape.seq_lens}"
        return _Case(label, padded, precise, same_dtype)

    def _run_case(
        self, config: AttentionConfig, case: _Case, sign: float
    ) -> Iterator[Check]:
        inputs, label = case.copy(sign), case.label
        count = inputs.shape.num_tokens
        keys, values = inputs.caches[0]
        out = torch.full_like(inputs.query, NAN)
        out[count:] = SENTINEL
        planner = self._planner(config, inputs.shape, _SPARE_ROWS)
        planner.partial.fill_(NAN)
        planner.lse.fill_(NAN)
        step = planner.plan(self._batch(inputs), inputs.query.shape[0])
        paged_attention(
            inputs.query,
            keys,
            values,
            step,
            inputs.options,
            out=out,
            key=inputs.key,
            value=inputs.value,
        )
        yield judge(sign * out[:count], case.precise, case.same_dtype, label)
        spare = out[count:]
        yield untouched(spare, torch.full_like(spare, SENTINEL), f"padding, {label}")
        before_keys, before_values = case.inputs.caches[0]
        if sign < 0:
            before_values = sign * before_values
        yield untouched(keys, before_keys, f"key cache, {label}")
        yield untouched(values, before_values, f"value cache, {label}")

    def _batch(self, inputs: Inputs) -> PagedBatch:
        return inputs.batch(lengths_on_host=self.device.type == "cpu")

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
