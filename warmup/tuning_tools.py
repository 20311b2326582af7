# SPDX-License-Identifier: Apache-2.0
"""The tools of a GPU at hand, and those of recorded sweeps; made for `Recipe`s."""

import hashlib
import json
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable_backend.device import DeviceInfo
from portable_backend.errors import UnsupportedError, bad_argument
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.matching import Environment, current_toolchain
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.replay import ReplayDevice
from portable_backend.warmup.search import Proposal, Trial
from portable_backend.warmup.sweeps import Sweep, read_sweeps
from portable_backend.warmup.tools import Compiler, Measurer, Prune, Recipe, Tools
from portable_backend.warmup.tuning_report import Task

if TYPE_CHECKING:
    from portable_backend.warmup.units import WorkUnit

HERE = "portable_backend.warmup.tuning_tools"


def gpu_recipe(
    *,
    workers: int | None = None,
    resource_model: bool = True,
    device: str = "cuda:0",
    measuring: Mapping[str, Any] | None = None,
) -> Recipe:
    """Recipe of the tools for a GPU.

    Args:
        workers: processes that compile; None: one less than there are CPUs.
        resource_model: whether configs that cannot win are dropped untried.
        device: which one.
        measuring: options of `MeasuringProcess`, where they differ from its own.
    """
    options = {
        "workers": workers,
        "resource_model": resource_model,
        "device": device,
        "measuring": dict(measuring or {}),
    }
    return Recipe(f"{HERE}:gpu_tools", options)


def replay_recipe(folder: Path) -> Recipe:
    """Recipe of tools that answer from recorded sweeps."""
    return Recipe(f"{HERE}:replay_tools", {"folder": str(folder)})


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


class SpaceCatalog:
    """The spaces and defaults of `kernel_specs` on one device."""

    def __init__(self, device: DeviceInfo) -> None:
        self.device = device
        self._listed: dict[object, tuple[KernelConfig, ...]] = {}

    def configs(self, key: TuningKey) -> Sequence[KernelConfig]:
        from portable_backend.warmup.kernel_specs import spec_of

        spec = spec_of(key)
        place = key.kernel, spec.problem(key)
        if place not in self._listed:
            self._listed[place] = spec.bound(key, self.device).configs
        return self._listed[place]

    def default(self, key: TuningKey) -> KernelConfig:
        from portable_backend.warmup.kernel_specs import spec_of

        return spec_of(key).default(key, self.device)


def resource_model() -> Prune:
    """The resource model's `prune`."""
    from portable_backend.warmup.resources import prune

    return prune


def gpu_tools(
    *,
    workers: int | None,
    resource_model: bool,
    device: str,
    measuring: Mapping[str, Any] | None = None,
) -> Tools:
    """Tools for the GPU at hand.

    Raises:
        UnsupportedError: there is none.
        RecordError: the kernels cannot be imported.
    """
    from portable_backend.warmup.digest import current_digests

    try:
        info = DeviceInfo.detect(device)
    except (ImportError, RuntimeError, AssertionError) as error:
        raise UnsupportedError(f"no GPU to tune for: {error}") from error
    environment = Environment(
        info.name, info.arch, current_digests(), current_toolchain()
    )

    def make_measurer() -> Measurer:
        from portable_backend.warmup.measuring_process import MeasuringProcess

        return MeasuringProcess(device=device, **(measuring or {}))

    def make_compiler() -> Compiler:
        from portable_backend.warmup.compile_pool import CompilePool

        return CompilePool(info, workers=workers or max(1, available_cpus() - 1))

    return Tools(
        device=info,
        environment=environment,
        catalog=SpaceCatalog(info),
        make_measurer=make_measurer,
        make_compiler=make_compiler,
        prune=globals()["resource_model"]() if resource_model else None,
    )


@dataclass(frozen=True)
class ReplayedConfirmation:
    """Beside the default, from all rounds that were recorded."""

    time_us: float
    default_us: float
    noise: float
    error_ratio: float | None = None
    wrong: str | None = None


class Replay:
    """Catalog and measurer that answer from sweeps of one GPU.

    Nothing lasts as long as it did: `seconds` adds up what it would have taken.

    Args:
        sweeps: at least one, all of one device.

    Raises:
        ValueError: they are of several devices.
    """

    def __init__(self, sweeps: Sequence[Sweep], seed: int = 0) -> None:
        devices = {sweep.device for sweep in sweeps}
        if len(devices) != 1:
            names = ", ".join(sorted({device.name for device in devices}))
            raise bad_argument("sweeps", "of one GPU", names, "replay them one by one")
        (self.device,) = devices
        self.sweeps = {key_of(sweep): sweep for sweep in sweeps}
        self.rounds = min(sweep.rounds for sweep in sweeps)
        self._replays = {
            key: ReplayDevice(sweep, seed=seed) for key, sweep in self.sweeps.items()
        }
        self._started = time.monotonic()

    @property
    def environment(self) -> Environment:
        """Its digests are the sweeps' own: such records never serve real kernels."""
        first = next(iter(self.sweeps.values()))
        digests: dict[str, str] = {}
        for kernel in sorted({key.kernel for key in self.sweeps}):
            digest = hashlib.sha256()
            for key, sweep in self.sweeps.items():
                if key.kernel == kernel:
                    rows = [(row.config.to_dict(), row.times_us) for row in sweep.rows]
                    digest.update(json.dumps([str(key), rows]).encode())
            digests[kernel] = f"replay:{digest.hexdigest()[:16]}"
        return Environment(self.device.name, self.device.arch, digests, first.toolchain)

    def clock(self) -> float:
        took = time.monotonic() - self._started
        return took + sum(replay.seconds for replay in self._replays.values())

    def configs(self, key: TuningKey) -> Sequence[KernelConfig]:
        return self._sweep(key).configs

    def default(self, key: TuningKey) -> KernelConfig:
        """The kernel's own default where it was recorded, else the first that ran."""
        times = {row.config: row.time_us for row in self._sweep(key).rows}
        try:
            config = SpaceCatalog(self.device).default(key)
        except ValueError:  # the sweep's key is not one that serves
            config = None
        if config is not None and times.get(config) is not None:
            return config
        return next(config for config, time_us in times.items() if time_us is not None)

    def measure(
        self,
        key: TuningKey,
        proposals: Sequence[Proposal],
        incumbent: KernelConfig | None = None,
    ) -> Iterator[Trial]:
        self._sweep(key)
        yield from self._replays[key].measure(proposals)

    def confirm(
        self, key: TuningKey, config: KernelConfig, seed: int
    ) -> ReplayedConfirmation:
        rows = {row.config: row for row in self._sweep(key).rows}
        ours, default = rows[config].times_us, rows[self.default(key)].times_us
        if not ours:
            raise bad_argument("config", "a valid one", dict(config), "confirm another")
        ratios = [a / b for a, b in zip(ours, default, strict=False)]
        middle = statistics.median(ratios)
        spread = statistics.median(abs(ratio - middle) for ratio in ratios)
        # 1.4826 MAD estimate the deviation, and the median's is 1.25 times the mean's.
        noise = 2 * 1.25 * 1.4826 * spread / len(ratios) ** 0.5
        times = statistics.median(ours), statistics.median(default)
        return ReplayedConfirmation(*times, noise)

    def close(self) -> None:
        pass

    def _sweep(self, key: TuningKey) -> Sweep:
        if key not in self.sweeps:
            raise bad_argument("key", "one of the sweeps'", key, "record it first")
        return self.sweeps[key]


def replay_tools(*, folder: str) -> Tools:
    """Tools that answer from the sweeps of a folder."""
    replay = Replay(read_sweeps(Path(folder)))
    return Tools(
        device=replay.device,
        environment=replay.environment,
        catalog=replay,
        make_measurer=lambda: replay,
        rounds=replay.rounds,
        clock=replay.clock,
    )


def key_of(sweep: Sweep) -> TuningKey:
    """The sweep's key as records have it; what it leaves open is left out."""
    fields: dict[str, int | str] = {}
    for name, value in sweep.key.items():
        if isinstance(value, int | str):
            fields[name] = value
        elif value is not None:
            fields[name] = str(value)
    return TuningKey.from_dict(sweep.kernel, fields)


def tasks_of_sweeps(folder: Path) -> list[Task]:
    """A unit of work for each sweep of a folder."""
    return [Task(key_of(sweep)) for sweep in read_sweeps(folder)]


def tasks_of(units: "Iterable[WorkUnit]") -> list[Task]:
    """Units of a model or a shapes file, as the tuner takes them."""
    return [Task(unit.key, unit.weight) for unit in units]


def estimated_s(trials: int, workers: int) -> float:
    """Seconds that a unit may take; a rough guess, made without a GPU.

    A config takes some 2.5 s of a CPU to compile and 0.25 s of the GPU to check and
    time; the longer of both counts, since they overlap.
    """
    return 5 + trials * max(2.5 / workers, 0.25)
