"""On CUDA GPUs: what the tests on CPUs take on trust. One GPU is enough, two or more check sharding over NCCL too.

Every run is real processes under torchrun: one that has used CUDA cannot be forked. Numbers agree to rounding only, for
attention and compiled kernels add in any order.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import ROOT, Outcome, torchrun
from model import peak_flops
from processes import whole_checkpoints

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
GPUS = torch.cuda.device_count()
WORLDS = [1, 2] if GPUS > 1 else [1]
Hparams = dict[str, Any]
Runs = dict[int, tuple[Outcome, Path]]  # and their folders, by number of ranks

# Large enough for tensor cores, attention kernels and several units; ends near its floor of ln(4) = 1.386.
SMALL: Hparams = {"global_batch_size": 32, "max_seq_len": 128, "vocab_size": 512, "d_model": 256, "n_heads": 4}
SMALL |= {"n_layers": 4, "lr": 1e-3, "warmup_steps": 10, "simulated_size_in_batches": 1000, "max_steps": 60}
SMALL |= {"reporting_period": 10, "validation_period": 30, "checkpoint_period": 60, "amp_dtype": None}

# Each rank prints its metrics at each report, which rank 0 alone logs.
DRIVER = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import torch, fsdp_train
SOURCE
report = fsdp_train.training_metrics
def training_metrics(state, *arguments):
    metrics = report(state, *arguments)
    line = json.dumps([int(os.environ["RANK"]), state.step, metrics])
    os.write(1, f"METRICS{{line}}\\n".encode())
    return metrics
fsdp_train.training_metrics = training_metrics
fsdp_train.main()
"""

# For large models, whose checkpoints have gigabytes.
NO_SAVE = """
import shutil, types
fsdp_train.save = lambda *_: "of nothing"
shutil.disk_usage = lambda _: types.SimpleNamespace(free=1 << 60)
"""


def train(folder: Path, ranks: int, *arguments: str, source: str = "", **hparams: Any) -> Outcome:
    """Run the script with SMALL hyperparameters, changed by `hparams`; `source` runs before it."""
    driver = folder / "driver.py"
    driver.write_text(DRIVER.replace("SOURCE", source))
    words = [f"{key}={json.dumps(value)}" for key, value in {**SMALL, **hparams}.items()]
    config = str(ROOT / "config.yaml")
    outcome = torchrun("--config", config, *arguments, *words, ranks=ranks, cwd=folder, script=driver)
    assert outcome.code == 0, outcome.text
    return outcome


def reports(outcome: Outcome, rank: int = 0) -> dict[int, dict[str, float]]:
    """The training metrics of a rank, by step."""
    lines = [json.loads(line) for line in re.findall(r"^METRICS(.*)$", outcome.text, re.M)]
    return {step: metrics for by, step, metrics in lines if by == rank}


def losses(outcome: Outcome) -> list[float]:
    """Of all reports and validations, in turn."""
    return [float(loss) for loss in re.findall(r"step \d+/\d+  (?:validation_)?loss ([\d.]+)", outcome.text)]


def weakest(gpus: int) -> tuple[tuple[int, int], str]:
    """Capability and name."""
    return min((torch.cuda.get_device_capability(gpu), torch.cuda.get_device_name(gpu)) for gpu in range(gpus))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Undisturbed float32 runs, with a checkpoint half-way."""
    folders = {ranks: tmp_path_factory.mktemp(f"full{ranks}") for ranks in WORLDS}
    return {ranks: (train(folder, ranks, checkpoint_period=30), folder) for ranks, folder in folders.items()}


def test_float32_learns_on_one_gpu_and_two(full: Runs) -> None:
    for ranks, (outcome, _) in full.items():
        measured = losses(outcome)
        assert measured == pytest.approx(losses(full[1][0]), rel=0.01), f"{ranks} GPUs see other data or weights"
        assert len(measured) == 8 and measured[-1] < 0.7 * measured[0], f"does not learn: {measured}"
        for name in ("peak_memory_gib", "peak_reserved_gib", "tokens_per_second"):
            assert all(metrics[name] > 0 for metrics in reports(outcome).values()), name
        assert f"1 node(s) x {ranks}\n" in outcome.text, outcome.text
        known = peak_flops(weakest(ranks)[1], None) > 0
        assert all(("mfu" in metrics) == known for metrics in reports(outcome).values()), weakest(ranks)


def test_precision_is_that_of_the_weakest_gpu(tmp_path: Path) -> None:
    for ranks in WORLDS:
        capability, name = weakest(ranks)
        outcome = train(tmp_path, ranks, max_steps=2, amp_dtype="auto")
        dtype, scaler = ("bfloat16", "off") if capability >= (8, 0) else ("float16", "on")
        why = "auto: {}, compute capability {}.{}".format(name, *capability)
        assert f"{dtype} ({why})\n" in outcome.text, outcome.text
        assert f"scaler      {scaler};" in outcome.text, outcome.text


@pytest.mark.parametrize("amp_dtype", ["bfloat16", "float16"])
def test_low_precision_gives_the_losses_of_float32(full: Runs, amp_dtype: str, tmp_path: Path) -> None:
    for ranks in WORLDS:
        if amp_dtype == "bfloat16" and weakest(ranks)[0] < (8, 0):
            pytest.skip("bfloat16 needs compute capability 8.0")
        others: Hparams = {"reduce_dtype": "float32", "micro_batch_size": 3, "activation_checkpointing": True}
        for more in ({}, others):
            outcome = train(tmp_path, ranks, amp_dtype=amp_dtype, **more)
            assert losses(outcome) == pytest.approx(losses(full[ranks][0]), rel=0.05), more
            assert reports(outcome)[60].get("skipped_steps", 0) <= 1, "overflows again and again"


def test_float16_skips_the_steps_that_overflow(tmp_path: Path) -> None:
    """The scale starts far too high, and comes down by a factor of 2 with each step that all ranks skip."""
    source = "import functools\n"
    source += "fsdp_train.ShardedGradScaler = functools.partial(fsdp_train.ShardedGradScaler, init_scale=2.0**36)"
    for ranks in WORLDS:
        outcome = train(tmp_path, ranks, source=source, amp_dtype="float16", reporting_period=2)
        first, *_, last = reports(outcome).values()
        assert "loss" not in first and first["skipped_steps"] == 2, "nothing to average where all steps were skipped"
        assert 5 < last["skipped_steps"] < 30, last
        assert last["loss_scale"] == 2.0 ** (36 - last["skipped_steps"])
        assert last["loss"] < 4, "learns once the scale fits"
        assert reports(outcome, ranks - 1)[60]["skipped_steps"] == last["skipped_steps"], "all skip the same"


def test_compiled_blocks_give_the_same_losses(full: Runs, tmp_path: Path) -> None:
    for ranks in WORLDS:
        outcome = train(tmp_path, ranks, compile=True)
        assert losses(outcome) == pytest.approx(losses(full[ranks][0]), rel=0.01)


def test_resumes_to_rounding_on_any_number_of_gpus(full: Runs, tmp_path: Path) -> None:
    for saved_by in WORLDS:
        straight, folder = full[saved_by]
        half = whole_checkpoints(folder / "checkpoints")[30]
        for ranks in WORLDS:
            outcome = train(tmp_path, ranks, "--resume", str(half), checkpoint_period=30)
            assert f"at step 30 of checkpoint {half}" in outcome.text, outcome.text
            expected = losses(straight)[4:]  # three reports and a validation
            assert losses(outcome) == pytest.approx(expected, rel=2e-3), f"of {saved_by} GPU(s), on {ranks}"


def test_peak_memory_is_what_the_dry_run_says(tmp_path: Path) -> None:
    """Of a model whose gathered units and activations, which are not counted there, are small: 0.3 billion."""
    hparams: Hparams = {"max_seq_len": 64, "vocab_size": 1024, "d_model": 1024, "n_heads": 8, "n_layers": 24}
    hparams |= {"global_batch_size": 2, "micro_batch_size": 1, "max_steps": 4, "reporting_period": 2}
    for ranks in WORLDS:
        dry = train(tmp_path, 1, "--dry-run", slots_per_trial=ranks, **hparams)
        (megabytes,) = re.findall(r"memory +([\d,.]+) MB a rank", dry.text)
        said = float(megabytes.replace(",", "")) * 1e6
        outcome = train(tmp_path, ranks, source=NO_SAVE, **hparams)
        for rank in range(ranks):
            measured = reports(outcome, rank)[4]["peak_memory_gib"] * 2**30
            assert measured == pytest.approx(said, rel=0.15), f"rank {rank} of {ranks}, dry run: {said / 1e9:.2f} GB"


def test_a_model_of_a_billion_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of distributed.yaml, on all GPUs: how near to their peak it comes."""
    if sum(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(GPUS)) < 38e9:
        pytest.skip("1.4 billion parameters need 38 GB of GPU memory, of all GPUs together")
    shape: Hparams = {"max_seq_len": 2048, "vocab_size": 50304, "d_model": 2048, "n_heads": 16, "n_layers": 24}
    shape |= {"global_batch_size": 8 * GPUS, "micro_batch_size": 4, "max_steps": 12, "reporting_period": 6}
    shape |= {"amp_dtype": "auto", "reduce_dtype": "float32", "activation_checkpointing": True, "lr": 1e-4}
    outcome = train(tmp_path, GPUS, source=NO_SAVE, **shape)
    assert "1,418,299,392 parameters" in outcome.text
    last = reports(outcome)[12]
    with capsys.disabled():
        print(f"\n1.4 billion parameters on {GPUS} x {weakest(GPUS)[1]}, {last['peak_memory_gib']:.1f} GiB each:")
        print(f"{last['tokens_per_second']:,.0f} tokens/s, mfu {last.get('mfu', 'not known')}")
    assert 0 < last.get("mfu", 0.5) < 1, "more than the GPU can do: is its peak in PEAK_FLOPS right?"
