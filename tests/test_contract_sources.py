"""Digests of sources: what moves them and what does not."""

import pytest

from isojax.contract.canonical import ContractError
from isojax.contract.sources import Sources, Symbol

OPS = '''
from pallas_kernels import kernel
from isojax.trees import total as add_up

def _helper(x: int) -> int:
    """Doc."""
    return add_up(x)

def op(x, limit=4):
    return kernel.run(_helper(x), limit)

op.register(_helper, 3)

def unrelated(x):
    return x
'''
TREES = "def total(x):\n    return x[0] + x[1]\n\ndef other(x):\n    return x\n"
KERNEL = """
from pallas_kernels.tuning import tile

SCALE = 2

def run(x, n):
    return x * SCALE + tile(n)
"""
TUNING = "def tile(n):\n    return 64\n"
FILES = {
    "isojax/ops.py": OPS, "isojax/trees.py": TREES,
    "pallas_kernels/kernel.py": KERNEL, "pallas_kernels/tuning.py": TUNING,
}  # fmt: skip


def closure(folder, **changed):
    """The closure of `op` in a checkout with some files replaced."""
    for path, text in (FILES | changed).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    packages = {name: folder / name for name in ("isojax", "pallas_kernels")}
    return Sources(packages).closure([Symbol("isojax.ops", "op")])


@pytest.fixture
def base(tmp_path):
    return closure(tmp_path / "base")


def test_it_reaches_the_last_helper_and_no_further(base):
    assert set(base) == {
        "isojax.ops.op", "isojax.ops._helper", "isojax.trees.total",
        "pallas_kernels.kernel.run", "pallas_kernels.kernel.SCALE",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("isojax/ops.py", "def op", "\n\n\n# a comment\ndef op"),
        ("isojax/ops.py", '"""Doc."""', '"""Other words."""'),
        ("isojax/ops.py", "x: int) -> int", "x: float) -> float"),
        ("isojax/ops.py", "return x\n", "return -x\n"),  # unrelated
        ("isojax/trees.py", "x[0] + x[1]", "(x[0]\n        + x[1])  # in order"),
        ("pallas_kernels/kernel.py", "x * SCALE", "x  *  SCALE"),
        ("pallas_kernels/tuning.py", "64", "128"),  # tiles are free
    ],
)
def test_what_moves_no_bit_moves_no_digest(tmp_path, base, path, before, after):
    text = FILES[path].replace(before, after)
    assert text != FILES[path]
    assert closure(tmp_path / "changed", **{path: text}) == base


@pytest.mark.parametrize(
    ("path", "before", "after", "moved"),
    [
        ("isojax/trees.py", "x[0] + x[1]", "x[1] + x[0]", "isojax.trees.total"),
        ("pallas_kernels/kernel.py", "x * SCALE + t", "x * SCALE - t", "pallas_kernels.kernel.run"),
        ("pallas_kernels/kernel.py", "SCALE = 2", "SCALE = 3", "pallas_kernels.kernel.SCALE"),
        ("isojax/ops.py", "limit=4", "limit=5", "isojax.ops.op"),
        ("isojax/ops.py", "_helper, 3", "_helper, 4", "isojax.ops.op"),
    ],
)
def test_one_character_of_arithmetic_moves_the_digest(tmp_path, base, path, before, after, moved):
    text = FILES[path].replace(before, after)
    found = closure(tmp_path / "changed", **{path: text})
    assert {name for name in base if found[name] != base[name]} == {moved}


def test_a_missing_root_is_refused(tmp_path):
    with pytest.raises(ContractError, match="no source"):
        Sources({"isojax": tmp_path}).closure([Symbol("isojax.ops", "nothing")])
