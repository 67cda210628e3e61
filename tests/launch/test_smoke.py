"""The path that every torch takes: train in low precision, save, resume on other ranks, export."""

import re
import sys
from pathlib import Path

import pytest
import torch

import fsdp_train
from launch import ROOT, launch, run
from model import Transformer
from processes import whole_checkpoints
from tiny import overrides, tiny_config


@pytest.mark.parametrize("amp_dtype", ["bfloat16", "float16"])
# torch 2.2 has no loss scaler for CPUs, and says so.
@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
def test_train_save_resume_export(amp_dtype: str, tmp_path: Path) -> None:
    for ranks, steps, *resume in ((2, 4), (1, 8, "--resume", "latest"), (2, 12, "--resume", "latest")):
        hparams = overrides(amp_dtype=amp_dtype, max_steps=steps, checkpoint_period=4, seed=5)
        outcome = run("--config", str(ROOT / "config.yaml"), *hparams, *resume, ranks=ranks, cwd=tmp_path)
        assert outcome.code == 0, outcome.text
        assert f"precision   {amp_dtype} (as configured)" in outcome.text
        assert (f"at step {steps - 4} of checkpoint" in outcome.text) is bool(resume), outcome.text
    saved = whole_checkpoints(tmp_path / "checkpoints")
    assert sorted(saved) == [4, 8, 12]
    if torch.__version__ < "2.3":
        return  # the export command came with 2.3
    convert = [sys.executable, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]
    exported = launch([[*convert, str(saved[12]), "weights.pt"]], tmp_path).finish()
    assert exported.code == 0, exported.text
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)["model"]
    model = Transformer(vocab_size=32, max_seq_len=16, d_model=16, n_heads=2, n_layers=2)
    model.load_state_dict(weights)
    # The exported model is the one that the run validated.
    data = fsdp_train.build_data(tiny_config(), "validation", 0, 1)
    with torch.no_grad():
        losses = [fsdp_train.next_token_loss(model, next(data), getattr(torch, amp_dtype)).item() for _ in range(2)]
    (logged,) = re.findall(r"step 12/12  validation_loss (\S+)", outcome.text)
    assert float(logged) == pytest.approx(sum(losses) / 2, abs=5e-4)
