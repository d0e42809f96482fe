"""How many tools return within the 0.95 quantile that is predicted, by samples seen and coefficient of variation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Annotated

import typer

from weft.core.prediction import Samples

VARIATIONS = (0.5, 1.0, 1.5, 2.0, 3.0)
COUNTS = (3, 5, 10, 19, 20, 38, 100, 256)


def draws(shape: str, variation: float, rng: random.Random) -> Callable[[], float]:
    """Times with a coefficient of variation."""
    if shape == "gamma":
        return lambda: rng.gammavariate(1 / variation**2, variation**2)
    return lambda: rng.lognormvariate(0.0, math.sqrt(math.log1p(variation**2)))


def main(windows: Annotated[int, typer.Option(help="Windows of samples for each figure.")] = 400) -> None:
    """Print the share covered in percent, for log-normal and for gamma distributed times."""
    for shape in ("log-normal", "gamma"):
        typer.echo(f"{shape}, percent of times up to the 0.95 quantile")
        typer.echo("| variation | " + " | ".join(f"{count} samples" for count in COUNTS) + " |")
        typer.echo("|---" * (len(COUNTS) + 1) + "|")
        for variation in VARIATIONS:
            row = []
            for count in COUNTS:
                draw = draws(shape, variation, random.Random(f"{shape} {variation} {count}"))
                covered = 0
                for _ in range(windows):
                    samples = Samples()
                    for _ in range(count):
                        samples.observe(draw())
                    quantile_s = samples.quantile_s(0.95)
                    covered += sum(draw() <= quantile_s for _ in range(50))
                row.append(f"{covered / windows * 2:.1f}")
            typer.echo(f"| {variation} | " + " | ".join(row) + " |")


if __name__ == "__main__":
    typer.run(main)
