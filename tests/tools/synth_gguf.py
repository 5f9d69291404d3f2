# ruff: noqa: PLR0911, PLR0917
"""Write GGUF files with random weights in the exact layout of real model families.

The files load in any GGUF engine, so two engines can be compared on the same bytes: logits on tiny models,
speed on full-size shapes (speed does not depend on the weight values). Needs only numpy and gguf.

    synth_gguf.py --arch qwen35 --size tiny --quant Q4_K_M --seed 1 out.gguf
    synth_gguf.py --arch qwen35 --size 27b  --quant Q4_K_M --seed 1 out.gguf      # 16 GB, shape of Qwen3.5/3.6/3.8-27B
    synth_gguf.py --list
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field, replace

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<tool_response>",
    "</tool_response>",
]
CHAT_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}# Tools\n"
    "{%- for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n<|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}{% if not (loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in (m.tool_calls or []) %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Hyperparameters of one model; zero or None means the family has no such part."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int = 32768
    rope_theta: float = 1e6
    rope_dim: int | None = None  # rotated part of a head
    tied: bool = False  # output head shares the embedding
    lin_k_heads: int = 0  # gated delta net
    lin_v_heads: int = 0
    lin_dim: int = 128
    conv: int = 4
    full_every: int = 0  # one full-attention layer in this many
    nextn: int = 0  # multi-token-prediction layers
    experts: int = 0
    experts_used: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    name: str = field(default="synthetic")


SHAPES: dict[tuple[str, str], Shape] = {
    ("llama", "tiny"): Shape(3, 256, 512, 4, 2, 64, 1024, rope_theta=1e5, tied=True),
    ("qwen2", "tiny"): Shape(3, 256, 512, 4, 2, 64, 1024, tied=True),
    ("qwen3", "tiny"): Shape(3, 256, 512, 4, 2, 128, 1024),
    ("qwen3moe", "tiny"): Shape(3, 256, 512, 4, 2, 64, 1024, experts=8, experts_used=2, expert_ffn=256),
    ("qwen35", "tiny"): Shape(
        8, 256, 512, 4, 2, 64, 1024, rope_theta=1e7, rope_dim=16, lin_k_heads=2, lin_v_heads=6, lin_dim=128, full_every=4, nextn=1
    ),
    ("qwen35moe", "tiny"): Shape(
        4,
        256,
        512,
        4,
        2,
        64,
        1024,
        rope_theta=1e7,
        rope_dim=16,
        lin_k_heads=2,
        lin_v_heads=4,
        lin_dim=128,
        full_every=4,
        nextn=1,
        experts=8,
        experts_used=2,
        expert_ffn=256,
        shared_ffn=256,
    ),
    # head and dimension ratios of the real 27B, few layers: for GPU kernel tests
    ("qwen35", "slice"): Shape(
        4,
        5120,
        17408,
        24,
        4,
        256,
        4096,
        context=262144,
        rope_theta=1e7,
        rope_dim=64,
        lin_k_heads=16,
        lin_v_heads=48,
        full_every=4,
        nextn=1,
    ),
    ("qwen35", "27b"): Shape(
        64,
        5120,
        17408,
        24,
        4,
        256,
        248320,
        context=262144,
        rope_theta=1e7,
        rope_dim=64,
        lin_k_heads=16,
        lin_v_heads=48,
        full_every=4,
        nextn=1,
    ),
    ("qwen35", "9b"): Shape(
        32,
        4096,
        12288,
        16,
        4,
        256,
        248320,
        context=262144,
        rope_theta=1e7,
        rope_dim=64,
        lin_k_heads=16,
        lin_v_heads=32,
        full_every=4,
        nextn=1,
    ),
    ("qwen35moe", "35b-a3b"): Shape(
        40,
        2048,
        0,
        16,
        2,
        256,
        248320,
        context=262144,
        rope_theta=1e7,
        rope_dim=64,
        lin_k_heads=16,
        lin_v_heads=32,
        full_every=4,
        nextn=1,
        experts=256,
        experts_used=8,
        expert_ffn=512,
        shared_ffn=512,
    ),
    ("qwen35moe", "122b-a10b"): Shape(
        48,
        3072,
        0,
        32,
        2,
        256,
        248320,
        context=262144,
        rope_theta=1e7,
        rope_dim=64,
        lin_k_heads=16,
        lin_v_heads=64,
        full_every=4,
        nextn=1,
        experts=256,
        experts_used=8,
        expert_ffn=1024,
        shared_ffn=1024,
    ),
    ("qwen3", "8b"): Shape(36, 4096, 12288, 32, 8, 128, 151936, context=40960),
    ("qwen3", "32b"): Shape(64, 5120, 25600, 64, 8, 128, 151936, context=40960),
}

# ---- random blocks -------------------------------------------------------------------------------------------------
# (bytes before the payload that hold fp16 scales, and how the value's size follows from them) per type.
_FP16_FIELDS = {  # byte offsets of fp16 fields: "d" multiplies, "m" is subtracted (K-quants) or added (_1 types)
    Q.Q4_0: {"d": 0},
    Q.Q4_1: {"d": 0, "m": 2},
    Q.Q5_0: {"d": 0},
    Q.Q5_1: {"d": 0, "m": 2},
    Q.Q8_0: {"d": 0},
    Q.Q2_K: {"d": 80, "m": 82},
    Q.Q3_K: {"d": 108},
    Q.Q4_K: {"d": 0, "m": 2},
    Q.Q5_K: {"d": 0, "m": 2},
    Q.Q6_K: {"d": 208},
    Q.IQ4_NL: {"d": 0},
    Q.IQ4_XS: {"d": 0},
    Q.IQ3_XXS: {"d": 0},
    Q.IQ3_S: {"d": 0},
    Q.IQ2_XXS: {"d": 0},
    Q.IQ2_XS: {"d": 0},
    Q.IQ2_S: {"d": 0},
}
_MID = {Q.Q4_1: -7.5, Q.Q5_1: -15.5, Q.Q2_K: 1.5, Q.Q4_K: 7.5, Q.Q5_K: 15.5}  # the minimum that centres the values


def random_blocks(rng: np.random.Generator, qtype: Q, rows: int, cols: int, std: float) -> np.ndarray:
    """Raw bytes of a [rows, cols] tensor of the given type whose values have about the given standard deviation."""
    if qtype == Q.F32:
        return rng.normal(0, std, (rows, cols)).astype(np.float32)
    if qtype == Q.F16:
        return rng.normal(0, std, (rows, cols)).astype(np.float16)
    if qtype == Q.BF16:
        v = rng.normal(0, std, (rows, cols)).astype(np.float32).view(np.uint32)
        return ((v + 0x8000) >> 16).astype(np.uint16).view(np.uint8).reshape(rows, cols * 2)
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    n = rows * cols // block
    pool = min(n, 65536)  # large tensors repeat a pool of blocks, shifted: speed tests only need the bytes to differ
    b = rng.integers(0, 256, (pool, size), dtype=np.uint8)
    fields = _FP16_FIELDS[qtype]

    def put(off: int, value: np.ndarray) -> None:
        b[:, off : off + 2] = value.astype(np.float16).reshape(-1, 1).view(np.uint8)

    put(fields["d"], np.full(pool, 1.0))
    if "m" in fields:
        put(fields["m"], np.full(pool, _MID[qtype]))
    probe = gguf.quants.dequantize(b[: min(pool, 512)], qtype)
    d = std / float(probe.std()) * rng.uniform(0.7, 1.3, pool)
    put(fields["d"], d)
    if "m" in fields:
        put(fields["m"], d * _MID[qtype])
    if n > pool:
        b = np.concatenate([b] * (n // pool + 1))[:n]
    return np.ascontiguousarray(b).reshape(rows, cols // block * size)


# ---- which type each tensor gets ------------------------------------------------------------------------------------
def type_for(recipe: str, name: str, layer: int, layers: int) -> Q:
    """Type of one weight matrix: the mixes of common files, or one type for all."""
    if name in ("ssm_alpha", "ssm_beta") and recipe not in Q.__members__:
        return Q.F32
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    if recipe == "Q4_K_M":
        if name == "output" or (name in ("attn_v", "ffn_down", "ffn_down_exps", "ffn_down_shexp") and more):
            return Q.Q6_K
        return Q.Q5_K if name == "attn_qkv" else Q.Q4_K
    if recipe == "UD-IQ4_XS":
        if name in ("output", "attn_v"):
            return Q.Q6_K
        if name in ("attn_qkv", "attn_q", "attn_k", "attn_output", "ssm_out", "attn_gate"):
            return Q.Q5_K
        return Q.IQ3_S if name in ("ffn_gate_exps", "ffn_up_exps") and not more else Q.IQ4_XS
    return Q[recipe]


# ---- tokenizer ------------------------------------------------------------------------------------------------------
def byte_chars() -> list[str]:
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {}, 0
    for b in range(256):
        if b in keep:
            table[b] = chr(b)
        else:
            table[b] = chr(256 + extra)
            extra += 1
    return [table[b] for b in range(256)]


def vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """A byte-level BPE vocabulary of exactly `size` tokens: bytes, then merged strings, then special tokens."""
    tokens = byte_chars()
    merges: list[str] = []
    space, lower = "\u0120", [chr(c) for c in range(97, 123)]
    first = [space, *lower, *[chr(c) for c in range(65, 91)], *"_.,:;()[]{}=+-*/'\"<>#0123456789"]
    seen = set(tokens)
    want = size - len(SPECIALS)
    level = [(a, b) for a in first for b in lower] + [("\u010a", "\u0120"), (space, space)]
    while len(tokens) < want:
        nxt = []
        for a, b in level:
            if len(tokens) >= want:
                break
            if a + b not in seen:
                seen.add(a + b)
                tokens.append(a + b)
                merges.append(f"{a} {b}")
                nxt.append(a + b)
        level = [(t, b) for t in nxt for b in lower]
        if not level:
            break
    types = [int(gguf.TokenType.NORMAL)] * len(tokens) + [int(gguf.TokenType.CONTROL)] * len(SPECIALS)
    return tokens + SPECIALS, types, merges


# ---- writing --------------------------------------------------------------------------------------------------------
def write(path: str, arch: str, s: Shape, recipe: str, seed: int, mtp: bool = True) -> None:
    rng = np.random.default_rng(seed)
    hybrid = arch.startswith("qwen35")
    nextn = s.nextn if mtp else 0
    blocks = s.layers + nextn
    w = gguf.GGUFWriter(path, arch, use_temp_file=False)
    w.add_name(f"synthetic {arch} seed {seed}")
    w.add_block_count(blocks)
    w.add_context_length(s.context)
    w.add_embedding_length(s.hidden)
    w.add_feed_forward_length(s.ffn or s.expert_ffn)
    w.add_head_count(s.heads)
    w.add_head_count_kv(s.kv_heads)
    w.add_key_length(s.head_dim)
    w.add_value_length(s.head_dim)
    w.add_rope_freq_base(s.rope_theta)
    w.add_rope_dimension_count(s.rope_dim or s.head_dim)
    w.add_layer_norm_rms_eps(1e-6)
    if s.experts:
        w.add_expert_count(s.experts)
        w.add_expert_used_count(s.experts_used)
        w.add_expert_feed_forward_length(s.expert_ffn)
        if s.shared_ffn:
            w.add_expert_shared_feed_forward_length(s.shared_ffn)
    if hybrid:
        quarter = (s.rope_dim or s.head_dim) // 2
        w.add_rope_dimension_sections(
            [quarter - 2 * (quarter // 3), quarter // 3, quarter // 3, 0] if quarter != 32 else [11, 11, 10, 0]
        )
        w.add_ssm_conv_kernel(s.conv)
        w.add_ssm_state_size(s.lin_dim)
        w.add_ssm_group_count(s.lin_k_heads)
        w.add_ssm_time_step_rank(s.lin_v_heads)
        w.add_ssm_inner_size(s.lin_v_heads * s.lin_dim)
        w.add_full_attention_interval(s.full_every)
        if nextn:
            w.add_nextn_predict_layers(nextn)
    tokens, types, merges = vocabulary(s.vocab)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm" if arch == "llama" else "qwen35" if hybrid else "qwen2")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges(merges)
    eos = tokens.index("<|im_end|>")
    w.add_eos_token_id(eos)
    w.add_pad_token_id(tokens.index("<|endoftext|>"))
    w.add_add_bos_token(False)
    w.add_chat_template(CHAT_TEMPLATE)

    def mat(name: str, kind: str, layer: int, rows: int, cols: int, gain: float = 1.0, lead: int | None = None) -> None:
        q = type_for(recipe, kind, layer, s.layers)
        if cols % gguf.GGML_QUANT_SIZES[q][0]:
            q = Q.Q8_0 if cols % 32 == 0 else Q.F16
        raw = random_blocks(rng, q, rows * (lead or 1), cols, gain / cols**0.5)
        if lead:
            raw = raw.reshape(lead, rows, -1)
        w.add_tensor(name, raw, raw_dtype=None if q in (Q.F32, Q.F16) else q)

    def vec(name: str, n: int, centre: float = 1.0, spread: float = 0.1, shape: tuple[int, ...] | None = None) -> None:
        w.add_tensor(name, rng.normal(centre, spread, shape or (n,)).astype(np.float32))

    mat("token_embd.weight", "token_embd", 0, s.vocab, s.hidden, gain=2.0 if s.tied else s.hidden**0.5)
    for i in range(blocks):
        p = f"blk.{i}."
        is_mtp = i >= s.layers
        linear = hybrid and not is_mtp and (i + 1) % s.full_every != 0
        vec(p + "attn_norm.weight", s.hidden)
        vec(p + ("post_attention_norm.weight" if hybrid else "ffn_norm.weight"), s.hidden)
        if linear:
            key, val = s.lin_k_heads * s.lin_dim, s.lin_v_heads * s.lin_dim
            mat(p + "attn_qkv.weight", "attn_qkv", i, 2 * key + val, s.hidden)
            mat(p + "attn_gate.weight", "attn_gate", i, val, s.hidden)
            vec(p + "ssm_conv1d.weight", 0, 0.0, 0.5, (2 * key + val, s.conv))
            vec(p + "ssm_dt.bias", s.lin_v_heads, 0.5, 0.5)
            w.add_tensor(p + "ssm_a", -np.exp(rng.normal(-1.5, 1.0, s.lin_v_heads)).astype(np.float32))
            mat(p + "ssm_beta.weight", "ssm_beta", i, s.lin_v_heads, s.hidden)
            mat(p + "ssm_alpha.weight", "ssm_alpha", i, s.lin_v_heads, s.hidden)
            vec(p + "ssm_norm.weight", s.lin_dim)
            mat(p + "ssm_out.weight", "ssm_out", i, s.hidden, val)
        else:
            q_rows = s.heads * s.head_dim * (2 if hybrid else 1)
            mat(p + "attn_q.weight", "attn_q", i, q_rows, s.hidden)
            mat(p + "attn_k.weight", "attn_k", i, s.kv_heads * s.head_dim, s.hidden)
            mat(p + "attn_v.weight", "attn_v", i, s.kv_heads * s.head_dim, s.hidden)
            mat(p + "attn_output.weight", "attn_output", i, s.hidden, s.heads * s.head_dim)
            if arch == "qwen2":
                vec(p + "attn_q.bias", q_rows, 0.0, 0.1)
                vec(p + "attn_k.bias", s.kv_heads * s.head_dim, 0.0, 0.1)
                vec(p + "attn_v.bias", s.kv_heads * s.head_dim, 0.0, 0.1)
            if arch in ("qwen3", "qwen3moe") or hybrid:
                vec(p + "attn_q_norm.weight", s.head_dim)
                vec(p + "attn_k_norm.weight", s.head_dim)
        if s.experts:
            w.add_tensor(p + "ffn_gate_inp.weight", rng.normal(0, s.hidden**-0.5 * 2, (s.experts, s.hidden)).astype(np.float32))
            mat(p + "ffn_gate_exps.weight", "ffn_gate_exps", i, s.expert_ffn, s.hidden, lead=s.experts)
            mat(p + "ffn_up_exps.weight", "ffn_up_exps", i, s.expert_ffn, s.hidden, lead=s.experts)
            mat(p + "ffn_down_exps.weight", "ffn_down_exps", i, s.hidden, s.expert_ffn, lead=s.experts)
            if s.shared_ffn:
                vec(p + "ffn_gate_inp_shexp.weight", s.hidden, 0.0, s.hidden**-0.5)
                mat(p + "ffn_gate_shexp.weight", "ffn_gate_shexp", i, s.shared_ffn, s.hidden)
                mat(p + "ffn_up_shexp.weight", "ffn_up_shexp", i, s.shared_ffn, s.hidden)
                mat(p + "ffn_down_shexp.weight", "ffn_down_shexp", i, s.hidden, s.shared_ffn)
        else:
            mat(p + "ffn_gate.weight", "ffn_gate", i, s.ffn, s.hidden)
            mat(p + "ffn_up.weight", "ffn_up", i, s.ffn, s.hidden)
            mat(p + "ffn_down.weight", "ffn_down", i, s.hidden, s.ffn)
        if is_mtp:
            mat(p + "nextn.eh_proj.weight", "nextn.eh_proj", i, s.hidden, 2 * s.hidden)
            vec(p + "nextn.enorm.weight", s.hidden)
            vec(p + "nextn.hnorm.weight", s.hidden)
            vec(p + "nextn.shared_head_norm.weight", s.hidden)
    vec("output_norm.weight", s.hidden)
    if not s.tied:
        mat("output.weight", "output", 0, s.vocab, s.hidden)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file(progress=s.hidden * s.layers > 100_000)
    w.close()


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out", nargs="?")
    ap.add_argument("--arch", default="qwen35")
    ap.add_argument("--size", default="tiny")
    ap.add_argument(
        "--quant", default="Q4_K_M", help="a mix (Q4_K_M, UD-IQ4_XS) or one GGML type for every matrix (Q8_0, Q5_K, ...)"
    )
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--layers", type=int, help="override the layer count")
    ap.add_argument("--vocab", type=int, help="override the vocabulary size")
    ap.add_argument("--no-mtp", action="store_true", help="leave out the multi-token-prediction layers")
    ap.add_argument("--list", action="store_true")
    a = ap.parse_args()
    if a.list or not a.out:
        for (arch, size), s in SHAPES.items():
            print(f"{arch:10s} {size:10s} layers {s.layers} hidden {s.hidden} vocab {s.vocab}")
        return 0 if a.list else 2
    if (a.arch, a.size) not in SHAPES:
        print(f"unknown shape {a.arch}/{a.size}; --list shows them", file=sys.stderr)
        return 2
    s = SHAPES[a.arch, a.size]
    s = replace(s, layers=a.layers or s.layers, vocab=a.vocab or s.vocab)
    write(a.out, a.arch, s, a.quant, a.seed, mtp=not a.no_mtp)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
