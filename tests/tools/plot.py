"""Draw the losses in a run's log: python tests/tools/plot.py LOG PNG (needs matplotlib)."""

import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt

text = Path(sys.argv[1]).read_text()
figure, axes = plt.subplots(figsize=(6, 3))
for name, style, label in (("loss", "-", "training"), ("validation_loss", "o", "validation")):
    points = [(int(step), float(loss)) for step, loss in re.findall(rf"step (\d+)/\d+  {name} ([\d.]+)", text)]
    axes.plot(*zip(*points, strict=True), style, label=label)
(floor,) = re.findall(r"^  floor +([\d.]+)", text, re.M)
axes.axhline(float(floor), color="gray", linestyle=":", label=f"floor {floor}")
axes.set(xlabel="step", ylabel="loss (nats per token)", ylim=(0, None))
axes.legend()
figure.savefig(sys.argv[2], dpi=110, bbox_inches="tight")
