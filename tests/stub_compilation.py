# SPDX-License-Identifier: Apache-2.0
"""Compiling ahead of launches: run by test_compilation.py in a process of its own.

Not collected by itself, since Triton's interpreter must be off before triton loads.
"""

import os
import random
from collections import defaultdict
from pathlib import Path
from unittest import mock

import pytest
import torch
import triton
from stub_driver import ARCHS, stub_gpu
from triton import knobs
from tuning_keys import decode_key, norm_key, prefill_key, write_key

from portable_backend.bench.inputs import make_inputs
from portable_backend.bench.shapes import AttentionShape
from portable_backend.device import DeviceInfo
from portable_backend.errors import UnsupportedError
from portable_backend.kernels import (
    AttentionPlanner,
    paged_attention,
    plan,
    rms_norm,
    write_kv_cache,
)
from portable_backend.kernels.config import AttentionConfig
from portable_backend.warmup.compilation import (
    compile_config,
    identity_of,
    launches_of,
)
from portable_backend.warmup.compile_pool import CompilePool, binary_of
from portable_backend.warmup.kernel_specs import DTYPES, spec_of

CPU = torch.device("cpu")
compile_for_real = triton.compiler.compile


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    assert Path(knobs.cache.dir) == folder
    return folder


def entries(cache):
    return sorted(path.name for path in cache.iterdir() if any(path.glob("*.json")))


def heads_of(fields):
    kv_heads = fields["num_kv_heads"]
    return kv_heads * fields["num_queries_per_kv"], kv_heads


def attention_call(key, config, device):
    """As attention is measured: planned ahead, then called, eagerly and captured."""
    fields = key.to_dict()
    num_seqs, query_len = fields["num_seqs"], fields["query_len"]
    prefilling = key.kernel == "prefill"
    seq_len = query_len + fields["context_len"] if prefilling else fields["seq_len"]
    shape = AttentionShape(
        name="tuned", group=key.kernel, heads=heads_of(fields),
        head_size=fields["head_size"], dtype="bf16", block_size=fields["block_size"],
        query_lens=(query_len,) * num_seqs, seq_lens=(seq_len,) * num_seqs,
        sliding_window=fields["sliding_window"] or None,
    )  # fmt: skip
    inputs = make_inputs(shape, CPU)
    parts = plan.default_config(
        num_queries_per_kv=fields["num_queries_per_kv"],
        num_kv_heads=fields["num_kv_heads"],
        head_size=fields["head_size"],
        dtype=DTYPES[fields["dtype"]],
        block_size=fields["block_size"],
        device=device,
        kind=plan.StepKind.of(
            0 if prefilling else num_seqs,
            prefilling and not fields["context_len"],
            prefilling,
        ),
        has_window=bool(fields["sliding_window"]),
    ).to_dict()
    planner = AttentionPlanner(
        num_query_heads=shape.heads[0], num_kv_heads=shape.heads[1],
        head_size=shape.head_size, dtype=inputs.query.dtype,
        block_size=shape.block_size, max_num_seqs=num_seqs,
        max_num_tokens=shape.num_tokens, sliding_window=shape.sliding_window,
        device=CPU,
        config=AttentionConfig.from_dict(parts | {key.kernel: config.to_dict()}),
    )  # fmt: skip
    new = {"key": inputs.key, "value": inputs.value}

    def call():
        batch = planner.plan(inputs.batch(lengths_on_host=False), shape.num_tokens)
        paged_attention(
            inputs.query, *inputs.caches[0], batch, inputs.options,
            out=torch.empty_like(inputs.query), **new,
        )  # fmt: skip

    return call


def row_call(key, config, device):
    fields = key.to_dict()
    dtype = DTYPES[fields["dtype"]]
    if key.kernel == "rms_norm":
        x = torch.zeros(fields["num_rows"], fields["row_size"], dtype=dtype)
        residual = torch.zeros_like(x) if fields["fused_add"] else None
        weight = torch.ones(fields["row_size"], dtype=dtype)
        return lambda: rms_norm(x, weight, 1e-5, residual=residual, config=config)
    heads = (fields["num_kv_heads"], fields["head_size"])
    new = torch.zeros(fields["num_tokens"], *heads, dtype=dtype)
    caches = torch.zeros(8, 2, 64, *heads, dtype=dtype).unbind(1)
    slots = torch.arange(fields["num_tokens"])
    return lambda: write_kv_cache(new, new, *caches, slots, config=config)


def launch(platform, key, configs):
    """What the launches of `key` compile anew, through Triton's own launch code."""
    compiled = []

    def listen(*, src, cache_hit, **_):
        compiled.append((src.fn.__name__, cache_hit))

    make = row_call if key.kernel in ("rms_norm", "kv_cache") else attention_call
    with stub_gpu(platform) as gpu:

        def check_and_stub(src, target=None, options=None, **more):
            compile_for_real(src, target=target, options=options, **more)
            return gpu.compile(src, target, options)

        with (
            mock.patch.object(triton.compiler, "compile", check_and_stub),
            mock.patch.object(knobs.compilation, "listener", listen),
        ):
            device = DeviceInfo.detect("cuda")
            for config in configs:
                call = make(key, config, device)
                for gpu.in_graph in (False, True):
                    assert gpu.record(call)
    assert compiled
    return [name for name, cache_hit in compiled if not cache_hit]


KEYS = [
    prefill_key(2, 96, 0),
    prefill_key(2, 96, 160, block_size=16),
    decode_key(3, 1, 200),
    decode_key(2, 4, 130, num_queries_per_kv=7, sliding_window=64),
    norm_key(5, 512),
    norm_key(1, 4096, fused_add=0, dtype="float16"),
    write_key(5),
]


@pytest.mark.parametrize("platform", ["cuda", "hip"])
def test_launches_find_what_workers_compiled(platform, cache):
    device = DeviceInfo.for_arch(ARCHS[platform], 132)
    chosen = {}
    for key in KEYS:
        spec = spec_of(key)
        drawn = spec.bound(key, device).sample(1, random.Random(4))
        chosen[key] = [spec.default(key, device), *drawn]
    with CompilePool(device, workers=2, limit_s=120) as pool:
        for key, configs in chosen.items():
            pool.submit(key, configs)
        for key, configs in chosen.items():
            for compiled in pool.wait(key, configs):
                assert compiled.failure is None, compiled
                readout = compiled.readout
                assert readout.registers > 0 and readout.code_bytes > 500
                assert readout.load_bytes >= 8
                if (
                    key.kernel in ("prefill", "decode")
                    and compiled.config == configs[0]
                ):
                    assert readout.load_bytes >= 16
                    assert readout.matrix_instructions > 4
    before = entries(cache)
    for key, configs in chosen.items():
        assert launch(platform, key, configs) == [], key
    assert entries(cache) == before


def test_launches_compile_what_no_worker_did(cache):
    key, device = norm_key(5, 512), DeviceInfo.for_arch("sm90", 132)
    one, other = spec_of(key).bound(key, device).configs[:2]
    compile_config(key, one, device)
    assert launch("cuda", key, [one]) == []
    assert launch("cuda", key, [other]) == ["_rms_norm_kernel"]


@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_candidates_said_to_share_a_binary_do(arch):
    """Otherwise a launch would compile what the pool believes to have compiled."""
    device = DeviceInfo.for_arch(arch, 132)
    keys = [
        *(decode_key(n, q, s) for n, q, s in [(1, 1, 64), (256, 1, 9000), (9, 2, 70)]),
        *(prefill_key(n, q, 0) for n, q in [(1, 16), (3, 4096)]),
        *(prefill_key(n, q, c) for n, q, c in [(1, 100, 60), (1, 64, 8000)]),
        *(norm_key(n) for n in (1, 2, 5000)),
        *(write_key(n) for n in (1, 3000)),
    ]
    found, pairs = defaultdict(set), 0
    for key in keys:
        rng = random.Random(key.kernel)
        for config in spec_of(key).bound(key, device).sample(25, rng):
            launches = launches_of(key, config, device)
            identities = tuple(identity_of(x, device) for x in launches)
            found[binary_of(key, config)].add(identities)
            pairs += 1
    assert all(len(identities) == 1 for identities in found.values())
    assert len(found) < pairs


def test_the_keys_own_kernel_comes_first():
    device = DeviceInfo.for_arch("sm90", 132)
    config = spec_of(KEYS[2]).default(KEYS[2], device).replace(MERGE="captured")
    names = [x.kernel for x in launches_of(KEYS[2], config, device)]
    # Once merging itself, and once with a merge behind it, as in a captured graph.
    assert names[:2] == ["decode", "decode"]
    assert set(names[2:]) == {"plan", "merge"}


@pytest.mark.parametrize("arch", ["sm90", "gfx90a", "gfx942", "gfx1201"])
def test_amd_has_a_binary_for_each_side_of_2_gib(arch, cache):
    """Offsets of 32 bits into a cache must not reach beyond what they can address."""
    device, found = DeviceInfo.for_arch(arch, 132), {}
    for seq_len in ((1 << 18) - 64, 1 << 18):  # 4 KiB for each token of two requests
        key = decode_key(2, 1, seq_len)
        config = spec_of(key).default(key, device).replace(LOAD="pointer")
        own, *_ = launches_of(key, config, device)
        is_far = own.arguments["key_cache"].untyped_storage().nbytes() >= 1 << 31
        found[is_far] = (identity_of(own, device), binary_of(key, config))
    (near, near_pair), (far, far_pair) = found[False], found[True]
    assert (near == far) == (arch == "sm90")
    assert near_pair != far_pair


def test_amd_registers_are_read_from_the_code(cache):
    device = DeviceInfo.for_arch("gfx90a", 110)
    key = norm_key()
    readout = compile_config(key, spec_of(key).default(key, device), device)
    assert 0 < readout.registers <= 512
    assert 0 < readout.scalar_registers <= 128
    assert readout.accumulator_registers == 0
    assert readout.spills == 0
    assert readout.programs_per_unit > 0
    assert readout.seconds > 0


def test_no_gpu_is_touched_and_nothing_stays_replaced():
    before = (triton.runtime.driver._active, DeviceInfo.__dict__["detect"])
    launches_of(norm_key(), spec_of(norm_key()).default(*SM90), SM90[1])
    assert (triton.runtime.driver._active, DeviceInfo.__dict__["detect"]) == before
    assert not torch.cuda.is_initialized()


SM90 = (norm_key(), DeviceInfo.for_arch("sm90"))


def test_the_interpreter_compiles_nothing():
    device = DeviceInfo.for_arch("interpreter")
    with pytest.raises(UnsupportedError, match="compiles nothing"):
        compile_config(norm_key(), spec_of(norm_key()).default(*SM90), device)
    with (
        mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}),
        pytest.raises(UnsupportedError, match="unset TRITON_INTERPRET"),
    ):
        compile_config(SM90[0], spec_of(SM90[0]).default(*SM90), SM90[1])
