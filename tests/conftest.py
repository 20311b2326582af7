# SPDX-License-Identifier: Apache-2.0
"""Fixtures and options of the whole suite.

Without a GPU the kernels run in Triton's interpreter, which must be switched on before
triton is first imported: hence the environment is set while this file is imported.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Helper modules lie beside the tests, which import mode "importlib" does not see.
sys.path.insert(0, str(Path(__file__).parent))


def _gpu_count() -> int:
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


GPU_COUNT = _gpu_count()
if GPU_COUNT == 0:
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"
ON_GPU = GPU_COUNT > 0 and not INTERPRETING
if not INTERPRETING:
    # Tests that make a builder would compile two dozen kernels for it.
    os.environ.setdefault("PORTABLE_BACKEND_COMPILE_AHEAD", "off")


@pytest.fixture(autouse=True)
def no_chosen_configs() -> Iterator[None]:
    """What an engine of one test has chosen for norms serves no other test."""
    yield
    served = sys.modules.get("portable_backend.kernels.served")
    if served is not None and not served.is_default():
        served.forget()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernel cases")
    group.addoption(
        "--cases",
        type=int,
        default=330 if ON_GPU else 40,
        help="how many attention cases to draw (default: 330 on a GPU, else 40)",
    )
    group.addoption(
        "--case-seed",
        type=int,
        action="append",
        help="draw only the attention case with this seed; may be given repeatedly",
    )
    group.addoption(
        "--case-size",
        choices=("small", "large"),
        default="large" if ON_GPU else "small",
        help="lengths of the drawn cases (default: large on a GPU)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "drawn_case" in metafunc.fixturenames:
        from kernel_draws import draw_case

        option = metafunc.config.getoption
        seeds = option("--case-seed") or range(option("--cases"))
        cases = [draw_case(seed, size=option("--case-size")) for seed in seeds]
        metafunc.parametrize("drawn_case", cases, ids=[f"seed{s}" for s in seeds])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import_vllm = importlib.util.find_spec("vllm") is not None
    rocm = False
    if ON_GPU:
        import torch

        rocm = torch.version.hip is not None
    reasons = {
        "gpu": None if ON_GPU else "needs a GPU, and TRITON_INTERPRET unset",
        "rocm": None if rocm else "needs an AMD GPU",
        "vllm": None if import_vllm else "needs vLLM installed",
    }
    for item in items:
        for mark, reason in reasons.items():
            if reason and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device():
    """The device under test: xdist worker n gets GPU n, else the CPU."""
    import torch

    if not ON_GPU:
        return torch.device("cpu")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    device = torch.device("cuda", int(worker) % GPU_COUNT)
    torch.cuda.set_device(device)
    return device


@pytest.fixture
def fresh_cache_dir(tmp_path, monkeypatch):
    """An empty folder that Triton's and our own caches point to."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
    monkeypatch.setenv("PORTABLE_BACKEND_CACHE_DIR", str(folder / "portable"))
    return folder
