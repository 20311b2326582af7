# SPDX-License-Identifier: Apache-2.0
"""What is read from assembly and binaries, on small pieces of both vendors'."""

import struct

import pytest

from portable_backend.warmup.machine_code import code_bytes, read_code


def elf(*sections):
    """A 64-bit ELF file of (flags, size) sections, without their contents."""
    header = b"\x7fELF" + bytes(0x24) + struct.pack("<Q", 64) + bytes(10)
    header += struct.pack("<HHH", 64, len(sections), 0)
    rows = (struct.pack("<IIQQQQ", 0, 1, f, 0, 0, n) + bytes(24) for f, n in sections)
    return header.ljust(64, b"\0") + b"".join(rows)


@pytest.mark.parametrize(
    ("line", "width"),
    [
        ("ld.global.b32 { %r1 }, [ %rd1 + 0 ];", 4),
        ("@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];", 16),
        ("ld.global.L1::evict_first.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];", 8),
        ("ld.global.L1::evict_last.L2::cache_hint.v4.b64 {%rd2}, [ %rd1 ], %rd9;", 32),
        ("ld.global.b16 { %rs1 }, [ %rd1 + 0 ];", 2),
        ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r9;", 16),
        ("cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 4, %r9;", 4),
        ("cp.async.bulk.tensor.4d.shared::cluster.global.tile [%r1], [%rd1];", 16),
        ("ld.param.b64 %rd1, [kernel_param_0];", 0),
        ("ld.shared.v4.b32 { %r1, %r2, %r3, %r4 }, [ %r5 + 0 ];", 0),
        ("st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };", 0),
    ],
)
def test_the_widest_load_of_ptx(line, width):
    found = read_code({"ptx": f"ld.param.b32 %r0, [x];\n\t{line}\n"})
    assert found["load_bytes"] == width


@pytest.mark.parametrize(
    ("line", "width"),
    [
        ("global_load_dword v1, v[2:3], off", 4),
        ("global_load_dwordx4 v[0:3], v[4:5], off", 16),
        ("buffer_load_dwordx2 v[0:1], v2, s[0:3], 0 offen", 8),
        ("buffer_load_b128 v[0:3], v4, s[0:3], 0 offen", 16),
        ("global_load_b64 v[0:1], v[2:3], off", 8),
        ("global_load_ushort v1, v[2:3], off", 2),
        ("s_load_dwordx8 s[0:7], s[8:9], 0x0", 0),
        ("ds_read_b128 v[0:3], v4", 0),
        ("global_store_dwordx4 v[4:5], v[0:3], off", 0),
    ],
)
def test_the_widest_load_of_amd(line, width):
    assert read_code({"amdgcn": f"\t{line}\n"})["load_bytes"] == width


@pytest.mark.parametrize(
    ("kind", "text", "number"),
    [
        ("ptx", "mma.sync.aligned.m16n8k16.row.col.f32.bf16 { };\n", 1),
        ("ptx", "\twgmma.mma_async.sync.aligned.m64n64k16.f32.bf16 { };\n" * 3, 3),
        ("ptx", "@%p2 tcgen05.mma.cta_group::1.kind::f16 [ %r1 ];\n", 1),
        ("ptx", "wgmma.fence.sync.aligned;\nfma.rn.f32 %f1, %f2, %f3, %f4;\n", 0),
        ("amdgcn", "\tv_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], 0\n", 1),
        ("amdgcn", "\tv_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[0:7]\n" * 2, 2),
        ("amdgcn", "\tv_fma_f32 v0, v1, v2, v3\n", 0),
    ],
)
def test_matrix_instructions_are_counted(kind, text, number):
    assert read_code({kind: text})["matrix_instructions"] == number


def test_code_is_what_can_be_executed():
    assert code_bytes(elf((0x6, 1000), (0x2, 5000), (0x6, 24))) == 1024
    assert code_bytes(b"no binary") is None
    assert read_code({"cubin": elf((0x6, 64)), "ptx": ""})["code_bytes"] == 64


def test_what_is_missing_is_unknown():
    assert set(read_code({}).values()) == {None}
