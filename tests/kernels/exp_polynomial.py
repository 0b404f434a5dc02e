"""Derives the coefficients of exp_ (docs/arithmetic.md) from nothing: a minimax fit by the Remez exchange.

    exp(r) = 1 + r + r^2 * (c2 + c3 r + c4 r^2 + c5 r^3 + c6 r^4),   |r| <= 0.347 (ln 2 / 2 and a little more)

The first two coefficients stay exactly 1, so that exp_(0) is 1 and small arguments lose nothing. Run it to print the constants.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

HALF_WIDTH = 0.347
NUM_COEFFICIENTS = 5


def fit() -> tuple[npt.NDArray[np.float64], float]:
    """The coefficients c2..c6 in float64, and the largest relative error of the polynomial they define."""
    grid = np.linspace(-HALF_WIDTH, HALF_WIDTH, 200_001)
    angles = np.pi * np.arange(NUM_COEFFICIENTS + 1) / NUM_COEFFICIENTS
    points = -HALF_WIDTH * np.cos(angles)
    coefficients = np.zeros(NUM_COEFFICIENTS)
    for _ in range(50):
        system = np.empty((NUM_COEFFICIENTS + 1, NUM_COEFFICIENTS + 1))
        for power in range(NUM_COEFFICIENTS):
            system[:, power] = points ** (power + 2)
        system[:, -1] = np.exp(points) * (-1.0) ** np.arange(NUM_COEFFICIENTS + 1)
        coefficients = np.linalg.solve(system, np.expm1(points) - points)[:-1]
        error = _relative_error(coefficients, grid)
        new_points = _alternation(grid, error)
        if len(new_points) != len(points) or np.allclose(new_points, points, rtol=0.0, atol=1e-9):
            break
        points = new_points
    return coefficients, float(np.abs(_relative_error(coefficients, grid)).max())


def _relative_error(coefficients: npt.NDArray[np.float64], r: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    tail = np.polynomial.polynomial.polyval(r, coefficients) * r * r
    return np.asarray((tail - (np.expm1(r) - r)) / np.exp(r))


def _alternation(grid: npt.NDArray[np.float64], error: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The place of the largest error between each two changes of its sign."""
    signs = np.sign(error)
    borders = np.flatnonzero(signs[1:] * signs[:-1] < 0) + 1
    pieces = np.split(np.arange(len(grid)), borders)
    return np.array([grid[piece[np.argmax(np.abs(error[piece]))]] for piece in pieces])


def main() -> None:
    """Prints the constants."""
    values, worst = fit()
    for index, value in enumerate(values.astype(np.float32), start=2):
        sys.stdout.write(f"c{index} = {float(value).hex()} ({float(value)!r})\n")
    sys.stdout.write(f"largest relative error of the polynomial before rounding its coefficients: {worst:.3e}\n")


if __name__ == "__main__":
    main()
