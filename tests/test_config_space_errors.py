# SPDX-License-Identifier: Apache-2.0
"""What a ConfigSpace refuses, and how it says why."""

import random
from dataclasses import FrozenInstanceError, replace

import pytest

from portable_backend.device import DeviceInfo
from portable_backend.kernels.config import (
    ConfigSpace,
    Constraint,
    Derived,
    KernelConfig,
    Parameter,
)

SM90 = DeviceInfo.for_arch("sm90")
GFX942 = DeviceInfo.for_arch("gfx942")


def whole_warps(config, problem, device):
    return config["BLOCK"] % config["num_warps"] == 0


SPACE = ConfigSpace(
    "scale",
    (
        Parameter("BLOCK", (64, 128, 192), "a power of two, or three of them"),
        Parameter("num_warps", (1, 4, 6)),
        Parameter("maxnreg", (None, 128), platforms=("cuda",)),
    ),
    (
        Constraint(
            "whole_warps", "warps share a block", ("BLOCK", "num_warps"), whole_warps
        ),
    ),
    (Derived("num_stages", 1, "the kernel has no loop"),),
)
MEMBER = KernelConfig.of(BLOCK=64, num_warps=4, maxnreg=None, num_stages=1)


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, []),
        ({"BLOCK": 192, "num_warps": 6}, []),
        ({"num_warps": 6}, ["whole_warps: warps share a block"]),
        (
            {"BLOCK": 65},
            ["BLOCK is 65, not one of 64, 128, 192: a power of two, or three of them"],
        ),
        ({"num_warps": None}, ["num_warps is None, not one of 1, 4, 6"]),
        ({"num_stages": 2}, ["num_stages is 2, not 1: the kernel has no loop"]),
        (
            {"TILE": 1},
            [
                "TILE is no parameter of scale: it has BLOCK, num_warps, maxnreg, "
                "num_stages"
            ],
        ),
        (
            {"num_warps": 6, "num_stages": 2, "maxnreg": 64},
            [
                "maxnreg is 64, not one of None, 128",
                "num_stages is 2, not 1: the kernel has no loop",
                "whole_warps: warps share a block",
            ],
        ),
    ],
)
def test_why_not_gives_every_reason(changes, reasons):
    config = MEMBER.to_dict() | changes
    assert SPACE.why_not(config, None, SM90) == reasons
    assert SPACE.contains(config, None, SM90) == (not reasons)


def test_why_not_names_what_is_missing():
    assert SPACE.why_not({}, None, GFX942) == [
        "BLOCK is missing: one of 64, 128, 192",
        "num_warps is missing: one of 1, 4, 6",
        "num_stages is missing, not 1: the kernel has no loop",
    ]


def no_cap(config, problem, device):
    return config["maxnreg"] is None


def test_why_not_tells_another_platforms_parameter_from_an_unknown_one():
    """Nor do constraints look at its value."""
    cap = Constraint("no_cap", "a test", ("maxnreg",), no_cap)
    space = replace(SPACE, constraints=(*SPACE.constraints, cap))
    config = MEMBER.replace(maxnreg=128)
    assert space.why_not(config, None, SM90) == ["no_cap: a test"]
    assert space.why_not(config, None, GFX942) == [
        "maxnreg exists on cuda only, not on hip"
    ]


@pytest.mark.parametrize("operation", ["neighbours", "mutate", "crossover"])
def test_configs_from_elsewhere_are_refused_with_the_reasons(operation):
    config = MEMBER.replace(num_warps=6)
    arguments = {
        "neighbours": (config,),
        "mutate": (config, random.Random(0)),
        "crossover": (MEMBER, config, random.Random(0)),
    }[operation]
    name = "b" if operation == "crossover" else "config"
    with pytest.raises(
        ValueError, match=f"^{name} must be in the space of scale.*warps share a block"
    ):
        getattr(SPACE, operation)(*arguments, None, SM90)


def test_a_negative_sample_is_refused():
    with pytest.raises(ValueError, match="n must be 0 or more, got -1"):
        SPACE.sample(-1, random.Random(0), None, SM90)


def test_an_undeclared_read_is_reported_where_it_happens():
    hasty = Constraint("hasty", "a test", ("BLOCK",), whole_warps)
    space = ConfigSpace("scale", SPACE.parameters, (hasty,))
    with pytest.raises(ValueError, match=r"reads of hasty .* add 'num_warps'"):
        list(space.configs(None, SM90))


def parameter(name="A", values=(1, 2), **more):
    return Parameter(name, values, **more)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: parameter(values="ab"), "values of A must be a sequence"),
        (lambda: parameter(values=(1, 1)), "values of A .* got \\(1, 1\\)"),
        (lambda: parameter(values=(1, 2.5)), "values of A .* got \\(1, 2.5\\)"),
        (lambda: parameter(platforms=("rocm",)), "platforms of A .* cuda, hip"),
        (lambda: Derived("A", 1, platforms="hip"), "platforms of A .* cuda, hip"),
        (lambda: Derived("A", 1, reads="B"), "reads of A must be a tuple"),
        (lambda: Constraint("c", " ", (), min), "reason of c must be a sentence"),
        (lambda: Constraint("c", "why", "A", min), "reads of c must be a tuple"),
        (
            lambda: ConfigSpace("s", (parameter(), parameter())),
            "parameters of space s must be different in name",
        ),
        (
            lambda: ConfigSpace("s", (parameter(),), (), (Derived("A", 1),)),
            "parameters of space s must be different in name",
        ),
        (
            lambda: ConfigSpace(
                "s", (parameter(),), (Constraint("c", "why", ("A",), min),) * 2
            ),
            "constraints of space s must be different in name",
        ),
        (
            lambda: ConfigSpace(
                "s", (parameter(),), (Constraint("c", "why", ("B",), min),)
            ),
            "reads of c must be among A, got B",
        ),
        (
            lambda: ConfigSpace(
                "s",
                (parameter(),),
                (),
                (Derived("B", min, reads=("C",)), Derived("C", 1)),
            ),
            "reads of B must be among A, got C",
        ),
        (lambda: ConfigSpace("s", (parameter("block"),)), "neither a kernel constant"),
    ],
)
def test_a_wrong_definition_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_values_computed_for_a_problem_are_checked_too():
    space = ConfigSpace("s", (parameter(values=lambda problem, device: [3, 3]),))
    with pytest.raises(ValueError, match=r"values of A .* got \(3, 3\)"):
        space.count(None, SM90)


def test_spaces_are_immutable():
    with pytest.raises(FrozenInstanceError):
        SPACE.name = "other"
    values = [1, 2]
    space = ConfigSpace("s", (parameter(values=values),))
    values.append(3)
    assert space.count(None, SM90) == 2


@pytest.mark.parametrize("strength", [0, 4, "2"])
def test_a_cover_of_another_strength_is_refused(strength):
    with pytest.raises(ValueError, match=r"strength must be 1, 2 or 3, got .*pairs"):
        SPACE.cover(strength, random.Random(0), None, SM90)


def test_a_cover_may_ignore_only_what_the_space_has():
    names = "BLOCK, num_warps, maxnreg, num_stages"
    with pytest.raises(ValueError, match=f"ignore must be among {names}, got WARPS"):
        SPACE.cover(2, random.Random(0), None, SM90, ignore=("WARPS",))
    # Elsewhere maxnreg does not exist, which is no reason to refuse its name.
    assert SPACE.cover(2, random.Random(0), None, GFX942, ignore=("maxnreg",))


def test_a_space_too_large_to_list_has_no_cover():
    space = ConfigSpace("huge", [Parameter(f"X{i}", range(10)) for i in range(24)])
    expected = "space huge must be of at most 200000 members, got more"
    with pytest.raises(ValueError, match=expected):
        space.cover(2, random.Random(0), None, SM90)
