"""What the ops of a program are. Written once: the reference executor and the device kernel both switch on these kinds."""

from __future__ import annotations

from enum import IntEnum


class OpKind(IntEnum):
    """One stage of a program. r is a row (a token position of the step), y the output buffer, x the first input.

    A buffer holds one value per feature and row. x2 is the second input. W is the op's weights stacked by rows, b its biases or
    0, E a table; p1, p2 .. are tensors used one by one. sigmoid(g) = 1 / (1 + exp(-g)), silu(g) = g sigmoid(g).
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
    """Rotate the first dim features of q and k heads of x in place: pair i turns by position[r] theta^(-2 i / dim) / factor[i]

    With YaRN by that times k + (1 - k) / s, and its length by 1 + 0.1 log s; k falls from 1 to 0 from pair `fast` to pair `slow`,
    which turn 32 times and once within the original context.
    """
    KV_APPEND = 6
    """K[layer][position[r]] = k heads of x, V[layer][position[r]] = v heads of x, in the pages of r's sequence"""
    ATTENTION = 7
    """y_h = sum_j softmax_j(q_h . K[layer][j] / sqrt(head_dim)) V[layer][j] over positions j <= position[r], head by head"""
    SWIGLU = 8
    """y = silu(x[:n]) * x[n:]"""
    SELECT = 9
    """y = x of the rows that are sampled"""
    QK_NORM = 10
    """RMS_NORM of every q head of x with p1 and of every k head with p2, in place"""
    DROP_GATE = 11
    """y = x without the gates: x holds [q of head 0, gate of head 0, q of head 1, ..], k, v; y holds q, k, v"""
    GATE = 12
    """y_h = y_h * sigmoid(g_h), head by head, with the gates of x2, which holds them as the x of DROP_GATE does"""
    ROUTE = 13
    """y_e = softmax(x)_e / sum of the chosen, for the `count` largest (of equals the first); 0 for all others"""
    EXPERTS = 14
    """y = y + sum_e x2_e p3[e] (silu(p1[e] x) * p2[e] x) over the experts with x2_e > 0, in the order of e"""
    SHARED_EXPERT = 15
    """y = y + sigmoid(p1 . x2) x"""
    DELTA_NET = 16
    """A gated DeltaNet of x = [m, z, alpha, beta] along the positions of r's sequence; p1 conv, p2 a, p3 dt; z is not used here.

    c = silu(sum_j p1[:, j] m[position - taps + 1 + j]), split into q_i, k_i, v_j; q_i, k_i = u / sqrt(sum(u^2) + eps)
    for V head j, i = j % k_heads, g = exp(p2_j log(1 + exp(alpha_j + p3_j))), b = sigmoid(beta_j), the state S_j going from
    position to position: d = b (v_j - g S_j k_i); S_j = g S_j + d k_i^T; y_j = S_j q_i / sqrt(head_dim)
    """
    GATED_NORM = 17
    """y_j = RMS_NORM(y_j) with p1, times silu(z_j), V head by V head, with the z of x as for DELTA_NET"""
