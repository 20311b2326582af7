# SPDX-License-Identifier: Apache-2.0
"""`doctor` finds what is wrong, says how to mend it, and survives what it examines."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
from record_fakes import make_record, without_root

from portable_backend import __version__, cli, plugin
from portable_backend.commands import doctor, doctor_caches, doctor_probes
from portable_backend.commands import doctor_system as system_module
from portable_backend.commands.doctor_system import ChildFailed, Gpu, System
from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.warmup.kernel_specs import KERNEL_SPECS
from portable_backend.warmup.layers import WritableLayer
from portable_backend.warmup.model_shapes import shape_of_config
from portable_backend.warmup.units import EngineLimits, units_of

H200 = Gpu(
    DeviceInfo("nvidia_h200", "sm90", 132, ARCH_LIMITS["sm90"]),
    count=8,
    runtime="CUDA 13.0",
    driver="580.65",
    capability=(9, 0),
)
VERSIONS = {
    "torch": "2.11.0",
    "triton": "3.6.0",
    "vllm": "0.33.0",
    "transformers": "5.1.0",
    "portable-backend": __version__,
}
ENTRY_POINTS = {
    group: [
        EntryPoint("other", "other:go", group),
        EntryPoint("portable", value, group),
    ]
    for group, value in doctor_probes.ENTRY_POINTS.items()
}
CHILDREN = {
    "vllm": {
        "vllm": "0.33.0",
        "platform": "cuda",
        "member": plugin.PATH,
        "class": "PortableBackend",
    },
    "kernel": {"device": "cuda", "error": 1e-7},
}
LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A clean environment, caches included; the folder of the user's cache."""
    for name in list(os.environ):
        if name.startswith(("PORTABLE_BACKEND_", "TRITON_", "VLLM_")):
            monkeypatch.delenv(name)
    folder = tmp_path / "cache"
    monkeypatch.setenv("PORTABLE_BACKEND_CACHE_DIR", str(folder))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.chdir(tmp_path)
    digests = {"decode": "sha256:aa", "rms_norm": "sha256:aa"}
    monkeypatch.setattr(doctor_caches, "_digests", lambda: digests)
    monkeypatch.setattr(
        "portable_backend.warmup.store.shipped_folder", lambda: tmp_path / "shipped"
    )
    disk = SimpleNamespace(free=1 << 40)
    monkeypatch.setattr(doctor_caches.shutil, "disk_usage", lambda path: disk)
    return folder


def _system(**changes):
    """A machine on which all is well, but for `changes`: functions, or what to give."""

    def version(names):
        return next((VERSIONS[name] for name in names if name in VERSIONS), None)

    functions = {
        "gpu": lambda: H200,
        "version": version,
        "requirements": lambda name: ["filelock", "triton==3.6.0; linux"],
        "entry_points": ENTRY_POINTS.__getitem__,
        "origin": lambda name: None,
        "child": CHILDREN.__getitem__,
    }
    return System(**functions | changes)


@pytest.fixture
def run(capsys, monkeypatch):
    def run(*arguments, **changes):
        """Exit code and the findings that are not ok: (check, state, text + remedy)."""
        monkeypatch.setattr(doctor, "SYSTEM", _system(**changes))
        code = cli.main(["doctor", "--json", *map(str, arguments)])
        result = json.loads(capsys.readouterr().out)
        assert result["ok"] == (code == 0)
        wrong = [f for f in result["findings"] if f["state"] != "ok"]
        assert all(f["text"] and f["remedy"] for f in wrong)
        return code, [
            (f["check"], f["state"], f"{f['text']} -> {f['remedy']}") for f in wrong
        ]

    return run


def _fail(error):
    def fail(*arguments):
        raise error

    return fail


UNTUNED = ("tuned", "warning")


def test_where_all_is_well_only_tuning_is_missing(run):
    code, (found,) = run()
    assert code == 0 and found[:2] == UNTUNED
    assert "nothing is tuned for nvidia_h200" in found[2]


def test_people_read_findings_on_stdout_and_progress_on_stderr(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "SYSTEM", _system())
    assert cli.main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert "8 x nvidia_h200 (sm90, 132 units), CUDA 13.0, driver 580.65" in out
    assert "-> portable-backend tune" in out
    assert out.endswith("serving would work\n")
    assert err.splitlines() == [f"checking {name}" for name in doctor.PROBES]
    monkeypatch.setenv("PORTABLE_BACKEND_TUNE", "maybe")
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("serving would fail: 1 problem\n")


def test_wrong_usage_exits_2(capsys):
    assert cli.main(["doctor", "--tensor-parallel-size", "0"]) == 2
    assert capsys.readouterr().out == ""


def _without(missing):
    return lambda names: next(
        (v for n, v in VERSIONS.items() if n in names and n not in missing), None
    )


def _versions(**changed):
    table = VERSIONS | {n.replace("_", "-"): v for n, v in changed.items()}
    return lambda names: next((table[n] for n in names if n in table), None)


# What is changed, and the finding that this must give: check, state, part of its text.
BROKEN = {
    "no torch": (
        {
            "version": _without(["torch"]),
            "gpu": _fail(ImportError("no module")),
        },
        [
            ("versions", "problem", "torch is not installed"),
            ("device", "problem", "ImportError: no module"),
        ],
    ),
    "no triton": (
        {"version": _without(["triton"])},
        [("versions", "problem", "triton is not installed")],
    ),
    "no vllm": (
        {"version": _without(["vllm"]), "child": lambda task: CHILDREN["kernel"]},
        [("versions", "problem", "vllm is not installed")],
    ),
    "no transformers": (
        {"version": _without(["transformers"])},
        [("versions", "warning", "transformers is not installed")],
    ),
    "old triton": (
        {"version": _versions(triton="3.4.0"), "requirements": lambda name: []},
        [("versions", "warning", "triton 3.4.0 is older than 3.6")],
    ),
    "triton of another torch": (
        {"version": _versions(triton="3.7.1+gitabc")},
        [("versions", "warning", "Triton 3.6.0, but 3.7.1+gitabc is installed")],
    ),
    "rocm's triton of another torch": (
        {"requirements": lambda name: ["pytorch-triton-rocm (==3.5.1)"]},
        [("versions", "warning", "torch was built with Triton 3.5.1")],
    ),
    "another version installed": (
        {"version": _versions(portable_backend="0.0.1")},
        [("versions", "warning", "but 0.0.1 is installed")],
    ),
    "no gpu": (
        {"gpu": lambda: "finds none"},
        [("device", "problem", "TRITON_INTERPRET=1")],
    ),
    "driver fails": (
        {"gpu": _fail(RuntimeError("CUDA driver error"))},
        [("device", "problem", "RuntimeError: CUDA driver error")],
    ),
    "old gpu": (
        {
            "gpu": lambda: Gpu(
                DeviceInfo("nvidia_t4", "sm75", 40, ARCH_LIMITS["sm86"]),
                1,
                "CUDA 13.0",
                None,
                (7, 5),
            )
        },
        [("device", "problem", "compute capability 7.5 is below 8.0")],
    ),
    "unknown gpu": (
        {
            "gpu": lambda: Gpu(
                DeviceInfo("new", "gfx1300", 40, ARCH_LIMITS["gfx1100"]),
                1,
                "HIP 8.0",
                None,
                None,
            )
        },
        [("device", "warning", "gfx1300 is not known")],
    ),
    "not installed": (
        {"entry_points": lambda group: []},
        [
            ("plugin", "problem", "vllm.general_plugins must be"),
            ("plugin", "warning", "vllm.platform_plugins must be"),
        ],
    ),
    "entry point of another package": (
        {"entry_points": lambda group: [EntryPoint("portable", "other:go", group)]},
        [("plugin", "problem", "got other:go"), ("plugin", "warning", "got other:go")],
    ),
    "unregistered": (
        {"child": lambda task: CHILDREN[task] | {"member": None}},
        [("plugin", "problem", "does not know attention back end PORTABLE")],
    ),
    "registered by another": (
        {"child": lambda task: CHILDREN[task] | {"member": "other.Backend"}},
        [("plugin", "problem", "registered PORTABLE as other.Backend")],
    ),
    "back end does not import": (
        {
            "child": lambda task: (
                CHILDREN[task] if task == "kernel" else {"failure": "ImportError: x"}
            )
        },
        [("plugin", "problem", "ImportError: x")],
    ),
    "children crash": (
        {"child": _fail(ChildFailed("ended with code -11: no output"))},
        [("plugin", "problem", "code -11"), ("kernel", "problem", "code -11")],
    ),
    "no compiler": (
        {
            "child": lambda task: (
                CHILDREN[task]
                if task == "vllm"
                else {"failure": "RuntimeError: Failed to find C compiler"}
            )
        },
        [("kernel", "problem", "name one in CC")],
    ),
    "wrong results": (
        {"child": lambda task: CHILDREN[task] | {"error": 0.5}},
        [("kernel", "problem", "wrong by 0.5 on cuda")],
    ),
    "no results": (
        {"child": lambda task: CHILDREN[task] | {"error": float("nan")}},
        [("kernel", "problem", "wrong by nan on cuda")],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_system_is_found_and_nothing_else(run, case):
    changes, expected = BROKEN[case]
    code, found = run(**changes)
    found = [finding for finding in found if finding[:2] != UNTUNED]
    assert [finding[:2] for finding in found] == [wanted[:2] for wanted in expected]
    for (_, _, text), (_, _, part) in zip(found, expected, strict=True):
        assert part in text
    assert code == any(state == "problem" for _, state, _ in expected)


@pytest.mark.parametrize("name", System.__dataclass_fields__)
@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), OSError(5, "broken")], ids=str
)
def test_whatever_fails_the_others_are_still_asked(run, name, error):
    _, found = run(**{name: _fail(error)})
    assert any("broken" in text for _, _, text in found)
    # Those that ask nothing of it give what they always do.
    assert {check for check, _, _ in found} < set(doctor.PROBES)


def test_a_check_that_exits_costs_its_own_findings_only(run, monkeypatch):
    probes = {"one": _fail(SystemExit(3)), **doctor.PROBES}
    monkeypatch.setattr(doctor, "PROBES", probes)
    code, found = run()
    assert code == 0
    assert found[0] == (
        "one",
        "warning",
        "this check failed: SystemExit: 3 -> mend what the message names, then run "
        "doctor again",
    )
    assert found[1][:2] == UNTUNED


def test_the_interpreter_serves_to_try_things_out(run, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, (found,) = run(gpu=lambda: "built for CPUs only")
    assert code == 0 and found[:2] == ("device", "warning")
    assert "not to serve" in found[2]


def test_a_gpu_beside_the_interpreter_is_a_problem(run, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, found = run(child=lambda task: {"vllm": CHILDREN["vllm"]}[task])
    assert code == 1
    assert ("device", "problem") in [finding[:2] for finding in found]


@pytest.mark.parametrize(
    ("value", "is_kept"), [("other", False), ("", False), ("other,portable", True)]
)
def test_vllms_filter_of_plugins_is_seen(run, monkeypatch, value, is_kept):
    monkeypatch.setenv("VLLM_PLUGINS", value)
    code, found = run()
    assert (code == 0) == is_kept
    assert any("add portable to it" in text for _, _, text in found) != is_kept


def test_settings_that_do_not_parse_are_problems(run, monkeypatch):
    monkeypatch.setenv("PORTABLE_BACKEND_TUNE", "maybe")
    monkeypatch.setenv("PORTABLE_BACKEND_TUNE_BUDGET_S", "-1")
    code, found = run()
    (text,) = [text for check, _, text in found if check == "settings"]
    assert code == 1 and "one of off, load, startup, background" in text
    assert "TUNE_BUDGET_S" in text


def test_a_setting_that_is_none_is_a_warning(run, monkeypatch):
    monkeypatch.setenv("PORTABLE_BACKEND_CACHE_DIRS", "/tmp")
    code, found = run()
    (text,) = [text for check, _, text in found if check == "settings"]
    assert code == 0 and "PORTABLE_BACKEND_CACHE_DIR is" in text


def test_our_kernels_in_the_place_of_hugging_faces(run, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    ours = tmp_path / "kernels"
    ours.mkdir()
    code, found = run()
    assert "conflicts" not in [check for check, _, _ in found]
    for name in ("rms_norm.py", "prefill.py"):
        (ours / name).write_text("")
    code, found = run()
    assert code == 0 and found[0][:2] == ("conflicts", "warning")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert "conflicts" not in [check for check, _, _ in run()[1]]
    code, found = run(origin=lambda name: ours)
    assert code == 0 and str(ours) in found[0][2]
    code, found = run(origin=lambda name: ours, version=_versions(kernels="0.12"))
    assert code == 1 and found[0][:2] == ("conflicts", "problem")


# ----------------------------------------------------------------------------- caches


def _caches(found):
    return [text for check, _, text in found if check == "caches"]


def test_records_are_counted_and_stale_ones_named(run, folder, capsys, monkeypatch):
    layer = WritableLayer("", folder)
    layer.merge_in([make_record(), make_record(kernel_digest="sha256:old")])
    code, found = run()
    assert code == 0 and len(_caches(found)) == 1
    assert "1 of 2 records are of other kernel code" in _caches(found)[0]
    monkeypatch.setattr(doctor, "SYSTEM", _system())
    cli.main(["doctor"])
    out = capsys.readouterr().out
    assert f"user cache: 2 records in {folder}" in out
    assert "keys with a record for nvidia_h200: decode 1" in out


def test_predictions_count_as_not_tuned_and_are_told(run, folder, capsys, monkeypatch):
    told = {"basis": "sweeps", "fitted_on": [], "num_units": 132, "serves": True}
    record = make_record(
        gpu="nvidia_h100",
        time_us=None,
        default_us=None,
        verified=False,
        unmeasured=told,
    )
    WritableLayer("", folder.parent / "shipped").merge_in([record])
    _, (found,) = run()
    assert found[:2] == UNTUNED
    assert "default configs serve, but for 1 keys near which a prediction" in found[2]
    monkeypatch.setattr(doctor, "SYSTEM", _system())
    cli.main(["doctor"])
    assert "shipped: 1 records, 1 of them unmeasured, in" in capsys.readouterr().out


def test_damaged_files_are_named(run, folder):
    (folder / "decode").mkdir(parents=True)
    for name in ("one.json", "two.json"):
        (folder / "decode" / name).write_text("{")
    code, found = run()
    (text,) = _caches(found)
    assert code == 0 and "one.json" in text and "(and 1 more)" in text


def test_image_layers_that_are_not_there_are_named(run, tmp_path, monkeypatch):
    layers = f"{tmp_path}:{tmp_path / 'absent'}"
    monkeypatch.setenv("PORTABLE_BACKEND_CACHE_LAYERS", layers)
    code, found = run()
    (text,) = _caches(found)
    assert code == 0 and f"image layer 2: {tmp_path / 'absent'} does not exist" in text


def test_a_user_cache_that_cannot_be_written_is_a_warning(run, tmp_path, monkeypatch):
    place = tmp_path / "a file"
    place.write_text("")
    monkeypatch.setenv("PORTABLE_BACKEND_CACHE_DIR", str(place / "cache"))
    code, found = run()
    assert code == 0 and "cannot be written" in _caches(found)[0]


def test_a_file_is_not_said_to_hold_records(run, tmp_path, monkeypatch, capsys):
    file = tmp_path / "a file"
    file.touch()
    monkeypatch.setenv("PORTABLE_BACKEND_CACHE_DIR", str(file))
    monkeypatch.setenv("PORTABLE_BACKEND_CACHE_LAYERS", str(file))
    code, found = run()
    own, image = _caches(found)
    assert code == 0 and f"user cache: {file} cannot be written" in own
    assert f"image layer 1: {file} is no folder" in image
    assert "mount the folder" in image
    cli.main(["doctor"])
    assert f"records in {file}" not in capsys.readouterr().out


def test_records_that_cannot_be_added_to_are_counted_in_one_line(
    run, folder, monkeypatch
):
    WritableLayer("", folder).merge_in([make_record()])
    monkeypatch.setattr(doctor_caches, "why_not_writable", lambda folder: "read-only")
    _, found = run()
    (text,) = _caches(found)
    assert f"user cache: 1 records, but {folder} cannot be written: read-only" in text


@pytest.mark.parametrize("part", ["decode", "decode/nvidia_h200.json", "."])
def test_what_cannot_be_read_or_written_is_a_warning(run, monkeypatch, part):
    # Others may not look into pytest's own folder.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        WritableLayer("", folder).merge_in([make_record()])
        for path in [*folder.rglob("*"), folder]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        (folder / part).chmod(0)
        monkeypatch.setenv("PORTABLE_BACKEND_CACHE_DIR", name)
        monkeypatch.setenv("TRITON_CACHE_DIR", tempfile.gettempdir())
        monkeypatch.chdir("/")
        with without_root():
            code, found = run()
        folder.chmod(0o700)
        (folder / "decode").chmod(0o700)
    texts = _caches(found)
    assert code == 0
    assert any(f"{folder} cannot be written" in text for text in texts)
    assert any(f"cannot be read: {folder / part}" in text for text in texts)


def test_kernels_without_a_digest_leave_records_unjudged(run, folder, monkeypatch):
    WritableLayer("", folder).merge_in([make_record(kernel_digest="sha256:old")])
    monkeypatch.setattr(doctor_caches, "_digests", _fail(ImportError("no triton")))
    code, found = run()
    assert code == 0 and "no triton" in _caches(found)[0] and len(_caches(found)) == 1


def test_a_full_disk_is_a_warning(run, monkeypatch):
    disk = SimpleNamespace(free=5 << 20)
    monkeypatch.setattr(doctor_caches.shutil, "disk_usage", lambda path: disk)
    code, found = run()
    assert code == 0
    assert [check for check, _, text in found if "5 MiB left" in text] == [
        "caches",
        "triton cache",
    ]


def test_tritons_cache_must_be_writable_on_a_gpu(run, tmp_path, monkeypatch):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "a file" / "cache"))
    code, found = run()
    assert code == 1 and ("triton cache", "problem") in [f[:2] for f in found]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, found = run(gpu=lambda: "none")
    assert code == 0 and ("triton cache", "warning") in [f[:2] for f in found]


@pytest.mark.parametrize("variable", ["TRITON_HOME", "HOME"])
def test_tritons_cache_is_where_triton_has_it(variable, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv(variable, str(tmp_path))
    assert doctor_caches._triton_folder() == tmp_path / ".triton" / "cache"


# ------------------------------------------------------------------------------ models


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_how_much_of_a_model_is_tuned(run, folder, model, capsys, monkeypatch):
    code, found = run("--model", model)
    assert code == 0 and found[0][:2] == UNTUNED
    assert "0% of" in found[0][2] and "decode 40 default" in found[0][2]
    assert f"portable-backend tune --model {model}" in found[0][2]
    digests = dict.fromkeys(("prefill", "decode", "rms_norm", "kv_cache"), "sha256:aa")
    monkeypatch.setattr(doctor_caches, "_digests", lambda: digests)
    units = units_of(shape_of_config(LLAMA, "llama"), EngineLimits())
    records = [
        make_record(
            unit.key,
            config=KERNEL_SPECS[unit.key.kernel].default(unit.key, H200.info),
        )
        for unit in units
    ]
    layer = WritableLayer("", folder)
    # Faster than the others, but with a config that today's spaces do not hold.
    layer.merge_in(make_record(unit.key, time_us=1) for unit in units)
    assert "0% of" in run("--model", model)[1][0][2]
    layer.merge_in(r for r in records if r.key.kernel == "decode")
    _, found = run("--model", model)
    assert "decode 40 exact" in found[0][2] and "prefill 15 default" in found[0][2]
    layer.merge_in(records)
    assert run("--model", model) == (0, [])
    code, found = run("--model", model, "--tensor-parallel-size", 2)
    assert found[0][:2] == UNTUNED and "rms_norm 14 exact" in found[0][2]


def test_without_a_gpu_a_models_units_are_counted(model, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(doctor, "SYSTEM", _system(gpu=lambda: "none"))
    assert cli.main(["doctor", "--model", str(model)]) == 0
    assert "has 76 units to tune" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"num_attention_heads": None}, "num_attention_heads must be given"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"head_dim": 512}, "head size 512"),
        ({"head_dim": 36}, "head size 36"),
    ],
)
def test_a_model_that_cannot_be_served_is_a_problem(run, model, changes, part):
    (model / "config.json").write_text(json.dumps(LLAMA | changes))
    code, found = run("--model", model)
    assert code == 1
    assert any(part in text for check, _, text in found if check == "tuned")


# ------------------------------------------------------------------- the machine itself


def test_a_child_that_crashes_or_hangs_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(system_module.sys, "executable", shutil.which("false"))
    with pytest.raises(ChildFailed, match="ended with code 1: no output"):
        system_module.run_child("kernel")
    monkeypatch.setattr(system_module.sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(ChildFailed, match="cannot be started"):
        system_module.run_child("kernel")
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(system_module, "CHILD_LIMIT_S", 0.2)
    monkeypatch.setattr(system_module.sys, "executable", str(slow))
    with pytest.raises(ChildFailed, match=r"no answer within 0\.2 s"):
        system_module.run_child("kernel")


def test_a_childs_own_output_is_not_taken_for_its_result(tmp_path, monkeypatch):
    noisy = tmp_path / "noisy"
    line = system_module.MARKER + '{"error": 0}'
    noisy.write_text(f"#!/bin/sh\necho 'loading'\necho '{line}'\necho 'bye'\n")
    noisy.chmod(0o755)
    monkeypatch.setattr(system_module.sys, "executable", str(noisy))
    assert system_module.run_child("kernel") == {"error": 0}


def test_the_drivers_version_is_read_where_the_kernel_tells_it(tmp_path):
    assert system_module.driver_version(tmp_path) is None
    amd = tmp_path / "sys/module/amdgpu/version"
    amd.parent.mkdir(parents=True)
    amd.write_text("6.10.5\n")
    assert system_module.driver_version(tmp_path) == "6.10.5"
    nvidia = tmp_path / "proc/driver/nvidia/version"
    nvidia.parent.mkdir(parents=True)
    nvidia.write_text("NVRM version: NVIDIA UNIX Kernel Module  580.65.06  Release\n")
    assert system_module.driver_version(tmp_path) == "580.65.06"


def test_packages_are_found_by_any_of_their_names():
    assert system_module.version_of(("no-such-package", "pytest")) == pytest.__version__
    assert system_module.version_of(("no-such-package",)) is None
    assert system_module.requirements_of("no-such-package") == []
    assert any("pluggy" in line for line in system_module.requirements_of("pytest"))
    assert system_module.origin_of("pytest") == Path(pytest.__file__).parent
    assert system_module.origin_of("no_such_module") is None


def _python(*arguments, **variables):
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
    command = [sys.executable, "-P", "-m", "portable_backend.cli", "doctor", "--json"]
    done = subprocess.run(
        [*command, *arguments], env=environ, capture_output=True, text=True
    )
    result = json.loads(done.stdout)
    return done.returncode, {f["check"]: f for f in result["findings"][::-1]}


@pytest.mark.vllm
def test_this_machine_is_examined_for_good():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("what a GPU adds is not asked for here")
    code, found = _python(TRITON_INTERPRET="1")
    assert found["kernel"]["state"] == "ok", found["kernel"]
    assert found["kernel"]["data"]["device"] == "cpu"
    registered = found["plugin"]["data"].get("member", plugin.PATH)
    assert registered == plugin.PATH
    assert found["device"]["state"] == "warning"
    assert code == any(f["state"] == "problem" for f in found.values())


def test_without_torch_and_vllm_doctor_still_answers(tmp_path):
    for name in ("torch", "triton", "vllm", "transformers"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    code, found = _python(PYTHONPATH=path, TRITON_INTERPRET="1")
    assert code == 1
    assert "no torch here" in found["device"]["text"]
    assert "no torch here" in found["kernel"]["text"]
    assert found["settings"]["state"] == "ok"
