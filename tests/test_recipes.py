"""The recipes of the README, applied to a copy of the project and run."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from launch import ROOT, Outcome, finish, start, torchrun

SECTION = (ROOT / "README.md").read_text().split("## Make it yours")[1].split("\n## ")[0]


def block(kind: str, heading: str) -> str:
    """The fenced block of `kind` after `heading`."""
    found = re.search(rf"```{kind}\n(.*?)```", SECTION.split(heading)[1], re.S)
    assert found
    return found[1]


def copy_project(folder: Path) -> Path:
    for name in ("fsdp_train.py", "model.py", "data.py", "config.yaml"):
        shutil.copy(ROOT / name, folder)
    return folder


def apply(diff: str, folder: Path) -> None:
    """Make the changes of a diff without line numbers, each where it fits; the script gains at most five lines."""
    for name, changes in re.findall(r"^\+\+\+ b/(\S+)\n(.*?)(?=^---|\Z)", diff, re.M | re.S):
        text = (folder / name).read_text()
        for change in changes.split("@@\n")[1:]:
            old, new = ("".join(f"{line[1:]}\n" for line in change.splitlines() if line[0] == sign) for sign in "-+")
            assert old and text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / name).write_text(text)
    added = re.findall(r"^\+(?!\+\+)", diff.split("b/fsdp_train.py")[1], re.M)
    assert 1 <= len(added) <= 5


def train(folder: Path, *arguments: str, ranks: int = 2) -> Outcome:
    outcome = finish(start([*torchrun(ranks), "fsdp_train.py", *arguments], folder))
    assert outcome.code == 0, outcome.text
    return outcome


def losses(outcome: Outcome, name: str = "validation_loss") -> list[float]:
    return [float(value) for value in re.findall(rf"\| {name} ([\d.]+)", outcome.text)]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    folder = copy_project(tmp_path)
    (folder / "my_data.py").write_text(block("python", "### Your tokens"))
    apply(block("diff", "### Your tokens"), folder)
    return folder


def test_your_tokens_train_and_resume_on_other_ranks(tokens: Path) -> None:
    command = block("bash", "### Your tokens").replace("python ", f"{sys.executable} ", 1)
    subprocess.run(["bash", "-c", command], cwd=tokens, check=True)
    counts = np.bincount(np.fromfile(tokens / "tokens.bin", np.uint8))
    frequencies = counts[counts > 0] / counts.sum()
    byte_frequency_loss = -(frequencies * np.log(frequencies)).sum()

    train(tokens, "vocab_size=256", "max_steps=60", "validation_period=60")
    resumed = train(tokens, "vocab_size=256", "max_steps=120", "--resume", "latest", ranks=1)
    assert "at step 60" in resumed.text and "step 70/120" in resumed.text
    assert losses(resumed)[-1] < byte_frequency_loss - 0.3


def test_your_tokens_are_each_seen_once_an_epoch(tokens: Path) -> None:
    np.arange(4001, dtype=np.uint16).tofile(tokens / "numbers.bin")

    def stream(rank: int, world_size: int, start: float = 0.0, end: float = 0.95) -> Any:
        place = {"rank": rank, "world_size": world_size, "device": torch.device("cpu")}
        module = load(tokens / "my_data.py")
        return module.TokenFile(
            tokens / "numbers.bin", np.uint16, start, end, seed=3, seq_len=8, global_batch_size=12, **place
        )

    two, one = [stream(0, 2), stream(1, 2)], stream(0, 1)
    length, seen = one.length, []
    for _ in range(20):
        seen += torch.cat([next(each) for each in two]).tolist()
    one.load_state_dict(two[1].state_dict())
    while len(seen) < 2 * length:
        seen += next(one).tolist()
    for epoch in (seen[:length], seen[length : 2 * length]):
        assert sorted(sequence[0] for sequence in epoch) == list(range(0, 8 * length, 8))
    assert seen[:length] != seen[length : 2 * length]
    assert all(sequence == list(range(sequence[0], sequence[0] + 9)) for sequence in seen)
    kept = {token for _ in range(50) for token in next(stream(0, 1, 0.95, 1.0)).flatten().tolist()}
    assert not kept & {token for sequence in seen for token in sequence}


def test_your_model_and_tied_embeddings(tmp_path: Path) -> None:
    folder = copy_project(tmp_path)
    (folder / "my_model.py").write_text(block("python", "### Your model"))
    apply(block("diff", "### Your model"), folder)
    untied = losses(train(folder, "max_steps=60", "validation_period=60"))
    assert untied[-1] < 2.2 < 6.24

    apply(block("diff", "**Tied embeddings.**"), folder)
    short = ("max_steps=20", "reporting_period=1", "amp_dtype=null")
    one, two = (losses(train(folder, *short, ranks=ranks), "loss") for ranks in (1, 2))
    assert len(one) == 20 and one[-1] < one[0]
    assert one == pytest.approx(two, abs=2e-4)  # the log has five digits
    checkpoints = sorted((folder / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    convert = [sys.executable, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]
    subprocess.run([*convert, str(checkpoints[-1]), "weights.pt"], cwd=folder, check=True)
    weights = torch.load(folder / "weights.pt", weights_only=True)["model"]
    assert "head.weight" not in weights and weights["embedding.weight"].shape == (512, 128)
