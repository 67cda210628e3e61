"""Draw the losses in a run's log: python tests/tools/plot.py LOG PNG (needs matplotlib)."""

import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt


def main(log: Path, picture: Path) -> None:
    text = log.read_text()
    training = re.findall(r"step (\d+)/\d+  loss ([\d.]+)", text)
    validation = re.findall(r"step (\d+)/\d+  validation_loss ([\d.]+)", text)
    floors = re.findall(r"^  floor +([\d.]+)", text, re.M)
    figure, axes = plt.subplots(figsize=(6, 3))
    axes.plot([int(step) for step, _ in training], [float(loss) for _, loss in training], label="training")
    axes.plot([int(step) for step, _ in validation], [float(loss) for _, loss in validation], "o", label="validation")
    axes.axhline(float(floors[0]), color="gray", linestyle=":", label=f"floor {floors[0]}")
    axes.set(xlabel="step", ylabel="loss (nats per token)", ylim=(0, None))
    axes.legend()
    figure.savefig(picture, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
