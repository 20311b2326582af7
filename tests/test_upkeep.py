# SPDX-License-Identifier: Apache-2.0
"""Pruning what is stale and verifying what is doubtful."""

import json
from datetime import date

import pytest
from record_fakes import (
    DEFAULT,
    DIGEST,
    ENVIRONMENT,
    GPU,
    make_config,
    make_key,
    make_portfolio,
    make_record,
)

from portable_backend.errors import UnsupportedError
from portable_backend.warmup.archive import archive_of
from portable_backend.warmup.layers import PORTFOLIO, Layer, WritableLayer
from portable_backend.warmup.lookup import Lookup
from portable_backend.warmup.store import RecordStore
from portable_backend.warmup.tables import merge_records
from portable_backend.warmup.upkeep import Measurement, prune, verify

STALE = make_record(kernel_digest="sha256:old")


@pytest.fixture
def layer(tmp_path):
    return WritableLayer("user cache", tmp_path)


def _held(layer):
    return {record for file in layer.load("decode") for record in file.records}


def test_prune_removes_records_of_other_code_alone(layer):
    fresh, other = make_record(), make_record(gpu="nvidia_h100", kernel_digest="x")
    layer.merge_in([STALE, fresh, other])
    layer.append(make_record(make_key(1), kernel_digest="sha256:old"))
    removed, tables = prune(layer, digests={"decode": DIGEST})
    assert len(removed) == 3 and not tables
    assert _held(layer) == {fresh}


def test_prune_leaves_kernels_whose_code_it_does_not_know(layer):
    layer.merge_in([STALE])
    assert prune(layer, digests={"prefill": DIGEST}) == ([], [])
    assert _held(layer) == {STALE}


def test_a_dry_run_removes_nothing(layer):
    layer.merge_in([STALE])
    removed, _ = prune(layer, digests={"decode": DIGEST}, dry_run=True)
    assert removed == [STALE] and _held(layer) == {STALE}
    path = layer.path("decode", GPU)
    path.write_text('{"schema": 0}')
    assert prune(layer, min_schema=1, dry_run=True) == ([], [str(path)])
    assert path.exists()


def test_prune_by_schema_removes_earlier_tables_and_no_others(layer):
    layer.merge_in([make_record(), make_record(gpu="nvidia_h100")])
    layer.append(make_record(make_key(7)))
    old = layer.path("decode", GPU)
    old.write_text(json.dumps(json.loads(old.read_text()) | {"schema": 0}))
    broken = layer.path("decode", "nvidia_b200")
    broken.write_text("not a table")
    assert prune(layer, min_schema=1) == ([], [str(old)])
    assert _held(layer) == {make_record(make_key(7)), make_record(gpu="nvidia_h100")}
    assert broken.exists() and not old.exists()
    for wrong in (2, 0, -1):
        with pytest.raises(ValueError, match=f"min_schema must be 1 to 1, got {wrong}"):
            prune(layer, min_schema=wrong)


def test_verify_keeps_what_the_measurement_gives(layer):
    doubtful = make_record(verified=False, time_us=1, measured="2020-01-01")
    layer.merge_in([doubtful])
    result = Measurement(time_us=44.0, error_ratio=0.5)
    (verdict,) = verify(layer, [doubtful], lambda record: result)
    (record,) = _held(layer)
    assert verdict.after == record and record.verified
    assert (record.time_us, record.error_ratio, record.default_us) == (44, 0.5, 47.9)
    assert record.measured == date.today().isoformat()


@pytest.mark.parametrize(
    "result", [Measurement(10, problem="wrong"), Measurement(), Measurement(-1.0)]
)
def test_verify_drops_what_fails_so_that_the_next_best_is_served(layer, result):
    bad, good = make_record(time_us=1), make_record(config=make_config(32))
    layer.merge_in([bad, good])
    (verdict,) = verify(layer, [bad], lambda record: result)
    assert verdict.after is None and verdict.problem
    assert {record for record in _held(layer) if not record.refuted} == {good}
    (told,) = [record for record in _held(layer) if record.refuted]
    assert (told.claim, told.refuted) == (bad.claim, verdict.problem)


def _lookup(*layers):
    return Lookup(RecordStore(layers), ENVIRONMENT, lambda key: DEFAULT)


BAD = make_record(time_us=1)
# The same config, measured before, or with another toolchain.
OLDER = [
    make_record(time_us=2, measured="2026-01-01"),
    make_record(toolchain={"triton": "3.5.0"}),
]
WRONG = Measurement(problem="the oracle disagrees")


def test_a_refuted_config_does_not_come_back_from_history(layer):
    layer.merge_in([BAD, *OLDER])
    verify(layer, [BAD], lambda record: WRONG)
    assert merge_records(_held(layer)).served == ()
    choice = _lookup(layer).choose(BAD.key)
    assert (choice.grade, choice.config) == ("default", DEFAULT)
    assert "the oracle disagrees" in choice.reasons[0]
    (told,) = _lookup(layer).explain(BAD.key).candidates
    assert [item.field for item in told.differences] == ["refuted"]


def test_a_refuted_config_does_not_come_back_by_a_merge_or_an_import(layer, tmp_path):
    good = make_record(config=make_config(32))
    layer.merge_in([BAD])
    verify(layer, [BAD], lambda record: WRONG)
    layer.merge_in([BAD, *OLDER, good])
    archive_of([BAD, *OLDER]).merge_into(layer)
    layer.append(BAD)
    assert merge_records(_held(layer)).served == (good,)
    assert _lookup(layer).choose(BAD.key).config == good.config
    # Nor where another folder gets both, whatever comes first.
    other = WritableLayer("", tmp_path / "other")
    other.merge_in([BAD, *OLDER])
    other.merge_in(_held(layer))
    assert _lookup(other).choose(BAD.key).config == good.config


def test_a_refuted_config_is_not_served_from_another_layer(layer, tmp_path):
    near, family = make_record(make_key(8192)), make_record(gpu="nvidia_h100")
    WritableLayer("", tmp_path / "image").merge_in([BAD, near, family])
    image = Layer("image", tmp_path / "image")
    assert _lookup(layer, image).choose(BAD.key).grade == "exact"
    layer.merge_in([BAD])
    verify(layer, [BAD], lambda record: WRONG)
    assert _lookup(layer, image).choose(BAD.key).grade == "default"
    # Of another key nobody has said so.
    assert _lookup(layer, image).choose(near.key).grade == "exact"


def test_a_portfolio_does_not_give_what_is_refuted(layer):
    portfolio = make_portfolio()
    layer.write_file("decode", GPU, PORTFOLIO, portfolio.to_text().encode())
    key = make_key(54, head_size=64)
    refuted = _lookup(layer).choose(key).config
    record = make_record(make_key(54), config=refuted)
    layer.merge_in([record])
    verify(layer, [record], lambda record: WRONG)
    (other,) = set(portfolio.configs) - {refuted}
    assert _lookup(layer).choose(key).config == other


def test_prune_forgets_refutations_when_told(layer):
    layer.merge_in([BAD])
    verify(layer, [BAD], lambda record: WRONG)
    layer.merge_in([BAD])
    assert prune(layer, digests={"decode": DIGEST}) == ([], [])
    (removed,), _ = prune(layer, refuted=True)
    assert removed.refuted and merge_records(_held(layer)).served == (BAD,)


def test_each_verdict_is_written_before_the_next_is_measured(layer):
    records = [make_record(make_key(n), verified=False) for n in (1, 2)]
    layer.merge_in(records)

    def measure(record):
        if record is records[1]:
            raise KeyboardInterrupt
        return Measurement(time_us=3.0)

    with pytest.raises(KeyboardInterrupt):
        verify(layer, records, measure)
    assert {(r.verified, r.key) for r in _held(layer)} == {
        (True, make_key(1)),
        (False, make_key(2)),
    }


def test_a_measurer_that_cannot_measure_costs_no_record(layer):
    layer.merge_in([STALE])

    def refuse(record):
        raise UnsupportedError("another GPU")

    with pytest.raises(UnsupportedError, match="another GPU"):
        verify(layer, [STALE], refuse)
    assert _held(layer) == {STALE}


def test_without_a_measurer_verify_says_so(layer):
    with pytest.raises(UnsupportedError, match="cannot be verified here"):
        verify(layer, [], None)
