#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Host time of calls by compiled handles and by Triton's dispatch, and their results.

    python -P scripts/host_cost.py                             # on a GPU
    python -P scripts/host_cost.py --compare few --json FILE   # compiles less
    TRITON_INTERPRET=1 python -P scripts/host_cost.py --calls 2 --rounds 1

The host time is what a call takes to return, driver included; the device works behind
it and is waited for between rounds. Results of both roads are compared bit for bit over
alignments, strides and sizes, in an order that gives each handle the chance to serve
the wrong call. In the interpreter there is but one road, and times mean nothing. Exit
code 1: some result differs.
"""

import argparse
import contextlib
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import triton

from portable_backend.device import DeviceInfo, interpreting
from portable_backend.kernels import (
    AttentionOptions,
    AttentionPlanner,
    PagedBatch,
    _direct,
    rms_norm,
    write_kv_cache,
)
from portable_backend.kernels._layer import AttentionLayer
from portable_backend.kernels.attention import attend

caches, norms, plans = (
    importlib.import_module(f"portable_backend.kernels.{name}")
    for name in ("kv_cache", "rms_norm", "plan")
)


# What the planner's default takes for a decode.
MAX_DECODE_QUERY_LEN = 8


@dataclass(frozen=True)
class Shape:
    """One attention call; offsets are elements behind an aligned address."""

    name: str
    query_lens: tuple[int, ...]
    context_len: int = 500
    heads: tuple[int, int] = (32, 8)
    head_size: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    query_offset: int = 0
    out_offset: int = 0
    cache_offset: int = 0
    row_pad: int = 0  # elements between rows of query and out
    features: bool = False  # window, softcap, ALiBi and sinks, all at once
    can_split: bool = True


@dataclass
class Call:
    """Something to time, and the tensors that it writes."""

    name: str
    run: Callable[[], Any]
    outputs: tuple[torch.Tensor, ...] = ()
    planner: AttentionPlanner | None = None
    prepare: Callable[[], Any] = lambda: None  # not timed


@contextlib.contextmanager
def dispatched(call: Call) -> Iterator[None]:
    """Triton's dispatch launches, and nothing kept from earlier calls is used."""
    kept = [(caches, "_BINDINGS"), (norms, "_BINDINGS"), (norms, "_LAUNCHES")]
    if call.planner is not None:
        kept += [(call.planner, "bindings"), (call.planner, "_launches")]
    with contextlib.ExitStack() as stack:
        for owner, name in kept:
            stack.enter_context(mock.patch.object(owner, name, _direct.Bindings()))
        stack.enter_context(
            mock.patch.object(_direct.Gate, "stream", lambda gate: None)
        )
        yield


def rows(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    offset: int = 0,
    pad: int = 0,
) -> torch.Tensor:
    """Random numbers; `pad` elements follow each index of the first axis."""
    width = torch.Size(shape[1:]).numel() + pad
    flat = torch.randn(offset + shape[0] * width, device=device).to(dtype)
    strides = torch.empty(shape[1:], device="meta").stride()
    return flat.as_strided(shape, (width, *strides), offset)


def attention_calls(
    shape: Shape, device: torch.device, planners: dict[object, AttentionPlanner]
) -> tuple[Call, Call]:
    """Planning of a step, and one layer's attention in it; planners are shared."""
    lens, (num_heads, num_kv_heads) = shape.query_lens, shape.heads
    num_tokens, num_seqs = sum(lens), len(lens)
    ends = [shape.context_len + n for n in lens]
    width = -(-max(ends) // shape.block_size)
    table = torch.randperm(num_seqs * width, device=device).to(torch.int32)
    starts = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    batch = PagedBatch(
        query_start_loc=starts.to(device),
        seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
        block_table=table.view(num_seqs, width),
        max_query_len=max(lens),
        max_seq_len=max(ends),
        # As the back end gives them: with prefills only, which no graph captures.
        query_start_loc_cpu=starts if max(lens) > MAX_DECODE_QUERY_LEN else None,
        no_context=max(lens) > MAX_DECODE_QUERY_LEN and shape.context_len == 0,
    )
    options = AttentionOptions(scale=shape.head_size**-0.5)
    if shape.features:
        options = replace(
            options,
            sliding_window=100,
            softcap=20.0,
            alibi_slopes=rows((num_heads,), torch.float32, device),
            sinks=rows((num_heads,), shape.dtype, device),
        )
    geometry = (
        shape.heads, shape.head_size, shape.dtype, shape.block_size, shape.features,
        shape.can_split,
    )  # fmt: skip
    planner = planners.get(geometry)
    if planner is None:
        planner = planners[geometry] = AttentionPlanner(
            num_query_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=shape.head_size,
            dtype=shape.dtype,
            block_size=shape.block_size,
            max_num_seqs=64,
            max_num_tokens=2048,
            sliding_window=options.sliding_window,
            device=device,
            config=None if shape.can_split else unsplit_config(shape, device),
        )
    q_shape = (num_tokens, num_heads, shape.head_size)
    cache = (num_seqs * width, shape.block_size, num_kv_heads, shape.head_size)
    pad, dtype = shape.row_pad, shape.dtype
    query = rows(q_shape, dtype, device, offset=shape.query_offset, pad=pad)
    out = rows(q_shape, dtype, device, offset=shape.out_offset, pad=pad)
    key_cache = rows(cache, dtype, device, offset=shape.cache_offset)
    value_cache = rows(cache, dtype, device)

    new = (num_tokens, num_kv_heads, shape.head_size)
    key, value = (rows(new, dtype, device) for _ in range(2))
    if batch.no_context:  # then what is new is all that the cache may be read for
        slots = table.view(num_seqs, width).long()[:, :, None] * shape.block_size
        slots = (slots + torch.arange(shape.block_size, device=device)).flatten(1)
        slots = torch.cat([row[:n] for row, n in zip(slots, lens, strict=True)])
        write_kv_cache(key, value, key_cache, value_cache, slots)

    layer = AttentionLayer(key_cache, value_cache, options)  # as the back end does

    def call() -> torch.Tensor:
        return attend(query, layer, planned, out=out, key=key, value=value)

    def plan() -> None:
        nonlocal planned
        planned = planner.plan(batch, num_tokens)

    planned = planner.plan(batch, num_tokens)
    return (
        Call(
            f"plan, {shape.name}",
            plan,
            (planner.header, planner.items, planner.splits, planner.tiles),
            planner,
        ),
        Call(
            f"attention, {shape.name}",
            call,
            (out,),
            planner,
            plan,
        ),
    )


def unsplit_config(shape: Shape, device: torch.device) -> Any:
    """The default config, but requests are never cut: no merge."""
    config = plans.default_config(
        num_queries_per_kv=shape.heads[0] // shape.heads[1],
        head_size=shape.head_size,
        dtype=shape.dtype,
        block_size=shape.block_size,
        device=DeviceInfo.detect(device),
    )
    return replace(config, decode=config.decode.replace(CTAS_PER_UNIT=0))


def cache_call(
    num_tokens: int, device: torch.device, *, offset: int = 0, pad: int = 0
) -> Call:
    new, cache = (num_tokens, 8, 128), (64, 16, 8, 128)
    key, value, key_cache, value_cache = (
        rows(shape, torch.bfloat16, device, offset=offset, pad=pad)
        for shape in (new, new, cache, cache)
    )
    slots = torch.randperm(64 * 16, device=device)[:num_tokens]
    return Call(
        f"cache write, {num_tokens} tokens",
        lambda: write_kv_cache(key, value, key_cache, value_cache, slots),
        (key_cache, value_cache),
    )


def norm_call(
    num_tokens: int,
    device: torch.device,
    *,
    fused: bool = False,
    size: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
    offset: int = 0,
    pad: int = 0,
) -> Call:
    shape = (num_tokens, size)
    x, residual, out = (
        rows(shape, dtype, device, offset=offset, pad=pad) for _ in range(3)
    )
    weight = rows((size,), dtype, device)
    if not fused:
        name, written = f"norm, {num_tokens} rows", (out,)
        return Call(name, lambda: rms_norm(x, weight, 1e-6, out=out), written)
    return Call(
        f"fused add and norm, {num_tokens} rows",
        lambda: rms_norm(
            x, weight, 1e-6, residual=residual, out=x, residual_out=residual
        ),
        (x, residual),
    )


def new_norm_call(num_tokens: int, device: torch.device) -> Call:
    x, weight = (rows(s, torch.bfloat16, device) for s in ((num_tokens, 4096), (4096,)))
    name = f"norm, {num_tokens} rows, new output"
    return Call(name, lambda: rms_norm(x, weight, 1e-6))


def bare_launch(device: torch.device) -> Call | None:
    """A norm's launch with everything looked up beforehand: launcher and driver."""
    x = rows((32, 4096), torch.bfloat16, device)
    with mock.patch.object(norms, "_BINDINGS", _direct.Bindings()):
        for _ in range(2):
            rms_norm(x, x[0], 1e-6, out=x)
        (binding,) = norms._BINDINGS.values()
    if not binding.launch.ready:
        return None
    stream = binding.gate.stream()
    args = (
        *[x.data_ptr()] * 5, binding.counts_ptr, *binding.strides, 32, 1e-6
    )  # fmt: skip
    return Call(
        "one launch alone",
        lambda: binding.launch(stream, binding.num_programs, 1, args),
        (x,),
    )


# ------------------------------------------------------------------------ what is done


def shapes_to_time(small: bool) -> list[Shape]:
    if small:
        few = Shape("2 decodes", (1, 1), 20, (4, 2), 64)
        return [few, replace(few, name="1 prompt of 20", query_lens=(20,))]
    decode = Shape("32 decodes", (1,) * 32)
    return [
        decode,
        replace(decode, name="32 decodes without merge", can_split=False),
        replace(decode, name="32 decodes, page 64", block_size=64),
        Shape("1 prompt of 1024", (1024,), 0),
        Shape("1 prompt of 1024, page 64", (1024,), 0, block_size=64),
        Shape("31 decodes, 1 prompt of 512", (1,) * 31 + (512,)),
    ]


def shapes_to_compare(few: bool, small: bool) -> list[Shape]:
    """Alignments, strides and sizes on either side of what Triton tells apart."""
    decode = Shape("decode", (1,) * 3, heads=(8, 2))
    mixed = replace(decode, name="mixed", query_lens=(1, 40, 1, 5, 1))
    if small:
        changes = {"context_len": 20, "head_size": 64, "heads": (4, 2)}
        decode = replace(decode, **changes, query_lens=(1, 1))
        mixed = replace(mixed, **changes, query_lens=(1, 12))
    found = []
    for base in (decode, mixed):
        found.append(base)
        for offset in (1,) if few else (1, 4, 8):
            found += [
                replace(base, query_offset=offset),
                replace(base, out_offset=offset),
                replace(base, cache_offset=offset),
            ]
        found += [replace(base, row_pad=pad) for pad in ((1,) if few else (1, 8, 16))]
        if few:
            continue
        found += [replace(base, dtype=d) for d in (torch.float16, torch.float32)]
        found += [replace(base, head_size=size) for size in (64, 80, 256)]
        found += [replace(base, block_size=size) for size in (32, 64)]
        found += [replace(base, heads=heads) for heads in ((1, 1), (5, 1), (32, 8))]
        found += [replace(base, features=True), replace(base, can_split=False)]
        found += [replace(base, query_lens=(1,) * n) for n in (1, 2, 16, 17)]
    return found


def other_calls_to_compare(few: bool, device: torch.device) -> Iterator[Call]:
    for num_tokens in (1, 16) if few else (1, 2, 16, 17):
        yield cache_call(num_tokens, device)
        yield norm_call(num_tokens, device)
        yield norm_call(num_tokens, device, fused=True)
    for offset in (1,) if few else (1, 4, 8):
        yield cache_call(5, device, offset=offset)
        yield norm_call(5, device, offset=offset)
        yield norm_call(5, device, offset=offset, fused=True)
    for pad in (1,) if few else (1, 8, 16):
        yield cache_call(5, device, pad=pad)
        yield norm_call(5, device, pad=pad)
        yield norm_call(1, device, pad=pad, fused=True)
    if few:
        return
    for dtype in (torch.float16, torch.float32):
        yield norm_call(5, device, dtype=dtype)
        yield norm_call(5, device, size=80, dtype=dtype, fused=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(kind)


def results(call: Call, before: list[torch.Tensor]) -> list[torch.Tensor]:
    for tensor, start in zip(call.outputs, before, strict=True):
        tensor.copy_(start)
    call.prepare()
    call.run()
    return [bits(tensor.clone()) for tensor in call.outputs]


def time_us(call: Call, device: torch.device, calls: int, rounds: int) -> float:
    """Median over rounds of the mean time until a call returns."""
    call.prepare()
    call.run()
    times = []
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call.run()
        times.append((time.perf_counter() - start) / calls * 1e6)
    synchronize(device)
    return statistics.median(times)


def compare(device: torch.device, few: bool, small: bool) -> list[str]:
    """Names of the calls whose results differ between the two roads."""
    planners: dict[object, AttentionPlanner] = {}
    calls = [
        (call, f"{call.name}: {shape}")
        for shape in shapes_to_compare(few, small)
        for call in attention_calls(shape, device, planners)
    ]
    calls += [(call, call.name) for call in other_calls_to_compare(few, device)]
    cases = []
    for call, name in calls:
        before = [tensor.clone() for tensor in call.outputs]
        with dispatched(call):
            expected = results(call, before)
        cases.append((call, name, before, expected))
    different: dict[str, None] = {}
    # Forth, back and forth again: the first pass still binds what it has not seen.
    for order in (cases, cases[::-1], cases):
        for call, name, before, expected in order:
            ours = results(call, before)
            if not all(map(torch.equal, ours, expected)):
                different[name] = None
    print(f"{len(cases) - len(different)} of {len(cases)} calls give the same bits")
    for name in different:
        print(f"DIFFERENT {name}")
    return list(different)


def measure(args: argparse.Namespace, device: torch.device, small: bool) -> list[dict]:
    planners: dict[object, AttentionPlanner] = {}
    calls: list[Call] = []
    for shape in shapes_to_time(small):
        calls += attention_calls(shape, device, planners)
    num_tokens = 2 if small else 32
    calls.append(cache_call(num_tokens, device))
    calls.append(norm_call(num_tokens, device))
    calls.append(new_norm_call(num_tokens, device))
    calls.append(norm_call(num_tokens, device, fused=True))
    alone = bare_launch(device)
    found = []
    print(f"\n{'host us per call':44}{'handles':>10}{'dispatch':>10}")
    for call in calls:
        row = {"call": call.name}
        row["handles_us"] = time_us(call, device, args.calls, args.rounds)
        with dispatched(call):
            row["dispatch_us"] = time_us(call, device, args.calls, args.rounds)
        print(
            f"{call.name:44}{row['handles_us']:10.1f}{row['dispatch_us']:10.1f}",
            flush=True,
        )
        found.append(row)
    if alone is not None:
        alone_us = time_us(alone, device, args.calls, args.rounds)
        print(f"{alone.name:44}{alone_us:10.1f}")
        found.append({"call": alone.name, "handles_us": alone_us})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--calls", type=int, default=100, help="calls between waits (default: 100)")
    add("--rounds", type=int, default=15, help="rounds per median (default: 15)")
    add(
        "--compare",
        choices=("all", "few", "none"),
        help="how many kinds of calls (default: all, in the interpreter few)",
    )
    add("--json", type=argparse.FileType("w"), help="write the numbers there too")
    args = parser.parse_args()
    small = interpreting()
    if not small and not torch.cuda.is_available():
        parser.error("torch finds no GPU; set TRITON_INTERPRET=1 to try it without one")
    device = torch.device("cpu" if small else "cuda:0")
    info = DeviceInfo.detect(device)
    torch.manual_seed(0)
    print(
        f"{info.name} ({info.arch}); torch {torch.__version__}, triton "
        f"{triton.__version__}, Python {sys.version.split()[0]}"
    )
    how_many = args.compare or ("few" if small else "all")
    different = []
    if how_many != "none":
        different = compare(device, how_many == "few", small)
    times = measure(args, device, small)
    if args.json:
        json.dump({"times": times, "different": different}, args.json, indent=1)
        args.json.close()
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
