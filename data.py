"""Seeded synthetic token sequences with a known entropy: data that can be learned, and a loss that cannot lie.

A sequence starts with a uniform token; each next token is (current + increment) mod vocab_size, with the increment
uniform in 1..branching. A model that has learned this has a loss of ln(branching) nats per token on sequences that it
never saw, and no honest model has less. Training losses can go below: the stream repeats, and a model can memorise it.
"""

import functools
import math

import torch
from torch import Tensor


class SyntheticTokens:
    """Endless iterator over this rank's rows of a data set of `size_in_batches` global batches, repeated for ever.

    `next()` gives int64 tokens of shape (global_batch_size / world_size, seq_len + 1) on `device`; the extra token is
    the target of the last position. Every rank draws the whole global batch from the same seed and keeps its own rows,
    so what the model sees does not depend on the number of ranks. `state_dict()` and `load_state_dict()` are those of
    torchdata's StatefulDataLoader.

    Args:
        seed: integer in [0, 2^63); the same on all ranks.
        branching: number of possible next tokens, 1..vocab_size; None makes the tokens uniform noise.
        size_in_batches: global batches before the generator reseeds itself, to the same seed.

    Raises:
        ValueError: global_batch_size is not a multiple of world_size, or branching is out of range.
    """

    def __init__(
        self,
        *,
        seed: int,
        vocab_size: int,
        branching: int | None,
        seq_len: int,
        global_batch_size: int,
        size_in_batches: int,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        if global_batch_size % world_size:
            raise ValueError(f"global_batch_size = {global_batch_size} is not a multiple of world_size = {world_size}")
        # Uniform noise is the case where every token may follow every other.
        self.branching = vocab_size if branching is None else branching
        if not 1 <= self.branching <= vocab_size:
            raise ValueError(f"branching = {branching} is not in 1..vocab_size = {vocab_size}")
        self.seed = seed
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size
        self.size_in_batches = size_in_batches
        rows = global_batch_size // world_size
        self.rows = slice(rank * rows, (rank + 1) * rows)
        self.generator = torch.Generator(device)
        self.position = 0  # global batches drawn since the start

    @property
    def entropy(self) -> float:
        """Nats per token after the first, ln(branching): the lowest honest validation loss."""
        return math.log(self.branching)

    def __iter__(self) -> "SyntheticTokens":
        return self

    def __next__(self) -> Tensor:
        if self.position % self.size_in_batches == 0:
            self.generator.manual_seed(self.seed)
        self.position += 1
        draw = functools.partial(torch.randint, generator=self.generator, device=self.generator.device)
        first = draw(0, self.vocab_size, (self.global_batch_size, 1))
        increments = draw(1, self.branching + 1, (self.global_batch_size, self.seq_len))
        return torch.cat((first, increments), dim=1)[self.rows].cumsum(dim=1) % self.vocab_size

    def state_dict(self) -> dict[str, int]:
        """Position in global batches: valid for any number of ranks."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with the batch after `state["position"]`; costs at most one cycle of draws."""
        replay = state["position"] % self.size_in_batches
        self.position = state["position"] - replay
        for _ in range(replay):
            next(self)
