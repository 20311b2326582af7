# SPDX-License-Identifier: Apache-2.0
"""Steps -> buckets: what is tuned, and which of it serves a step.

A bucket is a `TuningKey` whose sizes stand for a range. The functions named `*_key` map
any step onto one, by integers that the host knows without waiting for the device; the
tuner walks `all_keys()`, which lists every key that they can return.

Few and total: a step's sizes are clamped to the engine's limits, so whatever the engine
accepts, graph padding and drafts included, lands in the list.

- decode: requests rounded up as the planner has them, to a power of two or, from 24
  on, to three quarters of one, since their best configs differ (13 for 256).
  The host does not know how long sequences are: the lengths are on the device, and a
  captured graph is replayed with others. So serving passes no length and gets the
  representative one, the geometric mean of 1024 and max_model_len. Powers of 4 around
  it are tuned as well: they show how much is lost, and make up portfolios. Lengths
  beyond a sliding window are one bucket, and a batch is at most 2**20 cached tokens.
- prefill: new tokens in powers of 4, with nothing cached or with a context; of two
  contexts, serving gets the representative one.
- rms_norm and kv_cache: powers of 4 from 16, and the steps of the kernels' defaults, so
  that a bucket never mixes calls with different defaults.

A Llama with 8 KV heads, 131072 tokens and default limits has 76 keys.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from portable_backend.errors import bad_argument
from portable_backend.kernels.kv_cache import vector_size
from portable_backend.kernels.kv_cache_space import VECTOR_BUCKET
from portable_backend.kernels.plan import decode_batch, decode_batches
from portable_backend.kernels.rms_norm_space import ROW_BUCKETS
from portable_backend.warmup.kernel_specs import DTYPES
from portable_backend.warmup.model_shapes import ModelShape, NormShape
from portable_backend.warmup.records import TuningKey

# As the back end: requests with more new tokens take the prefill kernel.
MIN_DECODE_QUERY_LEN = 8
SHORTEST_SEQ_LEN = 1024
MAX_BATCH_TOKENS = 1 << 20
FEWEST_ROWS = 16
FEWEST_PREFILL_TOKENS = 32
CONTEXT_LENS = (2048, 32768)
# New tokens of one request where nothing is cached: usual prompts.
PROMPT_LEN = 2048


@dataclass(frozen=True)
class EngineLimits:
    """What bounds the steps of an engine.

    Attributes:
        max_num_seqs: requests of a step.
        max_num_batched_tokens: new tokens of a step.
        max_model_len: tokens of a sequence; None: what the model allows.
        block_size: tokens per KV block.
        speculative_tokens: drafts that a decode verifies.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    block_size: int = 64
    speculative_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise bad_argument(name, "1 or more", value, "correct it")
        if self.block_size < 16 or self.block_size % 16:
            raise bad_argument(
                "block_size", "a multiple of 16", self.block_size, "choose another one"
            )
        if self.speculative_tokens < 0:
            raise bad_argument(
                "speculative_tokens", "0 or more", self.speculative_tokens, "correct it"
            )

    @property
    def decode_query_len(self) -> int:
        """New tokens of a decode that verifies drafts."""
        return 1 + self.speculative_tokens

    @property
    def max_num_tokens(self) -> int:
        """Tokens of a step, with the slots that drafters append."""
        drafts = self.max_num_seqs * self.speculative_tokens
        return max(self.max_num_batched_tokens, self.max_num_seqs) + drafts

    def model_len(self, model: ModelShape) -> int:
        return self.max_model_len or model.max_model_len


@dataclass(frozen=True)
class Step:
    """What the host knows of a step before its kernels are launched.

    Attributes:
        num_tokens: new tokens of all requests, or an upper bound.
        num_decodes: requests that take the decode kernel, or an upper bound.
        num_prefill_tokens: new tokens of the others; 0 where there are none.
        no_context: whether those others have nothing cached.
    """

    num_tokens: int
    num_decodes: int = 0
    num_prefill_tokens: int = 0
    no_context: bool = False


def bucket_of_step(
    model: ModelShape, limits: EngineLimits, step: Step
) -> tuple[TuningKey, ...]:
    """The keys of all kernels that a step launches, each once."""
    keys = []
    for window in model.sliding_windows:
        if step.num_decodes:
            keys.append(
                decode_key(
                    model,
                    limits,
                    num_seqs=step.num_decodes,
                    sliding_window=window,
                )
            )
        if step.num_prefill_tokens:
            keys.append(
                prefill_key(
                    model,
                    limits,
                    num_tokens=step.num_prefill_tokens,
                    no_context=step.no_context,
                    sliding_window=window,
                )
            )
    keys.append(kv_cache_key(model, limits, num_tokens=step.num_tokens))
    for norm in model.norms:
        rows = step.num_tokens * norm.rows_per_token
        keys.append(rms_norm_key(model, limits, norm, num_rows=rows))
    return tuple(dict.fromkeys(keys))


def decode_key(
    model: ModelShape,
    limits: EngineLimits,
    *,
    num_seqs: int,
    seq_len: int | None = None,
    sliding_window: int = 0,
) -> TuningKey:
    """The bucket of a step's decodes.

    Args:
        model, limits: what serves.
        num_seqs: decodes of the step, graph padding included.
        seq_len: None, as in serving: the representative length.
        sliding_window: of the layer; 0: none.
    """
    num_seqs = decode_batch(min(max(num_seqs, 1), limits.max_num_seqs))
    lengths = seq_len_buckets(limits.model_len(model), sliding_window)
    lengths = [n for n in lengths if n * num_seqs <= MAX_BATCH_TOKENS] or lengths[:1]
    if seq_len is None:
        seq_len = _representative_len(limits.model_len(model))
    return TuningKey.of(
        "decode",
        **_heads(model, limits, sliding_window),
        num_seqs=num_seqs,
        query_len=limits.decode_query_len,
        seq_len=_nearest(lengths, seq_len),
    )


def prefill_key(
    model: ModelShape,
    limits: EngineLimits,
    *,
    num_tokens: int,
    no_context: bool,
    context_len: int | None = None,
    sliding_window: int = 0,
) -> TuningKey:
    """The bucket of a step's prefills.

    Where nothing is cached, a bucket is so many tokens of prompts of up to 2048, else a
    chunk of one prompt, or of as many as the tokens need.

    Args:
        model, limits: what serves.
        num_tokens: new tokens of all prefills.
        no_context: whether nothing is cached of any of them.
        context_len: None, as in serving: the representative length.
        sliding_window: of the layer; 0: none.
    """
    model_len = limits.model_len(model)
    tokens = _nearest(prefill_token_buckets(limits), num_tokens)
    longest = min(PROMPT_LEN, model_len) if no_context else max(1, model_len // 2)
    num_seqs = min(limits.max_num_seqs, -(-tokens // longest))
    query_len = max(1, min(longest, tokens // num_seqs))
    cached = 0
    if not no_context:
        lengths = context_len_buckets(model_len, sliding_window)
        if context_len is None:
            context_len = _representative_len(model_len)
        # A model of one token has no context; its bucket is there all the same.
        cached = max(1, min(_nearest(lengths, context_len), model_len - query_len))
    return TuningKey.of(
        "prefill",
        **_heads(model, limits, sliding_window),
        no_context=no_context,
        num_seqs=num_seqs,
        query_len=query_len,
        context_len=cached,
    )


def rms_norm_key(
    model: ModelShape, limits: EngineLimits, norm: NormShape, *, num_rows: int
) -> TuningKey:
    """The bucket of one call of `norm`, with num_rows rows."""
    return TuningKey.of(
        "rms_norm",
        dtype=model.dtype,
        row_size=norm.row_size,
        fused_add=norm.fused_add,
        num_rows=_round_up(_num_rows(model, limits, norm), num_rows),
    )


def kv_cache_key(
    model: ModelShape, limits: EngineLimits, *, num_tokens: int
) -> TuningKey:
    """The bucket of a step's write to the cache."""
    return TuningKey.of(
        "kv_cache",
        dtype=model.dtype,
        head_size=model.head_size,
        num_kv_heads=model.num_kv_heads,
        num_tokens=_round_up(_num_tokens(model, limits), num_tokens),
    )


def all_keys(model: ModelShape, limits: EngineLimits) -> Iterator[TuningKey]:
    """Every key that the functions above can return; some more than once."""
    model_len = limits.model_len(model)
    for window in model.sliding_windows:
        for num_seqs in num_seqs_buckets(limits):
            for seq_len in seq_len_buckets(model_len, window):
                yield decode_key(
                    model,
                    limits,
                    num_seqs=num_seqs,
                    seq_len=seq_len,
                    sliding_window=window,
                )
        for tokens in prefill_token_buckets(limits):
            for context_len in (0, *context_len_buckets(model_len, window)):
                yield prefill_key(
                    model,
                    limits,
                    num_tokens=tokens,
                    no_context=not context_len,
                    context_len=context_len,
                    sliding_window=window,
                )
    for tokens in _num_tokens(model, limits):
        yield kv_cache_key(model, limits, num_tokens=tokens)
    for norm in model.norms:
        for rows in _num_rows(model, limits, norm):
            yield rms_norm_key(model, limits, norm, num_rows=rows)


# Buckets: sorted, never empty


def num_seqs_buckets(limits: EngineLimits) -> list[int]:
    return decode_batches(limits.max_num_seqs)


def seq_len_buckets(model_len: int, window: int) -> list[int]:
    """Powers of 4 up to model_len, and up to the first that fills the window."""
    lengths = _powers_of_4(SHORTEST_SEQ_LEN, model_len) or [model_len]
    return _up_to_window(lengths, window)


def context_len_buckets(model_len: int, window: int) -> list[int]:
    lengths = [n for n in CONTEXT_LENS if n < model_len] or [max(1, model_len // 2)]
    return _up_to_window(lengths, window)


def _up_to_window(lengths: list[int], window: int) -> list[int]:
    if not window:
        return lengths
    return lengths[: bisect.bisect_left(lengths, window) + 1]


def prefill_token_buckets(limits: EngineLimits) -> list[int]:
    longest_decode = max(MIN_DECODE_QUERY_LEN, limits.decode_query_len)
    most = max(limits.max_num_batched_tokens, longest_decode + 1)
    sizes = _powers_of_4(FEWEST_PREFILL_TOKENS, most)
    return [n for n in sizes if n > longest_decode] or [most]


def _num_tokens(model: ModelShape, limits: EngineLimits) -> list[int]:
    head = model.head_size // vector_size(model.head_size, DTYPES[model.dtype])
    step = VECTOR_BUCKET // (model.num_kv_heads * head)
    return _sizes(limits.max_num_tokens, [step])


def _num_rows(model: ModelShape, limits: EngineLimits, norm: NormShape) -> list[int]:
    """Of all norms with this one's rows and addition, which share their keys."""
    most = max(
        other.rows_per_token
        for other in model.norms
        if (other.row_size, other.fused_add) == (norm.row_size, norm.fused_add)
    )
    return _sizes(limits.max_num_tokens * most, ROW_BUCKETS)


def _sizes(most: int, steps: Sequence[int]) -> list[int]:
    sizes = {*_powers_of_4(FEWEST_ROWS, most), *steps, most}
    return sorted(n for n in sizes if 0 < n <= most)


def _powers_of_4(first: int, last: int) -> list[int]:
    sizes = []
    while first <= last:
        sizes.append(first)
        first *= 4
    return sizes


def _round_up(sizes: Sequence[int], size: int) -> int:
    return sizes[min(bisect.bisect_left(sizes, size), len(sizes) - 1)]


def _nearest(sizes: Sequence[int], size: int) -> int:
    """By ratio; the smaller of two."""
    size = max(size, 1)
    for low, high in itertools.pairwise(sizes):
        if size * size <= low * high:
            return low
    return sizes[-1]


def _representative_len(model_len: int) -> int:
    """The geometric mean of the shortest bucket and the longest sequence."""
    if model_len <= SHORTEST_SEQ_LEN:
        return model_len
    return int((SHORTEST_SEQ_LEN * model_len) ** 0.5)


def _heads(model: ModelShape, limits: EngineLimits, window: int) -> dict[str, Any]:
    return {
        "dtype": model.dtype,
        "head_size": model.head_size,
        "num_kv_heads": model.num_kv_heads,
        "num_queries_per_kv": model.num_queries_per_kv,
        "block_size": limits.block_size,
        "sliding_window": window,
    }
