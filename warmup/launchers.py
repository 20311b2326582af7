# SPDX-License-Identifier: Apache-2.0
"""Launchers: C code that Triton 3.6 compiles besides a kernel, to launch it.

One for each signature, built where a kernel with it is first loaded: 0.3 s each, one
after the other, in the process that is to serve. Here whoever compiles the kernel
builds it into Triton's cache as well. Later versions of Triton have none.
"""

import contextlib
import importlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from triton.runtime import build

from portable_backend.device import DeviceInfo
from portable_backend.warmup.replacing import replaced_here

_DRIVERS = {"cuda": ("nvidia", "CudaLauncher"), "hip": ("amd", "HIPLauncher")}
_built: set[str] = set()  # by this process, or found


def build_launcher(compiled: Any, device: DeviceInfo) -> None:
    """Have the launcher of a kernel in Triton's cache; nothing is loaded.

    One that cannot be built is left to whoever launches the kernel, and says why.

    Args:
        compiled: Triton's CompiledKernel.
        device: that it was compiled for; need not be at hand, nor its driver.
    """
    name, launcher = _DRIVERS[device.platform]
    driver = importlib.import_module(f"triton.backends.{name}.driver")
    if not hasattr(driver, "make_launcher"):
        return
    descriptors = getattr(compiled.metadata, "tensordesc_meta", None)
    signature = f"{[*compiled.src.signature.values()]} {bool(descriptors)}"
    if signature in _built:
        return
    with contextlib.suppress(Exception), _unloaded(), _linked(driver):
        getattr(driver, launcher)(compiled.src, compiled.metadata)
        _built.add(signature)


@contextlib.contextmanager
def _unloaded() -> Iterator[None]:
    """What this thread builds is not loaded: that would take a GPU's driver."""
    module = SimpleNamespace(launch=None)
    with replaced_here(build, "_load_module_from_path", lambda name, path: module):
        yield


@contextlib.contextmanager
def _linked(driver: ModuleType) -> Iterator[None]:
    """Where CUDA's library is missing, as while an image is built, link a stand-in.

    Of a library its name is kept, and that is all: its functions are looked for when
    the launcher is loaded.
    """
    ordinary = getattr(driver, "library_dirs", None)
    if ordinary is None:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:

        def library_dirs() -> list[str]:
            try:
                found: list[str] = ordinary()
            except Exception:  # an assertion, or what ldconfig raises
                _write_stand_in(driver, Path(folder))
                return [folder]
            return found

        with replaced_here(driver, "library_dirs", library_dirs):
            yield


def _write_stand_in(driver: ModuleType, folder: Path) -> None:
    """With the functions that launchers call, since a linker may leave it out else."""
    text = Path(driver.__file__ or "").read_text()
    names = sorted(set(re.findall(r"\bcu[A-Z]\w+", text)))
    source = folder / "cuda.c"
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names))
    library = build._build("cuda", str(source), str(folder), [], [], [], [])
    Path(library).rename(folder / "libcuda.so.1")
