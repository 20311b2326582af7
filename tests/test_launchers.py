# SPDX-License-Identifier: Apache-2.0
"""Launchers of Triton 3.6 are built where kernels are compiled, not where they run.

The Triton at hand may have none, so a small stand-in does what 3.6 does: by Triton's
own cache and compiler, and linked to CUDA's library, which no test machine has to have.
"""

import hashlib
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from triton.runtime import build
from triton.runtime.cache import get_cache_manager

from portable_backend.device import DeviceInfo
from portable_backend.warmup import launchers

GPU = DeviceInfo.for_arch("sm90", 132)
DRIVER = "triton.backends.nvidia.driver"
SOURCE = """
#include <Python.h>
int cuGetErrorString(int, const char **);
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "__triton_launcher"}};
PyMODINIT_FUNC PyInit___triton_launcher(void) {{
  cuGetErrorString(0, 0);  /* of {signature} */
  return PyModule_Create(&module);
}}
"""


class Driver(ModuleType):
    """Triton's, when it had launchers."""

    def __init__(self, source):
        super().__init__(DRIVER)
        self.__file__ = str(source)
        self.make_launcher = lambda src: SOURCE.format(
            signature=[*src.signature.values()]
        )
        self.library_dirs = self._no_library
        self.CudaLauncher = self.launcher

    def _no_library(self):
        raise AssertionError("libcuda.so cannot found!")  # Triton's words

    def launcher(self, src, metadata):
        text = self.make_launcher(src)
        name, suffix = "__triton_launcher", sysconfig.get_config_var("EXT_SUFFIX")
        cache = get_cache_manager(hashlib.sha256(text.encode()).hexdigest())
        path = cache.get_file(name + suffix)
        if path is None:
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder, "launcher.c")
                source.write_text(text)
                dirs, libraries = self.library_dirs(), ["libcuda.so.1"]
                file = build._build(name, str(source), folder, dirs, [], libraries, [])
                data = Path(file).read_bytes()
            path = cache.put(data, name + suffix, binary=True)
        return build._load_module_from_path(name, path).launch


def kernel(*types, metadata=None):
    src = SimpleNamespace(signature=dict(enumerate(types)))
    return SimpleNamespace(src=src, metadata=metadata or SimpleNamespace())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr(launchers, "_built", set())
    return folder


@pytest.fixture
def driver(cache, tmp_path, monkeypatch):
    source = tmp_path / "driver.py"
    source.write_text(SOURCE)
    module = Driver(source)
    monkeypatch.setitem(sys.modules, DRIVER, module)
    return module


@pytest.fixture
def loaded(monkeypatch):
    """Modules that were loaded, instead of loading them."""
    paths = []

    def load(name, path):
        paths.append(Path(path))
        return SimpleNamespace(launch=None)

    monkeypatch.setattr(build, "_load_module_from_path", load)
    return paths


def no_compiler(*_):
    raise subprocess.CalledProcessError(1, ["cc"])


def built(cache):
    return sorted(cache.glob("*/*.so"))


def test_a_launcher_is_built_and_not_loaded(cache, driver, loaded, monkeypatch):
    launchers.build_launcher(kernel("*fp32", "i32"), GPU)
    (file,) = built(cache)
    assert loaded == []
    assert b"libcuda.so.1" in file.read_bytes()  # is looked for when it is loaded

    # Whoever launches the kernel finds it, and needs no compiler.
    monkeypatch.setattr(build, "_build", no_compiler)
    driver.launcher(kernel("*fp32", "i32").src, None)
    assert loaded == [file]


def test_one_for_each_signature(cache, driver):
    for types in (("*fp32",), ("*fp32", "i32"), ("*fp32",), ("*bf16",)):
        launchers.build_launcher(kernel(*types), GPU)
    assert len(built(cache)) == 3


def test_what_is_there_is_not_built_again(cache, driver, monkeypatch):
    launchers.build_launcher(kernel("*fp32"), GPU)
    monkeypatch.setattr(launchers, "_built", set())  # as in another process
    monkeypatch.setattr(build, "_build", no_compiler)
    launchers.build_launcher(kernel("*fp32"), GPU)
    assert len(built(cache)) == 1
    assert len(launchers._built) == 1


def test_a_library_that_is_there_is_linked(cache, driver, monkeypatch):
    places = []

    def note(name, src, folder, library_dirs, *_):
        places.append(library_dirs)
        Path(folder, "built").write_bytes(b"launcher")
        return Path(folder, "built")

    monkeypatch.setattr(driver, "library_dirs", lambda: ["/its/place"])
    monkeypatch.setattr(build, "_build", note)
    launchers.build_launcher(kernel("*fp32"), GPU)
    assert places == [["/its/place"]]
    assert [file.read_bytes() for file in built(cache)] == [b"launcher"]


def test_a_compiler_that_fails_is_no_failure(cache, driver, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(build, "_build", no_compiler)
        launchers.build_launcher(kernel("*fp32"), GPU)
    assert built(cache) == []
    launchers.build_launcher(kernel("*fp32"), GPU)  # it is tried again
    assert len(built(cache)) == 1


def test_a_triton_without_launchers_builds_none(cache, driver):
    del driver.make_launcher
    launchers.build_launcher(kernel("*fp32"), GPU)
    assert built(cache) == []
