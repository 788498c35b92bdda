"""Digests of sources: what moves them and what does not."""

import importlib
import inspect
import shutil
from pathlib import Path

import pytest

from isojax.contract.canonical import ContractError
from isojax.contract.cases import WRITTEN
from isojax.contract.sources import Sources, Symbol
from isojax.ops.op import REGISTRY

ROOT = Path(__file__).parent.parent

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
TREES = """
import jax

@jax.custom_jvp
def total(x):
    found: int = x[0] + x[1]
    if found < 0:
        raise ValueError(f"too small: {found}")
    return found

@total.defjvp
def _slope(x, dx):
    return total(x), dx[0] + dx[1]

def other(x):
    return x
"""
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
        ("isojax/trees.py", " x[0] + x[1]", " (x[0]\n        + x[1])  # in order"),
        ("isojax/trees.py", "found: int", "found: float"),
        ("isojax/trees.py", "too small", "below zero"),
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
        ("isojax/trees.py", " x[0] + x[1]", " x[1] + x[0]", "isojax.trees.total"),
        ("isojax/trees.py", "dx[0] + dx[1]", "dx[1] + dx[0]", "isojax.trees.total"),
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


def of_everything(folder: Path) -> dict[str, str]:
    """The contract's definitions in a checkout."""
    roots = [*map(inspect.unwrap, REGISTRY.values()), *WRITTEN]
    packages = {name: folder / name for name in ("isojax", "pallas_kernels")}
    return Sources(packages).closure(Symbol(root.__module__, root.__name__) for root in roots)


@pytest.fixture(scope="module")
def here():
    return of_everything(ROOT)


# of the modules that compute, what is in no program
NOT_COMPUTED = {
    "isojax.models.params.shapes",  # of weights, without any
    "isojax.ops.kernel.check_device",  # whether there is a GPU
    "isojax.ops.op.is_op",
    "isojax.trainer.score.Agreement",
    "isojax.trainer.score.compare",
}


@pytest.mark.parametrize(
    "folder",
    [
        "isojax/batch.py", "isojax/cache.py", "isojax/forward.py", "isojax/mesh.py",
        "isojax/models/blocks.py", "isojax/models/params.py", "isojax/numerics/collectives.py",
        "isojax/numerics/elementary.py", "isojax/numerics/policy.py", "isojax/numerics/trees.py",
        "isojax/ops", "isojax/sampler/executor.py", "isojax/sampler/inputs.py",
        "isojax/sampler/random.py", "isojax/sampler/sampling.py", "isojax/trainer/call.py",
        "isojax/trainer/gradients.py", "isojax/trainer/loss.py", "isojax/trainer/optimizer.py",
        "isojax/trainer/packing.py", "isojax/trainer/score.py", "isojax/trainer/sharding.py",
        "isojax/trainer/step.py",
    ],
)  # fmt: skip
def test_nothing_that_computes_escapes(here, folder):
    path = ROOT / folder
    for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        module = importlib.import_module(name)
        for attribute, value in vars(module).items():
            own = getattr(value, "__module__", None) == name and hasattr(value, "__qualname__")
            if own and value.__qualname__ == attribute and f"{name}.{attribute}" not in here:
                # a function that another's decorator registers is a part of that one
                text = inspect.getsource(value)
                registered = text.startswith("@") and ".def" in text.splitlines()[0]
                assert registered or f"{name}.{attribute}" in NOT_COMPUTED, attribute


PLANTED = [
    ("numerics/elementary.py", "1.9875691500e-4", "1.9875691501e-4", "numerics.elementary._EXP"),
    ("numerics/elementary.py", "s * (1.0 - s)", "s - s * s", "numerics.elementary.sigmoid"),
    ("numerics/elementary.py", "< 0.70710678", "< 0.70710679", "numerics.elementary.log"),
    ("forward.py", "positions, rotary_dim", "positions + 1, rotary_dim", "forward.forward"),
    ("models/blocks.py", "copies = max(1,", "copies = max(2,", "models.blocks.attention_block"),
    ("trainer/loss.py", "-weight * (", "weight * -(", "trainer.loss.policy_loss"),
    ("trainer/optimizer.py", "-rate * change", "rate * -change", "trainer.optimizer.update"),
    ("trainer/packing.py", "length <= free", "length < free", "trainer.packing.fill"),
    ("trainer/step.py", "scale=1.0 / tokens", "scale=2.0 / tokens", "trainer.step.Trainer"),
    ("sampler/sampling.py", "+ 0.25) * 2", "+ 0.75) * 2", "sampler.sampling._gumbel"),
    ("sampler/random.py", "(13, 15, 26, 6)", "(13, 15, 27, 6)", "sampler.random._ROTATIONS"),
    ("sampler/random.py", "range(5)", "range(4)", "sampler.random.threefry"),
    (
        "../pallas_kernels/gated_delta_tiles.py",
        "+ factor *",
        "- factor *",
        "gated_delta_tiles._term",
    ),
]


@pytest.mark.parametrize(("path", "before", "after", "moved"), PLANTED, ids=lambda x: str(x)[-24:])
def test_a_planted_change_anywhere_moves_one_definition(tmp_path, here, path, before, after, moved):
    for package in ("isojax", "pallas_kernels"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("*.pyc"))
    file = tmp_path / "isojax" / path
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, after))
    found = of_everything(tmp_path)
    (name,) = (name for name in here if found[name] != here[name])
    assert name.endswith(moved)
