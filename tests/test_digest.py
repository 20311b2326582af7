# SPDX-License-Identifier: Apache-2.0
"""The digest of kernel code changes when the code does, and only then."""

import importlib.util
import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest

from portable_backend.warmup.digest import KERNELS, current_digests, kernel_digest

SOURCE = '''
import math
import triton.language as tl

SCALE = 2
UNUSED = 3
NAMES = ("a", "b")


def helper(x):
    return x * SCALE


def other(x):
    return x


def kernel(x_ptr, y, BLOCK: int = 4):
    """What it does."""
    # a comment
    if y > 0:
        y = helper(y)
    for name in NAMES:
        y += math.pi
    return y + tl.arange(0, BLOCK)
'''
SAME = {
    "a comment": ("# a comment", "# quite another\n\n    # and more"),
    "a docstring": ('"""What it does."""', '"""Something else,\n\n    longer."""'),
    "no docstring": ('    """What it does."""\n', ""),
    "line numbers": ("import math", "\n\n\n# moved\nimport math"),
    "layout": ("y = helper(y)", "y = (\n            helper( y )\n        )"),
    "a constant that nothing reads": ("UNUSED = 3", "UNUSED = 4"),
    "a function that nothing calls": ("    return x\n", "    return x + 1\n"),
    "the helper's comment": ("x * SCALE", "x * SCALE  # doubled"),
}
CHANGED = {
    "an operator": ("y > 0", "y >= 0"),
    "a constant": ("SCALE = 2", "SCALE = 4"),
    "a constant's type": ("SCALE = 2", "SCALE = 2.0"),
    "a tuple of constants": ('("a", "b")', '("a", "c")'),
    "a called function": ("x * SCALE", "x * SCALE + 1"),
    "which function is called": ("y = helper(y)", "y = other(y)"),
    "a default": ("BLOCK: int = 4", "BLOCK: int = 8"),
    "an annotation": ("BLOCK: int", "BLOCK: float"),
    "a string that is no docstring": ("y = helper(y)", "y = 'helper'"),
}
_count = itertools.count()


@pytest.fixture
def load(tmp_path):
    def load(source):
        name = f"digest_case_{next(_count)}"
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def _edit(old, new):
    assert SOURCE.count(old) == 1, old
    return SOURCE.replace(old, new)


@pytest.mark.parametrize("edit", SAME.values(), ids=SAME)
def test_digest_ignores(load, edit):
    edited = load(_edit(*edit))
    assert kernel_digest([edited.kernel]) == kernel_digest([load(SOURCE).kernel])


@pytest.mark.parametrize("edit", CHANGED.values(), ids=CHANGED)
def test_digest_follows(load, edit):
    edited = load(_edit(*edit))
    assert kernel_digest([edited.kernel]) != kernel_digest([load(SOURCE).kernel])


def test_digest_follows_what_is_read_through_a_module(load, monkeypatch):
    library = load(SOURCE)
    monkeypatch.setitem(sys.modules, "digest_library", library)
    source = (
        "import digest_library as lib\n\ndef kernel(x):\n    return lib.helper(x)\n"
    )
    before = kernel_digest([load(source).kernel])
    monkeypatch.setattr(library, "SCALE", 5)
    assert kernel_digest([load(source).kernel]) != before


def test_digest_sees_through_jit_objects(load):
    module = load(SOURCE)
    jitted = SimpleNamespace(fn=module.kernel)
    plain = kernel_digest([module.kernel])
    assert kernel_digest([jitted]) == plain
    module.helper = SimpleNamespace(fn=module.helper)
    assert kernel_digest([jitted]) == plain


def test_digest_does_not_depend_on_the_order_of_functions(load):
    module = load(SOURCE)
    both = [module.kernel, module.other]
    assert kernel_digest(both) == kernel_digest(both[::-1])
    assert kernel_digest(both) != kernel_digest([module.kernel])


def test_a_function_without_source_is_refused():
    with pytest.raises(ValueError, match="source"):
        kernel_digest([eval("lambda x: x")])
    with pytest.raises(ValueError, match="got none"):
        kernel_digest([])


def test_our_kernels_have_digests_that_differ():
    pytest.importorskip("triton")
    digests = current_digests()
    assert digests.keys() == KERNELS.keys()
    assert len(set(digests.values())) == len(digests)


def test_our_digests_are_the_same_with_and_without_the_interpreter():
    pytest.importorskip("triton")
    code = "import portable_backend.warmup.digest as d; print(d.current_digests())"
    outputs = set()
    for value in "01":
        run = [sys.executable, "-P", "-c", code]
        path = {"PYTHONPATH": ":".join(sys.path), "TRITON_INTERPRET": value}
        done = subprocess.run(run, env=path, capture_output=True, text=True, check=True)
        outputs.add(done.stdout)
    assert len(outputs) == 1
