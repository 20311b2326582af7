# SPDX-License-Identifier: Apache-2.0
"""Configs of each kernel's space with every combination of values, and their calls."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from compiling.calls import (
    MAX_DECODE_QUERY_LEN,
    Call,
    Shape,
    attend,
    base_config,
    normalise,
    write,
)

from portable_backend.device import DeviceInfo
from portable_backend.kernels import kv_cache_space, rms_norm_space
from portable_backend.kernels.attention_space import (
    DECODE_SPACE,
    MERGE_SPACE,
    PREFILL_SPACE,
    AttentionShape,
)
from portable_backend.kernels.config import (
    ConfigSpace,
    Constraint,
    KernelConfig,
    Parameter,
    combinations,
)
from portable_backend.kernels.decode import block_m_for
from portable_backend.kernels.kv_cache import vector_size
from portable_backend.kernels.kv_cache_space import KVCacheProblem
from portable_backend.kernels.rms_norm_space import RMSNormProblem

# Parameters that only the host looks at. tests/test_cross_compile.py checks that they
# change no binary, and that MERGE "captured" launches those of the other two values.
HOST_ONLY = {"decode": ("CTAS_PER_UNIT",)}
# RMSNorm's and the cache write's spaces know a call's size: one in each bucket.
CALL_SIZES = (16, 2048, 8192)


def _query_lens(shape: AttentionShape, device: DeviceInfo) -> list[int]:
    """The shortest decodes for each number of rows that a program can have."""
    shortest: dict[int, int] = {}
    for n in range(1, MAX_DECODE_QUERY_LEN + 1):
        shortest.setdefault(block_m_for(n * shape.num_queries_per_kv), n)
    return list(shortest.values())


def _decode_overlaps(c: Any, shape: AttentionShape, device: DeviceInfo) -> bool:
    return not c["OVERLAP"] or c["launch_pdl"] is True


def _prefill_overlaps(c: Any, shape: AttentionShape, device: DeviceInfo) -> bool:
    return not c["OVERLAP"] or device.limits.has_early_launch


_MERGE: Parameter[AttentionShape] = Parameter("MERGE", ("kernel", "last"))
# What a step adds to the constants of a config's binary, as if it were chosen, too.
_OVERLAP: Parameter[AttentionShape] = Parameter("OVERLAP", (False, True))
_ROWS: Parameter[AttentionShape] = Parameter("QUERY_LEN", _query_lens)
STEP_SPACES: dict[str, ConfigSpace[AttentionShape]] = {
    "prefill": replace(
        PREFILL_SPACE,
        parameters=(*PREFILL_SPACE.parameters, _OVERLAP),
        constraints=(
            *PREFILL_SPACE.constraints,
            Constraint(
                "overlaps",
                "only where launches begin early does decode overlap prefill",
                ("OVERLAP",),
                _prefill_overlaps,
            ),
        ),
    ),
    "decode": replace(
        DECODE_SPACE,
        parameters=(
            *(_MERGE if p.name == "MERGE" else p for p in DECODE_SPACE.parameters),
            _OVERLAP,
            _ROWS,
        ),
        constraints=(
            *DECODE_SPACE.constraints,
            Constraint(
                "overlaps",
                "only a launch that begins early overlaps the prefill's",
                ("launch_pdl", "OVERLAP"),
                _decode_overlaps,
            ),
        ),
    ),
    "merge": MERGE_SPACE,
}


@dataclass(frozen=True)
class Cover:
    """Configs that have all combinations of a space's values between them.

    Attributes:
        kernel, shape: that they are for.
        configs: the members.
        num_combinations: that they, and the whole space, have.
        call: of the public function, with one of the configs.
    """

    kernel: str
    shape: Shape
    configs: tuple[KernelConfig, ...]
    num_combinations: int
    call: Callable[[KernelConfig], None]

    def calls(self) -> Iterator[Call]:
        for config in self.configs:
            yield Call(partial(self.call, config), {self.kernel: config})

    def summary(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "shape": self.shape.name,
            "configs": len(self.configs),
            "combinations": self.num_combinations,
        }


def covers_for(
    shapes: Iterable[Shape], strength: int, device: DeviceInfo
) -> Iterator[Cover]:
    """The covers of every kernel, always the same; none with strength 0."""
    for shape in shapes if strength else ():
        for kernel, space, problem, call in _spaces(shape, device):
            rng = random.Random(f"{device.arch} {shape.name} {kernel} {problem}")
            ignore = HOST_ONLY.get(kernel, ())
            found = space.cover(strength, rng, problem, device, ignore=ignore)
            number = len(combinations(found, strength, ignore))
            yield Cover(kernel, shape, tuple(found), number, call)


def _spaces(
    shape: Shape, device: DeviceInfo
) -> Iterator[tuple[str, ConfigSpace[Any], Any, Callable[[KernelConfig], None]]]:
    """(kernel, space, problem, call with a config) of all that a shape launches."""
    for kernel, space in STEP_SPACES.items():
        yield kernel, space, shape.problem, partial(_attend, shape, device, kernel)
    size = shape.dtype.itemsize
    per_token = (
        shape.heads[1] * shape.head_size // vector_size(shape.head_size, shape.dtype)
    )
    for n in CALL_SIZES:
        problem = RMSNormProblem(shape.hidden_size, n, size)
        yield "rms_norm", rms_norm_space.SPACE, problem, partial(normalise, shape, n)
        problem = RMSNormProblem(shape.head_size, n * shape.heads[0], size)
        call = partial(normalise, shape, n, of_heads=True)
        yield "rms_norm", rms_norm_space.SPACE, problem, call
        tokens = KVCacheProblem(n * per_token)
        yield "kv_cache", kv_cache_space.SPACE, tokens, partial(write, shape, n)


def _attend(
    shape: Shape, device: DeviceInfo, kernel: str, config: KernelConfig
) -> None:
    """The step that a config and its OVERLAP and QUERY_LEN are for."""
    values = config.to_dict()
    overlap = values.pop("OVERLAP", False)
    query_len = values.pop("QUERY_LEN", 1)
    base = base_config(shape, device)
    early = base.decode.replace(launch_pdl=overlap or None, MERGE="kernel")
    chosen = replace(base, decode=early)
    chosen = replace(chosen, **{kernel: KernelConfig.from_dict(values)})
    attend(
        shape,
        num_decodes=4 if kernel != "prefill" or overlap else 0,
        num_prefills=2 if kernel == "prefill" or overlap else 0,
        cached=values.get("LOAD") != "new",
        config=chosen,
        query_len=query_len,
    )
