# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there: Triton's own dispatch and launchers, but nothing below.

The compiler is replaced by one that returns kernels without code, the C function that
would call the driver by one that records. So each recorded launch says which compiled
kernel would have run, and with which arguments. Triton 3.6 to 3.9, CUDA and HIP.
"""

import contextlib
import importlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"  # before triton is first imported

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from portable_backend.device import DeviceInfo
from portable_backend.kernels import _direct, attention

TARGETS = {"cuda": GPUTarget("cuda", 90, 32), "hip": GPUTarget("hip", "gfx942", 64)}
ARCHS = {"cuda": "sm90", "hip": "gfx942"}
_DRIVERS = {"cuda": "nvidia", "hip": "amd"}
# What the compiler says of a descriptor argument; the driver's encoder is a stub too.
_DESCRIPTOR = {
    "swizzle": 3, "elem_size": 2, "elem_type": 9, "block_size": [1, 1, 64, 64],
    "fp4_padded": False,
}  # fmt: skip


@dataclass
class Launched:
    """One launch as the driver would see it, pointers as numbers."""

    kernel: str
    function: int
    grid: tuple[int, int, int]
    stream: int
    metadata: tuple[int, ...]
    args: list[Any]
    specialised: dict[str, "Specialised"]  # by parameter


@dataclass
class Specialised:
    """What a kernel was compiled to assume of one argument."""

    kind: str
    constant: Any
    attributes: dict[str, Any]


class StubKernel(CompiledKernel):
    """What the compiler would return; its launcher is Triton's own."""

    numbers = itertools.count(1000)

    def __init__(self, src: Any, options: dict[str, Any], target: GPUTarget) -> None:
        self.src = src
        self.name = src.fn.__name__
        self.module, self._module_pid = None, None  # nothing to unload
        self.function = next(self.numbers)
        shared = 1000 + self.function
        described = [t for t in src.signature.values() if t.startswith("tensordesc")]
        self.metadata = SimpleNamespace(
            name=self.name, target=target, num_warps=options["num_warps"], num_ctas=1,
            shared=shared, warp_size=target.warp_size, launch_cooperative_grid=False,
            launch_pdl=False, global_scratch_size=0, global_scratch_align=1,
            profile_scratch_size=0, profile_scratch_align=1, instrumentation_mode="",
            tensordesc_meta=[_DESCRIPTOR for _ in described],
        )  # fmt: skip
        self.packed_metadata = (options["num_warps"], 1, shared)
        self._run = driver.active.launcher_cls(src, self.metadata)

    def _init_handles(self) -> None:
        pass


@dataclass
class StubGpu:
    """Records launches; `device` and `stream` are what torch would report."""

    platform: str
    device: int = 0
    stream: int = 77
    launches: list[Launched] = field(default_factory=list)
    kernels: dict[int, StubKernel] = field(default_factory=dict)
    dispatched: int = 0  # launches that took Triton's ordinary road
    recording: bool = True
    in_graph: bool = True  # so that parts are merged by a launch of their own

    def __post_init__(self) -> None:
        self.driver_module = importlib.import_module(
            f"triton.backends.{_DRIVERS[self.platform]}.driver"
        )
        self.launcher_cls: Any = getattr(
            self.driver_module,
            {"cuda": "CudaLauncher", "hip": "HIPLauncher"}[self.platform],
        )
        self.utils = SimpleNamespace(
            launch=self._launch,
            build_signature_metadata=lambda signature: bytes(len(signature)),
            fill_tma_descriptor=encode_descriptor,
            fill_tma_descriptor_tiled=encode_descriptor,
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
        )

    def record(self, call: Callable[[], Any]) -> list[Launched]:
        """What `call` launches."""
        self.launches.clear()
        call()
        return list(self.launches)

    # Triton's driver interface

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream + 1000 * device

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.platform]

    def compile(self, src: Any, target: Any = None, options: Any = None, **_: Any):
        kernel = StubKernel(src, options, target)
        self.kernels[kernel.function] = kernel
        return kernel

    def _launch(self, *args: Any) -> None:
        """The C function behind every launcher, whose arguments differ by version."""
        if not self.recording:
            return
        names = ("gridX", "gridY", "gridZ", "stream", "function")
        hip = self.platform == "hip"
        args = args[1:] if hip else args  # launch_cooperative_grid leads
        grid_x, grid_y, grid_z, stream, function = args[: len(names)]
        kernel = self.kernels[function]
        if isinstance(args[-1], tuple | list):  # 3.8 and later: arguments in one
            enter, leave = self._hooks(args[:-3])
            kernel_args = list(args[-1])
        else:
            start = self._first_argument(kernel)
            enter, leave = args[start - 2 : start]
            kernel_args = list(args[start:])
        for hook in (enter, leave):
            if hook is not None:
                hook(None)
        params = kernel.src.fn.params
        assert len(kernel_args) >= len(params)
        self.launches.append(
            Launched(
                kernel=kernel.name,
                function=function,
                grid=(grid_x, grid_y, grid_z),
                stream=stream,
                metadata=kernel.packed_metadata,
                args=[as_number(arg) for arg in kernel_args],
                specialised=specialisation_of(kernel),
            )
        )

    def _hooks(self, args: tuple[Any, ...]) -> tuple[Any, Any]:
        # CUDA: ..., launch_metadata, enter, exit, global scratch, profile scratch.
        # HIP: ..., enter, exit, warp size.
        return args[-3:-1] if self.platform == "hip" else args[-4:-2]

    def _first_argument(self, kernel: StubKernel) -> int:
        # 3.6. CUDA: grid, stream, function, cooperative, pdl, 2 scratches, 4 more.
        # HIP: grid, stream, function, profile scratch, 4 more.
        return 10 if self.platform == "hip" else 13


def encode_descriptor(address: int, *layout: Any) -> tuple[Any, ...]:
    return ("descriptor", address, *map(str, layout))


def as_number(arg: Any) -> Any:
    """Addresses instead of what has one."""
    return arg.data_ptr() if hasattr(arg, "data_ptr") else arg


def specialisation_of(kernel: StubKernel) -> dict[str, Specialised]:
    src = kernel.src
    return {
        param.name: Specialised(
            kind=src.signature[param.name],
            constant=src.constants.get((index,)),
            attributes={name: value for name, value in src.attrs.get((index,), ())},
        )
        for index, param in enumerate(src.fn.params)
    }


@contextlib.contextmanager
def stub_gpu(platform: str, *, num_units: int = 132) -> Iterator[StubGpu]:
    """CPU tensors look as if they lay on a GPU of `platform`."""
    gpu = StubGpu(platform)
    info = DeviceInfo.for_arch(ARCHS[platform], num_units)
    detect = classmethod(lambda cls, device: info)
    module = gpu.driver_module
    ordinary_run = JITFunction.run

    def run(*args: Any, **kwargs: Any) -> Any:
        gpu.dispatched += 1
        return ordinary_run(*args, **kwargs)

    replaced = [
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(DeviceInfo, "detect", detect),
        mock.patch.object(_direct, "_gpu_index", lambda device: 0),
        mock.patch.object(_direct, "ON_HIP", platform == "hip"),
        mock.patch.object(triton.compiler, "compile", gpu.compile),
        mock.patch.object(driver, "_active", gpu),
        mock.patch.object(attention, "capturing", lambda: gpu.in_graph),
    ]
    values: dict[str, Any]
    if hasattr(module, "make_launcher"):  # 3.6 writes a launcher in C
        launcher = SimpleNamespace(launch=gpu._launch)
        values = {
            "compile_module_from_src": lambda **_: launcher,
            "library_dirs": list,
            "_get_path_to_hip_runtime_dylib": lambda: "libamdhip64.so",
        }
    else:
        values = {
            "PyKernelArg": SimpleNamespace,
            "ARG_CONSTEXPR": 0,
            "ARG_KERNEL": 1,
            "ARG_TUPLE": 2,
        }
    replaced += [
        mock.patch.object(module, name, value, create=True)
        for name, value in values.items()
    ]
    with contextlib.ExitStack() as stack:
        for patch in replaced:
            stack.enter_context(patch)
        forget()
        stack.callback(forget)
        yield gpu


@contextlib.contextmanager
def launch_hook(hook: Callable[[Any], None]) -> Iterator[None]:
    """Triton calls `hook` before each launch, which closes the direct road."""
    chain = knobs.runtime.launch_enter_hook
    chain.add(hook)
    try:
        yield
    finally:
        chain.remove(hook)


def forget() -> None:
    """Drop every compiled kernel and all that was kept of it."""
    for name in ("decode", "kv_cache", "plan", "prefill", "rms_norm"):
        module = importlib.import_module(f"portable_backend.kernels.{name}")
        for value in vars(module).values():
            if isinstance(value, JITFunction):
                value.device_caches.clear()
            elif isinstance(value, _direct.Bindings):
                value.clear()
    _direct.gate_for.cache_clear()
