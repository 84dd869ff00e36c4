"""The loss curve as a picture, drawn without a screen."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

type Points = tuple[list[int], list[float]]
"""Steps and losses of a curve, equally many."""


def draw_curve(path: Path, train: Points, held_out: Points) -> None:
    """Writes a PNG of the loss against the step.

    Args:
        path: The file to write.
        train: Loss of every step; its running mean is drawn over it.
        held_out: Loss of every evaluation; may be empty.
    """
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses = train
    axes.plot(steps, losses, color="#9ecae1", linewidth=1, label="training, each step")
    if len(steps) > 1:
        axes.plot(steps, running_mean(losses), color="#08519c", label="training, running mean")
    if held_out[0]:
        axes.plot(*held_out, color="#d94801", marker="o", linestyle="--", label="evaluation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def running_mean(values: list[float], decay: float = 0.9) -> np.ndarray:
    """Exponential running mean, corrected for its start, so that it begins at the first value."""
    mean = weight = 0.0
    means = []
    for value in values:
        mean = decay * mean + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        means.append(mean / weight)
    return np.asarray(means)
