"""`isojax verify`: the canary by itself, and the bisecting dump."""

from isojax.config import RunConfig, resolve_model
from isojax.contract import canary
from isojax.contract.bisect import Bisector
from isojax.contract.cases import engine_config
from isojax.contract.startup import bisected
from isojax.models import hf
from isojax.models.init import init_params
from isojax.sampler.executor import Executor
from isojax.trainer.score import Scorer


def run(config: RunConfig, *, bisect: bool) -> tuple[bool, list[str]]:
    """Whether all bits agree, and what to print.

    bisect: follow the first sequence that parts, or else one that does not, op by op.
    """
    model, policy, layout = resolve_model(config), config.policy, config.mesh
    mesh = layout.mesh()
    if config.checkpoint:
        _, params = hf.load(config.checkpoint, mesh, layout, policy)
    else:
        params = init_params(model, policy, layout, mesh, config.seed)
    engine = engine_config(config)
    executor = Executor(
        params, model=model, policy=policy, layout=layout, mesh=mesh,
        pages=engine.pool(policy.chunk), slots=engine.max_sequences,
    )  # fmt: skip
    scorer = Scorer(model, policy, layout, mesh, config.trainer.microbatch_tokens)
    found = canary.check(
        executor, engine, scorer, params,
        vocab=model.vocab_size, chunk=policy.chunk, ranks=layout.data,
    )  # fmt: skip
    executor.release()
    lines = [canary.describe(found)]
    bisector = Bisector(model, policy, layout, mesh, params)
    if found.first is not None:
        lines.append(bisected(bisector, found.first))
    elif bisect:
        request = canary.requests(engine, policy.chunk, model.vocab_size, layout.data, 0)[0]
        tokens = canary.tokens_of(request)
        where = bisector.find(tokens, max(1, len(tokens) - 4))
        exact = where is None
        lines.append("op by op: every row equal" if exact else f"first difference: {where}")
        return exact, lines
    return found.exact, lines
