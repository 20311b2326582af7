# SPDX-License-Identifier: Apache-2.0
"""`tune` leaves a portfolio for each kernel, from the records and logs at hand."""

from dataclasses import replace

import pytest
from search_cases import time_of
from tuner_fakes import (
    BEST,
    CONFIGS,
    DEFAULT,
    DEVICE,
    Measurer,
    key_of,
    open_store,
    tasks_of,
    tuner_with,
)

from portable_backend.warmup.layers import WritableLayer
from portable_backend.warmup.lookup import Lookup
from portable_backend.warmup.matching import Environment
from portable_backend.warmup.portfolio import parse_portfolio
from portable_backend.warmup.tuned_portfolios import (
    MAX_CONFIGS,
    known_times,
    write_portfolios,
)
from portable_backend.warmup.tuner import trial_folder, tune
from portable_backend.warmup.tuning_options import TuneOptions
from portable_backend.warmup.tuning_report import Outcome
from portable_backend.warmup.upkeep import Measurement, verify

EVERYTHING = TuneOptions(strategy="exhaustive", trials=None, warm_start=False)


def _tune(folder, *seq_lens, **parts):
    return tune(
        tasks_of(*seq_lens), tuner_with(Measurer(), folder, EVERYTHING, **parts)
    )


def _write(folder, outcomes, **options):
    layer = WritableLayer("", folder)
    return write_portfolios(outcomes, open_store(folder), layer, **options)


def _choose(folder, key, digest="sha256:aa"):
    environment = Environment(DEVICE.name, DEVICE.arch, {"decode": digest})
    return Lookup(open_store(folder), environment, lambda key: DEFAULT).choose(key)


def test_what_was_tuned_is_covered_and_serves_what_has_no_neighbour(tmp_path):
    far = key_of(1 << 30)
    outcomes = _tune(tmp_path, 1, 2)
    assert _choose(tmp_path, far).grade == "default"
    (written,) = _write(tmp_path, outcomes)
    assert written.cover.configs == (BEST,) and written.cover.loss == 1
    choice = _choose(tmp_path, far)
    assert (choice.grade, choice.config) == ("portfolio", BEST)
    assert _choose(tmp_path, far, "sha256:other").grade == "default"


def _records(folder, count):
    """Outcomes of that many keys, each with another config as its winner."""
    (one,) = _tune(folder, 1)
    store = open_store(folder)
    outcomes = []
    for n, config in enumerate(CONFIGS[:count], 1):
        record = replace(one.record, key=key_of(10**n), config=config, time_us=50.0)
        with store:
            store.put(record)
        outcomes.append(Outcome(record.key, "tuned", record=record))
    return outcomes


def test_it_holds_at_most_eight_configs_and_says_what_is_not_covered(tmp_path):
    (written,) = _write(tmp_path, _records(tmp_path, 12))
    assert len(written.cover.configs) == MAX_CONFIGS == 8
    told = written.to_dict()
    # Of the first key all configs were timed.
    assert told["buckets"] == 9 and len(told["uncovered"]) == 4
    assert "portfolio of 8 configs for 9 keys" in str(written)
    assert "none is known to run in 4 other keys" in str(written)
    data = written.path.read_bytes()
    assert parse_portfolio(data, "", "decode", DEVICE.name) == written.portfolio


def test_trials_tell_what_a_config_loses_in_other_keys(tmp_path):
    first = _tune(tmp_path, 1, 2, 4)
    store, slower = open_store(tmp_path), next(c for c in CONFIGS if c != BEST)
    record = replace(first[0].record, config=slower, time_us=0.5 * time_of(BEST))
    with store:  # as if it had been the fastest there
        store.put(record)
    times = known_times(record, open_store(tmp_path), tmp_path)
    for n in (1, 2, 4):
        assert times[key_of(n)] == {c: time_of(c) for c in (BEST, slower)}
    # Logs of other code, or without their names, tell nothing.
    for path in trial_folder(tmp_path, "decode", DEVICE.name).glob("*.jsonl"):
        path.rename(path.with_name(f"0{path.name}"))
    times = known_times(record, open_store(tmp_path), tmp_path)
    assert times[key_of(2)] == {BEST: time_of(BEST)}


@pytest.mark.parametrize("why", ["refuted", "failed"])
def test_what_was_refuted_or_failed_for_a_key_is_in_no_portfolio(tmp_path, why):
    outcomes = _records(tmp_path, 3)
    bad = outcomes[0].record
    if why == "refuted":
        layer = WritableLayer("", tmp_path)
        verify(layer, [bad], lambda record: Measurement(problem="wrong"))
    else:
        measurer = Measurer(bad={str(CONFIGS.index(bad.config)): "correctness"})
        tune(tasks_of(7), tuner_with(measurer, tmp_path, EVERYTHING))
    (written,) = _write(tmp_path, outcomes)
    assert bad.config not in written.cover.configs
    assert outcomes[1].record.config in written.cover.configs


def test_records_of_other_code_or_another_toolchain_are_not_mixed_in(tmp_path):
    outcomes = _tune(tmp_path, 1, digest="sha256:old")
    _tune(tmp_path, 2, toolchain={"triton": "3.5.0"})
    outcomes += _tune(tmp_path, 4)
    (written,) = _write(tmp_path, outcomes)
    assert set(written.cover.losses) == {key_of(4)}
    assert written.portfolio.kernel_digest == "sha256:aa"


def test_where_nothing_was_recorded_nothing_is_written(tmp_path):
    assert _write(tmp_path, [Outcome(key_of(1), "failed", "broken")]) == []
    assert not list(tmp_path.iterdir())
