"""How large the engine is, and the few shapes that its programs are compiled for."""

import dataclasses

from isojax.batch import Bucket


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes per data rank. They are deployment: none of them can change a sample.

    max_model_len: most tokens of prompt and response together.
    max_sequences: sequences that run at the same time, and slots of recurrent state.
    max_batch_tokens: most new tokens of one call. `max_sequences` of them are kept for sequences
      that decode, prompts share the others.
    pages: pages of the pool, each of policy.chunk tokens; 0 makes room for `max_sequences`
      sequences of full length.
    bucket_sizes: how many sizes of the decode call and of the mixed call are compiled, each a
      quarter of the one before.
    """

    max_model_len: int
    max_sequences: int = 64
    max_batch_tokens: int = 10_240
    pages: int = 0
    bucket_sizes: int = 2

    def __post_init__(self) -> None:
        for name, least in (
            ("max_model_len", 2),
            ("max_sequences", 1),
            ("max_batch_tokens", 1),
            ("pages", 0),
            ("bucket_sizes", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    def table_width(self, chunk: int) -> int:
        """Pages of a sequence of full length."""
        return -(-self.max_model_len // chunk)

    def pool(self, chunk: int) -> int:
        """Pages of the pool."""
        return self.pages or self.max_sequences * self.table_width(chunk)

    def prefill_budget(self, chunk: int) -> int:
        """Prompt tokens that one call may hold.

        Raises:
          ValueError: if not even one chunk fits.
        """
        budget = self.max_batch_tokens - self.max_sequences
        if budget < chunk:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_sequences + "
                f"chunk = {self.max_sequences + chunk}"
            )
        return budget


def buckets(config: EngineConfig, chunk: int) -> list[Bucket]:
    """All shapes, cheapest first: decode calls (a token a sequence), then mixed calls.

    A mixed call needs at most a piece for each sequence and one for each `chunk` tokens, because
    prompts are cut at multiples of `chunk`.
    """
    sequences, width = config.max_sequences, config.table_width(chunk)
    config.prefill_budget(chunk)
    shrunk = lambda size: [size // 4**i for i in range(config.bucket_sizes)]  # noqa: E731
    decode = [Bucket(n, n, n, width, 1) for n in shrunk(sequences) if n]
    mixed = [
        Bucket(tokens, sequences, sequences + tokens // chunk, width, chunk)
        for tokens in shrunk(config.max_batch_tokens)
        if tokens >= sequences + chunk
    ]
    return decode[::-1] + mixed[::-1]
