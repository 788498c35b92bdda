"""Drives the forward call by call, as sampler and trainer would, but with every choice in the
test's hands.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from isojax import cache as caches
from isojax.batch import Bucket, Segment, build
from isojax.forward import forward, logprobs
from isojax.mesh import Layout


@functools.cache
def program(model, policy):
    """(params, batch, cache, targets) -> (log-probabilities [T], cache), jitted."""

    layout = Layout()

    def step(params, batch, cache, targets):
        hidden, cache = forward(params, batch, cache, model=model, policy=policy, layout=layout)
        one = jnp.ones(targets.shape, jnp.float32)
        full, _ = logprobs(
            params, hidden, targets, one, -jnp.inf * one, policy=policy, layout=layout
        )
        return full, cache

    return jax.jit(step)


class Runner:
    """A pool of pages and slots of one rank, and the tokens fed so far."""

    def __init__(self, model, policy, params, *, pages=64, slots=16, seed=0, poison=True):
        self.model, self.policy, self.params = model, policy, params
        self.cache = caches.create(
            model, policy, Layout(), pages=pages, slots=slots, per_layer=True
        )
        if poison:  # whatever lies in an unused page or slot must not matter
            self.cache = jax.tree.map(
                lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.inexact) else x,
                self.cache,
            )
        random = np.random.default_rng(seed)
        self.free_pages = random.permutation(pages).tolist()
        self.free_slots = random.permutation(slots).tolist()
        self.state: dict[object, tuple[int, list[int], int]] = {}  # name -> (context, pages, slot)

    def drop(self, name) -> None:
        _, pages, slot = self.state.pop(name)
        self.free_pages += pages
        self.free_slots.append(slot)

    def feed(self, pieces, bucket: Bucket) -> dict:
        """pieces: list of (name, tokens, targets); -> {name: log-probabilities of its targets}."""
        segments, rows, row = [], [], 0
        targets = np.zeros(bucket.tokens, np.int32)
        for name, tokens, goal in pieces:
            context, pages, slot = self.state.get(name) or (0, [], self.free_slots.pop())
            end = context + len(tokens)
            while len(pages) * self.policy.chunk < end:
                pages = [*pages, self.free_pages.pop()]
            segments.append(Segment(tokens, context, pages, slot))
            self.state[name] = (end, pages, slot)
            targets[row : row + len(tokens)] = goal
            rows.append((name, row, len(tokens)))
            row += len(tokens)
        batch = build(segments, bucket, self.policy.chunk)
        out, self.cache = program(self.model, self.policy)(self.params, batch, self.cache, targets)
        out = np.asarray(out)
        return {name: out[at : at + n] for name, at, n in rows}
