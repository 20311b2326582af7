# SPDX-License-Identifier: Apache-2.0
"""What an installation holds: our packages, all of them, and nobody else's names."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def _folders() -> dict[str, str]:
    """Import name of every folder that holds an __init__.py, by the mapping."""
    found = {}
    for package, folder in SETUPTOOLS["package-dir"].items():
        for init in sorted((ROOT / folder).rglob("__init__.py")):
            parts = init.parent.relative_to(ROOT / folder).parts
            found[".".join((package, *parts))] = str(init.parent.relative_to(ROOT))
    return found


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this checkout, built from a copy."""
    pytest.importorskip("setuptools", "77", reason="builds with setuptools >= 77")
    copy = tmp_path_factory.mktemp("checkout")
    for name in ["pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, copy)
    for folder in SETUPTOOLS["package-dir"].values():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run(
        [*command, "--no-build-isolation", "-w", "out", "."], cwd=copy, check=True
    )
    return next((copy / "out").glob("*.whl"))


@pytest.fixture(scope="session")
def fresh_python(wheel, tmp_path_factory) -> Path:
    """An interpreter that has the wheel and nothing else, not even torch."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-index", "--target", site, wheel], check=True)
    return python


def _run(python: Path, code: str) -> str:
    done = subprocess.run(
        [python, "-P", "-c", code], capture_output=True, text=True, cwd="/", check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_package_list_names_every_folder_with_an_init():
    # An editable install works without; a wheel would lack the folder.
    assert sorted(SETUPTOOLS["packages"]) == sorted(_folders())


def test_wheel_holds_every_module_and_no_other_top_level_name(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    expected = {"portable_backend/py.typed"}
    for package, folder in _folders().items():
        for module in (ROOT / folder).glob("*.py"):
            expected.add(f"{package.replace('.', '/')}/{module.name}")
    assert expected <= set(names)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "portable_backend"
    }


def test_wheel_metadata_is_what_pyproject_says(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(info).decode())
        entry_points = archive.read(
            info.replace("METADATA", "entry_points.txt")
        ).decode()
    assert metadata["Name"] == "portable-backend"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) >= {"cpu", "tune", "study", "test"}
    for requirement in metadata.get_all("Requires-Dist"):
        assert "extra ==" in requirement, "a plain install must not touch torch or vLLM"
    assert "[console_scripts]\nportable-backend = portable_backend.cli:main" in (
        entry_points
    )
    for group in ("general_plugins", "platform_plugins"):
        assert f"[vllm.{group}]\nportable = portable_backend.plugin:" in entry_points


def test_every_extra_parses():
    requirements = pytest.importorskip("packaging.requirements")
    extras = PROJECT["project"]["optional-dependencies"]
    for name, lines in extras.items():
        for line in lines:
            requirement = requirements.Requirement(line)
            if requirement.name == "portable-backend":
                assert requirement.extras <= set(extras), f"{name}: {line}"


def test_version_is_the_same_everywhere(fresh_python):
    code = "import portable_backend as p, importlib.metadata as m; "
    code += "print(p.__version__, m.version('portable-backend'))"
    version = PROJECT["project"]["version"]
    assert _run(fresh_python, code) == f"{version} {version}"


def test_install_does_not_shadow_other_packages_called_kernels_or_warmup(fresh_python):
    code = "from importlib.util import find_spec; "
    code += "print(find_spec('kernels'), find_spec('warmup'))"
    assert _run(fresh_python, code) == "None None"


def test_package_imports_without_torch_triton_and_vllm(fresh_python):
    code = "import sys, portable_backend, portable_backend.plugin; "
    code += "print([m for m in ('torch', 'triton', 'vllm') if m in sys.modules])"
    assert _run(fresh_python, code) == "[]"


def test_records_are_read_without_torch_and_triton(fresh_python, tmp_path):
    code = "import sys; from portable_backend.cli import main; "
    code += f"code = main(['cache', 'list', '--cache-dir', {str(tmp_path)!r}]); "
    code += "print(code, [m for m in ('torch', 'triton') if m in sys.modules])"
    *listed, last = _run(fresh_python, code).splitlines()
    # Tables for GPUs that nobody has measured come along.
    assert any("shipped  decode  nvidia_a100" in line for line in listed)
    assert last == "0 []"


def test_tests_run_on_an_installation_not_on_the_checkout():
    import portable_backend
    import portable_backend.kernels

    if Path(portable_backend.__file__).is_relative_to(ROOT / "portable_backend"):
        pytest.skip("editable install: scripts/test.sh installs the wheel")
    folder = Path(portable_backend.__file__).parent
    assert Path(portable_backend.kernels.__file__).parent == folder / "kernels"
