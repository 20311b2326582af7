# SPDX-License-Identifier: Apache-2.0
"""Direct launches: on a stub GPU in a child process, and bit for bit on a real one."""

import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_cases import Case, bits, call, make_inputs, make_planner
from kernel_draws import draw_case
from stub_suites import check_suite

from portable_backend.kernels import launch_counts, rms_norm, write_kv_cache

SCRIPT = Path(__file__).parents[1] / "scripts" / "host_cost.py"


NO_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="checked where there is no GPU"
)


@NO_GPU
def test_direct_launches_on_a_stub_gpu():
    check_suite("stub_launches")


@NO_GPU
def test_the_host_cost_script_runs_in_the_interpreter(tmp_path):
    result = tmp_path / "times.json"
    command = [sys.executable, "-P", SCRIPT, "--calls", "1", "--rounds", "1"]
    done = subprocess.run(
        [*map(str, command), "--json", str(result)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
    found = json.loads(result.read_text())
    assert found["different"] == []
    assert {row["call"].split(",")[0] for row in found["times"]} == {
        "plan", "attention", "cache write", "norm", "fused add and norm"
    }  # fmt: skip


def test_the_host_cost_script_tells_which_result_differs(monkeypatch, capsys):
    script = load_script()
    number = torch.zeros(1)
    same = script.Call("same", lambda: number.add_(1), (number,))
    other = torch.zeros(1)
    runs = itertools.count()
    drifting = script.Call("drifting", lambda: other.fill_(next(runs)), (other,))
    monkeypatch.setattr(script, "shapes_to_compare", lambda few, small: [])
    monkeypatch.setattr(
        script, "other_calls_to_compare", lambda few, device: [same, drifting]
    )
    assert script.compare(torch.device("cpu"), True, True) == ["drifting"]
    assert "1 of 2 calls" in capsys.readouterr().out


def load_script():
    spec = importlib.util.spec_from_file_location("host_cost", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    return script


# ----------------------------------------------------------------------- on a real GPU


@contextlib.contextmanager
def ordinary_road():
    """A launch hook, which only Triton's own dispatch calls."""
    from triton import knobs

    def hook(_):
        pass

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)


def same_on_both_roads(attend, outputs, device, monkeypatch):
    """Run `attend` on either road: the same bits, as many launches."""
    from triton.runtime.jit import JITFunction

    before = [tensor.clone() for tensor in outputs]

    def run():
        for tensor, start in zip(outputs, before, strict=True):
            tensor.copy_(start)
        counts = launch_counts(device)
        attend()
        after = launch_counts(device)
        launched = {name: after[name] - counts[name] for name in after}
        return launched, [bits(tensor.clone()) for tensor in outputs]

    with ordinary_road():
        expected = run()
    run()  # keeps the handles
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", None)  # not called
        for _ in range(2):
            counts, tensors = run()
            assert counts == expected[0]
            for ours, theirs in zip(tensors, expected[1], strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_attention_is_the_same_on_both_roads(seed, device, monkeypatch):
    case = draw_case(seed, size="small")
    inputs = make_inputs(case, device)
    if case.num_tokens == 0:
        pytest.skip("an empty step launches nothing")
    planner = make_planner(case, device)
    inputs = replace(inputs, planner=planner)
    same_on_both_roads(lambda: call(inputs), [inputs.out_buffer], device, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_are_the_same_on_both_roads(dtype, offset, device, monkeypatch):
    def rows(*shape):
        flat = torch.randn(offset + shape[0] * shape[1], device=device).to(dtype)
        return flat[offset:].view(shape)

    x, residual, out = rows(7, 512), rows(7, 512), rows(7, 512)
    weight = torch.randn(512, device=device, dtype=dtype)
    same_on_both_roads(
        lambda: rms_norm(x, weight, 1e-5, out=out), [out], device, monkeypatch
    )
    same_on_both_roads(
        lambda: rms_norm(
            x, weight, 1e-5, residual=residual, out=x, residual_out=residual
        ),
        [x, residual],
        device,
        monkeypatch,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_cache_writes_are_the_same_on_both_roads(offset, device, monkeypatch):
    def rows(*shape):
        size = torch.Size(shape).numel()
        flat = torch.randn(offset + size, device=device).to(torch.bfloat16)
        return flat[offset:].view(shape)

    key, value = rows(9, 2, 64), rows(9, 2, 64)
    key_cache, value_cache = rows(4, 16, 2, 64), rows(4, 16, 2, 64)
    slots = torch.randperm(64, device=device)[:9]
    same_on_both_roads(
        lambda: write_kv_cache(key, value, key_cache, value_cache, slots),
        [key_cache, value_cache],
        device,
        monkeypatch,
    )


@pytest.mark.gpu
def test_a_graph_captures_direct_launches(device):
    case = Case(1, ((1, 40), (1, 700), (20, 33)), heads=(8, 2))
    inputs = make_inputs(case, device)
    inputs = replace(inputs, planner=make_planner(case, device))
    expected = call(inputs).clone()
    call(inputs)
    stream = torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call(inputs)
    inputs.out.zero_()
    graph.replay()
    rows = slice(case.num_tokens)
    assert torch.equal(bits(inputs.out[rows]), bits(expected[rows]))
