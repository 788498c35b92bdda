"""exp, log and their like: accurate, and the same bits in a loop of any length."""

import jax
import numpy as np
import pytest

from isojax.numerics import elementary
from tests.util import assert_same_bits

RANDOM = np.random.default_rng(0)
WIDE = (RANDOM.normal(size=4099) * 20).astype(np.float32)
POSITIVE = np.exp2(RANDOM.uniform(-120, 120, 4099)).astype(np.float32)
FUNCTIONS = {
    "exp": (elementary.exp, np.exp, WIDE),
    "log": (elementary.log, np.log, POSITIVE),
    "log1p": (elementary.log1p, np.log1p, RANDOM.uniform(-0.999, 2, 4099).astype(np.float32)),
    "sigmoid": (elementary.sigmoid, lambda x: 1 / (1 + np.exp(-x)), WIDE),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_accuracy(name):
    function, exact, x = FUNCTIONS[name]
    want = exact(x.astype(np.float64))
    normal = np.abs(want) > np.finfo(np.float32).tiny
    error = np.abs(np.asarray(jax.jit(function)(x)) - want)[normal]
    assert (error <= 3 * np.spacing(np.abs(want[normal]).astype(np.float32))).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_do_not_depend_on_the_shape(name):
    function, _, x = FUNCTIONS[name]
    whole = np.asarray(jax.jit(function)(x))
    for count in (1, 2, 3, 5, 7, 8, 15, 64, 65):
        assert_same_bits(jax.jit(function)(x[:count]), whole[:count])
    square = x[:4096].reshape(64, 64)
    turned = jax.jit(lambda a: function(a.T).T)(square)
    assert_same_bits(np.ascontiguousarray(turned), whole[:4096].reshape(64, 64))


def test_edges():
    inf, nan = np.inf, np.nan
    x = np.array([0, -0.0, inf, -inf, nan, 100, -100], np.float32)
    np.testing.assert_array_equal(elementary.exp(x), np.float32([1, 1, inf, 0, nan, inf, 0]))
    x = np.array([1, 0, inf, -1, nan], np.float32)
    np.testing.assert_array_equal(elementary.log(x), np.float32([0, -inf, inf, nan, nan]))


def test_gradients():
    for function, slope in (
        (elementary.exp, np.exp),
        (elementary.log, lambda x: 1 / x),
        (elementary.sigmoid, lambda x: np.exp(-x) / (1 + np.exp(-x)) ** 2),
    ):
        got = jax.vmap(jax.grad(function))(np.float32([0.5, 1, 2]))
        np.testing.assert_allclose(got, slope(np.array([0.5, 1, 2])), rtol=1e-6)
