# SPDX-License-Identifier: Apache-2.0
"""ConfigSpace against brute force on small random spaces, and alone on huge ones."""

import itertools
import pickle
import random
import time
from dataclasses import FrozenInstanceError, dataclass

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
# Spaces no larger are listed for sampling; with 0 all are drawn from.
LISTED = "portable_backend.kernels.config._LISTED"
DEVICES = (SM90, GFX942, DeviceInfo.for_arch("interpreter"))


@dataclass(frozen=True)
class Modulus:
    """A constraint: what it reads, weighted, leaves no remainder of 0."""

    names: tuple[str, ...]
    weights: tuple[int, ...]
    modulus: int

    def __call__(self, config, problem, device):
        total = problem
        for name, weight in zip(self.names, self.weights, strict=True):
            total += weight * (config[name] or 0)
        return total % self.modulus != 0


@dataclass(frozen=True)
class Total:
    """A derived value: the sum of what it reads."""

    names: tuple[str, ...]

    def __call__(self, config, problem, device):
        return problem + sum(config[name] or 0 for name in self.names)


def divisors(problem, device):
    return [n for n in (1, 2, 3, 4, 6, 12) if problem % n == 0]


def random_space(seed):
    """Up to six parameters, two of one platform each, constraints of all widths."""
    rng = random.Random(seed)
    parameters = [Parameter("D", divisors, "divides the problem")]
    for name in "ABC":
        values = rng.sample(range(20), rng.randint(2, 4))
        parameters.append(Parameter(name, values))
    parameters.append(Parameter("maxnreg", (None, 128), platforms=("cuda",)))
    parameters.append(Parameter("kpack", (1, 2), platforms=("hip",)))
    rng.shuffle(parameters)
    names = [p.name for p in parameters]
    derived = (
        Derived("num_stages", 2, "fixed"),
        Derived("SUM", Total(("A", "maxnreg")), reads=("A", "maxnreg")),
        Derived("TWICE", Total(("SUM", "SUM")), reads=("SUM",)),
        Derived("waves_per_eu", Total(("kpack",)), "AMD's", ("kpack",), ("hip",)),
    )
    constraints = []
    for i in range(rng.randint(0, 4)):
        reads = tuple(rng.sample([*names, "TWICE"], rng.randint(0, 3)))
        weights = tuple(rng.randint(1, 5) for _ in reads)
        holds = Modulus(reads, weights, rng.choice((2, 3, 5)))
        constraints.append(Constraint(f"c{i}", f"reason {i}", reads, holds))
    return ConfigSpace("toy", tuple(parameters), tuple(constraints), derived)


def brute_force(space, problem, device):
    """Members by the definition, without any of the walk."""
    here = device.platform
    free = [p for p in space.parameters if here in p.platforms]
    found = []
    for values in itertools.product(*(p.values_for(problem, device) for p in free)):
        config = dict(zip((p.name for p in free), values, strict=True))
        for derived in space.derived:
            if here in derived.platforms:
                value = derived.value
                if callable(value):
                    seen = {n: config.get(n) for n in derived.reads}
                    value = value(seen, problem, device)
                config[derived.name] = value
        everything = {n: config.get(n) for c in space.constraints for n in c.reads}
        if all(c.holds(everything, problem, device) for c in space.constraints):
            found.append(KernelConfig.from_dict(config))
    return found


CASES = [(seed, problem, device) for seed in range(8) for problem in (7, 12)
         for device in DEVICES]  # fmt: skip


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2].arch}")
def toy(request):
    """(space, problem, device, members, rng); over all cases, few are empty."""
    seed, problem, device = request.param
    space = random_space(seed)
    members = brute_force(space, problem, device)
    return space, problem, device, members, random.Random(seed)


def test_random_spaces_are_worth_testing():
    sizes = [len(brute_force(random_space(s), p, d)) for s, p, d in CASES]
    assert sum(size > 5 for size in sizes) > len(sizes) / 2
    assert any(size == 0 for size in sizes)


def test_listing_is_the_product_less_what_constraints_drop(toy):
    space, problem, device, members, _ = toy
    assert list(space.configs(problem, device)) == members
    assert space.count(problem, device) == len(members)


def test_why_not_is_empty_for_members_only(toy):
    space, problem, device, members, rng = toy
    for config in members:
        assert space.why_not(config, problem, device) == []
        assert space.contains(config, problem, device)
    if not members:
        return
    inside = set(members)
    for _ in range(50):
        config = rng.choice(members)
        name = rng.choice(list(config))
        other = config.replace(**{name: rng.choice((None, *range(20)))})
        assert space.contains(other, problem, device) == (other in inside)
        assert bool(space.why_not(other, problem, device)) == (other not in inside)


@pytest.mark.parametrize("listed", [50_000, 0], ids=["listed", "drawn"])
def test_samples_are_different_members(toy, listed, monkeypatch):
    monkeypatch.setattr(LISTED, listed)
    space, problem, device, members, rng = toy
    for n in (0, 1, 5, len(members), len(members) + 3):
        sample = space.sample(n, rng, problem, device)
        assert len(sample) == len(set(sample)) == min(n, len(members))
        assert set(sample) <= set(members)


def test_mutants_are_other_members(toy):
    space, problem, device, members, rng = toy
    for config in members[:20]:
        mutant = space.mutate(config, rng, problem, device)
        assert mutant in members
        assert (mutant == config) == (len(members) == 1)


def differing(space, a, b):
    return [p.name for p in space.parameters if a.get(p.name) != b.get(p.name)]


def test_children_have_each_parameter_from_a_parent(toy):
    space, problem, device, members, rng = toy
    for _ in range(20 if members else 0):
        a, b = rng.choice(members), rng.choice(members)
        child = space.crossover(a, b, rng, problem, device)
        assert child in members
        for name in (p.name for p in space.parameters):
            assert child.get(name) in (a.get(name), b.get(name))


def test_neighbours_differ_in_one_parameter_by_one_step(toy):
    space, problem, device, members, _ = toy
    for config in members[:20]:
        expected = []
        for other in members:
            changed = differing(space, config, other)
            if len(changed) != 1:
                continue
            parameter = next(p for p in space.parameters if p.name == changed[0])
            values = parameter.values_for(problem, device)
            steps = values.index(config[changed[0]]) - values.index(other[changed[0]])
            if abs(steps) == 1 or None in values:
                expected.append(other)
        found = space.neighbours(config, problem, device)
        assert len(found) == len(expected)
        assert set(found) == set(expected)


def test_words_have_every_other_word_for_a_neighbour():
    space = ConfigSpace("toy", (Parameter("LOAD", ("a", "b", "c")),))
    found = space.neighbours(KernelConfig.of(LOAD="a"), None, SM90)
    assert [config["LOAD"] for config in found] == ["b", "c"]


def test_the_same_seed_draws_the_same(toy):
    space, problem, device, *_ = toy
    first, second = (
        space.sample(3, random.Random(5), problem, device) for _ in range(2)
    )
    assert first == second


def equal_neighbours(config, problem, device):
    first, second = config.values()
    return first == second


def huge_space(constraints=()):
    """10**24 points, far more than anyone can list."""
    parameters = tuple(Parameter(f"X{i:02}", range(10)) for i in range(24))
    return ConfigSpace("huge", parameters, tuple(constraints))


PAIRS = [("X00", "X01"), ("X05", "X06")]
CHAIN = [(f"X{i:02}", f"X{i + 1:02}") for i in range(23)]


def equalities(pairs):
    return [Constraint("-".join(p), "equal", p, equal_neighbours) for p in pairs]


@pytest.mark.parametrize(
    ("pairs", "count"), [([], 10**24), (PAIRS, 10**22), (CHAIN, 10)]
)
def test_huge_spaces_are_counted_and_sampled_without_listing_them(pairs, count):
    space, rng = huge_space(equalities(pairs)), random.Random(3)
    start = time.perf_counter()
    assert space.count(None, SM90) == count
    sample = space.sample(200, rng, None, SM90)
    assert len(sample) == len(set(sample)) == min(200, count)
    for config in sample:
        assert space.contains(config, None, SM90)
        assert space.contains(space.mutate(config, rng, None, SM90), None, SM90)
        child = space.crossover(config, sample[0], rng, None, SM90)
        assert space.contains(child, None, SM90)
    assert time.perf_counter() - start < 20


def test_constraints_are_called_as_soon_as_their_parameters_are_chosen():
    calls = []

    def never(config, problem, device):
        calls.append(dict(config))
        return False

    space = ConfigSpace(
        "toy",
        (Parameter("A", range(3)), Parameter("B", range(100))),
        (Constraint("never", "a test", ("A",), never),),
    )
    assert list(space.configs(None, SM90)) == []
    assert calls == [{"A": 0}, {"A": 1}, {"A": 2}]


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


def test_why_not_tells_another_platforms_parameter_from_an_unknown_one():
    assert SPACE.why_not(MEMBER, None, GFX942) == [
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


@pytest.mark.parametrize("listed", [50_000, 0], ids=["listed", "drawn"])
def test_samples_of_one_reach_every_member_about_as_often(listed, monkeypatch):
    monkeypatch.setattr(LISTED, listed)
    rng = random.Random(1)
    counts = dict.fromkeys(SPACE.configs(None, SM90), 0)
    assert len(counts) == 14
    for _ in range(100 * len(counts)):
        counts[SPACE.sample(1, rng, None, SM90)[0]] += 1
    assert 60 < min(counts.values()) <= max(counts.values()) < 140


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
            lambda: ConfigSpace("s", (parameter(),), equalities([("A", "B")])),
            "reads of A-B must be among A, got B",
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


def test_spaces_are_immutable_and_can_be_pickled():
    with pytest.raises(FrozenInstanceError):
        SPACE.name = "other"
    values = [1, 2]
    space = ConfigSpace("s", (parameter(values=values),))
    values.append(3)
    assert space.count(None, SM90) == 2
    copy = pickle.loads(pickle.dumps(random_space(4)))
    assert list(copy.configs(12, SM90)) == list(random_space(4).configs(12, SM90))
