"""Names the first layer and op where the bits of two ways through the forward part.

One sequence goes through the model as the trainer scores it (whole, fresh state), as it reads it
under a gradient, and as the sampler does (its prompt in one piece, then token by token). Every op
call's rows are kept and compared with those of the score, in the order of the program.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from isojax import cache as caches
from isojax.batch import Bucket, Segment, build, concatenate
from isojax.contract.cases import DECODE, FORWARD, PREFILL, SCORE
from isojax.contract.taps import Tap, tapped
from isojax.forward import forward, logprobs
from isojax.mesh import DATA, MODEL, ROWS, Layout
from isojax.models.config import ModelConfig
from isojax.models.params import specs
from isojax.numerics.policy import Policy
from isojax.ops import weight

_RANKS = PartitionSpec((*ROWS, MODEL))


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Where two cases part first.

    layer: from 0; None outside the layers. op: its name. call: number of the op call in the program
    of one period. position: the first token affected. elements: of its row, how many differ.
    values: of the first such element, (the case, train_score).
    """

    layer: int | None
    op: str
    call: int
    case: str
    position: int
    elements: int
    values: tuple[float, float]

    def __str__(self) -> str:
        where = "outside the layers" if self.layer is None else f"layer {self.layer}"
        ours, theirs = self.values
        return (
            f"{where}, op {self.op} (call {self.call}): {self.case} and {SCORE} part at position "
            f"{self.position}, in {self.elements} elements of the row, first {ours!r} against "
            f"{theirs!r}"
        )


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of every op call: an array [ranks, loops.., rows, ...] for each output."""

    taps: list[Tap]
    arrays: list[tuple[np.ndarray, ...]]


class Bisector:
    """Taps the forward of one model on its mesh."""

    def __init__(
        self,
        model: ModelConfig,
        policy: Policy,
        layout: Layout,
        mesh: Mesh,
        params: Any,
    ) -> None:
        self._model, self._policy, self._layout, self._mesh = model, policy, layout, mesh
        self._params = params
        self._programs: dict[Any, Any] = {}

    def find(self, tokens: np.ndarray, prompt_length: int) -> Divergence | None:
        """The first difference for a sequence of tokens int [L], or None if all rows agree."""
        score = self._trainer(tokens, gradient=False)
        found = None
        for case, first, count, rows in self._others(tokens, prompt_length):
            here = self._compare(case, first, count, rows, score)
            if here is not None and (found is None or _order(here) < _order(found)):
                found = here
        return found

    def _others(self, tokens: np.ndarray, prompt_length: int) -> Any:
        """(case, first position, tokens, rows) of every call but the score."""
        yield FORWARD, 0, len(tokens), self._trainer(tokens, gradient=True)
        yield from self._sampler(tokens, prompt_length)

    def _trainer(self, tokens: np.ndarray, gradient: bool) -> _Rows:
        chunk, leaves = self._policy.chunk, self._policy.batch_leaves
        pages = -(-len(tokens) // chunk)
        rows = leaves // self._layout.data * pages * chunk
        bucket = Bucket(rows, 1, pages, pages, chunk)
        segment = Segment(tokens.tolist(), 0, range(pages), 0)
        return self._run(bucket, [segment], tokens, None, gradient)[0]

    def _sampler(self, tokens: np.ndarray, prompt_length: int) -> Any:
        """(case, first position, tokens, rows) of each call."""
        chunk = self._policy.chunk
        pages = -(-len(tokens) // chunk)
        size = -(-prompt_length // chunk)
        prefill = Bucket(size * chunk, 1, size, pages, chunk)
        segment = Segment(tokens[:prompt_length].tolist(), 0, range(pages), 0)
        rows, cache = self._run(prefill, [segment], tokens[:prompt_length], self._pool(pages))
        yield PREFILL, 0, prompt_length, rows
        # a decoded token is alone but for the padding rows that ranks need to share
        decode = Bucket(self._layout.stream_ranks, 1, 1, pages, 1)
        for at in range(prompt_length, len(tokens)):
            segment = Segment([int(tokens[at])], at, range(pages), 0)
            rows, cache = self._run(decode, [segment], tokens[at : at + 1], cache)
            yield DECODE, at, 1, rows

    def _pool(self, pages: int) -> Any:
        make, spec = self._cache(pages, per_layer=True)
        return jax.jit(self._shard(make, (), spec))()

    def _cache(self, pages: int, per_layer: bool) -> tuple[Callable, Any]:
        def make() -> Any:
            return caches.create(
                self._model, self._policy, self._layout, pages=pages, slots=1, per_layer=per_layer
            )

        return make, caches.specs(jax.eval_shape(make))

    def _shard(self, body: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(
            body, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _run(
        self,
        bucket: Bucket,
        segments: list,
        tokens: np.ndarray,
        cache: Any,
        gradient: bool = False,
    ) -> tuple:
        """One tapped call; every data rank reads the same sequence."""
        whole = cache is None
        one = build(segments, bucket, self._policy.chunk, whole=whole)
        batch = concatenate([one] * self._layout.data)
        targets = np.zeros(bucket.tokens, np.int32)
        targets[: len(tokens)] = tokens
        targets = np.concatenate([targets] * self._layout.data)
        key = (bucket, whole, gradient)
        if key not in self._programs:
            self._programs[key] = self._program(*key)
        program, taps = self._programs[key]
        arrays, cache = program(self._params, batch, targets, cache)
        # of every process's ranks, on every process
        arrays = multihost_utils.process_allgather(arrays, tiled=True)
        found = list(taps())
        whole_rows = [
            tuple(_whole(x, tap.depth, bucket.tokens, self._layout) for x in kept)
            for tap, kept in zip(found, arrays, strict=True)
        ]
        return _Rows(found, whole_rows), cache

    def _program(
        self, bucket: Bucket, whole: bool, gradient: bool
    ) -> tuple[Any, Callable[[], list[Tap]]]:
        policy, layout = self._policy, self._layout
        make, spec = self._cache(bucket.pages, per_layer=not whole)

        def rank(params: Any, batch: Any, targets: Any, cache: Any) -> tuple:
            hidden, cache = forward(
                params, batch, cache, model=self._model, policy=policy, layout=layout
            )
            one = jnp.ones(targets.shape, jnp.float32)
            full, _ = logprobs(
                params, hidden, targets, one, -jnp.inf * one, policy=policy, layout=layout
            )
            return full, cache

        # all rows, or those of a context rank, or of a rank's residual stream
        sizes = {bucket.tokens // n for n in (1, layout.context, layout.stream_ranks)}

        def keep(aval: Any) -> bool:
            shape: tuple[int, ...] = getattr(aval, "shape", ())
            # pools have more axes
            rows = 1 <= len(shape) <= 3 and shape[0] in sizes
            return rows and jnp.issubdtype(aval.dtype, jnp.inexact)

        run = tapped(rank, keep)

        def body(params: Any, batch: Any, targets: Any, cache: Any) -> tuple:
            cache = make() if cache is None else cache
            arrays: Any
            if gradient:  # ops then answer by the forwards of their vjps

                def rows(places: Any) -> tuple:
                    (full, _), arrays = run(weight.attach(params, places), batch, targets, cache)
                    return full, arrays

                arrays = jax.vjp(rows, weight.places(params), has_aux=True)[2]
            else:
                (_, cache), arrays = run(params, batch, targets, cache)
            return jax.tree.map(lambda x: x[None], arrays), None if whole else cache

        weights = specs(self._model, self._policy, self._layout)
        over, none = PartitionSpec(DATA), PartitionSpec()
        jitted = jax.jit(
            self._shard(
                body,
                (weights, over, over, none if whole else spec),
                (_RANKS, none if whole else spec),
            )
        )
        return jitted, lambda: run.taps  # type: ignore[attr-defined]

    def _compare(
        self, case: str, first: int, count: int, ours: _Rows, theirs: _Rows
    ) -> Divergence | None:
        """The first difference of one sampler call, by layer, then op."""
        if [t.op for t in ours.taps] != [t.op for t in theirs.taps]:
            raise RuntimeError(
                "sampler and trainer call different ops: see `isojax contract build`"
            )
        best: Divergence | None = None
        layers, adds = len(self._kinds()), 0
        for call, (tap, left, right) in enumerate(
            zip(ours.taps, ours.arrays, theirs.arrays, strict=True)
        ):
            layer = adds // 2 if tap.depth else None
            adds += tap.depth > 0 and tap.op == "add"  # two residual sums end a layer
            for a, b in zip(left, right, strict=True):
                hit = _first(a, b, tap.depth, first, count)
                if hit is None:
                    continue
                period, row, elements, values = hit
                number = None if layer is None else period * layers + layer
                if number is None and any(t.depth for t in ours.taps[:call]):
                    order = Divergence(None, tap.op, call, case, first + row, elements, values)
                else:
                    order = Divergence(number, tap.op, call, case, first + row, elements, values)
                if best is None or _order(order) < _order(best):
                    best = order
        return best

    def _kinds(self) -> tuple[str, ...]:
        return self._model.layer_types[: self._model.period]


def _whole(x: np.ndarray, depth: int, tokens: int, layout: Layout) -> np.ndarray:
    """Rows [ranks, loops.., rows, ...] that ranks may have cut -> [some ranks, loops.., T, ...]."""
    axis = 1 + depth
    runs = tokens // x.shape[axis]
    if runs == 1:
        return x
    data, model = layout.data, layout.model * layout.context // runs
    # "context" and then "model" ranks follow each other, and those that cut rows are the outer ones
    x = x.reshape(data, runs, model, *x.shape[1:])
    x = np.moveaxis(x, 1, axis + 1)
    rows = (*x.shape[2 : axis + 1], tokens)
    return x.reshape(data * model, *rows, *x.shape[axis + 3 :])


def _order(d: Divergence) -> tuple[float, int, int]:
    """Program order: before the layers, by layer, behind them."""
    if d.layer is None:
        return (-1.0 if d.call < 2 else float("inf"), d.call, d.position)
    return (float(d.layer), d.call, d.position)


def _first(
    a: np.ndarray, b: np.ndarray, depth: int, first: int, count: int
) -> tuple[int, int, int, tuple[float, float]] | None:
    """First difference (period, row, elements, values) of arrays [ranks, loops, rows, ...]."""
    a, b = (x if depth else x[:, None] for x in (a, b))
    a, b = a[:, :, :count], b[:, :, first : first + count]
    width = {1: np.uint8, 2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
    wrong = np.ascontiguousarray(a).view(width) != np.ascontiguousarray(b).view(width)
    if not wrong.any():
        return None
    wrong = wrong.reshape(*wrong.shape[:3], -1)
    period = int(np.argmax(wrong.any(axis=(0, 2, 3))))
    row = int(np.argmax(wrong[:, period].any(axis=(0, 2))))
    rank = int(np.argmax(wrong[:, period, row].any(axis=1)))
    elements = int(wrong[rank, period, row].sum())
    at = int(np.argmax(wrong[rank, period, row]))
    pick = lambda x: float(x[rank, period, row].reshape(-1)[at])  # noqa: E731
    return period, row, elements, (pick(a), pick(b))
