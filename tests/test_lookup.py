# SPDX-License-Identifier: Apache-2.0
"""Graded lookup: what serves a key, and why nothing better does."""

import itertools
import timeit
from dataclasses import replace
from pathlib import Path

import pytest
from record_fakes import (
    DEFAULT,
    ENVIRONMENT,
    GPU,
    TOOLCHAIN,
    log_lines,
    make_config,
    make_key,
    make_portfolio,
    make_record,
)

from portable_backend.warmup.layers import PORTFOLIO, WritableLayer
from portable_backend.warmup.lookup import Lookup
from portable_backend.warmup.store import RecordStore


@pytest.fixture
def look(tmp_path):
    """A lookup over a folder that holds the given records."""
    folders = itertools.count()

    def look(*records, environment=ENVIRONMENT, **options):
        folder = tmp_path / str(next(folders))
        WritableLayer("", folder).merge_in(records)
        return _lookup(folder, environment, **options)

    return look


def _lookup(folder, environment=ENVIRONMENT, layers=(), **options):
    store = RecordStore.open(folder, layers, shipped=Path(folder) / "none")
    return Lookup(store, environment, lambda key: DEFAULT, **options)


def test_a_record_for_the_key_is_exact(look):
    record = make_record()
    choice = look(record, make_record(make_key(8192))).choose(make_key())
    assert (choice.grade, choice.layer) == ("exact", "user cache")
    assert (choice.record, choice.config) == (record, record.config)
    assert choice.reasons == ()


def test_without_records_the_default_serves_and_says_why(look):
    choice = look().choose(make_key())
    assert (choice.grade, choice.config, choice.layer) == ("default", DEFAULT, None)
    assert GPU in choice.reasons[0]


def test_of_two_neighbours_as_near_the_larger_serves(look):
    small, large = make_record(make_key(2048), time_us=1), make_record(make_key(8192))
    assert look(small, large).choose(make_key(4096)).record == large


def test_the_nearest_size_serves(look):
    configs = {n: make_config(BLOCK_M=n) for n in (1024, 3000, 8192, 16384)}
    lookup = look(*(make_record(make_key(n), config=c) for n, c in configs.items()))
    for seq_len, nearest in [(4096, 3000), (8000, 8192), (12000, 16384), (700, 1024)]:
        choice = lookup.choose(make_key(seq_len))
        assert (choice.grade, choice.config) == ("nearest", configs[nearest])


def test_a_neighbour_may_be_four_times_away_and_no_more(look):
    lookup = look(make_record(make_key(1024)))
    assert lookup.choose(make_key(4096)).grade == "nearest"
    assert lookup.choose(make_key(4097)).grade == "default"
    assert lookup.choose(make_key(2048, num_seqs=128)).grade == "default"


@pytest.mark.parametrize(
    "fields", [{"dtype": "float16"}, {"head_size": 64}, {"num_queries_per_kv": 4}]
)
def test_another_structure_is_no_neighbour(look, fields):
    assert look(make_record(make_key(**fields))).choose(make_key()).grade == "default"


def test_another_gpu_of_the_architecture_is_family(look):
    record = make_record(make_key(8192), gpu="nvidia_h100")
    lookup = look(record, make_record(gpu="nvidia_a100", arch="sm80", time_us=1))
    choice = lookup.choose(make_key())
    assert (choice.grade, choice.record) == ("family", record)


def test_our_own_neighbour_beats_another_gpus_exact_size(look):
    ours, theirs = make_record(make_key(8192)), make_record(gpu="nvidia_h100")
    assert look(ours, theirs).choose(make_key()).record == ours


def test_an_earlier_layer_beats_a_better_time_but_not_a_better_grade(tmp_path):
    user, image = tmp_path / "user", tmp_path / "image"
    slow, fast = make_record(time_us=9), make_record(time_us=1)
    near, exact = make_record(make_key(64)), make_record(make_key(54))
    WritableLayer("", user).merge_in([slow, near])
    WritableLayer("", image).merge_in([fast, exact])
    lookup = _lookup(user, layers=[image])
    assert lookup.choose(make_key()).record == slow
    choice = lookup.choose(make_key(54))
    assert (choice.record, choice.layer) == (exact, "image layer 1")


def test_another_digest_is_never_used_and_the_reason_is_kept(look):
    choice = look(make_record(kernel_digest="sha256:old")).choose(make_key())
    assert choice.grade == "default"
    assert choice.reasons == (
        "user cache: kernel_digest: wanted sha256:aa, stored sha256:old",
    )


def test_a_kernel_without_a_known_digest_is_served_by_default(look):
    environment = replace(ENVIRONMENT, digests={})
    lookup = look(make_record(), environment=environment)
    assert lookup.choose(make_key()).grade == "default"


def test_unverified_records_serve_only_where_that_is_allowed(look):
    record = make_record(verified=False)
    assert look(record).choose(make_key()).grade == "default"
    lookup = look(record, require_verified=False)
    assert lookup.choose(make_key()).grade == "exact"


def test_another_toolchain_is_used_with_one_warning(look):
    toolchain = TOOLCHAIN | {"triton": "3.5.0"}
    records = [make_record(make_key(n), toolchain=toolchain) for n in (64, 512, 4096)]
    lookup = look(*records)
    with log_lines() as lines:
        choices = [lookup.choose(record.key) for record in records]
    assert [choice.grade for choice in choices] == ["exact"] * 3
    assert len(lines) == 1 and "toolchain.triton" in lines[0]
    assert "wanted 3.6.0, stored 3.5.0" in choices[2].reasons[0]


def test_within_a_layer_the_same_toolchain_beats_a_better_time(look):
    ours = make_record(time_us=9)
    other = make_record(time_us=1, toolchain={"triton": "3.5.0"})
    with log_lines() as lines:
        assert look(ours, other).choose(make_key()).record == ours
    assert not lines


def test_a_config_outside_todays_space_gives_way_to_the_next_best(look):
    best, loser = make_record(time_us=1), make_record(config=make_config(32))

    def check(key, config):
        return "BLOCK_N must be below 64" if config["BLOCK_N"] >= 64 else None

    choice = look(best, loser, space_check=check).choose(make_key())
    assert (choice.grade, choice.record) == ("exact", loser)
    assert "BLOCK_N must be below 64" in choice.reasons[0]
    assert look(best, loser).choose(make_key()).record == best, "nothing was lost"


def test_counts_tell_how_many_keys_got_which_grade(look):
    lookup = look(make_record())
    for seq_len in (4096, 4096, 8192, 2048, 1):
        lookup.choose(make_key(seq_len))
    counts = {"decode": {"exact": 1, "nearest": 2, "default": 1}}
    assert lookup.grade_counts() == counts


def test_a_choice_holds_until_refresh(look):
    lookup = look()
    key = make_key()
    assert lookup.choose(key).grade == "default"
    lookup.store.put(make_record())
    assert lookup.choose(key).grade == "default"
    lookup.refresh()
    assert lookup.choose(key).grade == "exact"
    assert lookup.grade_counts() == {"decode": {"exact": 1}}


def test_a_repeated_lookup_reads_no_file_and_takes_no_time(look, monkeypatch):
    lookup = look(make_record())
    first = lookup.choose(make_key())
    monkeypatch.setattr(lookup.store, "records", None)
    key = make_key()  # equal to the first, another object
    assert lookup.choose(key) is first
    rounds = timeit.repeat(lambda: lookup.choose(key), number=1000, repeat=20)
    # Promised below 2 us; the machine that tests may be slow and shared.
    assert min(rounds) / 1000 < 10e-6


# What differs, the record that has it, and the field that must be named.
MISSES = {
    "kernel_digest": ({"kernel_digest": "sha256:old"}, "sha256:aa", "sha256:old"),
    "gpu": ({"gpu": "nvidia_h100"}, GPU, "nvidia_h100"),
    "dtype": ({"key": make_key(dtype="float16")}, "bfloat16", "float16"),
    "seq_len": ({"key": make_key(8192)}, 4096, 8192),
    "toolchain.triton": ({"toolchain": TOOLCHAIN | {"triton": "9"}}, "3.6.0", "9"),
    "verified": ({"verified": False}, True, False),
}


@pytest.mark.parametrize("field", MISSES)
def test_explain_names_the_field_that_differs(look, field):
    changes, wanted, stored = MISSES[field]
    explanation = look(make_record(**changes)).explain(make_key())
    (candidate,) = explanation.candidates
    (difference,) = candidate.differences
    assert (difference.field, difference.wanted, difference.stored) == (
        field,
        wanted,
        stored,
    )
    assert difference.blocks == (field != "toolchain.triton")
    assert f"{field}: wanted {wanted}, stored {stored}" in str(explanation)


def test_explain_names_the_constraint_that_a_config_breaks(look):
    lookup = look(make_record(), space_check=lambda key, config: "too much memory")
    (candidate,) = lookup.explain(make_key()).candidates
    (difference,) = candidate.differences
    assert difference.field == "config" and "too much memory" in difference.wanted
    assert difference.stored == make_config().to_dict()


def test_explain_puts_the_closest_record_first_and_names_ignored_files(look):
    lookup = look(
        make_record(make_key(64, dtype="float16"), gpu="nvidia_h100"),
        make_record(make_key(64)),
        make_record(make_key(2048)),
    )
    path = lookup.store.layers[0].path("decode", "nvidia_b200")
    path.write_text('{"schema": 2}')
    explanation = lookup.explain(make_key())
    keys = [candidate.record.key for candidate in explanation.candidates]
    assert keys[:2] == [make_key(2048), make_key(64)] and len(keys) == 3
    assert "schema must be 1, got 2" in explanation.problems[0]
    assert explanation.to_dict()["problems"] == list(explanation.problems)


def _keep(lookup, portfolio):
    data = portfolio.to_text().encode()
    lookup.store.layers[0].write_file("decode", portfolio.gpu, PORTFOLIO, data)


def test_a_portfolio_serves_what_has_no_neighbour_by_the_bucket_most_like_it(look):
    lookup = look()
    _keep(lookup, make_portfolio())
    for seq_len, block_n in [(200, 16), (16000, 32)]:
        choice = lookup.choose(make_key(seq_len, head_size=64))
        assert (choice.grade, choice.config) == ("portfolio", make_config(block_n))


@pytest.mark.parametrize(
    "changes", [{"kernel_digest": "sha256:old"}, {"arch": "sm80", "gpu": "nvidia_a100"}]
)
def test_a_portfolio_of_other_code_or_architecture_is_not_used(look, changes):
    lookup = look()
    _keep(lookup, make_portfolio(**changes))
    assert lookup.choose(make_key()).grade == "default"


def test_a_portfolio_gives_the_config_that_todays_space_holds(look):
    check = {16: None, 32: "too large"}
    lookup = look(space_check=lambda key, config: check[config["BLOCK_N"]])
    _keep(lookup, make_portfolio())
    choice = lookup.choose(make_key(65536))
    assert (choice.grade, choice.config) == ("portfolio", make_config(16))
    assert "too large" in choice.reasons[0]


@pytest.mark.parametrize("cut", range(0, 600, 7))
def test_a_damaged_portfolio_gives_the_default_and_one_warning(look, cut):
    lookup = look()
    _keep(lookup, make_portfolio())
    path = lookup.store.layers[0].path("decode", GPU, PORTFOLIO)
    data = path.read_bytes()
    assert len(data) > 602
    path.write_bytes(data[:cut])
    with log_lines() as lines:
        assert lookup.choose(make_key()).grade == "default"
        lookup.refresh()
        lookup.choose(make_key())
    assert len(lines) == 1
