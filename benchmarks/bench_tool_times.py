"""How many tools return within the 0.95 quantile that is predicted, by samples seen and coefficient of variation.

python benchmarks/bench_tool_times.py --windows 1000 --out tool_times.svg
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer
from common import pyplot

from weft.core.prediction import Samples

VARIATIONS: Final = (0.5, 1.0, 1.5, 2.0, 3.0)
COUNTS: Final = (3, 5, 10, 19, 20, 38, 100, 256)
SHAPES: Final = ("log-normal", "gamma")
AIM: Final = (93, 97)  # percent
_NEXT: Final = 50  # times that are compared with the quantile of each window


def draws(shape: str, variation: float, rng: random.Random) -> Callable[[], float]:
    """Times with a coefficient of variation."""
    if shape == "gamma":
        return lambda: rng.gammavariate(1 / variation**2, variation**2)
    return lambda: rng.lognormvariate(0.0, math.sqrt(math.log1p(variation**2)))


def covered_percent(shape: str, variation: float, count: int, windows: int) -> float:
    """The share of times up to the quantile, after so many samples, over so many windows of samples."""
    draw = draws(shape, variation, random.Random(f"{shape} {variation} {count}"))
    covered = 0
    for _ in range(windows):
        samples = Samples()
        for _ in range(count):
            samples.observe(draw())
        quantile_s = samples.quantile_s(0.95)
        covered += sum(draw() <= quantile_s for _ in range(_NEXT))
    return 100 * covered / windows / _NEXT


def plot(found: dict[str, dict[float, list[float]]], path: Path) -> None:
    """The share covered over the samples seen, a line for each coefficient of variation."""
    plt = pyplot()
    plt.rcParams["svg.fonttype"] = "none"
    figure, axes = plt.subplots(1, len(found), figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, (shape, lines) in zip(axes, found.items(), strict=True):
        for variation, line in lines.items():
            axis.plot(COUNTS, line, "o-", markersize=3, linewidth=1, label=f"variation {variation:g}")
        axis.axhspan(*AIM, color="grey", alpha=0.15, linewidth=0)
        axis.axhline(95, color="grey", linewidth=0.8)
        axis.set(title=f"{shape} times", xscale="log", xlabel="samples seen", ylim=(90, 100))
        axis.set_xticks(COUNTS, ["" if count == 19 else str(count) for count in COUNTS])
        axis.minorticks_off()
    axes[0].set_ylabel("% of times up to the 0.95 quantile")
    axes[0].legend(fontsize="small", loc="upper right")
    figure.savefig(path)


def main(
    windows: Annotated[int, typer.Option(help="Windows of samples for each figure.")] = 400,
    out: Annotated[Path | None, typer.Option(help="A picture (.svg).")] = None,
) -> None:
    """Print the share covered in percent, for log-normal and for gamma distributed times."""
    found = {
        shape: {
            variation: [covered_percent(shape, variation, count, windows) for count in COUNTS]
            for variation in VARIATIONS
        }
        for shape in SHAPES
    }
    for shape, lines in found.items():
        typer.echo(f"{shape}, percent of times up to the 0.95 quantile")
        typer.echo("| variation | " + " | ".join(f"{count} samples" for count in COUNTS) + " |")
        typer.echo("|---" * (len(COUNTS) + 1) + "|")
        for variation, line in lines.items():
            typer.echo(f"| {variation} | " + " | ".join(f"{percent:.1f}" for percent in line) + " |")
    if out is not None:
        plot(found, out)


if __name__ == "__main__":
    typer.run(main)
