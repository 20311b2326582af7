# SPDX-License-Identifier: Apache-2.0
"""Named lists of attention and RMSNorm shapes: a grid, and what models serve with."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from portable_backend.bench.shapes import (
    AttentionShape,
    NormShape,
    attention_shapes,
    chunk,
    decode,
    feature_shapes,
    mixed,
    prefill,
)

# What one launch may have to hold, in tokens: queries of a prefill, keys of a decode.
_MOST_QUERIES = 1 << 16
_MOST_KEYS = 1 << 21
_GRID_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_GRID_LENGTHS = (16, 64, 256, 1024, 4096, 16384)


@dataclass(frozen=True)
class Family:
    """What one GPU has of a model.

    Attributes:
        heads: (query heads, KV heads).
        head_size: of each.
        row_sizes: of its RMSNorms.
        layers: the kinds of attention layers: name -> (sliding window or None).
        softcap, sinks: as in AttentionOptions.
    """

    heads: tuple[int, int]
    head_size: int
    row_sizes: tuple[int, ...]
    layers: dict[str, int | None]
    softcap: float | None = None
    sinks: bool = False

    def attention(self) -> list[AttentionShape]:
        """Steps of a server: prefills, a chunk, decodes, and both together."""
        steps = (
            prefill(1, 4096),
            prefill(8, 1024),
            chunk(2048, 6144),
            decode(1, 8192),
            decode(32, 2048),
            decode(128, 1024),
            mixed(31, 2048),
        )
        return [
            replace(
                step,
                name=f"{step.name}, {layer}" if layer else step.name,
                heads=self.heads,
                head_size=self.head_size,
                sliding_window=window,
                softcap=self.softcap,
                sinks=self.sinks,
            )
            for layer, window in self.layers.items()
            for step in steps
        ]

    def norms(self) -> list[NormShape]:
        """The norm before a layer, alone and with the residual added."""
        return [
            NormShape(fused, num_tokens, row_size)
            for row_size in self.row_sizes
            for fused in (False, True)
            for num_tokens in (1, 64, 2048)
        ]


# From each model's config.json; Qwen3 also normalises queries and keys by the head.
FAMILIES = {
    "llama3-8b": Family((32, 8), 128, (4096,), {"": None}),
    "llama3-70b-tp8": Family((8, 1), 128, (8192,), {"": None}),
    "qwen3-4b": Family((32, 8), 128, (2560, 128), {"": None}),
    "gemma2-9b": Family(
        (16, 8), 256, (3584,), {"global": None, "window": 4096}, softcap=50.0
    ),
    "gpt-oss-20b": Family(
        (64, 8), 64, (2880,), {"global": None, "window": 128}, sinks=True
    ),
}


def grid() -> list[AttentionShape]:
    """Batches of 1 to 128, lengths of 16 to 16384, as far as they fit; fp16 and bf16.

    32 query and 8 KV heads of size 128. Prefills of more than 65536 tokens are left
    out; decodes are all there.
    """
    shapes = [
        *(
            prefill(batch, length)
            for length in _GRID_LENGTHS
            for batch in _GRID_BATCHES
            if batch * length <= _MOST_QUERIES
        ),
        *(
            decode(batch, length)
            for length in _GRID_LENGTHS
            for batch in _GRID_BATCHES
            if batch * length <= _MOST_KEYS
        ),
    ]
    return [
        replace(shape, dtype=dtype) for dtype in ("fp16", "bf16") for shape in shapes
    ]


def _grid_norms() -> list[NormShape]:
    return [
        NormShape(fused, num_tokens, 4096, dtype)
        for dtype in ("fp16", "bf16")
        for fused in (False, True)
        for num_tokens in (1, 16, 128, 1024, 16384)
    ]


def _tiny() -> list[AttentionShape]:
    """For the interpreter: every kind of step, and every option."""
    return [*attention_shapes(tiny=True), *feature_shapes(tiny=True)]


def _tiny_norms() -> list[NormShape]:
    return [NormShape(fused, 5, 64, "fp32") for fused in (False, True)]


ATTENTION_LISTS: dict[str, Callable[[], list[AttentionShape]]] = {
    "tiny": _tiny,
    "grid": grid,
    **{name: family.attention for name, family in FAMILIES.items()},
}
NORM_LISTS: dict[str, Callable[[], list[NormShape]]] = {
    "tiny": _tiny_norms,
    "grid": _grid_norms,
    **{name: family.norms for name, family in FAMILIES.items()},
}
