# SPDX-License-Identifier: Apache-2.0
"""A digest of kernel code that changes when, and only when, its meaning does.

It covers the syntax tree of the given functions, the functions that they call and the
constants that they read. Comments, docstrings, layout and line numbers are left out, as
is what the toolchain's own packages provide: a record names their versions.
"""

import ast
import hashlib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from portable_backend.errors import RecordError

_FOREIGN = frozenset({"triton", "torch", "numpy"}) | sys.stdlib_module_names
# What can be launched with a tuned config: its module and its jit functions.
KERNELS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "prefill": ("portable_backend.kernels.prefill", ("_prefill_kernel",)),
    "decode": ("portable_backend.kernels.decode", ("_decode_kernel",)),
    "merge": ("portable_backend.kernels.decode", ("_merge_kernel",)),
    "rms_norm": ("portable_backend.kernels.rms_norm", ("_rms_norm_kernel",)),
    "kv_cache": ("portable_backend.kernels.kv_cache", ("_write_kv_cache_kernel",)),
}


def kernel_digest(functions: Iterable[Any]) -> str:
    """Digest of functions, or of `triton.jit` objects (anything with a `.fn`).

    Raises:
        ValueError: a function's source cannot be read.
    """
    texts: dict[int, str] = {}
    pending = [_plain(function) for function in functions]
    while pending:
        function = pending.pop()
        if id(function) in texts:
            continue
        tree = _tree(function)
        constants = []
        for name, value in _reads(tree, function):
            callee = _plain(value)
            if isinstance(callee, FunctionType):
                if not _is_foreign(callee.__module__):
                    pending.append(callee)
            elif (text := _constant(value)) is not None:
                constants.append(f"{name}={text}")
        texts[id(function)] = "\n".join([_canonical(tree), *sorted(set(constants))])
    if not texts:
        raise ValueError("functions must hold at least one function, got none")
    data = "\n\n".join(sorted(set(texts.values())))
    return f"sha256:{hashlib.sha256(data.encode()).hexdigest()}"


def current_digests(
    kernels: Mapping[str, tuple[str, tuple[str, ...]]] = KERNELS,
) -> dict[str, str]:
    """Digest of each kernel as installed; imports Triton.

    Raises:
        RecordError: the kernels cannot be imported here.
    """
    digests = {}
    for kernel, (module_name, names) in kernels.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise RecordError(
                f"the digest of kernel {kernel} needs {module_name}, "
                f"which does not import: {error}"
            ) from error
        digests[kernel] = kernel_digest(getattr(module, name) for name in names)
    return digests


def _plain(value: Any) -> Any:
    """The Python function within decorators, jit objects included."""
    for _ in range(10):
        if isinstance(value, ModuleType):
            break
        inner = getattr(value, "fn", None) or getattr(value, "__wrapped__", None)
        if not callable(inner):
            break
        value = inner
    return value


def _is_foreign(module: str | None) -> bool:
    return (module or "").split(".")[0] in _FOREIGN


def _tree(function: Callable[..., Any]) -> ast.FunctionDef:
    try:
        source = textwrap.dedent(inspect.getsource(function))
        node = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError) as error:
        raise ValueError(
            f"the source of {function!r} cannot be read: {error}"
        ) from None
    if not isinstance(node, ast.FunctionDef):
        raise ValueError(f"{function!r} must be a function that was written with def")
    return node


def _reads(tree: ast.FunctionDef, function: Any) -> Iterator[tuple[str, Any]]:
    """Globals that the function reads, `module.name` resolved; not its decorators."""
    scope = dict(function.__globals__)
    for name, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        try:
            scope[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    arguments = tree.args
    local = {a.arg for a in ast.walk(arguments) if isinstance(a, ast.arg)}
    for part in [arguments, *tree.body]:
        for node in ast.walk(part):
            found = _resolve(node, scope, local)
            if found is not None:
                yield found


def _resolve(
    node: ast.AST, scope: Mapping[str, Any], local: set[str]
) -> tuple[str, Any] | None:
    if isinstance(node, ast.Name):
        if node.id in scope and node.id not in local:
            return node.id, scope[node.id]
        return None
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value, scope, local)
        if owner is None or not isinstance(owner[1], ModuleType):
            return None
        if _is_foreign(owner[1].__name__) or not hasattr(owner[1], node.attr):
            return None
        return f"{owner[0]}.{node.attr}", getattr(owner[1], node.attr)
    return None


def _constant(value: Any) -> str | None:
    """Text of a compile-time constant; None for what is none, such as a module."""
    if type(value).__name__ == "constexpr":
        value = value.value
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(str(_constant(item)) for item in value)})"
    if type(value).__name__ == "dtype":
        return str(value)
    return None


def _canonical(node: Any) -> str:
    """The syntax tree as text, the same for every Python version that parses it."""
    if isinstance(node, list):
        return f"[{','.join(_canonical(item) for item in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = []
    for name, value in ast.iter_fields(node):
        if name in ("ctx", "kind", "type_comment", "type_params") or value in (
            None,
            [],
        ):
            if not (isinstance(node, ast.Constant) and name == "value"):
                continue
        elif name == "body" and isinstance(value, list):
            value = [item for item in value if not _is_docstring(item)]
        parts.append(f"{name}={_canonical(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
