"""Experts on NumPy: each row's sum goes over the experts it chose in the order of their numbers, whatever other rows chose."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .products import Products
from .reference_ops import swiglu

Array = NDArray[np.float32]


def route(logits: Array, count: int) -> None:
    """Replace logits [experts, columns] by the weights of the `count` largest, which sum to 1, and 0 for all others."""
    logits -= np.maximum.reduce(logits, axis=0)  # of a column that is not finite, nothing stays finite
    chosen = np.argsort(-logits, axis=0, kind="stable")[:count]
    scores = np.take_along_axis(logits, chosen, axis=0)
    np.exp(scores, out=scores)
    scores /= np.add.reduce(scores, axis=0)
    logits.fill(0)
    np.put_along_axis(logits, chosen, scores, axis=0)


def add_experts(total: Array, x: Array, weights: Array, experts: tuple[Array, Array, Array], products: Products) -> None:
    """Add to total [features, columns] what the experts (gate, up, down) make of x, weighted by weights [experts, rows].

    The rows are the first columns. Only experts that a row chose are multiplied, each with the columns of the rows that chose it.
    """
    gate, up, down = experts
    for expert in np.flatnonzero((weights != 0).any(axis=1)):
        columns = np.flatnonzero(weights[expert])
        picked = np.zeros((len(x), products.padded(len(columns))), np.float32)
        picked[:, : len(columns)] = x[:, columns]
        gate_up = np.empty((2 * gate.shape[1], picked.shape[1]), np.float32)
        products.multiply(gate[expert], picked, gate_up[: gate.shape[1]])
        products.multiply(up[expert], picked, gate_up[gate.shape[1] :])
        act = np.empty((gate.shape[1], picked.shape[1]), np.float32)
        swiglu(gate_up, act)
        made = np.empty_like(picked)
        products.multiply(down[expert], act, made)
        total[:, columns] += made[:, : len(columns)] * weights[expert, columns]
