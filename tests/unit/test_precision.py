"""Which dtype is chosen, and why: by the weakest GPU, or by what the CPU is known to multiply."""

from typing import Any

import determined as det
import pytest
import torch

import fsdp_train

CAPABILITIES = {"V100": (7, 0), "T4": (7, 5), "A100": (8, 0), "A10": (8, 6), "H100": (9, 0)}


@pytest.mark.parametrize("name", CAPABILITIES)
def test_dtype_by_capability(name: str) -> None:
    capability = CAPABILITIES[name]
    auto, why = fsdp_train.choose_amp_dtype("auto", "cuda", capability, name)
    assert auto == (torch.bfloat16 if capability >= (8, 0) else torch.float16)
    assert name in why
    assert fsdp_train.choose_amp_dtype("float16", "cuda", capability, name)[0] == torch.float16
    assert fsdp_train.choose_amp_dtype(None, "cuda", capability, name)[0] is None
    if auto == torch.bfloat16:
        assert fsdp_train.choose_amp_dtype("bfloat16", "cuda", capability, name)[0] == torch.bfloat16
    else:
        with pytest.raises(det.InvalidHP) as error:
            fsdp_train.choose_amp_dtype("bfloat16", "cuda", capability, name)
        assert all(part in str(error.value) for part in ("amp_dtype = bfloat16", name, "8.0", "auto or float16"))


@pytest.mark.parametrize(
    ("flags", "auto"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx2": True}, None),
        (None, None),
    ],
)
def test_auto_on_a_cpu_is_what_it_multiplies(
    flags: dict[str, bool] | None, auto: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old torch does not say what that is: float32, too."""
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    if flags is not None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags, raising=False)
    capability, name = fsdp_train.bfloat16_capability(torch.device("cpu"))
    dtype, why = fsdp_train.choose_amp_dtype("auto", "cpu", capability, name)
    assert dtype == auto
    assert "CPU" in why and ("amp_dtype=bfloat16" in why) is (auto is None), "how to try the other"
    for setting, asked in (("bfloat16", torch.bfloat16), ("float16", torch.float16), (None, None)):
        assert fsdp_train.choose_amp_dtype(setting, "cpu", capability, name)[0] == asked, "by name, as asked"


def test_name_and_capability_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    assert fsdp_train.bfloat16_capability(torch.device("cuda", 0)) == ((7, 5), "Tesla T4, compute capability 7.5")


@pytest.mark.parametrize(
    ("gpus", "local_ranks", "in_trial", "device"),
    [(0, 2, False, "cpu"), (0, 2, True, "cpu"), (1, 2, False, "cpu"), (1, 2, True, None), (2, 2, True, "cuda:1")],
)
def test_fewer_gpus_than_ranks(
    gpus: int,
    local_ranks: int,
    in_trial: bool,
    device: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Off-cluster all ranks train on the CPU, with one warning; on a cluster something is wrong."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    if device is None:
        with pytest.raises(fsdp_train.Refusal, match=r"2 ranks on this node, 1 GPU"):
            fsdp_train.choose_device(1, local_ranks, in_trial)
        return
    assert fsdp_train.choose_device(1, local_ranks, in_trial) == torch.device(device)
    assert len(caplog.messages) == (0 < gpus < local_ranks)
    assert all("2 ranks on this node, 1 GPU" in message and "CPU" in message for message in caplog.messages)


def test_the_scaler_is_enabled_for_float16_only() -> None:
    for dtype in (None, torch.bfloat16, torch.float16):
        scaler = fsdp_train.loss_scaler(torch.device("cpu"), dtype)
        assert scaler.is_enabled() is (dtype == torch.float16), dtype
