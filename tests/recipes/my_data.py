"""Sequences of a flat file of token ids, in a new order every epoch: copy this over data.py.

The last twentieth of the file is for validation.
"""

import os
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
        if not os.path.isfile(PATH):
            raise ValueError(f"{PATH}: no such file of token ids; its name stands at the top of data.py")
        size = os.path.getsize(PATH)
        if not size or size % np.dtype(DTYPE).itemsize:
            raise ValueError(f"{PATH} has {size} bytes: write token ids of type {np.dtype(DTYPE)} into it")
        tokens = np.memmap(PATH, DTYPE, mode="r")
        if config.global_batch_size % ranks:
            raise ValueError(f"global_batch_size = {config.global_batch_size} does not divide by the {ranks} ranks")
        least, greatest = tokens.min(), tokens.max()
        if least < 0 or greatest >= config.vocab_size:
            raise ValueError(f"{PATH} has ids from {least} to {greatest}: vocab_size must be above them")
        self.seq_len, self.global_batch_size = config.max_seq_len, config.global_batch_size
        cut = len(tokens) * 19 // 20
        parts = {"training": tokens[:cut], "validation": tokens[cut:]}
        for name, part in parts.items():  # both, before the first step
            if (len(part) - 1) // self.seq_len < self.global_batch_size:
                needed = self.global_batch_size * self.seq_len + 1
                raise ValueError(f"{PATH} has {len(part)} tokens for {name}: a global batch needs {needed}")
        self.tokens = parts[split]
        self.length = (len(self.tokens) - 1) // self.seq_len  # a sequence's last token is the first of the next
        rows = self.global_batch_size // ranks
        self.rows = slice(rank * rows, (rank + 1) * rows)
        self.seed, self.position, self.epoch = config.seed, 0, -1  # position: sequences drawn since the start

    def __iter__(self) -> "SyntheticTokens":
        return self

    def __next__(self) -> Tensor:
        batch = range(self.position, self.position + self.global_batch_size)
        self.position += self.global_batch_size
        tokens = torch.from_numpy(np.stack([self.sequence(index) for index in batch[self.rows]]))
        return tokens.pin_memory() if torch.cuda.is_available() else tokens

    def sequence(self, index: int) -> Any:
        epoch, place = divmod(index, self.length)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.length)
        start = self.order[place] * self.seq_len
        return self.tokens[start : start + self.seq_len + 1].astype(np.int64)

    def state_dict(self) -> dict[str, int]:
        """In sequences, so that another global batch goes on at the very next one."""
        return {"position": self.position, "max_seq_len": self.seq_len, "sequences": self.length, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on with the sequence after `state["position"]`; ValueError if it was counted in another order."""
        now = {**self.state_dict(), "position": state["position"]}
        if other := [f"{key} = {now.get(key)}, but it was {was}" for key, was in state.items() if now.get(key) != was]:
            raise ValueError(f"the data's order is not that of before: {'; '.join(other)}")
        self.position = state["position"]


build_data = SyntheticTokens
