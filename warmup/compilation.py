# SPDX-License-Identifier: Apache-2.0
"""Compile what a config launches, without launching it and without a GPU.

The public functions are called on tensors without storage while launches are recorded.
A recorded launch is then handed to Triton's own warm-up, with a driver that only names
the target: signature, specialisation and options come from the code that a real launch
takes, so what is compiled here into Triton's cache is found there by a real launch.

Recording and compiling replace parts of Triton and of the kernels. Only the thread that
asked for it notices: others meanwhile launch and compile as ever.
"""

import contextlib
import functools
import importlib
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from portable_backend.device import DeviceInfo, interpreting
from portable_backend.errors import UnsupportedError, bad_argument
from portable_backend.kernels import plan
from portable_backend.kernels._direct import Bindings
from portable_backend.kernels.attention import (
    AttentionOptions,
    PagedBatch,
    paged_attention,
)
from portable_backend.kernels.config import KernelConfig
from portable_backend.kernels.kv_cache import write_kv_cache
from portable_backend.kernels.rms_norm import rms_norm
from portable_backend.warmup.kernel_specs import DTYPES, spec_of
from portable_backend.warmup.launchers import build_launcher
from portable_backend.warmup.machine_code import read_code
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.replacing import REPLACING, replaced, replaced_here
from portable_backend.warmup.resources import Readout, programs_per_unit

# The kernels whose names in the source are not those of keys.
_NAMES = {"kv_cache": "write_kv_cache"}
# A kv_cache key leaves the block size open; the kernel is compiled for each.
_KV_BLOCK_SIZES = (16, 64)
_MAX_DECODE_QUERY_LEN = 8  # AttentionPlanner's default
ordinary_run: Any = getattr(JITFunction, "run", None)


@dataclass(frozen=True, eq=False)
class KernelLaunch:
    """A launch as it would have been.

    Attributes:
        kernel: the function's name without its underscores and "kernel".
        function: the @triton.jit function.
        args, kwargs: as for a call of it, tensors without storage among them.
    """

    kernel: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments by parameter; compiler options, too, by their name."""
        names = [param.name for param in self.function.params]
        return dict(zip(names, self.args, strict=False)) | self.kwargs


class _TargetDriver:
    """What Triton asks of a driver before anything is loaded, for one thread.

    Other threads get the driver in whose place this one stands, as does everybody once
    `end` has been called: they may have kept a reference.
    """

    def __init__(self, device: DeviceInfo, ordinary: Any) -> None:
        self._device = device
        self._ordinary = ordinary  # None: nobody has asked for one yet
        self._thread: int | None = threading.get_ident()

    def end(self) -> None:
        self._thread = None

    def get_current_device(self) -> Any:
        if self._is_asked_here():
            return self._device.arch  # a name for each target's compiled kernels
        return self._real().get_current_device()

    def get_current_stream(self, device: Any) -> Any:
        if self._is_asked_here():
            return 0
        return self._real().get_current_stream(device)

    def get_current_target(self) -> Any:
        if self._is_asked_here():
            return target_of(self._device)
        return self._real().get_current_target()

    def __getattr__(self, name: str) -> Any:
        # A kernel that is collected in this thread unloads its module.
        if self._is_asked_here() and self._ordinary is None:
            raise AttributeError(name)
        return getattr(self._real(), name)

    def _is_asked_here(self) -> bool:
        return self._thread == threading.get_ident()

    def _real(self) -> Any:
        return driver.default if self._ordinary is None else self._ordinary


def target_of(device: DeviceInfo) -> Any:
    """Triton's name for a device's architecture.

    Raises:
        UnsupportedError: the interpreter, for which nothing is compiled.
    """
    if device.platform == "interpreter":
        raise UnsupportedError("the interpreter compiles nothing")
    warp_size = device.limits.warp_size
    if device.platform == "cuda":
        return GPUTarget("cuda", int(device.arch.removeprefix("sm")), warp_size)
    return GPUTarget("hip", device.arch, warp_size)


@contextlib.contextmanager
def recording(device: DeviceInfo) -> Iterator[list[KernelLaunch]]:
    """Launches of this thread join the list instead, as they would be for `device`."""
    launches: list[KernelLaunch] = []

    def record(
        function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any
    ) -> None:
        launches.append(KernelLaunch(name_of(function), function, args, kwargs))

    with (
        compiler_for(device),
        replaced_here(DeviceInfo, "detect", lambda cls, of: device),
        replaced_here(JITFunction, "run", record),
    ):
        for name in ("kv_cache", "rms_norm"):
            _forget_lookups(importlib.import_module(f"portable_backend.kernels.{name}"))
        yield launches


def name_of(function: Any) -> str:
    """The name of a kernel's function without what all of them share."""
    name: str = function.__name__
    return name.removeprefix("_").removesuffix("_kernel")


@contextlib.contextmanager
def in_graph(captured: bool) -> Iterator[None]:
    """Attention looks captured into a graph, or not, to this thread."""
    module = importlib.import_module("portable_backend.kernels.attention")
    with replaced_here(module, "capturing", lambda: captured):
        yield


@contextlib.contextmanager
def compiler_for(device: DeviceInfo) -> Iterator[None]:
    """Triton compiles for `device` in this thread, whatever is at hand.

    Raises:
        UnsupportedError: in the interpreter.
    """
    if interpreting():
        raise UnsupportedError(
            "Triton's interpreter compiles nothing; unset TRITON_INTERPRET before "
            "Python starts"
        )
    with REPLACING:
        target = _TargetDriver(device, vars(driver)["_active"])
        with replaced(driver, "_active", target):
            try:
                yield
            finally:
                target.end()


def _forget_lookups(module: ModuleType) -> None:
    """Drop what a module cached for another architecture."""
    for value in vars(module).values():
        if isinstance(value, Bindings):
            value.clear()
        elif hasattr(value, "cache_clear"):
            value.cache_clear()


def distinct(
    launches: Iterable[KernelLaunch], device: DeviceInfo
) -> list[KernelLaunch]:
    """Those of the launches that need a binary of their own, in order."""
    found: dict[str, KernelLaunch] = {}
    with compiler_for(device):
        for launch in launches:
            found.setdefault(_identity(launch, device), launch)
    return list(found.values())


def identity_of(launch: KernelLaunch, device: DeviceInfo) -> str:
    """The same for launches that share a binary: kernel, specialisation, options."""
    with compiler_for(device):
        return _identity(launch, device)


def _identity(launch: KernelLaunch, device: DeviceInfo) -> str:
    *_, bind = launch.function.device_caches[device.arch]
    _, specialisation, options = bind(*launch.args, **launch.kwargs)
    return f"{launch.kernel} {specialisation} {options}"


def launches_of(
    key: TuningKey, config: KernelConfig, device: DeviceInfo
) -> list[KernelLaunch]:
    """What measuring `config` for `key` launches, each binary once.

    The key's own kernel comes first; the plan and the merge of attention's parts, at
    their defaults, follow.

    Raises:
        ValueError: the key is no kernel's, or the config does not fit it.
        UnsupportedError: in the interpreter.
    """
    spec_of(key)
    with recording(device) as launches:
        _CALLS[key.kernel](key.to_dict(), config, device)
    own = _NAMES.get(key.kernel, key.kernel)
    if all(launch.kernel != own for launch in launches):
        raise bad_argument(
            "key", f"one that launches {own}", str(key), "correct its sizes"
        )
    return sorted(distinct(launches, device), key=lambda launch: launch.kernel != own)


def new_tensor(*size: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without storage, which counts as 16-byte aligned."""
    return torch.empty(size, dtype=dtype, device="meta")


def _attend(fields: dict[str, Any], config: KernelConfig, device: DeviceInfo) -> None:
    dtype, head_size = DTYPES[fields["dtype"]], fields["head_size"]
    num_kv_heads, block_size = fields["num_kv_heads"], fields["block_size"]
    num_heads = num_kv_heads * fields["num_queries_per_kv"]
    num_seqs, query_len = fields["num_seqs"], fields["query_len"]
    no_context = bool(fields.get("no_context"))
    is_prefill = "no_context" in fields
    if is_prefill:
        # Shorter ones would take the decode kernel; the binary knows no length.
        query_len = max(query_len, _MAX_DECODE_QUERY_LEN + 1)
    seq_len = fields.get("seq_len") or fields["context_len"] + query_len
    num_tokens, num_blocks = num_seqs * query_len, -(-seq_len // block_size)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * query_len
    batch = PagedBatch(
        query_start_loc=new_tensor(num_seqs + 1, dtype=torch.int32),
        seq_lens=new_tensor(num_seqs, dtype=torch.int32),
        block_table=new_tensor(num_seqs, num_blocks, dtype=torch.int32),
        max_query_len=query_len,
        max_seq_len=seq_len,
        query_start_loc_cpu=starts,
        no_context=no_context,
    )
    defaults = plan.default_config(
        num_queries_per_kv=fields["num_queries_per_kv"],
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        block_size=block_size,
        device=device,
        kind=plan.StepKind.of(
            0 if is_prefill else num_seqs, no_context, is_prefill, query_len
        ),
        has_window=bool(fields["sliding_window"]),
    )
    name = "prefill" if is_prefill else "decode"
    pairs = new_tensor(
        num_seqs * num_blocks, 2, block_size, num_kv_heads, head_size, dtype=dtype
    )
    key_cache, value_cache = pairs.unbind(1)
    new = new_tensor(num_tokens, num_kv_heads, head_size, dtype=dtype)
    query = new_tensor(num_tokens, num_heads, head_size, dtype=dtype)
    for captured in (False, True):
        with in_graph(captured):
            paged_attention(
                query, key_cache, value_cache, batch,
                AttentionOptions(
                    scale=head_size**-0.5,
                    sliding_window=fields["sliding_window"] or None,
                ),
                out=torch.empty_like(query), key=new, value=new,
                config=replace(defaults, **{name: config}),
            )  # fmt: skip


def _norm(fields: dict[str, Any], config: KernelConfig, device: DeviceInfo) -> None:
    dtype, row_size = DTYPES[fields["dtype"]], fields["row_size"]
    x = new_tensor(fields["num_rows"], row_size, dtype=dtype)
    residual = torch.empty_like(x) if fields["fused_add"] else None
    weight = new_tensor(row_size, dtype=dtype)
    rms_norm(x, weight, 1e-6, residual=residual, config=config)


def _write(fields: dict[str, Any], config: KernelConfig, device: DeviceInfo) -> None:
    dtype, num_tokens = DTYPES[fields["dtype"]], fields["num_tokens"]
    heads = (fields["num_kv_heads"], fields["head_size"])
    new = new_tensor(num_tokens, *heads, dtype=dtype)
    slots = new_tensor(num_tokens, dtype=torch.int64)
    for block_size in _KV_BLOCK_SIZES:
        num_blocks = -(-num_tokens // block_size)
        pairs = new_tensor(num_blocks, 2, block_size, *heads, dtype=dtype)
        key_cache, value_cache = pairs.unbind(1)
        write_kv_cache(new, new, key_cache, value_cache, slots, config=config)


_CALLS: dict[str, Callable[[dict[str, Any], KernelConfig, DeviceInfo], None]] = {
    "prefill": _attend,
    "decode": _attend,
    "rms_norm": _norm,
    "kv_cache": _write,
}


def compile_config(key: TuningKey, config: KernelConfig, device: DeviceInfo) -> Readout:
    """Compile all that measuring `config` for `key` launches, into Triton's cache.

    Returns:
        What the key's own kernel takes; seconds are of all its binaries.

    Raises:
        ValueError, UnsupportedError: as launches_of; or whatever the compiler raises.
    """
    start = time.perf_counter()
    own, *others = launches_of(key, config, device)
    readout = compile_launch(own, device)
    for launch in others:
        _compile(launch, device)
    return replace(readout, seconds=time.perf_counter() - start)


def compile_parts(
    key: TuningKey, config: KernelConfig, device: DeviceInfo
) -> list[tuple[str, Readout]]:
    """As compile_config, but what every binary takes, by kernel; the key's own first.

    The seconds of each are its own.
    """
    names = {own: kernel for kernel, own in _NAMES.items()}
    return [
        (names.get(launch.kernel, launch.kernel), compile_launch(launch, device))
        for launch in launches_of(key, config, device)
    ]


def compile_launch(launch: KernelLaunch, device: DeviceInfo) -> Readout:
    """Compile one launch into Triton's cache; raises whatever the compiler raises."""
    start = time.perf_counter()
    return read_out(_compile(launch, device), device, start)


def _compile(launch: KernelLaunch, device: DeviceInfo) -> Any:
    with compiler_for(device):
        compiled = ordinary_run(
            launch.function, *launch.args, grid=(1,), warmup=True, **launch.kwargs
        )
    build_launcher(compiled, device)
    # Thousands are compiled one after the other; the cache on disk keeps them.
    forget_compiled([launch], device)
    return compiled


def forget_compiled(launches: Iterable[KernelLaunch], device: DeviceInfo) -> None:
    """Drop what Triton keeps of `device` for their functions, its compiler too."""
    for launch in launches:
        launch.function.device_caches.pop(device.arch, None)


def read_out(compiled: Any, device: DeviceInfo, start: float) -> Readout:
    """What a compiled kernel takes, from its metadata and its code.

    Args:
        compiled: Triton's CompiledKernel, not loaded.
        device: that it was compiled for.
        start: time.perf_counter() before it was compiled.
    """
    metadata, code = compiled.metadata, compiled.asm
    if "cubin" in code:
        used = _nvidia_usage(code["cubin"])
    else:
        used = _amd_usage(code["amdgcn"])
    tensor_columns = getattr(metadata, "tmem_size", None) or 0
    return Readout(
        shared_bytes=metadata.shared,
        **used,
        programs_per_unit=programs_per_unit(
            device,
            num_warps=metadata.num_warps,
            shared_bytes=metadata.shared,
            registers=used["registers"],
            tensor_columns=tensor_columns,
        ),
        num_warps=metadata.num_warps,
        tensor_columns=tensor_columns,
        seconds=time.perf_counter() - start,
        **read_code(code),
    )


@functools.cache
def _cuobjdump() -> Path | None:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return tool if tool.exists() else None


def _nvidia_usage(cubin: bytes) -> dict[str, int | None]:
    """Registers, and the stack, which only spills use, by cuobjdump."""
    tool = _cuobjdump()
    if tool is None:
        return {"registers": None, "spills": None}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        return {"registers": None, "spills": None}
    registers, stack = map(int, found.groups())
    return {"registers": registers, "spills": -(-stack // 4)}


def _amd_usage(assembly: str) -> dict[str, int | None]:
    """Registers, and those spilled, from the kernel's metadata."""

    def field(name: str) -> int | None:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        return int(found.group(1)) if found else None

    return {
        "registers": field("vgpr_count"),
        "spills": field("vgpr_spill_count"),
        "scalar_registers": field("sgpr_count"),
        "accumulator_registers": field("agpr_count"),
    }
