# SPDX-License-Identifier: Apache-2.0
"""Which shapes are measured: named lists, no torch."""

from dataclasses import dataclass, replace

BLOCK_SIZES = (16, 64)
# Lengths of a batch in which no two requests are alike.
MIXED_LENGTHS = tuple(range(128, 8193, 128))


@dataclass(frozen=True)
class AttentionShape:
    """One step and one layer.

    Attributes:
        name: what the table says.
        group: prefill, chunk, decode, verify or mixed.
        query_lens, seq_lens: of each request, new tokens and all tokens.
        heads: (query heads, KV heads).
        dtype: bf16, fp16 or fp32.
        sliding_window, softcap, alibi, sinks: as in AttentionOptions.
        baseline: name of the plain shape that a feature is compared with.
    """

    name: str
    group: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    head_size: int = 128
    block_size: int = 64
    dtype: str = "bf16"
    sliding_window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    baseline: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def fields(self) -> dict[str, str | int]:
        return {
            "heads": "{}/{}".format(*self.heads),
            "head_size": self.head_size,
            "block_size": self.block_size,
            "dtype": self.dtype,
        }

    @property
    def flops(self) -> float:
        """Of the two products, over the pairs that the masks leave."""
        window = self.sliding_window
        pairs = 0.0
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            first, last = seq_len - query_len + 1, seq_len
            if window is None or window >= last:
                pairs += query_len * (first + last) / 2
            else:
                short = max(0, min(window, last) - first + 1)
                pairs += short * (2 * first + short - 1) / 2
                pairs += (query_len - short) * window
        return 4 * self.heads[0] * self.head_size * pairs

    @property
    def num_bytes(self) -> float:
        """Each query, result and visible key and value moved once."""
        keys = 0
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            reach = (self.sliding_window or seq_len) + query_len - 1
            keys += min(seq_len, reach)
        size = 4 if self.dtype == "fp32" else 2
        rows = 2 * self.heads[1] * keys + 2 * self.heads[0] * self.num_tokens
        return size * self.head_size * rows


def prefill(num_seqs: int, length: int, group: str = "prefill") -> AttentionShape:
    """A step of `num_seqs` whole prompts."""
    lengths = (length,) * num_seqs
    return AttentionShape(f"prefill {num_seqs}x{length}", group, lengths, lengths)


def chunk(query_len: int, context_len: int) -> AttentionShape:
    """A step that continues one prompt."""
    return AttentionShape(
        f"chunk of {query_len} after {context_len}",
        "chunk",
        (query_len,),
        (query_len + context_len,),
    )


def decode(num_seqs: int, seq_len: int, query_len: int = 1) -> AttentionShape:
    """A step of requests with one new token each, or `query_len` to verify."""
    name, group = f"decode {num_seqs}x{seq_len}", "decode"
    if query_len > 1:
        name, group = f"verify {num_seqs}x{query_len} at {seq_len}", "verify"
    return AttentionShape(name, group, (query_len,) * num_seqs, (seq_len,) * num_seqs)


def mixed(num_decodes: int, length: int) -> AttentionShape:
    """A step of decodes beside one prompt, all of one length."""
    return AttentionShape(
        f"{num_decodes} decodes and a prefill of {length}",
        "mixed",
        (1,) * num_decodes + (length,),
        (length,) * (num_decodes + 1),
    )


def attention_shapes(tiny: bool = False) -> list[AttentionShape]:
    """The suite `attention`: steps of an 8B model, and a few beside them."""
    if tiny:
        return [_tiny(shape) for shape in (prefill(2, 20), mixed(2, 37))]
    name = f"decode of {len(MIXED_LENGTHS)} lengths to {MIXED_LENGTHS[-1]}"
    ones = (1,) * len(MIXED_LENGTHS)
    shapes = [
        *(prefill(*x) for x in ((32, 512), (8, 2048), (2, 8192), (1, 16384))),
        chunk(2048, 30720),
        *(decode(*x) for x in ((1, 4096), (1, 32768), (1, 131072), (8, 8192))),
        *(decode(*x) for x in ((32, 4096), (64, 2048), (128, 1024), (256, 4096))),
        AttentionShape(name, "decode", ones, MIXED_LENGTHS),
        mixed(63, 2048),
        replace(decode(32, 8192), heads=(8, 1)),
        replace(prefill(2, 4096), heads=(16, 8), head_size=256),
        decode(64, 2048, query_len=4),
    ]
    return [replace(s, block_size=size) for size in BLOCK_SIZES for s in shapes]


GEOMETRIES = (
    ((32, 32), 128),
    ((16, 2), 128),
    ((12, 2), 128),
    ((64, 8), 128),
    ((32, 8), 64),
    ((32, 8), 96),
    ((32, 8), 256),
)


def geometry_shapes(tiny: bool = False, every: bool = False) -> list[AttentionShape]:
    """The suite `geometries`: other heads, at lengths that are no round numbers.

    Args:
        tiny: for the interpreter.
        every: also at the smaller block size.
    """
    if tiny:
        return [_tiny(decode(2, 33), heads=heads) for heads in ((4, 4), (6, 1))]
    shapes = (prefill(4, 3000), chunk(1000, 9000), decode(48, 3333))
    return [
        replace(shape, heads=heads, head_size=head_size, block_size=block_size)
        for block_size in (BLOCK_SIZES if every else BLOCK_SIZES[-1:])
        for heads, head_size in GEOMETRIES
        for shape in (*shapes, decode(3, 50001))
    ]


def feature_shapes(tiny: bool = False) -> list[AttentionShape]:
    """The suite `features`: each beside the plain shape that it is compared with."""
    if tiny:
        return [
            shape
            for shape in _with_features(_tiny(decode(2, 33)))
            if shape.dtype == "fp32"
        ]
    shapes = []
    window = 4096
    # A window over a long context against a context that is no longer than it.
    for long, short in (
        (decode(1, 131072), decode(1, window)),
        (decode(8, 131072), decode(8, window)),
        (chunk(2048, 131072 - 2048), chunk(2048, window - 2048)),
    ):
        shapes += [short, _feature(long, short, "window", sliding_window=window)]
    for plain in (prefill(2, 8192), decode(32, 4096)):
        shapes += _with_features(plain)
    return shapes


def host_shapes(tiny: bool = False) -> tuple[AttentionShape, AttentionShape]:
    """A decode and a prefill whose calls the device finishes before the host."""
    if tiny:
        return _tiny(decode(2, 33)), _tiny(prefill(2, 20))
    return decode(8, 1024), prefill(2, 1024)


def _with_features(plain: AttentionShape) -> list[AttentionShape]:
    return [
        plain,
        _feature(plain, plain, "fp16", dtype="fp16"),
        _feature(plain, plain, "softcap", softcap=30.0),
        _feature(plain, plain, "sinks", sinks=True),
        _feature(plain, plain, "ALiBi", alibi=True),
    ]


def _feature(
    shape: AttentionShape, baseline: AttentionShape, name: str, **changes: object
) -> AttentionShape:
    named = {"name": f"{shape.name}, {name}", "group": name, "baseline": baseline.name}
    return replace(shape, **(named | changes))  # type: ignore[arg-type]


def _tiny(shape: AttentionShape, **changes: object) -> AttentionShape:
    """A shape for the interpreter, in fp32, since it only emulates bf16."""
    small = {"heads": (4, 2), "head_size": 32, "block_size": 16, "dtype": "fp32"}
    return replace(shape, **(small | changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class NormShape:
    """One RMSNorm, or with `fused` the residual added first.

    Attributes:
        num_tokens, row_size: of the input.
        dtype: bf16, fp16 or fp32.
    """

    fused: bool
    num_tokens: int
    row_size: int
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        return "add and norm" if self.fused else "norm"

    @property
    def fields(self) -> dict[str, str | int]:
        sizes = {"tokens": self.num_tokens, "row_size": self.row_size}
        return {**sizes, "dtype": self.dtype}

    @property
    def num_bytes(self) -> int:
        """x and out, and the residual read and written in the fused form."""
        size = 4 if self.dtype == "fp32" else 2
        passes = 4 if self.fused else 2
        return passes * size * self.num_tokens * self.row_size


NORM_TOKENS: tuple[int, ...] = (1, 16, 256, 4096, 16384)
NORM_SIZES: tuple[int, ...] = (576, 2048, 4096, 8192)
TINY_NORM: tuple[tuple[int, ...], tuple[int, ...]] = ((1, 5), (64,))  # tokens, sizes
CACHE_TOKENS = NORM_TOKENS
TINY_CACHE_TOKENS = (1, 5)
