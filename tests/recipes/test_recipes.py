"""The recipes do what the README says: another model and other data, in the script as it is."""

import re
import shutil
from pathlib import Path

import my_data
import numpy as np
import pytest

from launch import ROOT, Outcome, run
from tiny import tiny_config

HERE = Path(__file__).parent


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("fsdp_train.py", "model.py", "data.py", "config.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def train(folder: Path, *arguments: str, ranks: int = 2) -> Outcome:
    return run(*arguments, "amp_dtype=null", ranks=ranks, cwd=folder, script=folder / "fsdp_train.py")


def losses(outcome: Outcome, name: str = "validation_loss") -> list[float]:
    assert outcome.code == 0, outcome.text
    return [float(loss) for loss in re.findall(rf"step \d+/\d+  {name} ([\d.]+)", outcome.text)]


def test_your_model_and_tied_embeddings(project: Path) -> None:
    """With the lines that the recipe and the README show, and no other change."""
    shutil.copy(HERE / "my_model.py", project)
    model = (ROOT / "model.py").read_text()
    _, recipe = (HERE / "my_model.py").read_text().split('"""')[1].split("\n\n")
    (project / "model.py").write_text(f"{model}\n\n{recipe}\n")
    assert losses(train(project, "max_steps=40", "validation_period=40"))[-1] < 3.5 < 6.24

    readme = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    tied = readme.replace("ConvolutionalLM", "TiedLM").replace(
        "(nn.Embedding, Convolution, nn.Linear)", "(Convolution,)"
    )
    (project / "model.py").write_text(f"{model}\n\n{tied}\n")
    one, two = (losses(train(project, "max_steps=10", "reporting_period=1", ranks=ranks), "loss") for ranks in (1, 2))
    assert len(one) == 10 and one[-1] < one[0]
    assert one == pytest.approx(two, abs=2e-4)  # the log has four digits


def test_another_batch_size_goes_on_at_the_very_next_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even in another epoch, which has every sequence once, in another order."""
    monkeypatch.setattr(my_data, "PATH", str(tmp_path / "tokens.bin"))
    np.random.default_rng(0).integers(32, size=6000, dtype=np.uint8).tofile(my_data.PATH)
    twelve, six = (my_data.build_data(tiny_config(global_batch_size=n), "training", 0, 1) for n in (12, 6))
    drawn = [row.tolist() for _ in range(3) for row in next(twelve)]
    six.load_state_dict(twelve.state_dict())
    drawn += [row.tolist() for _ in range(57) for row in next(twelve)]
    assert [row.tolist() for _ in range(114) for row in next(six)] == drawn[36:]
    first, second = drawn[: twelve.length], drawn[twelve.length : 2 * twelve.length]
    assert sorted(first) == sorted(second) and first != second


def test_your_data(project: Path) -> None:
    shutil.copy(HERE / "my_data.py", project / "data.py")
    file = project / "tokens.bin"
    text = b"".join(path.read_bytes() for path in sorted(Path(np.__file__).parent.glob("*.py")))
    file.write_bytes(bytes(byte % 128 for byte in text))
    settings = ("vocab_size=128", "max_seq_len=32", "validation_period=20", "checkpoint_period=20")
    assert losses(train(project, *settings, "max_steps=20"))[-1] < 4.6 < np.log(128)
    resumed = train(project, *settings, "max_steps=40", "global_batch_size=8", "--resume", "latest")
    assert len(losses(resumed)) == 1
    for content, more, says in (
        (b"", (), "tokens.bin has 0 bytes"),
        (b"\x05" * 100, (), "tokens.bin has 95 tokens for training: a global batch needs 513"),
        (b"\x05" * 6000, (), "tokens.bin has 300 tokens for validation: a global batch needs 513"),
        (b"\xff" * 20000, (), "tokens.bin has ids from 255 to 255: vocab_size must be above them"),
        (text, ("max_seq_len=16", "--resume", "latest", "vocab_size=256"), "is of another model"),
        (bytes(len(text) - 100), ("--resume", "latest"), "but it was"),
        (None, (), "tokens.bin: no such file"),
        (None, ("--dry-run",), "tokens.bin: no such file"),
        (b"", ("--dry-run",), "tokens.bin has 0 bytes"),
    ):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        outcome = train(project, *settings, *more, ranks=1)
        assert outcome.code == 1 and says in outcome.text, (says, outcome.text)
        assert "Traceback" not in outcome.text and "first step" not in outcome.text, outcome.text
