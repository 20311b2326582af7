# SPDX-License-Identifier: Apache-2.0
"""Tools of a tuner that an engine on the CPU starts: real spaces, made-up times.

`make` is named by a recipe; `use` has start_tuning take it for a GPU's.
"""

import hashlib
import os
import time
from dataclasses import dataclass

import torch
from tuner_fakes import Confirmed, worker_path

from portable_backend.device import DeviceInfo
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.digest import current_digests
from portable_backend.warmup.matching import Environment, current_toolchain
from portable_backend.warmup.measuring_process import MeasuringProcess
from portable_backend.warmup.search import Trial
from portable_backend.warmup.tools import Recipe, Tools
from portable_backend.warmup.tuning_tools import SpaceCatalog


def time_of(config):
    """Between 1 and 2; a config is as fast in one process as in another."""
    digest = hashlib.sha256(repr(sorted(config.items_)).encode()).digest()
    return 1 + digest[0] / 255


@dataclass
class Measurer:
    """Attributes:
    trial_s: that each trial takes.
    hangs: in its first trial, whatever it is told.
    dies: in its first trial.
    """

    catalog: SpaceCatalog
    trial_s: float
    hangs: bool
    dies: bool

    def measure(self, key, proposals, incumbent=None):
        for proposal in proposals:
            while self.hangs:
                try:
                    time.sleep(60)
                except KeyboardInterrupt:
                    continue
            if self.dies:
                os._exit(9)
            time.sleep(self.trial_s)
            config = proposal.config
            yield Trial(config, proposal.rounds, time_of(config), seconds=self.trial_s)

    def confirm(self, key, config, seed):
        # The default is slower than anything, so that something wins.
        default = self.catalog.default(key)
        return Confirmed(3.0 if config == default else time_of(config), 3.0, 0.001)

    def close(self):
        pass


def make(*, trial_s=0.001, hangs=False, dies=False):
    device = DeviceInfo.detect(torch.device("cpu"))
    catalog = SpaceCatalog(device)
    return Tools(
        device=device,
        environment=Environment(
            device.name, device.arch, current_digests(), current_toolchain()
        ),
        catalog=catalog,
        make_measurer=lambda: Measurer(catalog, trial_s, hangs, dies),
    )


class PlantedCatalog:
    """Configs of `planted_workloads`; the default, "good", is the fastest."""

    def configs(self, key):
        names = ("good", "slow", "noted", "wrong")
        return [KernelConfig.of(BEHAVIOUR=name) for name in names]

    def default(self, key):
        return KernelConfig.of(BEHAVIOUR="good")


def make_planted(*, beacon, turn_us=1000.0):
    """Tools that measure in a process of their own, beside the engine of a beacon."""
    device = DeviceInfo.detect(torch.device("cpu"))
    return Tools(
        device=device,
        environment=Environment(
            device.name, device.arch, current_digests(), current_toolchain()
        ),
        catalog=PlantedCatalog(),
        make_measurer=lambda: MeasuringProcess(
            device="cpu",
            make="planted_workloads:make",
            beacon=beacon,
            turn_us=turn_us,
            confirm_rounds=2,
        ),
    )


def use_beside(set_attribute, folder, **behaviour):
    """Have background_tuning tune with such tools, as if the CPU were a GPU.

    Args:
        set_attribute: setattr, or a monkeypatch's.
        folder: of the beacon.
        behaviour: of `make`.
    """
    from portable_backend import background_tuning, start_tuning

    recipe = Recipe("start_tools:make", behaviour)
    os.environ["PYTHONPATH"] = worker_path()
    set_attribute(start_tuning, "_can_tune", lambda info: True)
    set_attribute(start_tuning, "_visible_name", lambda device: "0")
    set_attribute(background_tuning, "_gpu_id", lambda device: "test")
    set_attribute(background_tuning, "beacon_path", lambda gpu: folder / gpu)
    set_attribute(background_tuning, "_recipe", lambda *_: recipe)
    set_attribute(background_tuning, "_state", background_tuning._State())
    return background_tuning


def use(set_attribute, **behaviour):
    """Have start_tuning tune with such tools, as if the CPU were a GPU.

    Args:
        set_attribute: setattr, or a monkeypatch's.
        behaviour: of `make`.
    """
    from portable_backend import start_tuning

    recipe = Recipe("start_tools:make", behaviour)
    os.environ["PYTHONPATH"] = worker_path()
    set_attribute(start_tuning, "_can_tune", lambda info: True)
    set_attribute(start_tuning, "_recipe", lambda device: recipe)
    set_attribute(start_tuning, "_visible_name", lambda device: "0")
    set_attribute(start_tuning, "_spent", start_tuning._Spent())
    return start_tuning
