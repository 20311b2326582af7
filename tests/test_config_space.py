# SPDX-License-Identifier: Apache-2.0
"""ConfigSpace against brute force on small random spaces, and alone on huge ones."""

import itertools
import pickle
import random
import time
from dataclasses import dataclass

import pytest

from portable_backend.device import DeviceInfo
from portable_backend.kernels.config import (
    ConfigSpace,
    Constraint,
    Derived,
    KernelConfig,
    Parameter,
    combinations,
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


ODD_SUM = ("A", "B"), Modulus(("A", "B"), (1, 1), 2)


@pytest.mark.parametrize("listed", [50_000, 0], ids=["listed", "drawn"])
def test_samples_of_one_reach_every_member_about_as_often(listed, monkeypatch):
    monkeypatch.setattr(LISTED, listed)
    names = Parameter("A", range(5)), Parameter("B", range(3))
    space = ConfigSpace("toy", names, (Constraint("sum", "a test", *ODD_SUM),))
    rng = random.Random(1)
    counts = dict.fromkeys(space.configs(0, SM90), 0)
    assert len(counts) == 7
    for _ in range(100 * len(counts)):
        counts[space.sample(1, rng, 0, SM90)[0]] += 1
    assert 60 < min(counts.values()) <= max(counts.values()) < 140


def corner(config, problem, device):
    return config["A"] + config["B"] >= 297


@pytest.mark.parametrize("listed", [50_000, 0], ids=["listed", "drawn"])
def test_rare_members_are_found_where_draws_are_in_vain(listed, monkeypatch):
    """Three of 22500 points, too few to draw and too many to list for four configs."""
    monkeypatch.setattr(LISTED, listed)
    monkeypatch.setattr(LISTED.replace("_LISTED", "_VAIN_DRAWS"), 3)
    parameters = Parameter("A", range(150)), Parameter("B", range(150))
    rare = Constraint("corner", "a test", ("A", "B"), corner)
    space = ConfigSpace("toy", parameters, (rare,))
    sample = space.sample(4, random.Random(1), None, SM90)
    assert {(c["A"], c["B"]) for c in sample} == {(148, 149), (149, 148), (149, 149)}


def test_spaces_can_be_pickled():
    space = random_space(4)
    copy = pickle.loads(pickle.dumps(space))
    assert copy == space
    assert list(copy.configs(12, SM90)) == list(space.configs(12, SM90))


def projections(configs, names):
    return {tuple(config[name] for name in names) for config in configs}


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_covers_have_whatever_values_occur_together(toy, strength):
    """Constants and derived parameters among them."""
    space, problem, device, members, rng = toy
    cover = space.cover(strength, rng, problem, device)
    assert set(cover) <= set(members)
    assert len(set(cover)) == len(cover)
    names = list(members[0]) if members else []
    for chosen in itertools.combinations(names, strength):
        assert projections(cover, chosen) == projections(members, chosen)


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_no_config_of_a_cover_is_superfluous(toy, strength):
    space, problem, device, members, rng = toy
    cover = space.cover(strength, rng, problem, device)
    wanted = combinations(members, strength)
    assert combinations(cover, strength) == wanted
    for i in range(len(cover)):
        assert combinations(cover[:i] + cover[i + 1 :], strength) != wanted


# Parameters of four values each; rows of the smallest covering array, and at most.
@pytest.mark.parametrize(
    ("count", "strength", "least", "most"),
    [(6, 1, 4, 6), (5, 2, 16, 26), (7, 2, 16, 30), (5, 3, 64, 110)],
)
def test_covers_are_small(count, strength, least, most):
    parameters = [Parameter(f"X{i}", range(4)) for i in range(count)]
    space = ConfigSpace("toy", parameters)
    cover = space.cover(strength, random.Random(0), None, SM90)
    assert least <= len(cover) <= most


def test_the_same_seed_gives_the_same_cover(toy):
    space, problem, device, members, _ = toy
    covers = [space.cover(2, random.Random(i), problem, device) for i in (0, 0, *"abc")]
    assert covers[0] == covers[1]
    if len(members) > 20:
        assert any(set(cover) != set(covers[0]) for cover in covers)


def test_ignored_parameters_need_no_cover():
    parameters = Parameter("A", range(3)), Parameter("B", range(50))
    space = ConfigSpace("toy", parameters, derived=(Derived("C", 7),))
    cover = space.cover(2, random.Random(0), None, SM90, ignore=("B", "C"))
    assert sorted(config["A"] for config in cover) == [0, 1, 2]
    assert all(space.contains(config, None, SM90) for config in cover)


def test_combinations_leave_out_what_never_changes():
    configs = [KernelConfig.of(A=a, B=a % 2, C=5) for a in range(4)]
    assert combinations(configs, 1) == {
        *((("A", a),) for a in range(4)),
        *((("B", b),) for b in range(2)),
    }
    assert combinations(configs, 2) == {(("A", a), ("B", a % 2)) for a in range(4)}
    assert combinations(configs, 3) == combinations(configs, 2)
    assert combinations(configs, 2, ignore=("B",)) == {(("A", a),) for a in range(4)}
    assert combinations(configs[:1], 2) == {()}
