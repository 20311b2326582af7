# SPDX-License-Identifier: Apache-2.0
"""Options, device and report of the kernel benchmarks.

Without a GPU they run tiny shapes in Triton's interpreter, which must be switched on
before triton is first imported: hence the environment is set while this is imported.
"""

import argparse
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") != "1"
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from portable_backend.bench import cold, environment, providers
from portable_backend.bench.dense import DENSE
from portable_backend.bench.norm import IMPLEMENTATIONS as NORM
from portable_backend.bench.results import OUR_NAMES
from portable_backend.bench.shape_lists import ATTENTION_LISTS, FAMILIES, NORM_LISTS

DEVICE = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else "cpu"
ATTENTION = [
    *(name for name in providers.ATTENTION if name not in providers.ON_REQUEST),
    *DENSE,
]
PROVIDERS = dict.fromkeys([*ATTENTION, *NORM])


def _names(known: Sequence[str], option: str, text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise pytest.UsageError(
            f"{option} must name some of {', '.join(known)}, got {', '.join(unknown)}"
        )
    return names


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return int(text)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernel benchmarks")
    default = ",".join(FAMILIES) if ON_GPU else "tiny"
    group.addoption(
        "--shape-lists",
        default=default,
        help=f"some of {', '.join(ATTENTION_LISTS)} (default: {default})",
    )
    group.addoption(
        "--providers",
        default=",".join(PROVIDERS),
        help="some of %(default)s (default: all)",
    )
    group.addoption(
        "--timed-calls",
        type=_count,
        default=30 if ON_GPU else 1,
        help="of each shape and provider (default: %(default)s)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Shapes outside, providers inside: inputs and oracle are made once for all."""
    lists, known = (
        (ATTENTION_LISTS, ATTENTION)
        if metafunc.definition.name == "test_attention"
        else (NORM_LISTS, list(NORM))
    )
    option = metafunc.config.getoption
    chosen = _names(list(PROVIDERS), "--providers", option("--providers"))
    shapes = {}
    for name in _names(list(lists), "--shape-lists", option("--shape-lists")):
        for shape in lists[name]():
            fields = " ".join(str(value) for value in shape.fields.values())
            shapes[f"{name}: {shape.name} {fields}"] = shape
    metafunc.parametrize("shape", list(shapes.values()), ids=list(shapes))
    metafunc.parametrize("provider", [name for name in known if name in chosen])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ON_GPU:
            item.add_marker(pytest.mark.benchmark(timer=cold.device_timer))


def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    found = environment.describe(torch.device(DEVICE), [])
    del found["command"]
    machine_info["portable"] = found


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(DEVICE)


@pytest.fixture(scope="session")
def absent(device: torch.device) -> dict[str, str]:
    """Providers that cannot run here, and why."""
    return providers.absent_here(device)


@pytest.fixture(scope="session")
def flush(device: torch.device) -> Any:
    """Called before each timed call."""
    return cold.L2Flush(device) if device.type == "cuda" else lambda: None


@pytest.fixture
def timed_calls(request: pytest.FixtureRequest) -> int:
    number: int = request.config.getoption("--timed-calls")
    return number


def _check(error: Any, limit: float, when: str) -> float:
    found = float(error())
    assert found <= limit, f"wrong {when}: relative error {found:.1e} > {limit:.0e}"
    return found


@pytest.fixture
def measure(benchmark: Any, flush: Any, timed_calls: int, device: torch.device) -> Any:
    """measure(shape, provider, call, refill, error, limit): check, time, check again.

    `call` runs the kernel, `refill` puts inputs back and outputs to NaN, and `error`
    compares the last call's output. What is wrong is never timed, and what was wrong
    after it was timed is not reported.
    """

    def run(
        shape: Any, provider: str, call: Any, refill: Any, error: Any, limit: float
    ) -> None:
        refill()
        call()
        found = _check(error, limit, "before it was timed")
        timed = call
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            refill()
            with torch.cuda.graph(graph):
                call()
            timed = graph.replay
        warm_up = 3 if device.type == "cuda" else 0
        left = warm_up + timed_calls

        def before() -> None:
            refill()
            flush()

        def after() -> None:
            nonlocal left
            left -= 1
            if not left:
                _check(error, limit, "after it was timed")

        benchmark.group = f"{shape.name} " + " ".join(map(str, shape.fields.values()))
        benchmark.extra_info |= {
            "provider": provider,
            "ours": provider in OUR_NAMES,
            "shape": {"name": shape.name, **shape.fields},
            "num_bytes": shape.num_bytes,
            "flops": getattr(shape, "flops", None),
            "error": found,
        }
        benchmark.pedantic(
            timed,
            setup=before,
            teardown=after,
            rounds=timed_calls,
            warmup_rounds=warm_up,
        )

    return run
