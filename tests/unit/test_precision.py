"""Which dtype is chosen, and why: by the weakest GPU, or by what the CPU is known to multiply."""

from typing import Any

import determined as det
import pytest
import torch

from fsdp_train import Refusal, bfloat16_capability, choose_amp_dtype, choose_device, loss_scaler


def test_dtype_by_capability() -> None:
    cases = {"V100": (7, 0), "T4": (7, 5), "A100": (8, 0), "A10": (8, 6), "H100": (9, 0)}
    for name, capability in cases.items():
        auto = torch.bfloat16 if capability >= (8, 0) else torch.float16
        assert choose_amp_dtype("auto", "cuda", capability, name) == (auto, f"auto: {name}")
        for setting, asked in (("bfloat16", torch.bfloat16), ("float16", torch.float16), (None, None)):
            if (auto, asked) != (torch.float16, torch.bfloat16):
                assert choose_amp_dtype(setting, "cuda", capability, name)[0] == asked
                continue
            with pytest.raises(det.InvalidHP, match=f"amp_dtype = bfloat16 .* 8.0, not {name}: use auto or float16"):
                choose_amp_dtype(setting, "cuda", capability, name)


@pytest.mark.parametrize(
    ("flags", "auto"),
    [({"avx512_bf16": True}, torch.bfloat16), ({"amx_bf16": True}, torch.bfloat16), ({"avx2": True}, None), ({}, None)],
)
def test_auto_on_a_cpu_is_what_it_multiplies(
    flags: dict[str, bool], auto: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)  # old torch does not say: float32, too
    if flags:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags, raising=False)
    capability, name = bfloat16_capability(torch.device("cpu"))
    dtype, why = choose_amp_dtype("auto", "cpu", capability, name)
    assert dtype == auto
    assert "CPU" in why and ("amp_dtype=bfloat16" in why) is (auto is None), "how to try the other"
    for setting, asked in (("bfloat16", torch.bfloat16), ("float16", torch.float16), (None, None)):
        assert choose_amp_dtype(setting, "cpu", capability, name)[0] == asked, "by name, as asked"


def test_fewer_gpus_than_ranks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Off-cluster all ranks train on the CPU, with one warning; on a cluster something is wrong."""
    gpus = 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for in_trial in (False, True):
        assert choose_device(1, 2, in_trial) == torch.device("cpu")
    gpus = 2
    assert choose_device(1, 2, in_trial=True) == torch.device("cuda:1")
    assert caplog.messages == []
    gpus = 1
    few = "2 ranks on this node, 1 GPU(s): off-cluster all train on the CPU"
    assert choose_device(1, 2, in_trial=False) == torch.device("cpu") and caplog.messages == [few]
    with pytest.raises(Refusal, match=r"2 ranks on this node, 1 GPU"):
        choose_device(1, 2, in_trial=True)


def test_the_scaler_is_enabled_for_float16_only() -> None:
    for dtype in (None, torch.bfloat16, torch.float16):
        assert loss_scaler(torch.device("cpu"), dtype).is_enabled() is (dtype == torch.float16), dtype
