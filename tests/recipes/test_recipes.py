"""The recipes do what the README says: another model and other data, in the script as it is."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from launch import ROOT, Outcome, run
from tiny import overrides

HERE = Path(__file__).parent


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("fsdp_train.py", "model.py", "data.py", "config.yaml"):
        shutil.copy(ROOT / name, folder)
    return folder


def train(folder: Path, *arguments: str, ranks: int = 2) -> Outcome:
    return run(*arguments, ranks=ranks, cwd=folder, script=folder / "fsdp_train.py")


def losses(outcome: Outcome, name: str = "validation_loss") -> list[float]:
    assert outcome.code == 0, outcome.text
    return [float(loss) for loss in re.findall(rf"step \d+/\d+  {name} ([\d.]+)", outcome.text)]


def test_your_model_and_tied_embeddings(project: Path) -> None:
    """With the lines that the recipe shows, and no other change."""
    shutil.copy(HERE / "my_model.py", project)
    lines = re.findall(r"^ *(from my_model.*|BLOCK, .*|Transformer = .*)$", (HERE / "my_model.py").read_text(), re.M)
    assert len(lines) == 3
    model = (project / "model.py").read_text()
    (project / "model.py").write_text(model + "\n\n" + "\n".join(lines) + "\n")
    short = ("max_steps=40", "validation_period=40", "amp_dtype=null", "compile=false")
    assert losses(train(project, *short))[-1] < 3.5 < 6.24

    tied = (
        lines[0].replace("ConvolutionalLM", "TiedLM"),
        lines[1].replace("(nn.Embedding, Convolution, nn.Linear)", "(Convolution,)"),
    )
    (project / "model.py").write_text(model + "\n\n" + "\n".join([*tied, "Transformer = TiedLM"]) + "\n")
    few = ("max_steps=10", "reporting_period=1", "amp_dtype=null")
    one, two = (losses(train(project, *few, ranks=ranks), "loss") for ranks in (1, 2))
    assert len(one) == 10 and one[-1] < one[0]
    assert one == pytest.approx(two, abs=2e-4)  # the log has four digits


def test_your_data(project: Path) -> None:
    """Bytes of Python's own sources; a resume with another global batch goes on at the very next sequence."""
    shutil.copy(HERE / "my_data.py", project / "data.py")
    text = b"".join(path.read_bytes() for path in sorted(Path(np.__file__).parent.glob("*.py")))
    (project / "tokens.bin").write_bytes(bytes(byte % 128 for byte in text))
    settings = ("vocab_size=128", "max_seq_len=32", "amp_dtype=null", "validation_period=20", "checkpoint_period=20")
    assert losses(train(project, *settings, "max_steps=20"))[-1] < 4.6 < np.log(128)
    outcome = train(project, *settings, "max_steps=40", "global_batch_size=8", "--resume", "latest")
    assert len(losses(outcome)) == 1
    spy = "import sys; sys.path.insert(0, '.'); import data, types; from itertools import islice\n"
    spy += "make = lambda b: data.build_data(types.SimpleNamespace(seed=1, vocab_size=128, max_seq_len=32,"
    spy += " global_batch_size=b), 'training', 0, 1)\n"
    spy += "a, b = make(16), make(8); rows = [r.tolist() for t in islice(a, 3) for r in t]\n"
    spy += "c = make(16); next(c); b.load_state_dict(c.state_dict())\n"
    spy += "assert [r.tolist() for t in islice(b, 4) for r in t] == rows[16:], 'rows skipped or repeated'"
    checked = run("--help", ranks=0, cwd=project, script=project / "fsdp_train.py", before=spy)
    assert checked.code == 0, checked.text

    for content, more, says in (
        (b"", (), "tokens.bin has 0 bytes"),
        (b"\x05" * 100, (), "tokens.bin has 95 tokens for training: a global batch needs 513"),
        (b"\x05" * 6000, (), "tokens.bin has 300 tokens for validation: a global batch needs 513"),
        (b"\xff" * 20000, (), "tokens.bin has the id 255: vocab_size must be above it"),
        (text, ("max_seq_len=16", "--resume", "latest", "vocab_size=256"), "is of another model"),
        (bytes(len(text) - 100), ("--resume", "latest"), "but it was"),
    ):
        (project / "tokens.bin").write_bytes(content)
        outcome = train(project, *settings, *more)
        assert outcome.code == 1, (says, outcome.text)
        assert says in outcome.text and "Traceback" not in outcome.text, outcome.text
        assert "first step" not in outcome.text


def test_a_batch_size_changed_on_resume_is_refused_by_the_synthetic_data(tmp_path: Path) -> None:
    config = ("--config", str(ROOT / "config.yaml"))
    assert run(*config, *overrides(max_steps=8), ranks=2, cwd=tmp_path).code == 0
    outcome = run(*config, *overrides(global_batch_size=6), "--resume", "latest", ranks=2, cwd=tmp_path)
    assert outcome.code == 1 and "8 batches of 12 were drawn: go on with 12" in outcome.text, outcome.text
