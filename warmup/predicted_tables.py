# SPDX-License-Identifier: Apache-2.0
"""Tables for GPUs that nobody has measured: for common shapes, what a model puts first.

A prediction takes the default's place only where the model can be believed: it rests on
sweeps, puts the default farther behind than it ever erred on a held-out sweep, and the
resource model alone agrees. All other entries are there to be read, and the default
serves.
"""

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from portable_backend.device import DeviceInfo
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.kernel_specs import KERNEL_SPECS, spec_of
from portable_backend.warmup.prediction import (
    HeldOut,
    Measured,
    Predictor,
    across_heads,
    features_of,
    key_of,
    leave_one_out,
    margin,
    measured,
    no_readout,
)
from portable_backend.warmup.readouts import Job, Readouts
from portable_backend.warmup.records import FieldValue, TuningKey, TuningRecord
from portable_backend.warmup.resources import READS, estimate_us, estimates_us
from portable_backend.warmup.sweeps import Sweep

KERNELS = ("decode", "prefill", "rms_norm")
# So many of the best by estimated resources are compiled, and ranked by read-outs then;
# fewer where they will not serve.
SHORTLIST, SHORTLIST_UNMEASURED = 4, 2
# A parameter is ranked if at least this share of a sweep has other values.
_VARIED = 0.05
# (head size, KV heads, query heads of each) of common models and ranks of them.
_HEADS = (
    (128, 8, 4),  # Llama 8B, Qwen 8B
    (128, 4, 4),
    (128, 2, 4),
    (128, 8, 8),  # Llama 70B
    (128, 4, 8),
    (128, 2, 8),
    (128, 1, 8),
    (64, 8, 4),  # Llama 1B
    (64, 8, 8),  # gpt-oss
    (256, 8, 2),  # Gemma 2 9B
)
# Each stands for sizes up to two doublings away: 1 to 256 requests, 4096 to 16384 keys.
_DECODES = ((2, 8192), (8, 8192), (32, 8192), (128, 8192))
# Few, as long as nothing of these kernels was measured and so nothing serves.
_PREFILL_HEADS = ((128, 8, 4), (64, 8, 4))
_PREFILLS = ((4, 2048, 0), (1, 2048, 8192))
_ROWS = (16, 4096)
_ROW_SIZES = (4096,)


def common_keys(kernel: str) -> Iterator[TuningKey]:
    """The keys that tables hold."""
    fields: dict[str, FieldValue] = {"dtype": "bfloat16"}
    if kernel == "rms_norm":
        for size in _ROW_SIZES:
            for fused in (0, 1):
                for rows in _ROWS:
                    norm = {"row_size": size, "fused_add": fused, "num_rows": rows}
                    yield TuningKey.of(kernel, **fields | norm)
        return
    for head_size, num_kv_heads, group in _HEADS:
        heads = fields | {
            "head_size": head_size,
            "num_kv_heads": num_kv_heads,
            "num_queries_per_kv": group,
            "block_size": 64,
            "sliding_window": 0,
        }
        if kernel == "decode":
            for num_seqs, seq_len in _DECODES:
                sizes = {"num_seqs": num_seqs, "query_len": 1, "seq_len": seq_len}
                yield TuningKey.of(kernel, **heads | sizes)
        elif (head_size, num_kv_heads, group) in _PREFILL_HEADS:
            for num_seqs, query_len, context_len in _PREFILLS:
                sizes = {"num_seqs": num_seqs, "query_len": query_len}
                sizes |= {
                    "context_len": context_len,
                    "no_context": int(not context_len),
                }
                yield TuningKey.of(kernel, **heads | sizes)


@dataclass(frozen=True, eq=False)
class Model:
    """What the tables of one kernel rest on.

    Attributes:
        kernel: its name.
        predictor: fitted on all sweeps there are.
        sweeps: these; empty: the resource model alone ranks.
        varied: the parameters that it ranks; all others stay as the default has them.
        outcomes: predictions of held-out sweeps.
        margin: the least gain that it may be believed, infinite without outcomes.
        reads_code: it has learned from what compiled configs take, not from estimates.
    """

    kernel: str
    predictor: Predictor
    sweeps: tuple[Sweep, ...]
    varied: frozenset[str]
    outcomes: tuple[HeldOut, ...]
    margin: float
    reads_code: bool = True

    @classmethod
    def of(cls, kernel: str, sweeps: Sequence[Sweep], readouts: Readouts) -> "Model":
        """Fit and judge a model on the sweeps of a kernel; others are left out."""
        swept = [sweep for sweep in sweeps if sweep.kernel == kernel]
        own = measured_all(swept, readouts)
        reads_code = bool(swept) and not readouts.missing(sweep_jobs(swept))
        return cls.fitted(kernel, own, reads_code)

    @classmethod
    def fitted(cls, kernel: str, own: Sequence[Measured], reads_code: bool) -> "Model":
        sweeps = tuple(item.sweep for item in own)
        outcomes = (*leave_one_out(own), *across_heads(own))
        varied = _varied(sweeps) if sweeps else frozenset(READS[kernel])
        return cls(
            kernel,
            Predictor(own),
            sweeps,
            varied,
            outcomes,
            margin(outcomes),
            reads_code,
        )

    @property
    def fitted_on(self) -> list[str]:
        return sorted({sweep.device.name for sweep in self.sweeps})

    def margin_on(self, device: DeviceInfo, key: TuningKey) -> float:
        """Squared for a vendor that no sweep has, or a head size; cubed for both."""
        fields = key.to_dict()
        unlike = [
            all(sweep.device.platform != device.platform for sweep in self.sweeps),
            all(
                sweep.key.get("head_size") != fields.get("head_size")
                for sweep in self.sweeps
            ),
        ]
        return float(self.margin ** (1 + sum(unlike)))


def sweep_jobs(sweeps: Iterable[Sweep]) -> Iterator[Job]:
    """What has to be compiled to learn from what the sweeps' configs take."""
    for sweep in sweeps:
        for config in sweep.configs:
            yield key_of(sweep), config, sweep.device


def measured_all(sweeps: Sequence[Sweep], readouts: Readouts) -> list[Measured]:
    """The sweeps with their features: by read-outs where all of a kernel's are there,
    else by estimates, so that a model compares like with like."""
    items = []
    for sweep in sweeps:
        own = [other for other in sweeps if other.kernel == sweep.kernel]
        complete = not readouts.missing(sweep_jobs(own))
        items.append(measured(sweep, readouts.get if complete else no_readout))
    return items


def shortlist(
    model: Model, key: TuningKey, device: DeviceInfo
) -> tuple[KernelConfig, ...]:
    """The default, and what the model puts first by estimated resources."""
    if key.kernel == "decode":  # its tiles hold the queries of up to 16 heads
        key = TuningKey.from_dict("decode", key.to_dict() | {"num_queries_per_kv": 4})
    return _shortlist(model, key, device)


@functools.cache
def _shortlist(
    model: Model, key: TuningKey, device: DeviceInfo
) -> tuple[KernelConfig, ...]:
    spec = spec_of(key)
    default = spec.default(key, device)
    members = [
        config
        for config in _members(key.kernel, spec.problem(key), device)
        if all(config[n] == v for n, v in default.items_ if n not in model.varied)
    ]
    if model.sweeps:
        features = features_of(key, members, device, no_readout)
        predicted, count = model.predictor.predict(features), SHORTLIST
    else:
        predicted = estimates_us(key, members, device)
        count = SHORTLIST_UNMEASURED
    order = sorted(range(len(members)), key=lambda i: (predicted[i], i))
    best = [members[i] for i in order if math.isfinite(predicted[i])][:count]
    return tuple(dict.fromkeys([default, *best]))


@functools.cache
def _members(kernel: str, problem: Any, device: DeviceInfo) -> tuple[KernelConfig, ...]:
    return tuple(KERNEL_SPECS[kernel].space.configs(problem, device))


def jobs_of(model: Model, devices: Iterable[DeviceInfo]) -> Iterator[Job]:
    """What has to be compiled for the tables of these devices."""
    for device in devices:
        for key in common_keys(model.kernel):
            default, *others = shortlist(model, key, device)
            for config in (default, *others) if model.reads_code else others:
                yield key, config, device


def predicted_record(
    model: Model,
    key: TuningKey,
    device: DeviceInfo,
    readouts: Readouts,
    digest: str,
) -> TuningRecord:
    """The table's entry for a key: the model's first choice that compiles well."""
    default, *others = shortlist(model, key, device)
    configs = [
        default,
        *(c for c in others if readouts.why_not(key, c, device) is None),
    ]
    readout_of = readouts.get if model.reads_code else no_readout
    predicted = model.predictor.predict(features_of(key, configs, device, readout_of))
    best = min(range(len(configs)), key=lambda i: (predicted[i], i))
    config = configs[best]
    gain = math.exp(predicted[0] - predicted[best])
    times = [
        estimate_us(key, c, device, readout_of(key, c, device))
        for c in (default, config)
    ]
    reason = _why_default(
        model, device, key, config == default, gain, times[0] / times[1]
    )
    told: dict[str, Any] = {
        "basis": model.predictor.basis,
        "fitted_on": model.fitted_on,
        "num_units": device.num_units,
        "sweeps": fingerprint(model.sweeps),
        "default": default.to_dict(),
        "predicted_gain": _rounded(gain),
        "needed_gain": _rounded(model.margin_on(device, key)),
        "serves": reason is None,
        "reason": reason,
    }
    return TuningRecord(
        key=key,
        config=config,
        gpu=device.name,
        arch=device.arch,
        time_us=None,
        kernel_digest=digest,
        unmeasured=told,
    )


def _why_default(
    model: Model,
    device: DeviceInfo,
    key: TuningKey,
    is_default: bool,
    gain: float,
    estimated: float,
) -> str | None:
    """Why the default stays; None: the prediction may take its place."""
    if is_default:
        return "the model puts it first as well"
    if not model.sweeps:
        return "nothing of this kernel was measured"
    if device.arch in {sweep.device.arch for sweep in model.sweeps}:
        return f"it was chosen by measurements on {device.arch}"
    needed = model.margin_on(device, key)
    if gain < needed:
        return f"a predicted gain of {gain:.2f} is below {needed:.2f}"
    if estimated < 1:
        return "the resource model alone does not agree"
    return None


def _varied(sweeps: Sequence[Sweep]) -> frozenset[str]:
    """Parameters of which some sweep has several values in earnest."""
    found = set()
    for sweep in sweeps:
        for name in {name for config in sweep.configs for name, _ in config.items_}:
            counts: dict[object, int] = {}
            for config in sweep.configs:
                counts[config.get(name)] = counts.get(config.get(name), 0) + 1
            if max(counts.values()) <= (1 - _VARIED) * len(sweep.configs):
                found.add(name)
    return frozenset(found)


def fingerprint(sweeps: Iterable[Sweep]) -> str:
    """A short hash of what was measured, to tell whether tables rest on it."""
    content = sorted(
        json.dumps(
            [s.name, [[r.config.to_dict(), r.time_us] for r in s.rows]], sort_keys=True
        )
        for s in sweeps
    )
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:12]


def _rounded(value: float) -> float | None:
    return round(value, 2) if math.isfinite(value) else None


def why_stale(
    record: TuningRecord,
    device: DeviceInfo,
    digests: Mapping[str, str],
    fingerprints: Mapping[str, str],
) -> str | None:
    """Why an entry may not be what today's code and sweeps give, or None.

    Args:
        record: of a table.
        device: that the table is for.
        digests, fingerprints: of today's kernels and of their sweeps.
    """
    told, key = dict(record.unmeasured or {}), record.key
    if record.kernel_digest != digests[key.kernel]:
        return "of other kernel code"
    default = spec_of(key).default(key, device)
    if told.get("default") != default.to_dict():
        return f"its default was {told.get('default')}, now it is {default.to_dict()}"
    if told.get("sweeps") != fingerprints[key.kernel]:
        return "it rests on other sweeps"
    reasons = spec_of(key).bound(key, device).why_not(record.config)
    return f"no member of today's space: {'; '.join(reasons)}" if reasons else None
