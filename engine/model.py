"""What a model file holds: the family, its hyperparameters and the tensors they imply, each checked against the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NoReturn

from .errors import ModelFileError
from .gguf_file import GgufFile, TensorInfo
from .model_metadata import MAX_HEAD_DIM, MAX_WIDTH, Metadata
from .records import DECODABLE

MAX_LAYERS = 1024
MAX_CONTEXT = 1 << 24
MAX_EXPERTS = 1 << 14
MAX_CONV_TAPS = 16

Shapes = dict[str, tuple[int, ...]]


class RopeStyle(StrEnum):
    ADJACENT = "adjacent"  # pairs (2i, 2i + 1): the llama converter interleaves the rows of q and k
    HALVES = "halves"  # pairs (i, i + rotated / 2), also called NEOX


class Family(NamedTuple):
    """How the models of a family differ from the plain transformer."""

    rope_style: RopeStyle = RopeStyle.HALVES
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_experts: bool = False
    is_hybrid: bool = False
    """Most layers are gated DeltaNet; the others gate what they attended; part of a head is rotated."""


FAMILIES = {
    "llama": Family(RopeStyle.ADJACENT),
    "qwen2": Family(has_qkv_bias=True),
    "qwen3": Family(has_qk_norm=True),
    "qwen3moe": Family(has_qk_norm=True, has_experts=True),
    "qwen35": Family(has_qk_norm=True, is_hybrid=True),
    "qwen35moe": Family(has_qk_norm=True, has_experts=True, is_hybrid=True),
}
"""The supported families."""


@dataclass(frozen=True, slots=True)
class Yarn:
    """Rope stretched by `factor` over a longer context than `original_context`, but for the pairs that turn fast."""

    factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Experts:
    """A feed-forward part of which each row uses a few experts, and one that every row uses if `shared_ffn` is not 0."""

    count: int
    used: int
    ffn: int
    shared_ffn: int


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """A gated DeltaNet layer. V head j uses K head j % k_heads (converters reorder the V heads so)."""

    k_heads: int
    v_heads: int
    head_dim: int
    conv_taps: int

    @property
    def k_width(self) -> int:
        return self.k_heads * self.head_dim

    @property
    def v_width(self) -> int:
        return self.v_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: q, k, v."""
        return 2 * self.k_width + self.v_width

    @property
    def input_width(self) -> int:
        """The channels, the output gate z, then alpha and beta of each V head."""
        return self.conv_width + self.v_width + 2 * self.v_heads


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: str
    num_layers: int
    """Without a block for multi-token prediction."""
    hidden: int
    ffn: int
    """0 where there are experts."""
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rope_style: RopeStyle
    rope_dim: int
    """Leading features of a head that are rotated."""
    yarn: Yarn | None
    rms_eps: float
    context: int
    """Positions that the model was trained for."""
    vocab_size: int
    is_tied: bool
    """The output head is token_embd."""
    has_qkv_bias: bool
    has_rope_freqs: bool
    """The file divides the angle of each rope pair by a factor of its own (Llama 3.1)."""
    has_qk_norm: bool
    experts: Experts | None
    delta: DeltaShape | None
    delta_layers: frozenset[int]
    """The layers of which the attention is a gated DeltaNet."""
    mtp_tensors: frozenset[str] | None
    """Optional tensors of the block for multi-token prediction, None where there is no such block. It is checked, not run."""

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def has_attention_gate(self) -> bool:
        """attn_q makes q and a gate, head by head."""
        return self.delta is not None

    @property
    def ffn_norm(self) -> str:
        return "ffn_norm" if self.delta is None else "post_attention_norm"


def load_config(file: GgufFile) -> ModelConfig:
    """Read and check the model. Raises ModelFileError for other families, values out of range, tensors amiss."""
    config = _config(Metadata(file, FAMILIES))
    _check_tensors(file, tensor_shapes(config))
    return config


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of such a model by name, shapes in NumPy order."""
    shapes: Shapes = {
        "token_embd.weight": (config.vocab_size, config.hidden),
        "output_norm.weight": (config.hidden,),
    }
    if not config.is_tied:
        shapes["output.weight"] = (config.vocab_size, config.hidden)
    if config.has_rope_freqs:
        shapes["rope_freqs.weight"] = (config.rope_dim // 2,)
    for layer in range(config.num_layers):
        parts = _norm_shapes(config) | _ffn_shapes(config)
        parts |= _delta_shapes(config) if layer in config.delta_layers else _attention_shapes(config)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    if config.mtp_tensors is not None:
        parts = _norm_shapes(config) | _ffn_shapes(config) | _attention_shapes(config) | _mtp_shapes(config, config.mtp_tensors)
        shapes |= {f"blk.{config.num_layers}.{name}": shape for name, shape in parts.items()}
    return shapes


def _norm_shapes(config: ModelConfig) -> Shapes:
    return {"attn_norm.weight": (config.hidden,), f"{config.ffn_norm}.weight": (config.hidden,)}


def _attention_shapes(config: ModelConfig) -> Shapes:
    shapes: Shapes = {
        "attn_q.weight": (config.q_width * (2 if config.has_attention_gate else 1), config.hidden),
        "attn_k.weight": (config.kv_width, config.hidden),
        "attn_v.weight": (config.kv_width, config.hidden),
        "attn_output.weight": (config.hidden, config.q_width),
    }
    if config.has_qkv_bias:
        shapes |= {"attn_q.bias": (config.q_width,), "attn_k.bias": (config.kv_width,), "attn_v.bias": (config.kv_width,)}
    if config.has_qk_norm:
        shapes |= {"attn_q_norm.weight": (config.head_dim,), "attn_k_norm.weight": (config.head_dim,)}
    return shapes


def _delta_shapes(config: ModelConfig) -> Shapes:
    assert config.delta is not None
    delta = config.delta
    return {
        "attn_qkv.weight": (delta.conv_width, config.hidden),
        "attn_gate.weight": (delta.v_width, config.hidden),
        "ssm_alpha.weight": (delta.v_heads, config.hidden),
        "ssm_beta.weight": (delta.v_heads, config.hidden),
        "ssm_a": (delta.v_heads,),
        "ssm_dt.bias": (delta.v_heads,),
        "ssm_conv1d.weight": (delta.conv_width, delta.conv_taps),
        "ssm_norm.weight": (delta.head_dim,),
        "ssm_out.weight": (config.hidden, delta.v_width),
    }


def _ffn_shapes(config: ModelConfig) -> Shapes:
    if config.experts is None:
        return _swiglu_shapes("", config.hidden, config.ffn)
    experts = config.experts
    shapes: Shapes = {"ffn_gate_inp.weight": (experts.count, config.hidden)}
    routed = _swiglu_shapes("_exps", config.hidden, experts.ffn)
    shapes |= {name: (experts.count, *shape) for name, shape in routed.items()}
    if experts.shared_ffn:
        shapes["ffn_gate_inp_shexp.weight"] = (config.hidden,)
        shapes |= _swiglu_shapes("_shexp", config.hidden, experts.shared_ffn)
    return shapes


def _swiglu_shapes(suffix: str, hidden: int, ffn: int) -> Shapes:
    return {
        f"ffn_gate{suffix}.weight": (ffn, hidden),
        f"ffn_up{suffix}.weight": (ffn, hidden),
        f"ffn_down{suffix}.weight": (hidden, ffn),
    }


def _mtp_shapes(config: ModelConfig, optional: frozenset[str]) -> Shapes:
    shapes: Shapes = {
        "nextn.eh_proj.weight": (config.hidden, 2 * config.hidden),
        "nextn.enorm.weight": (config.hidden,),
        "nextn.hnorm.weight": (config.hidden,),
    }
    all_optional: Shapes = {
        "nextn.shared_head_norm.weight": (config.hidden,),
        "nextn.embed_tokens.weight": (config.vocab_size, config.hidden),
        "nextn.shared_head_head.weight": (config.vocab_size, config.hidden),
    }
    return shapes | {name: all_optional[name] for name in optional}


MTP_OPTIONAL = ("nextn.shared_head_norm.weight", "nextn.embed_tokens.weight", "nextn.shared_head_head.weight")


def _config(meta: Metadata) -> ModelConfig:
    family = FAMILIES[meta.family]
    meta.refuse_used("attention.sliding_window", *(() if family.has_experts else ("expert_count",)))
    hidden = meta.whole("embedding_length", 1, MAX_WIDTH)
    heads, kv_heads = _heads(meta, family)
    head_dim = meta.head_dim(hidden, heads)
    num_blocks = meta.whole("block_count", 1, MAX_LAYERS)
    num_mtp = meta.whole("nextn_predict_layers", 0, 1, default=0) if family.is_hybrid else 0
    if num_mtp == num_blocks:
        meta.refuse("it holds a block for multi-token prediction only, not the model")
    num_layers = num_blocks - num_mtp
    tensors = meta.file.tensors
    vocab_size = meta.vocab_size()
    return ModelConfig(
        family=meta.family,
        num_layers=num_layers,
        hidden=hidden,
        ffn=0 if family.has_experts else meta.whole("feed_forward_length", 1, MAX_WIDTH),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=meta.number("rope.freq_base", 1.0, 1e12, default=10_000.0),
        rope_style=family.rope_style,
        rope_dim=_rope_dim(meta, family, head_dim),
        yarn=_yarn(meta),
        rms_eps=meta.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1),
        context=meta.whole("context_length", 1, MAX_CONTEXT),
        vocab_size=vocab_size,
        is_tied="output.weight" not in tensors,
        has_qkv_bias=family.has_qkv_bias or "blk.0.attn_q.bias" in tensors,
        has_rope_freqs="rope_freqs.weight" in tensors,
        has_qk_norm=family.has_qk_norm,
        experts=_experts(meta) if family.has_experts else None,
        delta=_delta(meta) if family.is_hybrid else None,
        delta_layers=_delta_layers(meta, num_layers, num_blocks) if family.is_hybrid else frozenset(),
        mtp_tensors=frozenset(n for n in MTP_OPTIONAL if f"blk.{num_layers}.{n}" in tensors) if num_mtp else None,
    )


def _heads(meta: Metadata, family: Family) -> tuple[int, int]:
    heads = meta.whole("attention.head_count", 1, MAX_WIDTH)
    read = meta.whole_where_used if family.is_hybrid else meta.whole
    kv_heads = read("attention.head_count_kv", 1, MAX_WIDTH, heads)
    if heads % kv_heads:
        meta.refuse(f"its {heads} attention heads cannot be shared out over {kv_heads} KV heads")
    return heads, kv_heads


def _rope_dim(meta: Metadata, family: Family, head_dim: int) -> int:
    if not family.is_hybrid:
        meta.must_equal("rope.dimension_count", head_dim, "the head dimension")
        return head_dim
    rope_dim = meta.whole("rope.dimension_count", 2, head_dim, default=head_dim)
    if rope_dim % 2:
        meta.refuse(f"{meta.family}.rope.dimension_count is {rope_dim}, which is odd")
    return rope_dim


def _yarn(meta: Metadata) -> Yarn | None:
    scaling = "rope.scaling."
    kind = meta.text(f"{scaling}type", "none")
    if kind == "none":
        return None
    if kind != "yarn":
        meta.refuse(f"{meta.family}.{scaling}type is {kind[:40]!r}, which is not supported; none and yarn are")
    usual = {"attn_factor": 1, "yarn_attn_factor": 1, "yarn_ext_factor": 1, "yarn_beta_fast": 32, "yarn_beta_slow": 1}
    for name, value in (usual | {"yarn_log_multiplier": 0}).items():
        meta.number(f"{scaling}{name}", value, value, default=value)
    factor = meta.number(f"{scaling}factor", 1.0, 1e4)
    meta.number("rope.freq_base", 1.001, 1e12, default=10_000.0)  # its logarithm divides
    context = meta.whole("context_length", 1, MAX_CONTEXT)
    return Yarn(factor, meta.whole(f"{scaling}original_context_length", 1, MAX_CONTEXT, default=context))


def _experts(meta: Metadata) -> Experts:
    meta.must_equal("expert_gating_func", 1, "softmax, which is")
    count = meta.whole("expert_count", 1, MAX_EXPERTS)
    shared = "expert_shared_feed_forward_length"
    return Experts(
        count=count,
        used=meta.whole("expert_used_count", 1, count),
        ffn=meta.whole("expert_feed_forward_length", 1, MAX_WIDTH),
        shared_ffn=meta.whole(shared, 1, MAX_WIDTH) if FAMILIES[meta.family].is_hybrid else 0,
    )


def _delta(meta: Metadata) -> DeltaShape:
    k_heads = meta.whole("ssm.group_count", 1, MAX_WIDTH)
    v_heads = meta.whole("ssm.time_step_rank", 1, MAX_WIDTH)
    if v_heads % k_heads:
        meta.refuse(f"its {v_heads} V heads cannot be shared out over {k_heads} K heads")
    head_dim = meta.whole("ssm.state_size", 1, MAX_HEAD_DIM)
    meta.must_equal("ssm.inner_size", v_heads * head_dim, "its V heads times their width,")
    return DeltaShape(k_heads, v_heads, head_dim, meta.whole("ssm.conv_kernel", 2, MAX_CONV_TAPS))


def _delta_layers(meta: Metadata, num_layers: int, num_blocks: int) -> frozenset[int]:
    flags = meta.flags("attention.recurrent_layers", num_blocks)
    if flags is None:
        interval = meta.whole("full_attention_interval", 1, MAX_LAYERS)
        flags = tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    return frozenset(layer for layer in range(num_layers) if flags[layer])


def _check_tensors(file: GgufFile, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        info = file.tensors.get(name)
        if info is None:
            _refuse_tensor(file, f"tensor {name} is missing")
        _check_tensor(file, info, shape)
    extra = [name for name in file.tensors if name not in shapes]
    if extra:
        _refuse_tensor(file, f"it has {len(extra)} tensors that this family does not use, such as {extra[0]!r}")


def _check_tensor(file: GgufFile, info: TensorInfo, shape: tuple[int, ...]) -> None:
    # Some converters keep the one row of this vector as a dimension.
    may_be_row = info.name.endswith("ffn_gate_inp_shexp.weight")
    if info.shape != shape and not (may_be_row and info.shape == (1, *shape)):
        _refuse_tensor(file, f"tensor {info.name} has the shape {info.shape}, but the metadata implies {shape}")
    if info.ggml_type not in DECODABLE:
        _refuse_tensor(file, f"tensor {info.name} has the block type {info.ggml_type.name}, which is not supported")


def _refuse_tensor(file: GgufFile, reason: str) -> NoReturn:
    raise ModelFileError(
        f"model file {file.path} cannot be run: {reason}", "choose another model: `quadjet model list` names some"
    )
