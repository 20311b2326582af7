# SPDX-License-Identifier: Apache-2.0
"""A run against a simulated clock: within its budget, and better than defaults."""

from simulated_tuning import COMPILE_S, DEVICE, Clock, Compiler, simulate
from tuning_keys import decode_key

from portable_backend.warmup.kernel_specs import spec_of
from portable_backend.warmup.tuning_options import TuneOptions

OPTIONS = TuneOptions(strategy="evolutionary", patience=48)


def test_a_budget_is_kept_and_well_spent():
    found = simulate(60.0, OPTIONS, limit=4)
    # What compiles when the time is up is waited for, and winners are confirmed.
    assert found["seconds"] < 60 + 2 * COMPILE_S
    assert found["failed"] == found["unreached"] == 0
    assert found["quality"] > found["default"] + 0.05
    # Keys share binaries: more is timed than is compiled.
    assert found["timed"] > 0.9 * found["binaries"] > 30


def test_the_most_valuable_units_are_not_starved_in_a_short_budget():
    """Their grants are of 3 s, and it takes 9 s until a config is compiled."""
    found = simulate(45.0, OPTIONS)
    assert min(found["first"]) > 6
    assert found["seconds"] < 1.05 * 45
    assert found["weighted"] > 0.78  # 0.757 with starved ones


def test_a_short_budget_is_kept_though_compilers_are_late():
    found = simulate(20.0, OPTIONS, limit=6)
    assert found["seconds"] < 1.1 * 20
    assert found["timed"] > 10


def test_the_simulated_pool_starts_first_what_is_waited_for():
    key, clock = decode_key(), Clock()
    compiler = Compiler(clock, workers=1)
    default = spec_of(key).default(key, DEVICE)
    configs = [default.replace(num_stages=n) for n in (1, 2, 3)]
    compiler.submit(key, configs)
    (found,) = compiler.wait(key, configs[2:])
    assert found.config == configs[2]
    # The only worker had begun with the first.
    assert clock.now <= 2 * 1.4 * COMPILE_S
    assert compiler.ready(key, configs) == [configs[0], configs[2]]
