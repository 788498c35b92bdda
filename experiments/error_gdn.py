"""Error of the gated delta rule against float64, by rounding points and by length.

Without a GPU: the reference evaluation under rounding policies, beside the formula of
flash-linear-attention's chunk kernels (T = (I + L)^-1, u = T beta v, w = T beta exp(G) k and
d = u - w S in bfloat16), all on the same bfloat16 inputs. With one (`--state`): the state after
many tokens of the Hopper kernels, and of that library's chunk kernel if it is installed.

usage: python experiments/error_gdn.py [--tokens N] [--state]
"""

import argparse
import dataclasses

import numpy as np

WIDTH, CHUNK = 128, 64
# exp(A_log) and dt_bias of the heads: from hardly any decay to a strong one.
DECAYS = {"weak": (-6.0, -3.0), "middle": (-2.0, 0.0), "strong": (1.0, 1.0)}


def draw(tokens: int, heads: int, seed: int = 0):
    import jax.numpy as jnp

    rng = np.random.default_rng(seed)
    take = lambda *s: jnp.asarray(rng.normal(size=(tokens, heads, *s)), jnp.bfloat16)  # noqa: E731
    return take(WIDTH), take(WIDTH), take(WIDTH), take(), take()


def exact(q, k, v, a, b, A_log, dt_bias, out: bool = True):
    """Float64 token by token -> (o [T, H, V] or None, S [H, K, V])."""
    q, k, v, a, b, A_log, dt_bias = (
        np.asarray(x.astype("float32"), np.float64) for x in (q, k, v, a, b, A_log, dt_bias)
    )
    unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    q, k = unit(q) * WIDTH**-0.5, unit(k)
    g, beta = -np.exp(A_log) * np.log1p(np.exp(a + dt_bias)), 1 / (1 + np.exp(-b))
    state, rows = np.zeros((v.shape[1], WIDTH, WIDTH)), []
    for t in range(len(q)):
        state *= np.exp(g[t])[:, None, None]
        d = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state += k[t][:, :, None] * d[:, None, :]
        if out:
            rows.append(np.einsum("hkv,hk->hv", state, q[t]))
    return (np.stack(rows) if out else None), state


def inverse_form(q, k, v, a, b, A_log, dt_bias):
    """bfloat16 operands where flash-linear-attention's chunk kernels have them -> o [T, H, V]."""
    import jax.numpy as jnp

    low = lambda x: np.asarray(  # noqa: E731
        jnp.asarray(x, jnp.bfloat16).astype(jnp.float32), np.float64
    )
    q, k, v, a, b, A_log, dt_bias = (
        np.asarray(x.astype("float32"), np.float64) for x in (q, k, v, a, b, A_log, dt_bias)
    )
    unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    q, k = low(unit(q)), low(unit(k))
    g, beta = -np.exp(A_log) * np.log1p(np.exp(a + dt_bias)), low(1 / (1 + np.exp(-b)))
    heads = lambda x: np.moveaxis(x, 1, 0)  # noqa: E731
    q, k, v, g, beta = (heads(x) for x in (q, k, v, g, beta))
    state, rows = np.zeros((len(q), WIDTH, WIDTH)), []
    for at in range(0, q.shape[1], CHUNK):
        here = slice(at, at + CHUNK)
        Q, K, V, B = q[:, here], k[:, here], v[:, here], beta[:, here, None]
        G = np.cumsum(g[:, here], 1)
        E = np.exp(np.tril(G[:, :, None] - G[:, None, :]))
        KT = np.swapaxes(K, 1, 2)
        T = low(np.linalg.inv(np.eye(CHUNK) + np.tril(B * (K @ KT) * E, -1)))
        u, w = low(T @ low(B * V)), low(T @ low(B * np.exp(G)[..., None] * K))
        S = low(state)
        d = u - w @ S
        o = (np.exp(G)[..., None] * (Q @ S)) + low(np.tril((Q @ KT) * E)) @ low(d)
        rows.append(low(o * WIDTH**-0.5))
        fade = np.exp(G[:, -1:] - G)[..., None]
        state = np.exp(G[:, -1])[:, None, None] * state + KT @ low(fade * d)
    return np.moveaxis(np.concatenate(rows, 1), 0, 1)


def relative(x, y) -> float:
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def one_sequence(tokens: int):
    from isojax.batch import Bucket, Segment, build

    bucket = Bucket(tokens, 1, tokens // CHUNK, 1, CHUNK)
    return build([Segment([0] * tokens, 0, [], 0)], bucket, CHUNK)


def ours(args, policy):
    import jax.numpy as jnp

    from isojax.ops.gated_delta import gated_delta, init_state

    tokens, heads = args[0].shape[:2]
    state = init_state(1, 1, heads, heads, WIDTH, WIDTH, policy)
    out, state = gated_delta(*args, state, jnp.int32(0), one_sequence(tokens), policy=policy)
    return np.asarray(out.astype(jnp.float32), np.float64), np.asarray(state.state[0, 0])


def rounding_points(tokens: int) -> None:
    import jax.numpy as jnp

    from isojax.numerics.policy import Policy

    print("| decay | delta form | only q, k, o rounded | nothing rounded | inverse form |")
    print("| --- | --- | --- | --- | --- |")
    for name, (A_log, dt_bias) in DECAYS.items():
        gates = jnp.full((1,), A_log), jnp.full((1,), dt_bias)
        args = (*draw(tokens, 1), *gates)
        want, _ = exact(*args)
        low = Policy()
        mixed = dataclasses.replace(low, delta_dtype="float32")
        full = Policy(compute_dtype="float32")
        wide = (*(x.astype(jnp.float32) for x in args[:5]), *gates)
        errors = [relative(ours(args, p)[0], want) for p in (low, mixed)]
        errors.append(relative(ours(wide, full)[0], want))
        errors.append(relative(inverse_form(*args), want))
        print(f"| {name} | " + " | ".join(f"{e:.2e}" for e in errors) + " |", flush=True)


def long_state(tokens: int) -> None:
    import jax.numpy as jnp

    from isojax.numerics.policy import Policy

    gates = tuple(jnp.asarray(x, jnp.float32) for x in zip(*DECAYS.values(), strict=True))
    args = (*draw(tokens, len(DECAYS)), *gates)
    _, want = exact(*args, out=False)
    _, got = ours(args, Policy(evaluation="mosaic"))
    for name, x, y in zip(DECAYS, got, want, strict=True):
        print(f"state after {tokens} tokens, {name} decay: {relative(x, y):.2e}", flush=True)
    try:
        import torch
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        print(f"no native kernel here: {error}")
        return
    tensor = lambda x: torch.from_numpy(np.asarray(x.astype(jnp.float32)))[None].cuda()  # noqa: E731
    q, k, v, a, b, A_log, dt_bias = (tensor(x) for x in args)
    g = -A_log[0].exp() * torch.nn.functional.softplus(a + dt_bias[0])
    low = [x.bfloat16() for x in (q, k, v)]
    _, state = chunk_gated_delta_rule(
        *low, g, b.sigmoid().bfloat16(), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    for name, x, y in zip(DECAYS, state[0].double().cpu().numpy(), want, strict=True):
        print(f"native state after {tokens} tokens, {name} decay: {relative(x, y):.2e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--state", action="store_true", help="the Hopper kernels' state")
    options = parser.parse_args()
    if options.state:
        long_state(options.tokens)
    else:
        rounding_points(options.tokens)


if __name__ == "__main__":
    main()
