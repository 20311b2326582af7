# SPDX-License-Identifier: Apache-2.0
"""Imports point one way, and importing the package is free."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "portable_backend": ROOT / "portable_backend",
    "portable_backend.bench": ROOT / "portable_backend" / "bench",
    "portable_backend.commands": ROOT / "portable_backend" / "commands",
    "portable_backend.kernels": ROOT / "kernels",
    "portable_backend.warmup": ROOT / "warmup",
}
# Modules that know neither vLLM nor a kernel, by the layers that may use them.
LEAVES = ("portable_backend.errors", "portable_backend.device")
# The benchmarks' stopwatch and inputs, which the tuner measures with.
STOPWATCH = tuple(
    f"portable_backend.bench.{name}"
    for name in ("inputs", "results", "shapes", "timing")
)
# backend -> warmup -> stopwatch -> kernels -> (device, errors)
ALLOWED = {
    "leaf": {"leaf"},
    "kernels": {"kernels", "leaf"},
    "stopwatch": {"stopwatch", "kernels", "leaf"},
    "warmup": {"warmup", "stopwatch", "kernels", "leaf"},
    "backend": {"backend", "warmup", "stopwatch", "kernels", "leaf"},
}


def _modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.glob("*.py")):
            name = package if path.stem == "__init__" else f"{package}.{path.stem}"
            found[name] = path
    return found


MODULES = _modules()


def _layer(module: str) -> str:
    for layer in ("kernels", "warmup"):
        if f"{module}.".startswith(f"portable_backend.{layer}."):
            return layer
    if module in STOPWATCH:
        return "stopwatch"
    return "leaf" if module in LEAVES else "backend"


def _imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = {name for name in names if name in MODULES}
            found |= submodules or {node.module}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    layer = _layer(module)
    for target in _imports(MODULES[module]):
        if target == "portable_backend":
            continue  # the version
        if target.split(".")[0] == "portable_backend":
            assert _layer(target) in ALLOWED[layer], f"{module} imports {target}"


@pytest.mark.parametrize("module", [m for m in MODULES if _layer(m) != "backend"])
def test_vllm_is_imported_by_the_back_end_alone(module):
    targets = {target.split(".")[0] for target in _imports(MODULES[module])}
    assert "vllm" not in targets


@pytest.mark.parametrize("module", MODULES)
def test_hugging_faces_kernels_are_not_mistaken_for_ours(module):
    targets = {target.split(".")[0] for target in _imports(MODULES[module])}
    assert not targets & {"kernels", "warmup"}


def _loaded_after(code: str) -> set[str]:
    """Top-level packages that a new interpreter has loaded after running `code`."""
    code += "; import sys; print(*{m.split('.')[0] for m in sys.modules})"
    run = [sys.executable, "-P", "-c", code]
    result = subprocess.run(run, capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "portable_backend",
        "portable_backend.plugin",
        "portable_backend.settings",
        "portable_backend.device",
        "portable_backend.errors",
        "portable_backend.worker_extension",
        "portable_backend.bench",
        "portable_backend.bench.cli",
        "portable_backend.cli",
        "portable_backend.commands.tune",
        "portable_backend.commands.tune_progress",
        "portable_backend.kernels",
        "portable_backend.kernels.config",
        "portable_backend.warmup.archive",
        "portable_backend.warmup.digest",
        "portable_backend.warmup.lookup",
        "portable_backend.warmup.measuring_process",
        "portable_backend.warmup.spread",
        "portable_backend.warmup.tuner",
        "portable_backend.warmup.upkeep",
    ],
)
def test_light_modules_import_nothing_heavy(module):
    loaded = _loaded_after(f"import {module}")
    assert "portable_backend" in loaded
    assert not loaded & {
        "torch",
        "triton",
        "vllm",
        "numpy",
        "optuna",
        "sklearn",
        "ray",
        "rich",
    }
