# SPDX-License-Identifier: Apache-2.0
"""One compiled kernel as plain data: what Triton is told, and nothing of a launch.

A `Binary` is read off a recorded launch, by the code of Triton that a real launch
takes. It travels as JSON to whoever compiles it, and leads to the same entry of
Triton's cache as that launch.
"""

import base64
import hashlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key
from triton.runtime.jit import JITFunction

from portable_backend.device import DeviceInfo
from portable_backend.errors import bad_argument
from portable_backend.warmup.compilation import (
    KernelLaunch,
    compiler_for,
    distinct,
    forget_compiled,
    ordinary_run,
    target_of,
)
from portable_backend.warmup.launchers import build_launcher
from portable_backend.warmup.replacing import replaced_here

_MODULES = "portable_backend.kernels."
# What is left out where binaries are compared: paths of the installation.
_PATHS = "extern_libs"


@dataclass(frozen=True)
class Binary:
    """What Triton compiles.

    Attributes:
        module, function: where the @triton.jit function is.
        signature: (parameter, type) of each.
        constants: (path, value) of compile-time constants; a path is where among the
            parameters.
        attributes: (path, what is assumed of that argument).
        options: (name, value) for the compiler.
    """

    module: str
    function: str
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    attributes: tuple[tuple[tuple[int, ...], Any], ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def kernel(self) -> str:
        """The function's name without its underscores and "kernel"."""
        return self.function.removeprefix("_").removesuffix("_kernel")

    @property
    def identity(self) -> str:
        """The same for binaries that are compiled alike, wherever Triton lies."""
        options = [pair for pair in self.options if pair[0] != _PATHS]
        return repr((self.function, self.signature, self.constants, self.attributes,
                     options))  # fmt: skip

    @property
    def parameters(self) -> dict[str, Any]:
        """Its constants by name."""
        names = [name for name, _ in self.signature]
        return {names[path[0]]: value for path, value in self.constants}

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__annotations__}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Binary":
        """Read what `to_dict` gave, also after it was JSON."""
        return cls(**{name: _tuples(data[name]) for name in cls.__annotations__})

    def __str__(self) -> str:
        constants = " ".join(f"{n}={v}" for n, v in self.parameters.items())
        return f"{self.kernel}[{constants}]"


def _tuples(value: Any) -> Any:
    """Lists, as JSON has them, are tuples in all that Triton is told."""
    if isinstance(value, list | tuple):
        return tuple(map(_tuples, value))
    return value


class _Told(Exception):
    """Ends a compilation where Triton has said what it would compile."""

    def __init__(self, binary: Binary) -> None:
        self.binary = binary


def binaries_of_launches(
    launches: Sequence[KernelLaunch], device: DeviceInfo
) -> dict[Binary, list[KernelLaunch]]:
    """What launches need compiled for `device`, in order.

    Returns:
        For each binary its launches, one of each kind that Triton tells apart.

    Raises:
        UnsupportedError: in the interpreter.
    """
    found: dict[Binary, list[KernelLaunch]] = {}

    def tell(src: Any, target: Any = None, options: Any = None, **_: Any) -> None:
        raise _Told(binary_of_source(src, options))

    with compiler_for(device), replaced_here(triton.compiler, "compile", tell):
        forget_compiled(launches, device)  # its compiler would be another one
        try:
            for launch in distinct(launches, device):
                binary = _told(launch)
                found.setdefault(binary, []).append(launch)
        finally:
            forget_compiled(launches, device)
    return found


def _told(launch: KernelLaunch) -> Binary:
    try:
        ordinary_run(
            launch.function, *launch.args, grid=(1,), warmup=True, **launch.kwargs
        )
    except _Told as told:
        return told.binary
    raise AssertionError(f"{launch.kernel} was compiled unasked")


def binary_of_source(src: Any, options: Mapping[str, Any]) -> Binary:
    """What Triton compiles of an ASTSource with such options."""
    return Binary(
        module=src.fn.module,
        function=src.fn.__name__,
        signature=_tuples(list(src.signature.items())),
        constants=_tuples(sorted((tuple(k), v) for k, v in src.constants.items())),
        attributes=_tuples(sorted((tuple(k), v) for k, v in src.attrs.items())),
        options=_tuples(sorted(options.items())),
    )


def source_of(binary: Binary) -> Any:
    """The ASTSource of a binary.

    Raises:
        ValueError: it is none of this package's kernels.
    """
    found = None
    if binary.module.startswith(_MODULES):
        module = importlib.import_module(binary.module)
        found = getattr(module, binary.function, None)
    if not isinstance(found, JITFunction):
        raise bad_argument(
            "binary",
            "of a kernel of this package",
            f"{binary.module}.{binary.function}",
            "enumerate it anew",
        )
    signature, constants = dict(binary.signature), dict(binary.constants)
    attributes = {
        path: [list(pair) for pair in value] for path, value in binary.attributes
    }
    return ASTSource(found, signature, constants, attributes)


def compile_binary(binary: Binary, device: DeviceInfo) -> int:
    """Compile into Triton's cache; raises whatever the compiler raises.

    Returns:
        Shared memory of a program, in bytes.
    """
    with compiler_for(device):
        compiled = triton.compile(
            source_of(binary), target=target_of(device), options=dict(binary.options)
        )
    build_launcher(compiled, device)
    return int(compiled.metadata.shared)


def cache_entry(binary: Binary, device: DeviceInfo) -> tuple[str, str]:
    """(folder, name of the group's file) of a binary in Triton's cache."""
    source = source_of(binary)
    with compiler_for(device):
        backend = make_backend(target_of(device))
        options = backend.parse_options(dict(binary.options))
        key = get_cache_key(source, backend, options, get_cache_invalidating_env_vars())
    digest = hashlib.sha256(key.encode()).hexdigest()
    folder = base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")
    return folder, f"__grp__{source.name[:150]}.json"
