# SPDX-License-Identifier: Apache-2.0
"""The suite `host`: what each call costs the CPU when nothing waits for the device."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from portable_backend.bench import cache, norm
from portable_backend.bench.inputs import DTYPES, Inputs, make_cache, make_inputs
from portable_backend.bench.providers import ATTENTION
from portable_backend.bench.results import OURS, Job, Row
from portable_backend.bench.settings import Settings
from portable_backend.bench.shapes import AttentionShape, host_shapes
from portable_backend.bench.timing import Call, race_on_host

Makers = dict[str, Callable[[], Call]]


def jobs(settings: Settings) -> Iterator[Job]:
    decode, prefill = host_shapes(settings.tiny)
    for shape in (decode, prefill):
        kinds = {"attention": _attention, "plan": _plan, "build": _build}
        if not _has_vllm(settings):
            del kinds["build"]
        for kind, makers in kinds.items():
            yield _job(f"{kind}, {shape.name}", shape.fields, makers, shape, settings)
    yield _job("cache write, 8 tokens", {}, _cache_write, settings)
    for fused in (False, True):
        name = "add and norm" if fused else "norm"
        yield _job(f"{name}, 8 tokens", {}, _norm, fused, settings)


def _has_vllm(settings: Settings) -> bool:
    installed = importlib.util.find_spec("vllm") is not None
    return installed and (settings.tiny or "vllm" not in settings.absent)


def _job(
    name: str,
    fields: dict[str, str | int],
    makers: Callable[..., Makers],
    *arguments: Any,
) -> Job:
    settings: Settings = arguments[-1]

    def run() -> Row:
        results = race_on_host(
            makers(*arguments), device=settings.device, rounds=settings.rounds
        )
        return Row("host", name, "host", fields, results=results)

    return Job("host", name, fields, run)


def _attention(shape: AttentionShape, settings: Settings) -> Makers:
    inputs = make_inputs(shape, settings.device, layout=settings.layout)

    def maker(name: str) -> Call:
        return ATTENTION[name](inputs, torch.empty_like(inputs.query)).calls[0]

    names = settings.chosen(list(ATTENTION))
    return {name: partial(maker, name) for name in names}


def _plan(shape: AttentionShape, settings: Settings) -> Makers:
    inputs = make_inputs(shape, settings.device, num_layers=0)

    def maker(name: str) -> Call:
        plan = ATTENTION[name](inputs, torch.empty_like(inputs.query)).plan
        assert plan is not None
        return plan

    names = settings.chosen(["fa3", OURS, "portable_exact"])
    return {name: partial(maker, name) for name in names}


def _build(shape: AttentionShape, settings: Settings) -> Makers:
    """Our metadata builder's build(), which vLLM calls once per step."""
    inputs = make_inputs(shape, settings.device, num_layers=0)

    def maker() -> Call:
        from portable_backend.metadata import PortableMetadataBuilder

        spec = SimpleNamespace(
            block_size=shape.block_size,
            num_kv_heads=shape.heads[1],
            head_size=shape.head_size,
        )

        class Builder(PortableMetadataBuilder):
            def _compile_ahead(self, *args: Any) -> None:
                """No engine starts here."""

        builder = Builder(spec, [], _vllm_config(shape), settings.device)
        return partial(builder.build, 0, _common_metadata(inputs))

    return {OURS: maker} if settings.chosen([OURS]) else {}


def _vllm_config(shape: AttentionShape) -> Any:
    """As much of a VllmConfig as the builder reads."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={}, cudagraph_capture_sizes=[512]
        ),
        model_config=SimpleNamespace(
            dtype=DTYPES[shape.dtype],
            max_model_len=32768,
            get_num_attention_heads=lambda _: shape.heads[0],
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=8192),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=None,
    )


def _common_metadata(inputs: Inputs) -> Any:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    shape = inputs.shape
    common = CommonAttentionMetadata(
        query_start_loc=inputs.query_start_loc,
        query_start_loc_cpu=inputs.query_start_loc.cpu(),
        seq_lens=inputs.seq_lens,
        num_reqs=len(shape.seq_lens),
        num_actual_tokens=shape.num_tokens,
        max_query_len=inputs.max_query_len,
        max_seq_len=inputs.max_seq_len,
        block_table_tensor=inputs.block_table,
        slot_mapping=torch.zeros(
            shape.num_tokens, dtype=torch.int64, device=inputs.query.device
        ),
        causal=True,
    )
    common.seq_lens_cpu_upper_bound = inputs.seq_lens.cpu()  # as every engine step has
    return common


def _cache_write(settings: Settings) -> Makers:
    dtype = torch.float32 if settings.tiny else torch.bfloat16
    new = torch.zeros(8, 8, 128, dtype=dtype, device=settings.device)
    _, caches = make_cache(settings.layout, 8, 16, 8, 128, new)
    slots = torch.arange(8, device=settings.device) * 16
    return {
        name: partial(cache.IMPLEMENTATIONS[name], (new, new, slots), caches)
        for name in settings.chosen(list(cache.IMPLEMENTATIONS))
    }


def _norm(fused: bool, settings: Settings) -> Makers:
    dtype = torch.float32 if settings.tiny else torch.bfloat16
    x = torch.ones(8, 4096, dtype=dtype, device=settings.device)
    buffers = (x, x.clone(), x.clone())
    weight = x[0].clone()
    implementations: Mapping[str, Callable[..., None]] = norm.IMPLEMENTATIONS

    def maker(name: str) -> Call:
        return partial(implementations[name], fused, weight, buffers)

    names = settings.chosen(["vllm", OURS])
    return {name: partial(maker, name) for name in names}
