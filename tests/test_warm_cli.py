# SPDX-License-Identifier: Apache-2.0
"""`portable-backend warm`: what it refuses, and what it compiles for a stub GPU."""

import json
from pathlib import Path

import pytest
from stub_suites import check_suite
from test_model_shapes import GEMMA2, GEMMA3, GPT_OSS, LLAMA, QWEN3

from portable_backend import cli
from portable_backend.commands import warm
from portable_backend.device import ARCH_LIMITS
from portable_backend.warmup.model_traits import ModelTraits, traits_of_config
from portable_backend.warmup.targets import TARGETS, devices_of
from portable_backend.warmup.triton_cache import relocate, shared_bytes, size_bytes


@pytest.mark.long
def test_warming_beside_a_stub_gpu():
    pytest.importorskip("vllm", reason="needs the back end, and so vLLM")
    check_suite("stub_warming")


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")

    def run(*arguments):
        try:
            code = cli.main(["warm", *map(str, arguments)])
        except SystemExit as error:
            code = error.code
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say what to compile: --model"),
        (["--relocate"], "--relocate needs --cache-dir"),
        (["--relocate", "--cache-dir", "nowhere"], "cache must be a folder"),
        (["--model", "nowhere/at/all"], "model must be a folder"),
        (["--model", "MODEL", "--mount-at", "/x"], "--mount-at needs --cache-dir"),
        (
            ["--model", "MODEL", "--cache-dir", "x", "--mount-at", "x"],
            "--mount-at must be an absolute path",
        ),
        (["--model", "MODEL", "--target", "sm90,sm1"], "must be all or some of sm80"),
        (["--model", "MODEL", "--block-size", "8"], "block_size must be a multiple"),
        (["--model", "MODEL", "--workers", "0"], "must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(run, model, arguments, message):
    code, err = run(*(model if x == "MODEL" else x for x in arguments))
    assert code == 2
    assert message in err


def test_the_interpreter_is_refused(run, model, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, err = run("--model", model, "--target", "sm90")
    assert code == 2
    assert "unset TRITON_INTERPRET" in err


def test_all_means_every_target():
    names = [target.arch for target in warm._targets("all")]
    assert names == list(TARGETS)


def test_every_architecture_is_a_target():
    assert {*TARGETS, "interpreter"} == set(ARCH_LIMITS)
    for arch in TARGETS:
        units = [device.num_units for device in devices_of(arch)]
        assert units and len(set(units)) == len(units)
    with pytest.raises(ValueError, match="arch must be one of"):
        devices_of("sm75")


@pytest.mark.parametrize(
    ("config", "traits"),
    [
        (LLAMA, ModelTraits()),
        (QWEN3, ModelTraits()),
        (QWEN3 | {"num_kv_shared_layers": 2}, ModelTraits(shares_cache=True)),
        (GEMMA2, ModelTraits(softcap=50.0, fp32_norm_weight=True)),
        (GEMMA3, ModelTraits(fp32_norm_weight=True)),
        (GPT_OSS, ModelTraits(sinks=True)),
        ({"model_type": "bloom"}, ModelTraits(alibi=True)),
        ({"model_type": "falcon"}, ModelTraits()),
        ({"model_type": "falcon", "alibi": True}, ModelTraits(alibi=True)),
        ({"model_type": "mpt", "attn_config": {"alibi": False}}, ModelTraits()),
        ({"model_type": "baichuan", "hidden_size": 4096}, ModelTraits()),
        ({"model_type": "baichuan", "hidden_size": 5120}, ModelTraits(alibi=True)),
    ],
)
def test_traits_of_models(config, traits):
    assert traits_of_config(config) == traits


# Triton's cache as a folder


def make_entry(cache, name, place, files=("k.json", "k.cubin")):
    (cache / name).mkdir(parents=True)
    for file in files:
        (cache / name / file).write_text(json.dumps({"shared": 128}))
    paths = {file: f"{place}/{name}/{file}" for file in files}
    listed = cache / name / "__grp__k.json"
    listed.write_text(json.dumps({"child_paths": paths}))
    return listed


def test_entries_are_found_where_they_lie_after_a_move(tmp_path):
    make_entry(tmp_path, "ONE", "/elsewhere")
    make_entry(tmp_path, "TWO", tmp_path)
    assert shared_bytes(tmp_path, "ONE", "__grp__k.json") is None
    assert relocate(tmp_path) == 1
    assert shared_bytes(tmp_path, "ONE", "__grp__k.json") == 128
    assert shared_bytes(tmp_path, "TWO", "__grp__k.json") == 128
    assert relocate(tmp_path) == 0
    assert relocate(tmp_path, Path("/mounted")) == 2
    assert "/mounted/ONE/k.cubin" in (tmp_path / "ONE/__grp__k.json").read_text()
    assert not [*tmp_path.rglob("*.tmp")]


def test_an_entry_that_lacks_a_file_is_not_found(tmp_path):
    make_entry(tmp_path, "ONE", tmp_path)
    (tmp_path / "ONE" / "k.cubin").unlink()
    assert shared_bytes(tmp_path, "ONE", "__grp__k.json") is None
    assert shared_bytes(tmp_path, "NONE", "__grp__k.json") is None


@pytest.mark.parametrize("content", ["", "[]", '{"child_paths": 3}', '{"a": {}}'])
def test_a_damaged_list_is_left_alone(tmp_path, content):
    listed = make_entry(tmp_path, "ONE", "/elsewhere")
    listed.write_text(content)
    assert relocate(tmp_path) == 0
    assert listed.read_text() == content
    assert shared_bytes(tmp_path, "ONE", "__grp__k.json") is None


def test_sizes_add_up(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(bytes(70))
    (tmp_path / "c").write_bytes(bytes(7))
    assert size_bytes(tmp_path) == 77
