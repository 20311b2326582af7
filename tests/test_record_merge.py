# SPDX-License-Identifier: Apache-2.0
"""The conflict rule: merging is a union, in whatever order it is done."""

from hypothesis import given, settings
from hypothesis import strategies as st
from record_fakes import make_config, make_key, make_record

from portable_backend.warmup.tables import HISTORY_LIMIT, merge_records

# Few values for each field, so that records compete, and tie, often.
RECORDS = st.builds(
    lambda size, block, time, verified, digest, trials, triton, refuted: make_record(
        make_key(size),
        config=make_config(block),
        time_us=time,
        verified=verified and not refuted,
        kernel_digest=digest,
        trials=trials,
        toolchain={"triton": triton},
        refuted=refuted,
    ),
    st.sampled_from([1, 2]),
    st.sampled_from([16, 32, 64, 128]),
    st.sampled_from([1.0, 1, 2.0, 3.5]),
    st.booleans(),
    st.sampled_from(["sha256:a", "sha256:b"]),
    st.integers(0, 5),
    st.sampled_from(["3.6.0", None]),
    st.sampled_from([None, None, None, None, "wrong", "it hangs"]),
)
CACHES = st.lists(RECORDS, max_size=25)


@settings(deadline=None)
@given(CACHES, CACHES, CACHES)
def test_merging_is_associative_commutative_and_idempotent(one, two, three):
    whole = merge_records(one, two, three)
    left = merge_records(merge_records(one, two).all, three)
    right = merge_records(one, merge_records(two, three).all)
    assert left == whole and right == whole
    assert merge_records(three, one, two) == whole
    assert merge_records(whole.all, whole.all, one) == whole


@settings(deadline=None)
@given(CACHES)
def test_the_best_verified_time_of_a_key_and_environment_is_served(records):
    merged = merge_records(records)
    refuted = {record.claim for record in records if record.refuted}
    assert not refuted & {record.claim for record in merged.served}
    rivals = [record for record in records if record.claim not in refuted]
    # So few that none of them is left out.
    for record in rivals if len(records) <= HISTORY_LIMIT else ():
        (best,) = (
            s
            for s in merged.served
            if s.key == record.key and s.environment == record.environment
        )
        assert best.verified or not record.verified
        if best.verified == record.verified:
            assert best.time_us <= record.time_us


def test_unverified_loses_to_verified_however_fast():
    slow, fast = make_record(time_us=50), make_record(time_us=1, verified=False)
    merged = merge_records([fast], [slow])
    assert merged.served == (slow,) and merged.history == (fast,)


def test_environments_do_not_compete():
    records = [
        make_record(),
        make_record(kernel_digest="sha256:bb"),
        make_record(toolchain={"triton": "3.7"}),
        make_record(gpu="nvidia_h100"),
    ]
    assert set(merge_records(records).served) == set(records)


def test_history_holds_the_best_losers_and_is_bounded():
    records = [make_record(time_us=time) for time in range(1, 30)]
    merged = merge_records(records)
    assert merged.served == (records[0],)
    assert set(merged.history) == set(records[1 : HISTORY_LIMIT + 1])
