"""The path that every torch takes: train in low precision, save, resume on other ranks, export."""

import sys
from pathlib import Path

import pytest
import torch

from launch import ROOT, launch, run
from model import Transformer
from processes import whole_checkpoints
from tiny import overrides

CONFIG = ("--config", str(ROOT / "config.yaml"))


@pytest.mark.parametrize("amp_dtype", ["bfloat16", "float16"])
# torch 2.2 has no loss scaler for CPUs, and says so.
@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
def test_train_save_resume_export(amp_dtype: str, tmp_path: Path) -> None:
    steps = 0
    for ranks, resume in ((2, ()), (1, ("--resume", "latest")), (2, ("--resume", "latest"))):
        steps += 4
        hparams = overrides(amp_dtype=amp_dtype, max_steps=steps, validation_period=4, checkpoint_period=4)
        outcome = run(*CONFIG, *hparams, *resume, ranks=ranks, cwd=tmp_path)
        assert outcome.code == 0, outcome.text
        assert f"precision   {amp_dtype} (as configured)" in outcome.text
        assert f"step {steps}/{steps}  validation_loss" in outcome.text
        assert (f"at step {steps - 4} of checkpoint" in outcome.text) is bool(resume), outcome.text
    saved = whole_checkpoints(tmp_path / "checkpoints")
    assert sorted(saved) == [4, 8, 12]
    if torch.__version__ < "2.3":
        return  # the export command came with 2.3
    convert = [sys.executable, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]
    outcome = launch([[*convert, str(saved[12]), "weights.pt"]], tmp_path).finish()
    assert outcome.code == 0, outcome.text
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)["model"]
    Transformer(vocab_size=32, max_seq_len=16, d_model=16, n_heads=2, n_layers=2).load_state_dict(weights)
