# SPDX-License-Identifier: Apache-2.0
"""Tune a whole model against a clock that is simulated, and times that are made up.

    python tests/simulated_tuning.py --budget-s 600 --strategy bayesian

The units, spaces, defaults and the tuner are the real ones. A config takes
`--compile-s` of one of 15 workers to compile and `--trial-s` to check and time; before
the first one, the processes take `--start-s` to start. A config's time is the model's
estimate, times what a synthetic landscape makes of its parameters (`synthetic_sweeps`),
with 0.5 % of noise. What comes out compares settings of the tuner with each other; it
says nothing about a GPU. "weighted" is the quality by the units' weights, and "first"
how many configs were timed for each of the six most valuable units, which have 62 % of
the weight.
"""

import argparse
import functools
import heapq
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from synthetic_sweeps import SCALES, draw, uniform

from portable_backend.device import DeviceInfo
from portable_backend.warmup import warm_start
from portable_backend.warmup.compare import geometric_mean
from portable_backend.warmup.compile_pool import binary_of
from portable_backend.warmup.matching import Environment
from portable_backend.warmup.model_shapes import ModelShape, NormShape
from portable_backend.warmup.preparation import prepare
from portable_backend.warmup.resources import estimates_us
from portable_backend.warmup.search import Trial
from portable_backend.warmup.store import RecordStore
from portable_backend.warmup.tools import Recipe, Tools
from portable_backend.warmup.tuner import Tuner, tune
from portable_backend.warmup.tuning_options import TuneOptions
from portable_backend.warmup.tuning_report import total
from portable_backend.warmup.tuning_tools import SpaceCatalog, resource_model, tasks_of
from portable_backend.warmup.units import EngineLimits, units_of

DEVICE = DeviceInfo.for_arch("sm90", 132)
COMPILE_S, PREPARE_S, HOST_S = 5.0, 1.0, 0.3
# As an H200's pieces add up: before a trial, 6 ms; its check, 4 / 5 of which went with
# inputs that are kept, 15; 18 turns of 2.5 ms. A confirmation makes three checks of 60
# ms, and seven rounds of three turns of 10 ms.
TRIAL_S, CONFIRM_S = 0.07, 0.45
# A compile worker, and the process that measures, import torch.
START_S = 4.0
NOISE, OWN = 0.005, 0.01
SPREAD = 0.4  # of the landscape: so that a default has some 70 % of the best speed


class Truth:
    """The time of each config of a key."""

    def __init__(self, key, catalog):
        self.configs = catalog.configs(key)
        self.number = {config: n for n, config in enumerate(self.configs)}
        fields = key.to_dict()
        sizes = [fields.get(n) or 1 for n in ("num_seqs", "num_tokens", "num_rows")]
        lengths = [fields.get(n) or 0 for n in ("seq_len", "query_len", "context_len")]
        drift = math.log2(max(sizes)) / 6, math.log2(max(1, sum(lengths))) / 6
        values = {n: [c.get(n) for c in self.configs] for n in self.configs[0]}
        # Codes of values; a table of effects for each parameter and each pair.
        kinds = {n: list(dict.fromkeys(v)) for n, v in values.items()}
        kinds = {n: found for n, found in kinds.items() if len(found) > 1}
        codes = {n: np.array([kinds[n].index(v) for v in values[n]]) for n in kinds}

        def effect(scale, *what):
            level = draw(*what)
            drifts = [d * draw(axis, *what) for axis, d in enumerate(drift)]
            return scale * (level + 0.4 * sum(drifts))

        logs = np.zeros(len(self.configs))
        for n in kinds:
            table = [effect(SCALES.get(n, 0.02), key.kernel, n, v) for v in kinds[n]]
            logs += np.array(table)[codes[n]]
        for n, m in itertools.combinations(kinds, 2):
            scale = 0.3 * math.sqrt(SCALES.get(n, 0.02) * SCALES.get(m, 0.02))
            table = [
                [effect(scale, key.kernel, n, v, m, w) for w in kinds[m]]
                for v in kinds[n]
            ]
            logs += np.array(table)[codes[n], codes[m]]
        logs += np.random.default_rng(len(self.configs)).normal(0, OWN, len(logs))
        estimates = np.array(estimates_us(key, self.configs, DEVICE))
        self.times_us = np.minimum(estimates, 1e8) * np.exp(SPREAD * logs)
        self.best_us = float(self.times_us.min())

    def of(self, config):
        return float(self.times_us[self.number[config]])


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@dataclass
class Compiled:
    config: object
    failure: str | None
    readout: object = None


class Compiler:
    """As `CompilePool`: in order, but what is waited for goes first."""

    def __init__(self, clock, workers, start_s=0.0, compile_s=COMPILE_S):
        self.clock, self.done, self.compile_s = clock, {}, compile_s
        self.free = [start_s] * workers
        self.waiting = {}  # binary: when it was submitted

    def submit(self, key, configs):
        self._start_due()
        for config in configs:
            binary = binary_of(key, config)
            if binary not in self.done:
                self.waiting.setdefault(binary, self.clock.now)

    def wait(self, key, configs, until=None):
        until = math.inf if until is None else until
        self.submit(key, configs)
        wanted = [binary_of(key, config) for config in configs]
        first = {b: self.waiting[b] for b in wanted if b in self.waiting}
        self.waiting = first | self.waiting
        for config, binary in zip(configs, wanted, strict=True):
            while binary not in self.done and self.free[0] <= until:
                self.clock.now = max(self.clock.now, self.free[0])
                self._start_due()
            ready = self.done.get(binary, math.inf)
            self.clock.now = max(self.clock.now, min(ready, until))
            if ready > until:
                return
            corner = key.kernel, config.get("LOAD"), config["num_warps"]
            corner += (config["num_stages"],) if "num_stages" in config else ()
            bad = len(config) > 4 and uniform("corner", *corner) < 0.1
            yield Compiled(config, "planted" if bad else None)

    def ready(self, key, configs):
        self._start_due()
        now, done = self.clock.now, self.done
        return [c for c in configs if done.get(binary_of(key, c), math.inf) <= now]

    def close(self):
        pass

    def _start_due(self):
        while self.waiting and self.free[0] <= self.clock.now:
            binary = next(iter(self.waiting))
            start = max(self.waiting.pop(binary), heapq.heappop(self.free))
            took = self.compile_s * (0.6 + 0.8 * uniform("compile", binary))
            self.done[binary] = start + took
            heapq.heappush(self.free, start + took)


@dataclass(frozen=True)
class Confirmed:
    time_us: float
    default_us: float
    noise: float = 0.005
    error_ratio: float = 1.0
    wrong: str | None = None


class Measurer:
    def __init__(self, clock, catalog, trial_s, confirm_s, start_s):
        self.clock, self.catalog = clock, catalog
        self.trial_s, self.confirm_s, self.start_s = trial_s, confirm_s, start_s
        self.rng, self.key, self.ready_s = random.Random(0), None, 0.0
        self.truth = functools.cache(lambda key: Truth(key, catalog))

    def begin(self, key):
        """The host then takes a moment for its own part."""
        if key != self.key:
            starts_s = 0.0 if self.key else self.start_s
            self.key, self.ready_s = key, self.clock.now + starts_s + PREPARE_S
            self.clock.now += HOST_S

    def roof_us(self, key):
        """Unknown; to ask waits for the inputs."""
        self.begin(key)
        self.clock.now = max(self.clock.now, self.ready_s)

    def measure(self, key, proposals, incumbent=None):
        self.roof_us(key)
        for p in proposals:
            self.clock.now += self.trial_s
            time_us = self.truth(key).of(p.config) * math.exp(self.rng.gauss(0, NOISE))
            yield Trial(p.config, p.rounds, time_us, seconds=self.trial_s)

    def confirm(self, key, config, seed):
        self.clock.now += self.confirm_s
        truth = self.truth(key)
        return Confirmed(truth.of(config), truth.of(self.catalog.default(key)))

    def close(self):
        pass


def llama_8b():
    """Llama-3.1-8B."""
    return ModelShape(
        name="llama", dtype="bfloat16", hidden_size=4096, num_layers=32, head_size=128,
        num_query_heads=32, num_kv_heads=8, tensor_parallel_size=1,
        max_model_len=131072, windows=((0, 32),),
        norms=(NormShape(4096, True, 1, 64), NormShape(4096, False, 1, 1)),
    )  # fmt: skip


def served_for(key, outcomes):
    """The config of the nearest record, as a lookup finds it."""
    known = [(key.distance(o.key), o.record) for o in outcomes if o.record]
    distance, record = min(known, key=lambda pair: pair[0], default=(9, None))
    return record.config if distance <= 2 else None


def simulate(
    budget_s,
    options,
    *,
    workers=15,
    limit=None,
    trial_s=TRIAL_S,
    confirm_s=CONFIRM_S,
    start_s=START_S,
    compile_s=COMPILE_S,
):
    """What a run takes and gives.

    Args:
        budget_s, options: of the tuner.
        workers: that compile.
        limit: the first units alone.
        trial_s, confirm_s: what these take.
        start_s: until a process can compile or measure.
        compile_s: what a config takes on average.
    """
    clock = Clock()
    catalog = SpaceCatalog(DEVICE)
    measurer = Measurer(clock, catalog, trial_s, confirm_s, start_s)
    compiler = Compiler(clock, workers, start_s, compile_s)
    digests = dict.fromkeys(("prefill", "decode", "rms_norm", "kv_cache"), "synthetic")
    tools = Tools(
        device=DEVICE,
        environment=Environment(DEVICE.name, DEVICE.arch, digests, {"triton": None}),
        catalog=catalog,
        make_measurer=lambda: measurer,
        make_compiler=lambda: compiler,
        prune=resource_model(),
        clock=clock,
    )
    tasks = tasks_of(units_of(llama_8b(), EngineLimits()))[:limit]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = RecordStore.open(folder, shipped=folder / "none")
        tuner = Tuner(Recipe("none:none"), store, options, log_root=folder)
        tuner._tools = tools
        started = time.monotonic()
        with tuner:
            outcomes = tune(tasks, tuner, budget_s=budget_s)
    qualities, defaults, kept, weighted = defaultdict(list), [], [], 0.0
    for task, outcome in zip(tasks, outcomes, strict=True):
        key = outcome.key
        truth = measurer.truth(key)
        default = catalog.default(key)
        config = served_for(key, outcomes) or default
        qualities[key.kernel].append(truth.best_us / truth.of(config))
        weighted += task.weight * qualities[key.kernel][-1]
        defaults.append(truth.best_us / truth.of(default))
        prepared = prepare(key, tools, options)
        kept.append(truth.best_us / min(map(truth.of, prepared.space.configs)))
    every = list(itertools.chain(*qualities.values()))
    result = {"quality": geometric_mean(every), "worst": min(every)}
    result |= {"weighted": weighted / sum(task.weight for task in tasks)}
    result |= {kernel: geometric_mean(found) for kernel, found in qualities.items()}
    result |= {"default": geometric_mean(defaults)}
    # What is left of a record's loss beside the best of what was searched.
    result |= {"searched": geometric_mean(kept), "found": 0.0, "seconds": clock.now}
    result["found"] = result["quality"] / result["searched"]
    counts = total(outcomes)
    states = [outcome.state for outcome in outcomes]
    result |= {"considered": counts.considered, "timed": counts.timed}
    result |= {"binaries": len(compiler.done), "unreached": states.count("unreached")}
    result |= {"first": [outcome.counts.timed for outcome in outcomes[:6]]}
    return result | {"failed": states.count("failed"),
                     "host_s": time.monotonic() - started}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget-s", type=float)
    parser.add_argument("--trial-s", type=float, default=TRIAL_S)
    parser.add_argument("--confirm-s", type=float, default=CONFIRM_S)
    parser.add_argument("--start-s", type=float, default=START_S)
    parser.add_argument("--compile-s", type=float, default=COMPILE_S)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--units", type=int)
    for name in ("trials", "patience", "candidates", "batch", "finalists"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--strategy")
    parser.add_argument("--limit", type=int, default=warm_start.LIMIT)
    parser.add_argument("--from-ready", type=int, default=warm_start.FROM_READY)
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args())
    warm_start.FROM_READY = args.pop("from_ready")
    limit = args.pop("limit")
    warm_start.warm_ranking.__kwdefaults__["limit"] = limit
    budget_s, workers, units = (args.pop(n) for n in ("budget_s", "workers", "units"))
    names = "trial_s", "confirm_s", "start_s", "compile_s"
    costs = {name: args.pop(name) for name in names}
    given = {"patience": 48} | {n: v for n, v in args.items() if v is not None}
    options = TuneOptions(**given)
    result = simulate(budget_s, options, workers=workers, limit=units, **costs)
    given |= {"from_ready": warm_start.FROM_READY, "limit": limit} | costs
    json.dump(given | {"budget_s": budget_s} | result, sys.stdout)
    print()


if __name__ == "__main__":
    main()
