"""Sequences of a flat file of token ids, in a new order every epoch: copy this over data.py.

The last twentieth of the file is for validation.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

PATH = "tokens.bin"  # on a cluster one that every node sees
DTYPE = np.uint8  # np.uint16 for a tokenizer of up to 65,536 tokens


class SyntheticTokens:
    """This rank's sequences of a part of the file; an epoch has each of them exactly once."""

    entropy = 0.0  # no better floor is known for real text

    def __init__(self, config: Any, split: str, rank: int, ranks: int) -> None:
        try:
            tokens = np.memmap(PATH, DTYPE, mode="r")
        except ValueError:
            raise RuntimeError(f"{PATH} is empty: write token ids of type {DTYPE.__name__} into it") from None
        if config.global_batch_size % ranks:
            raise ValueError(f"global_batch_size = {config.global_batch_size} does not divide by the {ranks} ranks")
        if tokens.max() >= config.vocab_size:
            raise RuntimeError(f"{PATH} has the id {tokens.max()}: vocab_size must be above it")
        cut = len(tokens) * 19 // 20
        self.tokens = tokens[:cut] if split == "training" else tokens[cut:]
        self.seq_len, self.global_batch_size = config.max_seq_len, config.global_batch_size
        self.length = (len(self.tokens) - 1) // self.seq_len  # a sequence's last token is the first of the next
        if self.length < self.global_batch_size:
            needed = self.global_batch_size * self.seq_len + 1
            raise RuntimeError(f"{PATH} has {len(self.tokens)} tokens for {split}: a global batch needs {needed}")
        rows = self.global_batch_size // ranks
        self.rows = slice(rank * rows, (rank + 1) * rows)
        self.seed, self.position, self.epoch = config.seed, 0, -1  # position: sequences drawn since the start

    def __iter__(self) -> "SyntheticTokens":
        return self

    def __next__(self) -> Tensor:
        batch = range(self.position, self.position + self.global_batch_size)
        self.position += self.global_batch_size
        return torch.from_numpy(np.stack([self.sequence(index) for index in batch[self.rows]]))

    def sequence(self, index: int) -> Any:
        epoch, place = divmod(index, self.length)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.length)
        start = self.order[place] * self.seq_len
        return self.tokens[start : start + self.seq_len + 1].astype(np.int64)

    def state_dict(self) -> dict[str, int]:
        """In sequences, so that another global batch goes on at the very next one."""
        return {"position": self.position, "seq_len": self.seq_len}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state.get("seq_len", self.seq_len) != self.seq_len:
            raise ValueError(f"max_seq_len = {self.seq_len}, but the position was counted with {state['seq_len']}")
        self.position = state["position"]


build_data = SyntheticTokens
