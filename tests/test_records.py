# SPDX-License-Identifier: Apache-2.0
"""Keys, records, and what is refused as one."""

import json
import pickle
import subprocess
import sys

import pytest
from record_fakes import DIGEST, GPU, TOOLCHAIN, make_config, make_key, make_record

from portable_backend.errors import RecordError
from portable_backend.warmup.records import TuningKey, record_from_dict
from portable_backend.warmup.tables import (
    NewerSchemaError,
    format_table,
    merge_records,
    parse_line,
    parse_table,
)

HEADER = {
    "schema": 1,
    "kernel": "decode",
    "gpu": GPU,
    "arch": "sm90",
    "kernel_digest": DIGEST,
    "toolchain": TOOLCHAIN,
}


def _entry(**changes):
    entry = make_record().to_dict() | changes
    return {name: value for name, value in entry.items() if value is not ...}


def _parse(*entries, **header):
    data = json.dumps(HEADER | header | {"records": list(entries)}).encode()
    return parse_table(data, "a.json", "decode", GPU)


def test_keys_with_the_same_fields_are_equal_in_any_order():
    one = TuningKey.of("decode", seq_len=1, dtype="bfloat16")
    two = TuningKey.of("decode", dtype="bfloat16", seq_len=1)
    assert one == two and hash(one) == hash(two)
    assert one != TuningKey.of("prefill", dtype="bfloat16", seq_len=1)


def test_a_key_may_have_a_field_called_kernel():
    assert TuningKey.of("decode", kernel="x").to_dict() == {"kernel": "x"}


def test_a_key_pickled_elsewhere_is_found_here():
    code = "import pickle, sys; from portable_backend.warmup.records import TuningKey; "
    code += "k = TuningKey.of('decode', dtype='bfloat16', seq_len=4); "
    code += "sys.stdout.buffer.write(pickle.dumps(k))"
    run = [sys.executable, "-P", "-c", code]
    data = subprocess.run(run, capture_output=True, check=True).stdout
    here = TuningKey.of("decode", dtype="bfloat16", seq_len=4)
    assert pickle.loads(data) in {here}


@pytest.mark.parametrize("value", [1.5, None, [1], -1, "12"])
def test_a_size_that_is_no_size_is_refused_by_name(value):
    with pytest.raises(ValueError, match="seq_len"):
        TuningKey.of("decode", seq_len=value)


def test_distance_counts_factors_of_two_over_sizes_alone():
    key = make_key(4096)
    assert key.distance(key) == 0
    assert key.distance(make_key(8192)) == pytest.approx(1)
    assert key.distance(make_key(1024, num_seqs=64)) == pytest.approx(3)
    assert key.distance(make_key(4096, dtype="float16")) == float("inf")
    assert key.distance(make_key(4096, query_len=1)) == float("inf")
    assert make_key(0).distance(make_key(1)) == pytest.approx(1)


def test_a_table_read_back_holds_the_same_records():
    records = [make_record(make_key(n), time_us=n + 0.5) for n in (1, 54, 1328)]
    records.append(make_record(make_key(1), time_us=9, arch="sm90a"))
    text = format_table("decode", GPU, merge_records(records))
    table = parse_table(text.encode(), "a.json", "decode", GPU)
    assert set(table.records) == set(records) and not table.problems
    assert format_table("decode", GPU, merge_records(table.records)) == text


def test_a_journal_line_read_back_is_the_same_record():
    record = make_record(extra={"note": "by hand"})
    assert "\n" not in record.to_line()
    assert parse_line(record.to_line().encode(), "j", "decode", GPU) == record


def test_entries_lacking_digest_and_toolchain_take_the_headers():
    own = {"triton": "9"}
    table = _parse(
        _entry(kernel_digest=..., toolchain=...),
        _entry(kernel_digest="sha256:own", toolchain=own),
    )
    assert [r.kernel_digest for r in table.records] == [DIGEST, "sha256:own"]
    assert [r.toolchain for r in table.records] == [TOOLCHAIN, own]


def test_an_entry_of_the_house_style_example_counts_as_verified_by_its_error():
    entry = {
        "key": {"seq_len": 4096},
        "config": {"BLOCK_N": 64, "num_warps": 4},
        "time_us": 41.3,
        "default_us": 47.9,
        "error_ratio": 1.1,
    }
    assert _parse(entry).records[0].verified
    assert not _parse(entry | {"error_ratio": None}).records[0].verified
    assert not _parse(entry | {"verified": False}).records[0].verified


def test_unknown_fields_are_kept():
    (record,) = _parse(_entry(note="x", deep={"a": [1]})).records
    assert record.extra == {"note": "x", "deep": {"a": [1]}}
    assert record.to_dict()["note"] == "x"


WRONG = [
    ("time_us", -1.0),
    ("time_us", 0),
    ("time_us", 1e9),
    ("time_us", "41"),
    ("time_us", True),
    ("time_us", None),
    ("time_us", ...),
    ("default_us", -3),
    ("error_ratio", -0.1),
    ("verified", "yes"),
    ("measured", "yesterday"),
    ("trials", 1.5),
    ("toolchain", {"triton": 3}),
    ("kernel_digest", 7),
    ("key", {}),
    ("key", {"seq_len": 1.5}),
    ("key", ["seq_len"]),
    ("config", {"BLOCK_N": [1]}),
    ("config", {"block_n": 1}),
    ("config", "BLOCK_N=1"),
    ("gpu", "nvidia_h100"),
    ("kernel", "prefill"),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_entry_is_named_and_the_others_stay(name, value):
    expected = "seq_len" if value == {"seq_len": 1.5} else name
    if name == "config" and isinstance(value, dict):
        expected = next(iter(value))
    kept = _entry(key={"seq_len": 7})
    if (name, value) == ("time_us", ...):
        value = ...
    table = _parse(_entry(**{name: value}), kept)
    assert len(table.records) == 1
    (problem,) = table.problems
    assert "a.json, records entry 1: " in problem and expected in problem
    assert "must be" in problem or "nor one of" in problem


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_times_that_are_not_numbers_are_refused(text):
    data = json.dumps(HEADER | {"records": [_entry()]}).replace("41.5", text)
    try:
        table = parse_table(data.encode(), "a.json", "decode", GPU)
    except RecordError as error:
        assert "is not a number" in str(error)
    else:
        assert not table.records and "time_us" in table.problems[0]


def test_a_later_schema_is_told_from_an_earlier_one():
    with pytest.raises(NewerSchemaError, match="schema must be 1, got 2"):
        _parse(schema=2)
    with pytest.raises(RecordError, match="schema must be 1, got 0") as caught:
        _parse(schema=0)
    assert not isinstance(caught.value, NewerSchemaError)


@pytest.mark.parametrize(
    ("header", "field"),
    [
        ({"schema": "1"}, "schema"),
        ({"schema": None}, "schema"),
        ({"kernel": "prefill"}, "kernel"),
        ({"gpu": "nvidia_h100"}, "gpu"),
        ({"history": {}}, "history"),
    ],
)
def test_a_wrong_header_is_refused_by_field(header, field):
    with pytest.raises(RecordError, match=rf"a\.json: {field} must be"):
        _parse(**header)


@pytest.mark.parametrize("gpu", ["", ".hidden", "..", "a\nb", 3, "x" * 201])
def test_a_gpus_name_must_serve_as_a_files(gpu):
    with pytest.raises(RecordError, match="gpu must be a name"):
        make_record(gpu=gpu)


def test_configs_are_data_and_nothing_in_them_is_evaluated():
    entry = _entry(config={"BLOCK_N": "__import__('os').abort()"})
    record = record_from_dict(entry, HEADER, "here")
    assert record.config["BLOCK_N"] == "__import__('os').abort()"


def test_equal_records_are_one_and_any_other_field_tells_them_apart():
    assert make_record() == make_record(time_us=41.5)
    for change in (
        {"time_us": 41.6},
        {"config": make_config(32)},
        {"trials": 13},
        {"extra": {"note": 1}},
        {"gpu": "nvidia_h100"},
    ):
        assert make_record() != make_record(**change)
