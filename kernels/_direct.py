# SPDX-License-Identifier: Apache-2.0
"""Launch compiled kernels by their handles, past Triton's dispatch.

`kernel[grid](...)` binds, specialises and looks up every argument: some 17 us of host
time where a kernel takes 40. From one call of a layer to the next only addresses and a
few numbers change. A `Launch` fixes the rest, takes the ordinary road once, and from
then on hands its arguments straight to the launcher of the kernel that came back.

The caller's side of the bargain: whatever Triton specialises on is fixed in the Launch
or part of the key under which the caller keeps it. That is every constant and compiler
option, dtypes, the device, `pointer_class` of each tensor, and each number that the
kernel does not list in do_not_specialize with its type annotated. Floats are passed as
Python floats.

Where Triton is not as known here, where launch hooks are set, and in the interpreter,
every launch takes the ordinary road. Triton's compile-time knobs count as they were at
the first launch.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

# How Triton 3.6 to 3.9 call a launcher, on CUDA and HIP: grid, stream, function, these,
# and then the kernel's arguments, constants included, in the order of its parameters.
_GRID_AND_FUNCTION = ["gridX", "gridY", "gridZ", "stream", "function"]
_METADATA_AND_HOOKS = [
    "kernel_metadata",
    "launch_metadata",
    "launch_enter_hook",
    "launch_exit_hook",
]
# What Triton 3.6 to 3.9 know of a pointer: divisible by 16; storage within 2 GB.
_POINTER_ATTRIBUTES = frozenset({"", "D", "S", "DS"})
_HIP_STORAGE_BYTES = 2**31 - 1
ON_HIP = torch.version.hip is not None


class Unknown(Exception):
    """Triton does something that this module was not written for."""


class Gate:
    """Whether kernels may be launched directly on one device now, and on what stream.

    Args:
        device: with its index, where it is a GPU; None never opens.
        platform: as in DeviceInfo.
    """

    __slots__ = ("_current_device", "_current_stream", "_index", "_runtime")

    def __init__(self, device: torch.device | None = None, platform: str = "") -> None:
        self._index: int | None = None
        if device is None or platform not in ("cuda", "hip"):
            return
        index = _gpu_index(device)
        if index is None:
            return
        try:
            from triton import knobs
            from triton.runtime import driver

            self._runtime: Any = knobs.runtime
            active = driver.active
            self._current_device: Callable[[], int] = active.get_current_device
            self._current_stream: Callable[[int], int] = active.get_current_stream
        except (ImportError, AttributeError, RuntimeError) as error:
            logger.debug("Every launch on %s goes through Triton: %s", device, error)
            return
        self._index = index

    def stream(self) -> int | None:
        """The current stream; None where launches must take the ordinary road."""
        index = self._index
        if index is None or self._current_device() != index:
            return None
        runtime = self._runtime
        for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
            # A chain without calls is no hook; anything else counts as one.
            if hook is not None and getattr(hook, "calls", True):
                return None
        return self._current_stream(index)


@functools.cache
def gate_for(device: torch.device, platform: str) -> Gate:
    """The gate of one device, made once."""
    return Gate(device, platform)


def _gpu_index(device: torch.device) -> int | None:
    return device.index if device.type == "cuda" else None


def pointer_class(tensor: torch.Tensor) -> int:
    """What Triton may specialise a pointer on, beside its dtype; 0 is usual."""
    unaligned = int(tensor.data_ptr() % 16 != 0)
    if not ON_HIP:
        return unaligned
    reach = getattr(tensor, "ptr_range", None)
    size = tensor.untyped_storage().size() if reach is None else reach()
    return unaligned + 2 * (size > _HIP_STORAGE_BYTES)


def pointer_classes(
    address_bits: int, tensors: tuple[torch.Tensor, ...]
) -> tuple[int, ...] | None:
    """The class of each tensor, whose addresses or'ed are given; None is usual."""
    if address_bits % 16 == 0 and not ON_HIP:
        return None
    return tuple(pointer_class(tensor) for tensor in tensors)


class Launch:
    """One kernel with all but addresses and unspecialised numbers fixed.

    Args:
        kernel: a @triton.jit function.
        constants: by name; they are its last parameters, in any order.
        options: for the compiler.
        gate: of the device it will run on.

    Attributes:
        encode: makes a direct launch's arguments of a pair of tensor descriptors, to be
            kept by the caller; set once `ready`.
        ready: the kernel has been compiled, and launches may be direct.
    """

    __slots__ = (
        "_call", "_compiled", "_constants", "_gate", "_kernel", "_options", "_refused",
        "encode", "ready",
    )  # fmt: skip

    def __init__(
        self,
        kernel: Any,
        constants: dict[str, Any],
        options: dict[str, Any],
        gate: Gate,
    ) -> None:
        self._kernel = kernel
        self._constants = constants
        self._options = options
        self._gate = gate
        self._refused = False
        self.encode: Encode = tuple
        self.ready = False

    def __call__(
        self, stream: int | None, grid_x: int, grid_y: int, args: tuple[Any, ...]
    ) -> None:
        """Launch on a grid of grid_x times grid_y programs.

        Args:
            stream: from the gate, once `ready`; None takes the ordinary road.
            args: the kernel's arguments but for the constants. Tensors and descriptors
                on the ordinary road; their addresses, and what `encode` made of
                descriptors, on the direct one.
        """
        if stream is None:
            self._dispatch((grid_x, grid_y), args)
        else:
            self._call(grid_x, grid_y, stream, args)

    def _dispatch(self, grid: tuple[int, int], args: tuple[Any, ...]) -> None:
        compiled = self._kernel[grid](*args, **self._constants, **self._options)
        if self.ready or self._refused or self._gate.stream() is None:
            return
        try:
            self._keep(compiled, args)
        except (Unknown, AttributeError, LookupError, TypeError, ValueError) as error:
            self._refused = True
            name = getattr(self._kernel, "__name__", self._kernel)
            logger.debug("%s always goes through Triton: %s", name, error)

    def _keep(self, compiled: Any, args: tuple[Any, ...]) -> None:
        kernel = self._kernel
        if kernel.pre_run_hooks:
            raise Unknown("the kernel has hooks of its own")
        names = kernel.arg_names[len(args) :]
        if set(names) != set(self._constants):
            raise Unknown(f"constants {sorted(self._constants)} are not the last ones")
        if not isinstance(compiled, _compiled_kernel_type()):
            raise Unknown(f"a launch returned {type(compiled).__name__}")
        _check_specialisation(kernel, args, self._constants)
        run: Any = compiled.run
        launcher: Any = type(run)
        _check_launcher(launcher)
        function = compiled.function
        if not isinstance(function, int):
            raise Unknown(f"the function is a {type(function).__name__}")
        self._compiled = compiled  # unloads its binary when it goes
        tail = tuple(self._constants[name] for name in names)
        past_launcher = _c_function_call(compiled, args, tail)
        if past_launcher is None:
            self._call = _launcher_call(compiled, tail)
        else:
            self._call, self.encode = past_launcher
        self.ready = True


Caller = Callable[[int, int, int, tuple[Any, ...]], None]
Encode = Callable[[tuple[Any, Any]], tuple[Any, ...]]


def _launcher_call(compiled: Any, tail: tuple[Any, ...]) -> Caller:
    """Through Triton's launcher object."""
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata

    def call(grid_x: int, grid_y: int, stream: int, args: tuple[Any, ...]) -> None:
        run(
            grid_x, grid_y, 1, stream, function, packed, None, None, None, *args, *tail
        )  # fmt: skip

    return call


def _c_function_call(
    compiled: Any, args: tuple[Any, ...], tail: tuple[Any, ...]
) -> tuple[Caller, Encode] | None:
    """Past the launcher object, to the C function that it calls; None if unknown.

    The object asks for scratch memory, of which these kernels have none, and encodes
    descriptors anew at each launch. Here callers encode and keep them.
    """
    run = compiled.run
    if type(run).__name__ != "CudaLauncher" or getattr(run, "gsan_enabled", False):
        return None
    if run.global_scratch_size or run.profile_scratch_size or run.num_ctas != 1:
        return None
    launch, encode = _unwrapped(compiled, args)
    if launch is None or encode is None:
        return None
    function, packed = compiled.function, compiled.packed_metadata
    flags = (run.launch_cooperative_grid, run.launch_pdl)
    if hasattr(run, "kernel_signature"):  # Triton 3.8 and 3.9
        annotations, signature = run.arg_annotations, run.kernel_signature

        def call(x: int, y: int, stream: int, args: tuple[Any, ...]) -> None:
            launch(
                x, y, 1, stream, function, *flags, packed, None, None, None, None,
                None, annotations, signature, (*args, *tail),
            )  # fmt: skip

    else:  # Triton 3.6

        def call(x: int, y: int, stream: int, args: tuple[Any, ...]) -> None:
            launch(
                x, y, 1, stream, function, *flags, None, None, packed, None, None,
                None, *args, *tail,
            )  # fmt: skip

    return call, encode


def _unwrapped(
    compiled: Any, args: tuple[Any, ...]
) -> tuple[Any, Encode] | tuple[None, None]:
    """The C function, and what makes its arguments of descriptors; or (None, None).

    Triton wraps the function of a kernel with descriptors in one that encodes them.
    """
    launch = compiled.run.launch
    places = [i for i, arg in enumerate(args) if hasattr(arg, "block_shape")]
    if not places:
        return launch, tuple
    names = getattr(getattr(launch, "__code__", None), "co_freevars", ())
    module = sys.modules[type(compiled.run).__module__]
    encode: Any = getattr(module, "make_tensordesc_arg", None)
    layouts: Any = getattr(compiled.metadata, "tensordesc_meta", None)
    first = places[0]
    known = "launcher" in names and encode is not None and layouts
    if not known or places != [first, first + 1] or len(layouts) != 2:
        return None, None
    unused = (None,) * (len(inspect.signature(encode).parameters) - 2)

    def encode_pair(pair: tuple[Any, Any]) -> tuple[Any, ...]:
        return tuple(
            argument
            for descriptor, layout in zip(pair, layouts, strict=True)
            for argument in encode(descriptor, layout, *unused)
        )

    function = launch.__closure__[names.index("launcher")].cell_contents
    return function, encode_pair


@functools.cache
def _compiled_kernel_type() -> Any:
    from triton.compiler import CompiledKernel

    return CompiledKernel


@functools.cache
def _check_launcher(launcher: Any) -> None:
    """Raise Unknown unless `launcher` is called as we call it."""
    params = list(inspect.signature(launcher.__call__).parameters.values())[1:]
    names = [p.name for p in params[:-1]]
    known = (_GRID_AND_FUNCTION, _GRID_AND_FUNCTION + _METADATA_AND_HOOKS)
    if names not in known or params[-1].kind != inspect.Parameter.VAR_POSITIONAL:
        raise Unknown(f"{launcher.__name__} takes {names}")


def _check_specialisation(
    kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Raise Unknown if Triton tells pointers apart by more than `pointer_class`."""
    from triton.runtime import driver

    *_, bind = kernel.device_caches[driver.active.get_current_device()]
    _, specialisation, _ = bind(*args, **constants)
    for kind, attribute in specialisation[: len(args)]:
        if kind.startswith("*") and attribute not in _POINTER_ATTRIBUTES:
            raise Unknown(f"a pointer is specialised as {attribute!r}")


class Bindings(dict[Any, Any]):
    """What was checked and prepared for a signature; forgets all when it is full."""

    def __init__(self, limit: int = 4096) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= self._limit:
            self.clear()
        super().__setitem__(key, value)


def cdiv(a: int, b: int) -> int:
    """Quotient rounded up; triton.cdiv takes 2 us."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Least power of two that is at least n, for n > 0; triton's takes 2 us."""
    return 1 << (n - 1).bit_length()
