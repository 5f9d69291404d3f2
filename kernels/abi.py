"""What the ops of a program are. Written once: the reference executor and the device kernel both switch on these kinds."""

from __future__ import annotations

from enum import IntEnum


class OpKind(IntEnum):
    """One stage of a program. r is a row (a token position of the step), y the output buffer, x the first input.

    A buffer holds one value per feature and row. W is the op's weights stacked by rows, b its biases or 0, E a table.
    Sums run in an order that depends on the weights and the position only, never on how many rows the step has.
    """

    EMBED = 1
    """y[:, r] = E[token[r]]"""
    RMS_NORM = 2
    """y = x / sqrt(mean(x^2) + eps) * w"""
    MATMUL = 3
    """y = W x + b"""
    MATMUL_ADD = 4
    """y = y + W x + b"""
    ROPE = 5
    """Rotate the q and k heads of x in place: pair i turns by position[r] * theta^(-2 i / head_dim) / factor[i]"""
    KV_APPEND = 6
    """K[layer][position[r]] = k heads of x, V[layer][position[r]] = v heads of x, in the pages of r's sequence"""
    ATTENTION = 7
    """y_h = sum_j softmax_j(q_h . K[layer][j] / sqrt(head_dim)) V[layer][j] over positions j <= position[r], head by head"""
    SWIGLU = 8
    """y = silu(x[:n]) * x[n:], silu(g) = g / (1 + exp(-g))"""
    SELECT = 9
    """y = x of the rows that are sampled"""
