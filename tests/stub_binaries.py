# SPDX-License-Identifier: Apache-2.0
"""Random steps on a stub GPU against the list of binaries: run by test_binaries.py.

Not collected by itself, since Triton's interpreter must be off before triton loads.
"""

import contextlib
import functools
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
from backend_fakes import PACKED, UNPACKED, modules
from stub_driver import ARCHS, stub_gpu
from test_model_shapes import GEMMA2, GEMMA3, GPT_OSS, LLAMA, QWEN3

from portable_backend.device import DeviceInfo
from portable_backend.settings import get_settings
from portable_backend.warmup.binaries import binaries_of
from portable_backend.warmup.binary import binary_of_source
from portable_backend.warmup.buckets import EngineLimits
from portable_backend.warmup.kernel_specs import DTYPES
from portable_backend.warmup.model_shapes import shape_of_config
from portable_backend.warmup.model_traits import traits_of_config

pytestmark = pytest.mark.vllm
NUM_UNITS = {"cuda": 132, "hip": 304}
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
# Heads of 72 elements, of which strides are and are not multiples of 16.
UNEVEN = LLAMA | {
    "head_dim": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
SHARED = QWEN3 | {"num_kv_shared_layers": 2}
BLOOM = LLAMA | {"model_type": "bloom"}


@pytest.fixture(autouse=True)
def nothing_ahead(monkeypatch):
    """Steps ask for what they need: no start has prepared it."""
    monkeypatch.setenv("PORTABLE_BACKEND_COMPILE_AHEAD", "off")
    get_settings.cache_clear()
    yield
    get_settings.cache_clear()


def described(config):
    return shape_of_config(config, "model"), traits_of_config(config)


@dataclass
class Request:
    new: int
    cached: int


class Engine:
    """Layers of each kind, and steps as vLLM's runner would have them."""

    def __init__(self, config, limits, form, *, far=False, before_builder=None):
        """`before_builder` is called with vLLM's config, its layers made."""
        pb = modules()
        self.before_builder = before_builder or (lambda vllm_config: None)
        self.config = config
        self.model, self.traits = described(config)
        self.limits = limits
        self.dtype = DTYPES[self.model.dtype]
        self.form, self.far = form, far
        self.max_seqs = limits.max_num_seqs
        most = limits.max_num_tokens
        self.starts = torch.zeros(self.max_seqs + 1, dtype=torch.int32)
        self.starts_cpu = torch.zeros(self.max_seqs + 1, dtype=torch.int32)
        self.lens = torch.zeros(self.max_seqs, dtype=torch.int32)
        self.table = torch.zeros(self.max_seqs, 64, dtype=torch.int32)
        self.slots = torch.zeros(most, dtype=torch.int64)
        self.layers = []
        for window in self.model.sliding_windows:
            impls = [self.make_impl(pb, window)]
            if self.traits.shares_cache:
                impls.append(self.make_impl(pb, window, shares=True))
            builder = self.make_builder(pb, impls, window)
            self.layers += [(impl, builder, self.make_cache()) for impl in impls]

    def make_impl(self, pb, window, shares=False):
        heads = self.model.num_query_heads
        return pb.Impl(
            heads, self.model.head_size, 0.1, self.model.num_kv_heads,
            [0.5] * heads if self.traits.alibi else None,
            window or None, "auto",
            self.traits.softcap or None,
            "decoder", "another" if shares else None,
            **({"sinks": torch.zeros(heads, dtype=self.dtype)}
               if self.traits.sinks else {}),
        )  # fmt: skip

    def make_builder(self, pb, impls, window):
        drafts = self.limits.speculative_tokens
        layers = {f"layer{i}": SimpleNamespace(impl=x) for i, x in enumerate(impls)}
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                static_forward_context=layers, cudagraph_capture_sizes=[1, 2, 4, 8]
            ),
            model_config=SimpleNamespace(
                dtype=self.dtype,
                max_model_len=self.limits.max_model_len or 4096,
                hf_text_config=SimpleNamespace(to_dict=lambda: self.config),
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=self.limits.max_num_seqs,
                max_num_batched_tokens=self.limits.max_num_batched_tokens,
            ),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            cache_config=SimpleNamespace(
                block_size=self.limits.block_size, user_specified_block_size=True
            ),
            speculative_config=SimpleNamespace(
                num_speculative_tokens=drafts, parallel_drafting=False
            )
            if drafts
            else None,
        )
        spec = SimpleNamespace(
            block_size=self.limits.block_size,
            num_kv_heads=self.model.num_kv_heads,
            head_size=self.model.head_size,
            dtype=self.dtype,
            sliding_window=window or None,
        )
        self.vllm_config = config
        self.before_builder(config)
        return pb.Builder(spec, list(layers), config, torch.device("cpu"))

    def make_cache(self):
        slots, heads = self.limits.block_size, self.model.num_kv_heads
        size = self.model.head_size
        if self.form in UNPACKED:
            order, shape = UNPACKED[self.form], [3, 2, slots, heads, size]
        else:
            order, shape = PACKED[self.form], [3, heads, slots, 2 * size]
        if self.far:
            shape[0] = 2**30 // (2 * slots * heads * size) + 1  # elements of 2 bytes
        memory = torch.empty([shape[axis] for axis in order], dtype=self.dtype)
        return memory.permute([order.index(axis) for axis in range(len(shape))])

    def metadata(self, builder, requests, pad):
        """Of a step with `pad` requests of nothing behind those that are."""
        lens = [r.new for r in requests] + [0] * pad
        count = len(lens)
        starts = torch.tensor([0, *lens]).cumsum(0)
        self.starts[: count + 1] = starts
        self.starts_cpu[: count + 1] = starts
        seq_lens = torch.tensor([r.new + r.cached for r in requests] + [0] * pad)
        self.lens[:count] = seq_lens
        num_tokens = int(starts[-1])
        return builder.build(
            0,
            SimpleNamespace(
                query_start_loc=self.starts[: count + 1],
                query_start_loc_cpu=self.starts_cpu[: count + 1],
                seq_lens=self.lens[:count],
                seq_lens_cpu_upper_bound=seq_lens,
                num_reqs=count,
                num_actual_tokens=num_tokens,
                max_query_len=max(lens),
                max_seq_len=int(seq_lens.max()),
                block_table_tensor=self.table[:count],
                slot_mapping=self.slots[:num_tokens],
                causal=True,
            ),
        )

    def step(self, rng, requests, pad=0):
        num_tokens = sum(r.new for r in requests)
        for impl, builder, cache in self.layers:
            metadata = self.metadata(builder, requests, pad)
            self.run_layer(rng, impl, cache, metadata, num_tokens)
            if self.limits.speculative_tokens and metadata.max_query_len == 1:
                builder.update_draft_decode_metadata(metadata)
                self.run_layer(rng, impl, cache, metadata, num_tokens)

    def run_layer(self, rng, impl, cache, metadata, num_tokens):
        heads, kv_heads = self.model.num_query_heads, self.model.num_kv_heads
        size = self.model.head_size
        sizes = [heads * size, kv_heads * size, kv_heads * size]
        # A graph pads tokens, too.
        rows = min(num_tokens + rng.choice([0, 3]), self.limits.max_num_tokens)
        parts = torch.empty(rows, sum(sizes), dtype=self.dtype).split(sizes, dim=-1)
        if impl is self.layers[0][0]:
            self.norms(parts, rows)
        # As they come, or made anew by a rotation, or all of projections of their own.
        own = rng.choice([0, 2, 3])
        query, key, value = (
            part if i >= own else torch.empty(part.shape, dtype=self.dtype)
            for i, part in enumerate(parts)
        )
        query = query.view(-1, heads, size)
        key, value = key.view(-1, kv_heads, size), value.view(-1, kv_heads, size)
        out = torch.empty(rows, sizes[0], dtype=self.dtype).view(-1, heads, size)
        if impl.kv_sharing_target_layer_name is None:
            impl.do_kv_cache_update(None, key, value, cache, metadata.slot_mapping)
        impl.forward(None, query, key, value, cache, metadata, output=out)

    def norms(self, parts, rows):
        ops = torch.ops.portable_backend
        dtype = torch.float32 if self.traits.fp32_norm_weight else self.dtype
        weight = torch.ones(self.model.hidden_size, dtype=dtype)
        x = torch.empty(rows, self.model.hidden_size, dtype=self.dtype)
        ops.rms_norm(x, weight, 1e-6)
        ops.fused_add_rms_norm(x, torch.empty_like(x), weight, 1e-6)
        if self.model.head_size not in self.model.norm_row_sizes:
            return
        size = self.model.head_size
        weight = torch.ones(size, dtype=dtype)
        for part in parts[:2]:
            for x in (part, torch.empty(part.shape, dtype=self.dtype)):
                ops.rms_norm(x.unflatten(-1, (-1, size)), weight, 1e-6)


def draw_step(rng, limits):
    """(requests, requests of padding, whether a graph holds the step)."""
    drafts, most = limits.speculative_tokens, limits.max_num_seqs
    longest = max(8, 1 + drafts)
    count = min(most, rng.randint(1, 1 << rng.randint(0, most.bit_length())))
    kind = rng.choice(
        ["graph", "decodes", "short", "short", "short", "prefills", "mixed", "mixed"]
    )

    def cached():
        return rng.choice([0, 1, 700])

    if kind == "graph":
        new = rng.choice([1, 1 + drafts])
        count = min(count, limits.max_num_batched_tokens // new)
        padded = min(most, 1 << (count - 1).bit_length())
        return [Request(new, 50)] * count, padded - count, True
    if kind == "decodes":
        news = [rng.choice([1, 1 + drafts]) for _ in range(count)]
    elif kind == "short":
        bound = rng.randint(1, longest)
        news = [rng.randint(1, bound) for _ in range(count)]
    else:
        left = limits.max_num_batched_tokens
        news = []
        for _ in range(min(count, rng.choice([1, 3]))):
            new = rng.choice([longest + 1, 100, rng.randint(longest + 1, 4096), left])
            new = min(new, left)
            if new > longest:
                news.append(new)
                left -= new
        if kind == "mixed":
            bound = rng.randint(1, longest)
            news += [rng.randint(1, bound) for _ in range(count)]
    with_context = rng.random() < 0.5
    requests = [Request(new, cached() if with_context or new <= longest else 0)
                for new in news]  # fmt: skip
    return within(requests, limits), 0, False


def within(requests, limits):
    kept, left = [], limits.max_num_batched_tokens
    for request in requests[: limits.max_num_seqs]:
        if request.new <= left:
            kept.append(request)
            left -= request.new
    return kept


@contextlib.contextmanager
def lengths_as_on_a_gpu(pb):
    """The host knows of lengths what it would know of a GPU's."""
    on_host = pb.metadata.PortableMetadata.unplanned

    def unplanned(metadata):
        return replace(
            on_host(metadata), query_start_loc_cpu=metadata.query_start_loc_cpu
        )

    with mock.patch.object(pb.metadata.PortableMetadata, "unplanned", unplanned):
        yield


def walk(
    platform,
    config,
    limits,
    steps,
    seed=0,
    compiler=None,
    on_start=None,
    before_builder=None,
):
    """Binaries that random steps ask for, by what they are.

    `compiler` is called as Triton's is, each time that Triton's would be. `on_start` is
    called with what the start asked for before the first step, whose own list begins
    then.
    """
    rng, found = random.Random(seed), {}
    pb = modules()
    from portable_backend import ir_ops  # noqa: F401  registers the norms

    with (
        stub_gpu(platform, num_units=NUM_UNITS[platform]) as gpu,
        lengths_as_on_a_gpu(pb),
    ):

        def compile_and_note(src, target=None, options=None, **more):
            binary = binary_of_source(src, options)
            found.setdefault(binary.identity, binary)
            if compiler is not None:
                compiler(src, target=target, options=options, **more)
            return gpu.compile(src, target, options)

        with mock.patch.object(triton.compiler, "compile", compile_and_note):
            forms = [(form, False) for form in [*UNPACKED, *PACKED]]
            forms += [(next(iter(UNPACKED)), True)] * (platform == "hip")
            engines = [
                Engine(config, limits, form, far=far, before_builder=before_builder)
                for form, far in forms
            ]
            gpu.recording = False
            if on_start is not None:
                on_start(dict(found))
                found.clear()
            for number in range(steps):
                requests, pad, gpu.in_graph = draw_step(rng, limits)
                engines[number % len(engines)].step(rng, requests, pad)
    return found


LIMITS = EngineLimits()
WALKS = {
    "llama": ("cuda", LLAMA, LIMITS),
    "llama, small": ("cuda", LLAMA, EngineLimits(max_num_seqs=1)),
    "llama, blocks of 16": ("cuda", LLAMA, EngineLimits(48, 512, block_size=16)),
    "llama, fp16": ("cuda", LLAMA | {"torch_dtype": "float16"}, LIMITS),
    "smollm2": ("cuda", SMOLLM2, LIMITS),
    "gemma2": ("cuda", GEMMA2, LIMITS),
    "gemma2, another cap": ("cuda", GEMMA2 | {"attn_logit_softcapping": 90}, LIMITS),
    "gemma3": ("cuda", GEMMA3, LIMITS),
    "gpt-oss": ("cuda", GPT_OSS, LIMITS),
    "qwen3, cache shared": ("cuda", SHARED, LIMITS),
    "slopes": ("cuda", BLOOM, LIMITS),
    "uneven heads": ("cuda", UNEVEN, LIMITS),
    "llama on amd": ("hip", LLAMA, LIMITS),
    "gpt-oss on amd": ("hip", GPT_OSS, LIMITS),
} | {
    f"llama, {n} drafts": ("cuda", LLAMA, EngineLimits(speculative_tokens=n))
    for n in (1, 4, 9)
}


@functools.cache
def listed(name):
    platform, config, limits = WALKS[name]
    device = DeviceInfo.for_arch(ARCHS[platform], NUM_UNITS[platform])
    return {x.identity: x for x in binaries_of(*described(config), limits, device)}


@pytest.mark.parametrize("name", WALKS)
def test_steps_ask_for_what_is_listed_and_for_all_of_it(name):
    found = walk(*WALKS[name], steps=400)
    surprises = [str(found[x]) for x in found.keys() - listed(name).keys()]
    assert not surprises, surprises
    never = [str(listed(name)[x]) for x in listed(name).keys() - found.keys()]
    assert not never, never
