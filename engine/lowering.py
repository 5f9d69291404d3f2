"""From a model's hyperparameters to its program."""

from __future__ import annotations

from dataclasses import replace

from ..kernels.abi import OpKind
from .model import ModelConfig, tensor_shapes
from .program import LOGITS, TOKENS, AttentionShape, Buffer, Op, Program, Rope, Rows


def lower(config: ModelConfig) -> Program:
    """The program of a pre-norm transformer: attention or gated DeltaNet in each layer, then SwiGLU, of experts or dense."""
    attention = AttentionShape(config.heads, config.kv_heads, config.head_dim)
    head = "token_embd.weight" if config.is_tied else "output.weight"
    ops = [Op(OpKind.EMBED, (TOKENS,), "x", ("token_embd.weight",))]
    num_kv = num_delta = 0
    for layer in range(config.num_layers):
        if layer in config.delta_layers:
            ops += _delta_ops(config, layer, num_delta)
            num_delta += 1
        else:
            ops += _attention_ops(config, layer, num_kv)
            num_kv += 1
        ops += _ffn_ops(config, layer)
    ops += [
        Op(OpKind.SELECT, ("x",), "last"),
        Op(OpKind.RMS_NORM, ("last",), "last_normed", ("output_norm.weight",), eps=config.rms_eps),
        Op(OpKind.MATMUL, ("last_normed",), LOGITS, (head,)),
    ]
    delta_layers = (config.delta,) * num_delta if config.delta is not None else ()
    return Program(tuple(ops), _buffers(config), tensor_shapes(config), (attention,) * num_kv, delta_layers, config.vocab_size)


def _buffers(config: ModelConfig) -> dict[str, Buffer]:
    ffn = config.ffn if config.experts is None else config.experts.shared_ffn
    widths = {
        TOKENS: 1,
        "x": config.hidden,
        "normed": config.hidden,
        "qkv": config.q_width + 2 * config.kv_width,
        "attended": config.q_width,
        "gate_up": 2 * ffn,
        "act": ffn,
    }
    if config.has_attention_gate:
        widths["gated_qkv"] = widths["qkv"] + config.q_width
    if config.delta is not None:
        widths |= {"delta_in": config.delta.input_width, "delta": config.delta.v_width}
    if config.experts is not None:
        widths |= {"router": config.experts.count, "shared": config.hidden if ffn else 0}
    buffers = {name: Buffer(width) for name, width in widths.items() if width}
    sampled = {"last": config.hidden, "last_normed": config.hidden, LOGITS: config.vocab_size}
    return buffers | {name: Buffer(width, Rows.SAMPLED) for name, width in sampled.items()}


def _attention_ops(config: ModelConfig, layer: int, index: int) -> list[Op]:
    prefix = f"blk.{layer}."
    names = [f"{prefix}attn_{part}" for part in "qkv"]
    biases = tuple(f"{name}.bias" for name in names) if config.has_qkv_bias else ()
    weights = tuple(f"{name}.weight" for name in names)
    factors = "rope_freqs.weight" if config.has_rope_freqs else None
    rope = Rope(config.rope_theta, config.rope_style, config.rope_dim, factors, config.yarn)
    ops = [_norm(config, f"{prefix}attn_norm.weight")]
    if config.has_attention_gate:
        ops += [
            Op(OpKind.MATMUL, ("normed",), "gated_qkv", weights, biases),
            Op(OpKind.DROP_GATE, ("gated_qkv",), "qkv", layer=index),
        ]
    else:
        ops.append(Op(OpKind.MATMUL, ("normed",), "qkv", weights, biases))
    if config.has_qk_norm:
        norms = (f"{prefix}attn_q_norm.weight", f"{prefix}attn_k_norm.weight")
        ops.append(Op(OpKind.QK_NORM, ("qkv",), "qkv", params=norms, layer=index, eps=config.rms_eps))
    ops += [
        Op(OpKind.ROPE, ("qkv",), "qkv", layer=index, rope=rope),
        Op(OpKind.KV_APPEND, ("qkv",), "qkv", layer=index),
        Op(OpKind.ATTENTION, ("qkv",), "attended", layer=index),
    ]
    if config.has_attention_gate:
        ops.append(Op(OpKind.GATE, ("attended", "gated_qkv"), "attended", layer=index))
    return [*ops, Op(OpKind.MATMUL_ADD, ("attended",), "x", (f"{prefix}attn_output.weight",))]


def _delta_ops(config: ModelConfig, layer: int, index: int) -> list[Op]:
    prefix = f"blk.{layer}."
    inputs = tuple(f"{prefix}{name}.weight" for name in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta"))
    params = tuple(f"{prefix}{name}" for name in ("ssm_conv1d.weight", "ssm_a", "ssm_dt.bias"))
    return [
        _norm(config, f"{prefix}attn_norm.weight"),
        Op(OpKind.MATMUL, ("normed",), "delta_in", inputs),
        Op(OpKind.DELTA_NET, ("delta_in",), "delta", params=params, layer=index, eps=config.rms_eps),
        Op(
            OpKind.GATED_NORM,
            ("delta_in",),
            "delta",
            params=(f"{prefix}ssm_norm.weight",),
            layer=index,
            eps=config.rms_eps,
        ),
        Op(OpKind.MATMUL_ADD, ("delta",), "x", (f"{prefix}ssm_out.weight",)),
    ]


def _ffn_ops(config: ModelConfig, layer: int) -> list[Op]:
    prefix = f"blk.{layer}."
    ops = [_norm(config, f"{prefix}{config.ffn_norm}.weight")]
    if config.experts is None:
        return [*ops, *_swiglu_ops(prefix, ""), Op(OpKind.MATMUL_ADD, ("act",), "x", (f"{prefix}ffn_down.weight",))]
    experts = tuple(f"{prefix}ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
    routed = [
        Op(OpKind.MATMUL, ("normed",), "router", (f"{prefix}ffn_gate_inp.weight",)),
        Op(OpKind.ROUTE, ("router",), "router", count=config.experts.used),
        Op(OpKind.EXPERTS, ("normed", "router"), "x", params=experts),
    ]
    if not config.experts.shared_ffn:
        return [*ops, *routed]
    shared = [*_swiglu_ops(prefix, "_shexp"), Op(OpKind.MATMUL, ("act",), "shared", (f"{prefix}ffn_down_shexp.weight",))]
    for one, other in zip(routed, shared, strict=True):  # both sides of the step work their way to "x" at once
        ops += [one, replace(other, joins=True)]
    return [*ops, Op(OpKind.SHARED_EXPERT, ("shared", "normed"), "x", params=(f"{prefix}ffn_gate_inp_shexp.weight",))]


def _swiglu_ops(prefix: str, suffix: str) -> list[Op]:
    return [
        Op(OpKind.MATMUL, ("normed",), "gate_up", tuple(f"{prefix}ffn_{part}{suffix}.weight" for part in ("gate", "up"))),
        Op(OpKind.SWIGLU, ("gate_up",), "act"),
    ]


def _norm(config: ModelConfig, weight: str) -> Op:
    return Op(OpKind.RMS_NORM, ("x",), "normed", (weight,), eps=config.rms_eps)
