# SPDX-License-Identifier: Apache-2.0
"""Launch parameters as plain data.

A `KernelConfig` says how one kernel is compiled and tiled. It never changes what is
computed, only how fast, so any config may serve any input its limits allow.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Value = int | bool | str | None
# Options that only one platform's compiler knows; the other drops them.
PLATFORM_OPTIONS = {
    "cuda": frozenset({"maxnreg", "launch_pdl"}),
    "hip": frozenset({"waves_per_eu", "matrix_instr_nonkdim", "kpack"}),
    "interpreter": frozenset(),
}
_COMMON_OPTIONS = frozenset({"num_warps", "num_stages"})


@dataclass(frozen=True)
class KernelConfig(Mapping[str, Value]):
    """Immutable mapping of launch parameters, hashable, in fixed order.

    Upper-case names are compile-time constants of the kernel (`BLOCK_N`); lower-case
    names are compiler options (`num_warps`).
    """

    items_: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, **params: Value) -> "KernelConfig":
        return cls.from_dict(params)

    @classmethod
    def from_dict(cls, params: Mapping[str, Value]) -> "KernelConfig":
        """Build from a flat mapping, as a tuning record stores it.

        Raises:
            ValueError: a name is neither upper case nor a known compiler option, or
                a value is not a plain number, string or bool.
        """
        known = _COMMON_OPTIONS.union(*PLATFORM_OPTIONS.values())
        for name, value in params.items():
            if not name.isupper() and name not in known:
                raise ValueError(
                    f"config parameter {name} is neither a kernel constant (upper "
                    f"case) nor one of the compiler options {', '.join(sorted(known))}"
                )
            if not isinstance(value, int | bool | str | None):
                raise ValueError(
                    f"config parameter {name} must be an int, bool, str or None, "
                    f"got {value!r}"
                )
        return cls(tuple(sorted(params.items())))

    def to_dict(self) -> dict[str, Value]:
        return dict(self.items_)

    def replace(self, **params: Value) -> "KernelConfig":
        return self.from_dict(self.to_dict() | params)

    def options(self, platform: str) -> dict[str, Any]:
        """Compiler options that `platform` ("cuda", "hip", "interpreter") knows."""
        if platform == "interpreter":
            return {}
        allowed = _COMMON_OPTIONS | PLATFORM_OPTIONS[platform]
        return {k: v for k, v in self.items_ if k in allowed and v is not None}

    def __getitem__(self, name: str) -> Any:
        for key, value in self.items_:
            if key == name:
                return value
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (k for k, _ in self.items_)

    def __len__(self) -> int:
        return len(self.items_)


@dataclass(frozen=True)
class AttentionConfig:
    """One config for each kernel that `paged_attention` can launch."""

    prefill: KernelConfig
    decode: KernelConfig
    merge: KernelConfig

    def to_dict(self) -> dict[str, dict[str, Value]]:
        return {
            "prefill": self.prefill.to_dict(),
            "decode": self.decode.to_dict(),
            "merge": self.merge.to_dict(),
        }

    @classmethod
    def from_dict(cls, params: Mapping[str, Mapping[str, Value]]) -> "AttentionConfig":
        return cls(*(KernelConfig.from_dict(params[k]) for k in cls.__annotations__))
