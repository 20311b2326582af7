# SPDX-License-Identifier: Apache-2.0
"""Images and deployment examples, as far as that goes without building them."""

import importlib.util
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILES = [ROOT / "Dockerfile.cuda", ROOT / "Dockerfile.rocm"]
KUBERNETES = [DEPLOY / "kubernetes" / "nvidia.yaml", DEPLOY / "kubernetes" / "amd.yaml"]
SCRIPTS = [
    ROOT / "scripts" / name
    for name in ("build_images.sh", "fleet.sh", "test_images.sh")
]
EVERYTHING = [*DOCKERFILES, *SCRIPTS, *(p for p in DEPLOY.rglob("*") if p.is_file())]
# Tokens of Hugging Face, GitHub, AWS and OpenAI, private keys, and assigned secrets.
SECRET = re.compile(
    r"hf_\w{20,}|gh[pousr]_\w{20,}|AKIA\w{16}|sk-\w{20,}|-----BEGIN [A-Z ]*PRIVATE"
    r"|(?:PASSWORD|SECRET|TOKEN|API_KEY)\s*[=:]\s*[\"']?[A-Za-z0-9/+]{8,}"
)


def _load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _different_lines(first: Path, second: Path) -> list[tuple[str, str]]:
    a, b = first.read_text().splitlines(), second.read_text().splitlines()
    assert len(a) == len(b)
    return [(x, y) for x, y in zip(a, b, strict=True) if x != y]


def _version() -> str:
    text = (ROOT / "pyproject.toml").read_text()
    return re.search(r'^version = "(.+)"', text, re.M)[1]


# -------------------------------------------------------------------------- Dockerfiles


def test_dockerfiles_differ_in_base_image_and_architectures_only():
    pairs = _different_lines(*DOCKERFILES)
    names = [tuple(line.split("=")[0] for line in pair) for pair in pairs]
    assert names == [("ARG BASE_IMAGE",) * 2, ("ARG GPU_ARCHS",) * 2]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.suffix)
def test_base_image_is_pinned_by_tag_and_digest(path):
    (pin,) = re.findall(r"^ARG BASE_IMAGE=(\S+)$", path.read_text(), re.M)
    assert re.fullmatch(r"docker\.io/[\w./-]+:v\d+\.\d+\.\d+@sha256:[0-9a-f]{64}", pin)
    stages = re.findall(r"^FROM (\S+)", path.read_text(), re.M)
    assert set(stages) == {"${BASE_IMAGE}", "installed"}


def test_both_base_images_have_the_same_vllm():
    tags = {re.search(r":v([\d.]+)@", p.read_text())[1] for p in DOCKERFILES}
    assert len(tags) == 1


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.suffix)
def test_kernels_are_compiled_for_all_architectures_of_the_vendor(path):
    from portable_backend.device import ARCH_LIMITS
    from portable_backend.warmup.targets import TARGETS

    (archs,) = re.findall(r"^ARG GPU_ARCHS=(\S+)$", path.read_text(), re.M)
    vendor = {".cuda": "cuda", ".rocm": "hip"}[path.suffix]
    known = [arch for arch in TARGETS if ARCH_LIMITS[arch].platform == vendor]
    assert sorted(archs.split(",")) == sorted(known)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.suffix)
def test_image_runs_as_a_user_of_its_own(path):
    assert re.findall(r"^USER (\S+)$", path.read_text(), re.M)[-1] == "10001:0"


def test_copied_paths_exist_and_are_not_ignored():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"  # what is not named never reaches a build
    sources = []
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILES[0].read_text(), re.M):
        sources += line.split()[:-1]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert "!" + source.split("/")[0] in rules, source


@pytest.mark.parametrize("path", EVERYTHING, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_unpinned_or_secret(path):
    text = path.read_text()
    assert ":latest" not in text
    assert not SECRET.search(text)


def test_secret_pattern_finds_secrets():
    for text in ("hf_" + "a" * 30, "HF_TOKEN=abcdefgh1", "-----BEGIN RSA PRIVATE KEY"):
        assert SECRET.search(text)


@pytest.mark.parametrize(
    ("tool", "paths"), [("shellcheck", SCRIPTS), ("hadolint", DOCKERFILES)]
)
def test_linter_is_content(tool, paths):
    # Beside this interpreter, where pip puts it, or on PATH.
    beside = Path(sys.executable).with_name(tool)
    program = str(beside) if beside.exists() else shutil.which(tool)
    if program is None:
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run([program, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# --------------------------------------------------------------------------- deployment


def _documents(path: Path) -> list[dict]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(path.read_text()))


def test_manifests_differ_in_image_and_resource_name_only():
    pairs = [(a.strip(), b.strip()) for a, b in _different_lines(*KUBERNETES)]
    assert pairs == [
        (
            "image: &image portable-backend-cuda:0.1.0",
            "image: &image portable-backend-rocm:0.1.0",
        ),
        ("nvidia.com/gpu: 1", "amd.com/gpu: 1"),
    ]


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda p: p.stem)
def test_pod_is_restricted_and_waits_for_the_model(path):
    documents = {d["kind"]: d for d in _documents(path)}
    assert set(documents) == {"PersistentVolumeClaim", "Deployment", "Service"}
    pod = documents["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    for container in pod["initContainers"] + pod["containers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in pod["volumes"]}
        assert {"cache", "tmp"} <= mounted
    (server,) = pod["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"] == {"path": "/health", "port": "http"}
    startup = server["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    claim = documents["PersistentVolumeClaim"]["metadata"]["name"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim


def test_compose_services_differ_in_image_and_devices_only():
    (compose,) = _documents(DEPLOY / "compose.yaml")
    nvidia, amd = compose["services"]["nvidia"], compose["services"]["amd"]
    own = {"profiles", "image", "deploy", "devices", "group_add"}
    assert set(nvidia) | set(amd) > own
    for name in (set(nvidia) | set(amd)) - own:
        assert nvidia[name] == amd[name]
    assert nvidia["read_only"]
    assert nvidia["volumes"] == ["cache:/cache"]
    name = compose["volumes"]["cache"]["name"]
    assert f"${{volume:-{name}}}:/cache" in (ROOT / "scripts/fleet.sh").read_text()


def test_versions_in_examples_are_ours():
    for path in [*KUBERNETES, DEPLOY / "compose.yaml"]:
        tags = re.findall(r"portable-backend-(?:cuda|rocm):([\d.]+)", path.read_text())
        assert set(tags) == {_version()}


def test_models_to_compile_for_are_readable():
    from portable_backend.warmup.model_shapes import read_model

    folders = [config.parent for config in DEPLOY.glob("models/*/config.json")]
    assert folders
    for folder in folders:
        assert read_model(str(folder)).head_size % 8 == 0


# -------------------------------------------------------------------------- entry point


@pytest.fixture
def entrypoint():
    return _load(DEPLOY / "entrypoint.py")


@pytest.fixture
def baked(tmp_path):
    for name in ("AAA", "BBB"):
        entry = tmp_path / "baked" / name
        entry.mkdir(parents=True)
        (entry / "kernel.cubin").write_text(name)
    return tmp_path / "baked"


def test_seeding_copies_what_is_missing_and_keeps_the_rest(entrypoint, baked, tmp_path):
    cache = tmp_path / "cache"
    (cache / "AAA").mkdir(parents=True)
    (cache / "AAA" / "kernel.cubin").write_text("compiled here")
    assert entrypoint.seed(baked, cache) == 1
    assert (cache / "AAA" / "kernel.cubin").read_text() == "compiled here"
    assert (cache / "BBB" / "kernel.cubin").read_text() == "BBB"
    assert entrypoint.seed(baked, cache) == 0
    assert sorted(os.listdir(cache)) == ["AAA", "BBB"]


def test_copied_entries_need_the_image_no_more(entrypoint, tmp_path, monkeypatch):
    cache = pytest.importorskip("triton.runtime.cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "baked"))
    manager = cache.FileCacheManager("KEY")
    path = manager.put(b"binary", "kernel.cubin")
    manager.put_group("kernel.json", {"kernel.cubin": path})
    entrypoint.seed(tmp_path / "baked", tmp_path / "cache")
    shutil.rmtree(tmp_path / "baked")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (found,) = cache.FileCacheManager("KEY").get_group("kernel.json").values()
    assert Path(found).read_bytes() == b"binary"


def test_a_failed_copy_leaves_no_part_behind(entrypoint, baked, tmp_path, monkeypatch):
    def full_disk(source, target):
        Path(target).mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(entrypoint.shutil, "copytree", full_disk)
    with pytest.raises(OSError, match="No space"):
        entrypoint.seed(baked, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_containers_may_seed_one_volume_at_once(entrypoint, baked, tmp_path):
    cache = tmp_path / "cache"
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda: counts.append(entrypoint.seed(baked, cache)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 8
    assert sorted(os.listdir(cache)) == ["AAA", "BBB"]
    assert (cache / "BBB" / "kernel.cubin").read_text() == "BBB"


def test_unwritable_cache_is_replaced_then_done_without(
    entrypoint, baked, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").write_text("")
    unwritable = tmp_path / "file" / "cache"
    monkeypatch.setattr(entrypoint.tempfile, "gettempdir", lambda: str(tmp_path))
    chosen = entrypoint.prepare(baked, unwritable)
    assert chosen.parent == tmp_path
    assert (chosen / "AAA").is_dir()
    assert "cannot hold" in capsys.readouterr().err
    monkeypatch.setattr(entrypoint.tempfile, "gettempdir", lambda: str(unwritable))
    assert entrypoint.prepare(baked, unwritable) == baked


def test_entrypoint_runs_the_command_and_says_what_it_cannot(tmp_path):
    command = [sys.executable, "-I", str(DEPLOY / "entrypoint.py")]
    run = {"capture_output": True, "text": True}
    done = subprocess.run([*command, "echo", "here"], **run)
    assert (done.returncode, done.stdout) == (0, "here\n")
    done = subprocess.run([*command, str(tmp_path / "absent")], **run)
    assert done.returncode == 1
    assert "cannot run" in done.stderr
    assert "no command" in subprocess.run(command, **run).stderr


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1), (None, 1)])
def test_health_check_follows_the_server(status, expected):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}/health"
        if status is not None:
            thread = threading.Thread(target=server.handle_request)
            thread.start()
        else:
            server.server_close()
        done = subprocess.run(
            [sys.executable, "-IS", str(DEPLOY / "healthcheck.py")],
            env={**os.environ, "HEALTH_URL": url},
        )
    assert done.returncode == expected


def test_health_check_takes_tls_and_explains_a_wrong_address(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not installed")

    def check(url):
        return subprocess.run(
            [sys.executable, "-IS", str(DEPLOY / "healthcheck.py")],
            env={**os.environ, "HEALTH_URL": url},
            capture_output=True,
            text=True,
        )

    files = {"-keyout": tmp_path / "key", "-out": tmp_path / "certificate"}
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-batch"]
        + [str(x) for pair in files.items() for x in pair],
        check=True,
        capture_output=True,
    )

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args):
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["-out"], files["-keyout"])
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        done = check(f"https://127.0.0.1:{server.server_port}/health")
        thread.join()
    assert done.returncode == 0, done.stderr
    for wrong in ("localhost:8000", "http://localhost:port/health"):
        done = check(wrong)
        assert done.returncode == 1
        assert wrong in done.stderr
        assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------ scripts


@pytest.fixture
def fake_tool(tmp_path):
    """A folder for PATH whose `docker` logs its arguments; digests by Dockerfile."""
    folder = tmp_path / "bin"
    folder.mkdir()
    tool = folder / "docker"
    tool.write_text(
        "#!/bin/sh\n"
        f'echo "$*" >> {tmp_path}/log\n'
        'case "$1 $*" in\n'
        '  run*-rocm*) echo "${ROCM_DIGEST:-sha256:aa}" ;;\n'
        "  run*) echo sha256:aa ;;\n"
        "  image*) echo sha256:image ;;\n"
        "esac\n"
    )
    tool.chmod(0o755)
    return folder


def _script(name: str, *arguments, path: Path, **environment):
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / name), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{path}:{os.environ['PATH']}", **environment},
    )


def test_build_script_builds_both_and_compares_kernels(fake_tool, tmp_path):
    options = ["--base", "localhost/x:1", "--build-arg", "GPU_ARCHS=sm90"]
    options += ["--tag", "trial"]
    done = _script("build_images.sh", *options, path=fake_tool)
    assert done.returncode == 0, done.stderr
    assert "localhost/x:1 is not pinned" in done.stderr
    assert len(done.stdout.splitlines()) == 2
    builds = [x for x in (tmp_path / "log").read_text().splitlines() if "build " in x]
    assert ["Dockerfile.cuda" in builds[0], "Dockerfile.rocm" in builds[1]] == [
        True
    ] * 2
    for build in builds:
        assert "BASE_IMAGE=localhost/x:1" in build
        assert "GPU_ARCHS=sm90" in build
        # The label tells the package's version, whatever the tag.
        assert f"VERSION={_version()} " in build
        assert ":trial " in build
    pinned = ["--base", "localhost/x:1@sha256:aa"]
    done = _script("build_images.sh", *pinned, path=fake_tool, ROCM_DIGEST="sha256:bb")
    assert "not pinned" not in done.stderr
    assert done.returncode == 1
    assert "different kernels" in done.stderr


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("build_images.sh", ["--only", "tpu"]),
        ("build_images.sh", ["--tool", "lxc"]),
        ("build_images.sh", ["--base"]),
        ("fleet.sh", []),
        ("fleet.sh", ["tune", "--model", "x"]),
        ("fleet.sh", ["tune", "--model", "x", "--out", "/absent/x.zip"]),
        ("fleet.sh", ["verify", "x.zip"]),
        ("fleet.sh", ["bake", "absent.zip"]),
        ("test_images.sh", ["--only", "tpu"]),
    ],
)
def test_scripts_say_how_they_are_used(script, arguments, fake_tool):
    done = _script(script, *arguments, path=fake_tool)
    assert done.returncode == 2
    assert "usage:" in done.stderr


@pytest.fixture
def command_folder(tmp_path):
    """A folder for PATH: our command, and a `docker` that runs commands here."""
    folder = tmp_path / "bin"
    folder.mkdir()
    ours = f'exec "{sys.executable}" -P -m portable_backend.cli "$@"\n'
    docker = (
        f'echo "$*" >> {tmp_path}/log\n'
        'while [ "${1#portable-backend-cuda:}" = "$1" ]; do shift; done\n'
        "shift\n"
        # No GPU is here: what would tune or measure has done so.
        'case "$1 $2 $3" in *" tune "* | *" cache verify") exit ;; esac\n'
        'exec "$@"\n'
    )
    for name, text in {"portable-backend": ours, "docker": docker}.items():
        (folder / name).write_text("#!/bin/sh\n" + text)
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("tool", ["local", "docker"])
def test_records_travel_from_one_node_to_an_image(tool, command_folder, tmp_path):
    from record_fakes import make_record

    from portable_backend.warmup.layers import Layer, WritableLayer

    def fleet(*arguments):
        done = _script(
            "fleet.sh",
            *(str(argument) for argument in arguments),
            *("--tool", tool, "--device", "nvidia"),
            path=command_folder,
            # The cache of the node, which a container finds in its volume.
            PORTABLE_BACKEND_CACHE_DIR=str(tmp_path / "cache"),
            TMPDIR=str(tmp_path),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    WritableLayer("user cache", tmp_path / "cache").append(make_record())
    archive, target = tmp_path / "records.zip", tmp_path / "layer"
    if tool == "docker":  # local would tune in earnest
        assert fleet("tune", "--model", "x", "--out", archive) == f"{archive}\n"
    else:
        ours = command_folder / "portable-backend"
        options = ["--cache-dir", tmp_path / "cache"]
        subprocess.run([ours, "cache", "export", archive, *options], check=True)
    shutil.rmtree(tmp_path / "cache")
    target.mkdir()
    (target / "README.md").write_text("stays")
    fleet("bake", archive, "--layer", target)
    (table,) = [p for p in target.rglob("*") if p.is_file() and p.suffix != ".md"]
    assert len(json.loads(table.read_text())["records"]) == 1
    assert (target / "README.md").read_text() == "stays"
    assert not (tmp_path / "cache").exists()
    fleet("import", archive)
    kernel = make_record().key.kernel
    (held,) = Layer("user cache", tmp_path / "cache").load(kernel)
    assert len(held.records) == 1


def test_fleet_shares_no_folder_that_both_sides_write(command_folder, tmp_path):
    from record_fakes import make_record

    from portable_backend.warmup.layers import WritableLayer

    WritableLayer("user cache", tmp_path / "cache").append(make_record())
    (tmp_path / "model").mkdir()
    options = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "x.zip")]
    done = _script(
        "fleet.sh",
        *("tune", *options, "--device", "nvidia"),
        path=command_folder,
        PORTABLE_BACKEND_CACHE_DIR=str(tmp_path / "cache"),
        TMPDIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "log").read_text()
    volumes = re.findall(r"--volume (\S+)", log)
    assert set(volumes) == {
        "portable-backend-cache:/cache",
        f"{(tmp_path / 'model').resolve()}:/model:ro",
    }
    first, second = log.split("run --rm ")[1:]
    assert "--gpus all" in first
    assert first.endswith("portable-backend tune --model /model\n")
    assert "--gpus" not in second


def test_a_bad_file_changes_no_layer(command_folder, tmp_path):
    (tmp_path / "bad.zip").write_text("no archive")
    (tmp_path / "layer").mkdir()
    options = ["--layer", str(tmp_path / "layer"), "--device", "nvidia"]
    done = _script(
        "fleet.sh",
        *("bake", str(tmp_path / "bad.zip"), *options),
        path=command_folder,
        TMPDIR=str(tmp_path),
    )
    assert done.returncode == 1
    assert not list((tmp_path / "layer").iterdir())


def test_what_the_manifests_serve_is_baked():
    """Kernels of every shape are compiled while the image is built."""
    served = set()
    for manifest in (ROOT / "deploy" / "kubernetes").glob("*.yaml"):
        served |= set(
            re.findall(r"^ *- [\w.-]+/([\w.-]+)$", manifest.read_text(), re.M)
        )
    baked = {folder.name for folder in (ROOT / "deploy" / "models").iterdir()}
    assert served and {name.lower() for name in served} <= baked
