# SPDX-License-Identifier: Apache-2.0
"""Tools for tuning that need no GPU: times from a formula, and planted mischief.

`make` is named by recipes, so worker processes can make these tools as well.
"""

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from search_cases import small_configs, time_of

from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.warmup.matching import Environment
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.search import Trial
from portable_backend.warmup.store import RecordStore
from portable_backend.warmup.tools import Recipe, Tools
from portable_backend.warmup.tuner import Tuner
from portable_backend.warmup.tuning_options import TuneOptions
from portable_backend.warmup.tuning_report import Task

DEVICE = DeviceInfo("nvidia_h200", "sm90", 132, ARCH_LIMITS["sm90"])
TOOLCHAIN = {"torch": "2.11.0", "triton": "3.6.0"}
CONFIGS = small_configs()
BEST, *_ = sorted(CONFIGS, key=time_of)
DEFAULT = CONFIGS[0]


def key_of(seq_len: int) -> TuningKey:
    return TuningKey.of("decode", num_seqs=8, seq_len=seq_len)


def tasks_of(*seq_lens: int) -> list[Task]:
    return [Task(key_of(n), 1.0) for n in seq_lens]


class Catalog:
    def configs(self, key):
        return CONFIGS

    def default(self, key):
        return DEFAULT


@dataclass(frozen=True)
class Confirmed:
    time_us: float
    default_us: float
    noise: float
    error_ratio: float | None = 1.0
    wrong: str | None = None


@dataclass
class Measurer:
    """Times configs by `time_of`; its clock goes on by `trial_s` with each trial.

    Attributes:
        bad: number of a config to why measuring finds it invalid.
        overfitted: numbers of configs that seem fast, and fail on unseen data.
        noise: of each confirmation.
        speedup: the default is so many times slower than it seems.
        breaks_on: seq_len at which it raises, `breaks` times.
        kills_on: seq_len at which its process dies, unless `token` names a file, which
            then makes it the only time.
        log: file that gets a line for each trial.
    """

    trial_s: float = 0.0
    sleep_s: float = 0.0
    bad: dict = field(default_factory=dict)
    overfitted: tuple = ()
    noise: float = 0.001
    default_us: float | None = None
    breaks_on: int | None = None
    breaks: int = 0
    kills_on: int | None = None
    token: str | None = None
    log: str | None = None
    interrupts_after: int | None = None
    interrupts_in_confirm: bool = False
    clock_s: float = 0.0
    measured: list = field(default_factory=list)
    confirmed: list = field(default_factory=list)
    seeds: list = field(default_factory=list)
    closed: int = 0

    def measure(self, key, proposals, incumbent=None):
        assert incumbent in CONFIGS
        for proposal in proposals:
            self._misbehave(key)
            time.sleep(self.sleep_s)
            self.clock_s += self.trial_s
            self.measured.append((key, proposal.config))
            if self.log:
                with open(self.log, "a") as file:
                    number = CONFIGS.index(proposal.config)
                    file.write(f"{dict(key.fields)['seq_len']} {number}\n")
            number, rounds = CONFIGS.index(proposal.config), proposal.rounds
            reason = self.bad.get(str(number))
            if reason:
                yield Trial(
                    proposal.config, rounds, None, reason, "planted", self.trial_s
                )
                continue
            time_us = time_of(proposal.config)
            if number in self.overfitted:
                time_us = 0.01
            yield Trial(proposal.config, rounds, time_us, seconds=self.trial_s)

    def confirm(self, key, config, seed):
        if self.interrupts_in_confirm:
            raise KeyboardInterrupt
        self.confirmed.append(config)
        self.seeds.append(seed)
        wrong = None
        if CONFIGS.index(config) in self.overfitted:
            wrong = "right for the timing shape alone"
        default_us = self.default_us or time_of(DEFAULT)
        time_us = default_us if config == DEFAULT else time_of(config)
        return Confirmed(time_us, default_us, self.noise, 1.0, wrong)

    def close(self):
        self.closed += 1

    def _misbehave(self, key):
        seq_len = key.to_dict()["seq_len"]
        if seq_len == self.breaks_on and self.breaks > 0:
            self.breaks -= 1
            raise RuntimeError("the measuring process does not start")
        if seq_len == self.kills_on and not (self.token and Path(self.token).exists()):
            if self.token:
                Path(self.token).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.interrupts_after == len(self.measured):
            self.interrupts_after = None
            raise KeyboardInterrupt


def make(**behaviour) -> Tools:
    """Tools around a `Measurer` of that behaviour."""
    measurer = Measurer(**behaviour)
    return tools_around(measurer)


def tools_around(measurer, digest="sha256:aa", toolchain=None, **parts) -> Tools:
    environment = Environment(
        DEVICE.name, DEVICE.arch, {"decode": digest}, toolchain or TOOLCHAIN
    )
    return Tools(
        device=DEVICE,
        environment=environment,
        catalog=Catalog(),
        make_measurer=lambda: measurer,
        clock=lambda: time.monotonic() + measurer.clock_s,
        **parts,
    )


def tuner_with(measurer, folder, options=None, on_event=None, **parts) -> Tuner:
    """A tuner in this process whose records and logs are in `folder`."""
    tuner = Tuner(
        Recipe("tuner_fakes:make"),
        open_store(folder),
        options or TuneOptions(strategy="random", trials=108, warm_start=False),
        log_root=folder,
        on_event=on_event or (lambda event: None),
    )
    tuner._tools = tools_around(measurer, **parts)
    return tuner


def open_store(folder) -> RecordStore:
    return RecordStore.open(folder, shipped=Path(folder) / "none")


def served(folder) -> dict:
    """Served records by seq_len, as another process reads them."""
    records = [record for _, record in open_store(folder).records("decode")]
    return {record.key.to_dict()["seq_len"]: record for record in reversed(records)}


def worker_path() -> str:
    """PYTHONPATH of a process that imports what this one does."""
    return os.pathsep.join(path for path in sys.path if path)
