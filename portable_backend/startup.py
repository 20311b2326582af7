# SPDX-License-Identifier: Apache-2.0
"""Compile and load what an engine's steps can launch, while it starts.

Unless PORTABLE_BACKEND_COMPILE_AHEAD=off, called by each metadata builder, which is
made before graphs are captured and knows its planners' configs. What to compile comes
from `warmup/binaries.py`; worker processes compile what Triton's cache lacks; then each
launch takes Triton's ordinary road in this process, short of the launch itself, so that
the first real one finds its kernel loaded.

Workers begin when weights are loaded, with what builders will most likely ask for
(`likely_layers.py`): then they are done when PyTorch has compiled the model.
"""

import contextlib
import datetime
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from triton import knobs

from portable_backend import plugin, ranks
from portable_backend.device import DeviceInfo
from portable_backend.engine_config import drafts_of
from portable_backend.engine_norms import norms_of
from portable_backend.kernels import AttentionPlanner, served
from portable_backend.kernels.attention import capturing
from portable_backend.kernels.config import AttentionConfig
from portable_backend.kernels.plan import StepKind
from portable_backend.likely_layers import LikelyLayers, likely_layers
from portable_backend.settings import get_settings
from portable_backend.tuned import choices, grades, tuning_s
from portable_backend.warmup.binaries import serving_launches
from portable_backend.warmup.binary import Binary, binaries_of_launches
from portable_backend.warmup.buckets import EngineLimits
from portable_backend.warmup.compilation import KernelLaunch
from portable_backend.warmup.cpus import usable_cpus
from portable_backend.warmup.early_warming import EarlyWarming
from portable_backend.warmup.kernel_specs import DTYPES
from portable_backend.warmup.model_shapes import ModelShape
from portable_backend.warmup.model_traits import ModelTraits, traits_of_config
from portable_backend.warmup.report import StartupReport, write_report
from portable_backend.warmup.serving_configs import ServingConfigs
from portable_backend.warmup.warming import Warmed, missing_binaries, warm_binaries

logger = logging.getLogger("vllm.portable_backend.startup")

# In Triton's cache: whoever holds it compiles, other processes wait and find.
LOCK = "portable_backend.lock"
# Longer than any model takes; then the holder hangs, and two may well compile at once.
LOCK_TIMEOUT_S = 300.0
# Each takes some 400 MB, and there are two dozen kernels.
MAX_WORKERS = 16
# What some kernels' files take.
_ROOM_BYTES = 1 << 20
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Layers by their planner: what `prepare_kernels` is given.
Layers = Mapping[AttentionPlanner, Sequence[Any]]
_P = TypeVar("_P", AttentionPlanner, LikelyLayers)


@dataclass(frozen=True)
class Needs:
    """Attention layers of one geometry, or the norms of a model, and their steps.

    Attributes:
        model: shapes; without windows there are norms only.
        traits: of the layers.
        limits: of the steps.
        configs: (window, kind of step, config of its attention).
        served: the version of what norms and cache writes are served with.
    """

    model: ModelShape
    traits: ModelTraits
    limits: EngineLimits
    configs: tuple[tuple[int, StepKind, AttentionConfig], ...] = ()
    served: int = field(default_factory=served.version)

    def launches(self, device: DeviceInfo) -> list[KernelLaunch]:
        planned = {(window, kind): config for window, kind, config in self.configs}
        configs = _PlannedConfigs(self.model, self.limits, device, planned=planned)
        return serving_launches(self.model, self.traits, self.limits, device, configs)


@dataclass(frozen=True)
class _PlannedConfigs(ServingConfigs):
    """The planners' configs, and the defaults of all else, as the back end serves."""

    planned: Mapping[tuple[int, StepKind], AttentionConfig] = field(
        default_factory=dict
    )

    def attention(self, kind: StepKind, window: int) -> Iterator[AttentionConfig]:
        yield self.planned[window, kind]


@dataclass
class _Start:
    """What this process has made ready so far, for all builders together."""

    needs: set[Needs] = field(default_factory=set)
    ready: set[Binary] = field(default_factory=set)
    compiled: int = 0
    load_s: float = 0.0
    compile_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    begun: bool = False
    early: EarlyWarming | None = None
    launches: dict[Needs, list[KernelLaunch]] = field(default_factory=dict)
    spare: "tempfile.TemporaryDirectory[str] | None" = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_start = _Start()


def prepare_kernels(vllm_config: Any, layers: Layers, num_drafts: int) -> None:
    """Have every kernel compiled and loaded that steps of these layers can launch.

    Does nothing for layers that were prepared before, in the interpreter, and while a
    graph is captured. Never raises: what is not ready compiles at its first use.

    Args:
        vllm_config: the engine's.
        layers: the impls of each planner; none where they are not known.
        num_drafts: tokens that a request can have beyond one in a decode.
    """
    try:
        with _start.lock:
            _prepare(vllm_config, layers, num_drafts)
    except Exception:  # of any kind: the engine serves all the same
        logger.warning(
            "kernels are not compiled ahead: each is when it is first launched, which "
            "makes requests wait; see portable-backend doctor",
            exc_info=True,
        )


def begin(device: torch.device) -> None:
    """Begin when weights are loaded, before the profile run; once, and never raises.

    Loads those kernels of norms that the cache holds: the profile run launches norms
    before there is a builder, and where vLLM has moved Triton's cache by then, they
    would be compiled anew. What the cache lacks is compiled from now on, in processes.

    Args:
        device: that the model being loaded is on.
    """
    if _start.begun:
        return
    _start.begun = True
    try:
        info = DeviceInfo.detect(device)
        if info.platform != "interpreter":
            with _start.lock:
                _begin(info, device)
    except Exception as error:  # of any kind: the first builder tells
        logger.info("kernels are not compiled early, but later: %r", error)


def _begin(info: DeviceInfo, device: torch.device) -> None:
    from vllm.config import get_current_vllm_config

    vllm_config = get_current_vllm_config()
    num_drafts, norms = drafts_of(vllm_config), []
    if plugin.norm_is_enabled():
        norms = _needs_of_norms(vllm_config, num_drafts)
    folder = cache_folder()
    with caching_in(folder):
        by_binary = _listed(norms, info)
        missing = missing_binaries(list(by_binary), info)
        for binary, uses in by_binary.items():
            if binary not in missing:
                _load(uses, device)
    # What is tuned first is not known yet; and one rank compiles for all.
    if get_settings().tune == "startup" or not ranks.decides():
        return
    layers = likely_layers(vllm_config, info)
    attention = _listed(_needs_of_attention(vllm_config, layers, num_drafts), info)
    with caching_in(folder):
        missing += missing_binaries(list(attention), info)
        if missing and _takes_files(folder):
            logger.info("compiling %d kernels into %s meanwhile", len(missing), folder)
            _start.early = EarlyWarming(
                list(dict.fromkeys(missing)),
                info,
                folder=folder,
                workers=_num_workers(),
                turn=turn,
            )


def _prepare(vllm_config: Any, layers: Layers, num_drafts: int) -> None:
    planner = next(iter(layers))
    device = planner.info
    if capturing():
        return  # nothing may be loaded now, and there will be another builder
    wanted = _needs(vllm_config, layers, num_drafts)
    needs = [need for need in wanted if need not in _start.needs]
    if not needs:
        return
    _start.needs.update(needs)  # also when it fails: not again for each builder
    if device.platform != "interpreter":
        _make_ready(needs, planner)
    report = _report(device)
    logger.info("%s", report.line())
    if device.platform != "interpreter":
        write_report(report, get_settings().cache_dir)


# What is needed


def _needs(vllm_config: Any, layers: Layers, num_drafts: int) -> list[Needs]:
    found = _needs_of_attention(vllm_config, layers, num_drafts)
    if plugin.norm_is_enabled():
        found += _needs_of_norms(vllm_config, num_drafts)
    return found


def _needs_of_attention(
    vllm_config: Any, layers: Mapping[_P, Sequence[Any]], num_drafts: int
) -> list[Needs]:
    """One for all layers that differ in their window at most."""
    groups: dict[Any, list[_P]] = {}
    for planner, impls in layers.items():
        limits = _limits(vllm_config, planner, num_drafts)
        model = _shape(planner)
        for traits in _traits(impls):
            groups.setdefault((model, traits, limits), []).append(planner)
    found = []
    for (model, traits, limits), planners in groups.items():
        windows = sorted((planner.sliding_window or 0, 1) for planner in planners)
        configs = tuple(
            (planner.sliding_window or 0, kind, planner.config_for(kind))
            for planner in planners
            for kind in StepKind.within(planner.max_num_seqs)
        )
        model = replace(model, windows=tuple(windows))
        found.append(Needs(model, traits, limits, configs))
    return found


def _shape(planner: AttentionPlanner | LikelyLayers) -> ModelShape:
    return ModelShape(
        name="",
        dtype=_DTYPE_NAMES[planner.dtype],
        hidden_size=planner.num_query_heads * planner.head_size,
        num_layers=1,
        head_size=planner.head_size,
        num_query_heads=planner.num_query_heads,
        num_kv_heads=planner.num_kv_heads,
        tensor_parallel_size=1,
        max_model_len=1,
        norms=(),
        windows=(),
    )


def _limits(
    vllm_config: Any, planner: AttentionPlanner | LikelyLayers, num_drafts: int
) -> EngineLimits:
    model_len = vllm_config.model_config.max_model_len
    return EngineLimits(
        max_num_seqs=planner.max_num_seqs,
        max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        # Only whether a query can be too long for the decode kernel counts. The length
        # itself may shrink between one builder and the next.
        max_model_len=min(model_len, planner.max_decode_query_len + 1),
        block_size=planner.block_size,
        speculative_tokens=num_drafts,
    )


def _traits(impls: Sequence[Any]) -> list[ModelTraits]:
    """Each once; layers that share a cache launch all that others do, and more."""
    shares = any(impl.kv_sharing_target_layer_name is not None for impl in impls)
    found = [
        ModelTraits(
            softcap=float(impl.logits_soft_cap or 0.0),
            sinks=impl.sinks is not None,
            alibi=impl.alibi_slopes is not None,
            shares_cache=shares,
            fp32_sinks=impl.sinks is not None and impl.sinks.dtype == torch.float32,
        )
        for impl in impls
    ]
    return list(dict.fromkeys(found)) or [ModelTraits()]


def _needs_of_norms(vllm_config: Any, num_drafts: int) -> list[Needs]:
    """Of the model and its drafter."""
    scheduler = vllm_config.scheduler_config
    limits = EngineLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        speculative_tokens=num_drafts,
    )
    return [
        Needs(shape, traits_of_config(config), limits)
        for shape, config in norms_of(vllm_config)
    ]


# Getting it


def _make_ready(needs: Sequence[Needs], planner: AttentionPlanner) -> None:
    began = time.monotonic()
    device = planner.info
    by_binary = _listed(needs, device)
    listed = time.monotonic()
    failures = _join_early(list(by_binary), device)
    compile_s = time.monotonic() - listed
    hopeful = {x: uses for x, uses in by_binary.items() if x not in failures}
    for folder, some in _places(hopeful, device):
        began_here = time.monotonic()
        with caching_in(folder):
            warmed = _compile(list(some), device, folder)
            compile_s += time.monotonic() - began_here
            failures |= dict(warmed.failures)
            for binary, uses in some.items():
                failure = failures.get(binary) or _load(uses, planner.device)
                if failure is None:
                    _start.ready.add(binary)
                else:
                    failures[binary] = failure
        _start.compiled += warmed.compiled
        _start.details["triton_cache"] = str(folder)
    ended = time.monotonic()
    module_s = ended - listed - compile_s
    _start.compile_s += compile_s
    _start.load_s += listed - began + module_s
    for name, seconds in (("list_s", listed - began), ("module_s", module_s)):
        total = _start.details.get(name, 0.0) + seconds
        _start.details[name] = round(total, 3)
    _tell_failures(failures)


def _listed(
    needs: Iterable[Needs], device: DeviceInfo
) -> dict[Binary, list[KernelLaunch]]:
    """Binaries of some needs and their launches.

    Launches are recorded once for each need; what they compile depends on what the
    compiler is told by now, which PyTorch's may have changed.
    """
    launches: list[KernelLaunch] = []
    for need in needs:
        if need not in _start.launches:
            _start.launches[need] = need.launches(device)
        launches += _start.launches[need]
    return binaries_of_launches(launches, device)


def _join_early(binaries: Sequence[Binary], device: DeviceInfo) -> dict[Binary, str]:
    """Wait for workers that began early, if they do what is needed; what failed."""
    early = _start.early
    if early is None:
        return {}
    with caching_in(cache_folder()):
        missing = set(missing_binaries(binaries, device))
        if missing & early.binaries - early.failures.keys():
            done = early.wait(LOCK_TIMEOUT_S)
            if not done or missing - early.binaries:
                early.stop()  # hangs, or was on a wrong track
            missing = set(missing_binaries(binaries, device))
    failures = dict(early.failures)
    return {binary: failures[binary] for binary in missing & failures.keys()}


def _num_workers() -> int:
    return min(MAX_WORKERS, usable_cpus())


def _places(
    by_binary: Mapping[Binary, list[KernelLaunch]], device: DeviceInfo
) -> list[tuple[Path, Mapping[Binary, list[KernelLaunch]]]]:
    """Caches, and what to look for and compile in each.

    What the usual one lacks and has no room for goes into one that lasts as long as
    this process: Triton launches nothing that it cannot write.
    """
    folder = cache_folder()
    with caching_in(folder):
        missing = set(missing_binaries(list(by_binary), device))
    if not missing or _takes_files(folder):
        return [(folder, by_binary)]
    try:
        _start.spare = _start.spare or tempfile.TemporaryDirectory(prefix="triton-")
    except OSError as error:
        logger.warning("%s cannot be written, nor can another: %s", folder, error)
        return [(folder, by_binary)]
    spare = Path(_start.spare.name)
    logger.warning(
        "%s cannot be written: %d kernels are compiled into %s, for this start only; "
        "set TRITON_CACHE_DIR to a folder that can be",
        folder,
        len(missing),
        spare,
    )
    present = {x: uses for x, uses in by_binary.items() if x not in missing}
    absent = {x: uses for x, uses in by_binary.items() if x in missing}
    return [(folder, present), (spare, absent)]


def _takes_files(folder: Path) -> bool:
    """Whether a kernel's files can be made there; where a disk is full they cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM_BYTES))
            file.flush()
    except OSError:
        return False
    return True


def cache_folder() -> Path:
    """The user's TRITON_CACHE_DIR, else Triton's own folder, else vLLM's.

    vLLM sets TRITON_CACHE_DIR when it compiles a model, to a folder for each rank and
    set of options; some versions do so whether it is set or not. What is loaded here is
    found wherever it lies, so ranks and engines can share one.
    """
    folder = plugin.TRITON_CACHE_AT_START or knobs.cache.get_triton_dir("cache")
    path = Path(folder).expanduser().absolute()
    if plugin.TRITON_CACHE_AT_START or _is_writable(path):
        return path
    return Path(knobs.cache.dir).absolute()


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


@contextlib.contextmanager
def caching_in(folder: Path) -> Iterator[None]:
    """Triton and workers use that cache meanwhile."""
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_CACHE_DIR"]
        else:
            os.environ["TRITON_CACHE_DIR"] = before


def _compile(binaries: Sequence[Binary], device: DeviceInfo, folder: Path) -> Warmed:
    """Compile what is missing; nothing is written, or waited for, where nothing is."""
    if not missing_binaries(binaries, device):
        return Warmed(present=len(binaries))
    with turn(folder):
        missing = missing_binaries(binaries, device)
        if missing:
            logger.info(
                "compiling %d of %d kernels into %s; the next start finds them",
                len(missing),
                len(binaries),
                folder,
            )
        warmed = warm_binaries(binaries, device, workers=_num_workers())
        failed = dict(warmed.failures)
        lost = missing_binaries([b for b in binaries if b not in failed], device)
    if lost:
        note = (
            f"{len(lost)} kernels were compiled by another compiler than this process "
            f"uses, and are compiled again, one after the other: {lost[0]}"
        )
        _start.notes.append(note)
        logger.warning("%s", note)
    return warmed


@contextlib.contextmanager
def turn(folder: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """One process of the host at a time, unless one holds its turn for too long.

    Triton's cache bears several at once: they would only do the same work. The lock of
    a process that ends, however it does, is free.
    """
    from filelock import Timeout, UnixFileLock

    lock = UnixFileLock(folder / LOCK, timeout=timeout_s)
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock)
        except (Timeout, OSError, NotImplementedError) as error:
            logger.warning(
                "%s: compiling without waiting for other processes: %s", folder, error
            )
        yield


def _load(launches: Iterable[KernelLaunch], device: torch.device) -> str | None:
    """Have Triton know and the device hold what launches need; or why not."""
    of_gpu = device.type == "cuda"
    with torch.cuda.device(device) if of_gpu else contextlib.nullcontext():
        try:
            for launch in launches:
                compiled = launch.function.run(
                    *launch.args, grid=(1,), warmup=True, **launch.kwargs
                )
                if compiled is not None:  # a hook of Triton's may have refused
                    _ = compiled.run  # loads it
        except Exception as error:  # whatever compilers and drivers raise
            return f"{type(error).__name__}: {error}"
    return None


def _tell_failures(failures: Mapping[Binary, str]) -> None:
    if not failures:
        return
    notes = [f"{binary}: {failure}" for binary, failure in failures.items()]
    _start.notes += notes
    logger.warning(
        "%d kernels are not ready, steps that launch them compile them or fail: %s%s",
        len(notes),
        notes[0],
        " and others" if len(notes) > 1 else "",
    )


def _report(device: DeviceInfo) -> StartupReport:
    found = grades()
    early = set(_start.early.compiled) if _start.early is not None else set()
    return StartupReport(
        gpu=device.name,
        arch=device.arch,
        mode=get_settings().tune,
        buckets=sum(sum(counts.values()) for counts in found.values()),
        grades=found,
        binaries=len(_start.ready),
        compiled=_start.compiled + len(early & _start.ready),
        load_s=round(_start.load_s, 3),
        tune_s=round(tuning_s(), 3),
        compile_s=round(_start.compile_s, 3),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        notes=tuple(_start.notes),
        extra={**_start.details, "choices": choices()},
    )
