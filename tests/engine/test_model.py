"""Hyperparameters and tensors: read for all families, refused by name where they are wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from quadjet.engine.errors import ModelFileError
from quadjet.engine.gguf_file import GgufFile, TensorInfo
from quadjet.engine.model import DeltaShape, Experts, RopeStyle, Yarn, load_config, tensor_shapes
from tiny_models import FAMILIES, tiny_model


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return GgufFile.open(tiny_model(tmp_path_factory.mktemp("models"), arch=request.param))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufFile]:
    folder = tmp_path_factory.mktemp("families")
    return {family: GgufFile.open(tiny_model(folder, arch=family)) for family in FAMILIES}


def changed(
    file: GgufFile,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, TensorInfo | None] | None = None,
) -> GgufFile:
    """The file with some keys (without their family prefix, unless they have a dot of their own) and tensors replaced."""
    family = file.metadata["general.architecture"]
    keys = {key[1:] if key.startswith("=") else f"{family}.{key}": value for key, value in (metadata or {}).items()}
    new_metadata = {key: value for key, value in {**file.metadata, **keys}.items() if value is not None}
    new_tensors = {name: info for name, info in {**file.tensors, **(tensors or {})}.items() if info is not None}
    return GgufFile(file.path, new_metadata, new_tensors, np.zeros(0, np.uint8))


def test_a_plain_transformer_is_read(file: GgufFile) -> None:
    config = load_config(file)
    family = file.metadata["general.architecture"]
    assert (config.family, config.num_layers, config.hidden, config.ffn) == (family, 3, 256, 512)
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (4, 2, 64, 1024)
    assert (config.rope_theta, config.context) == (1e5 if family == "llama" else 1e6, 32768)
    assert config.rms_eps == pytest.approx(1e-6)
    assert config.rope_style is (RopeStyle.ADJACENT if family == "llama" else RopeStyle.HALVES)
    assert (config.is_tied, config.has_qkv_bias) == (True, family == "qwen2")
    assert set(tensor_shapes(config)) == set(file.tensors)


def test_one_value_per_layer_is_read_if_they_agree(file: GgufFile) -> None:
    config = load_config(changed(file, {"attention.head_count_kv": np.array([2, 2, 2], np.int32)}))
    assert config.kv_heads == 2


def test_the_head_dimension_follows_from_the_width_if_it_is_not_given(file: GgufFile) -> None:
    keys = {"attention.key_length": None, "attention.value_length": None, "rope.dimension_count": None}
    assert load_config(changed(file, keys)).head_dim == 64


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("=general.architecture", "gpt2", r"family 'gpt2'; supported: llama, qwen2, qwen3, qwen35, qwen35moe, qwen3moe"),
        ("=general.architecture", None, r"family None; supported"),
        ("=general.architecture", ["llama"], r"supported"),
        ("block_count", None, r"block_count is missing"),
        ("block_count", 0, r"block_count is 0"),
        ("block_count", 4, r"blk\.3\.attn_norm\.weight is missing"),
        ("block_count", 2, r"tensors that this family does not use, such as 'blk\.2"),
        ("block_count", 2**31, r"not a whole number from 1 to 1024"),
        ("block_count", "3", r"block_count is '3'"),
        ("block_count", True, r"block_count is True"),
        ("block_count", 3.0, r"block_count is 3.0"),
        ("block_count", np.array([], np.int32), r"differs from layer to layer"),
        ("embedding_length", 128, r"has the shape .* implies"),
        ("feed_forward_length", 513, r"ffn_gate\.weight has the shape \(512, 256\), but the metadata implies \(513, 256\)"),
        ("feed_forward_length", np.array([512, 256, 512]), r"feed_forward_length differs from layer to layer"),
        ("attention.head_count", 0, r"head_count is 0"),
        ("attention.head_count", 8, r"attn_q\.weight has the shape"),
        ("attention.head_count_kv", 3, r"4 attention heads cannot be shared out over 3 KV heads"),
        ("attention.head_count_kv", 4, r"attn_k\.weight has the shape"),
        ("attention.key_length", 63, r"head dimension 63 is odd"),
        ("attention.value_length", 32, r"value_length is 32, but must equal the head dimension 64"),
        ("rope.dimension_count", 32, r"dimension_count is 32, but must equal"),
        ("rope.freq_base", float("nan"), r"freq_base is nan"),
        ("rope.freq_base", float("inf"), r"freq_base is inf"),
        ("rope.freq_base", 0.0, r"freq_base is 0.0"),
        ("rope.scaling.type", "linear", r"rope\.scaling\.type is 'linear', which is not supported"),
        ("rope.scaling.type", "yarn", r"rope\.scaling\.factor is missing"),
        ("rope.scaling.type", 7, r"rope\.scaling\.type is 7, not a text"),
        ("attention.layer_norm_rms_epsilon", None, r"epsilon is missing"),
        ("attention.layer_norm_rms_epsilon", 0.0, r"epsilon is 0.0"),
        ("attention.layer_norm_rms_epsilon", float("nan"), r"epsilon is nan"),
        ("attention.layer_norm_rms_epsilon", -1e-6, r"epsilon is -1e-06"),
        ("attention.sliding_window", 512, r"sliding_window, which is not supported"),
        ("expert_count", 8, r"expert_count, which is not supported"),
        ("context_length", 0, r"context_length is 0"),
        ("vocab_size", 1000, r"vocab_size says 1000 tokens, but token_embd\.weight has 1024 rows"),
        ("=tokenizer.ggml.tokens", ["a"], r"tokenizer\.ggml\.tokens says 1 tokens"),
        ("=tokenizer.ggml.tokens", 7, r"tokenizer\.ggml\.tokens says None tokens"),
    ],
)
def test_a_value_that_cannot_be_is_refused(file: GgufFile, key: str, value: object, reason: str) -> None:
    with pytest.raises(ModelFileError, match=reason) as caught:
        load_config(changed(file, {key: value}) if value is not None else changed(file, {key: None}))
    assert caught.value.fix


F32_NORM = TensorInfo("blk.1.attn_norm.weight", (256,), gguf.GGMLQuantizationType.F32, 0, 1024)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("token_embd.weight", lambda info: None, r"token_embd\.weight is missing"),
        ("token_embd.weight", lambda info: replace(info, shape=(1024,)), r"token_embd\.weight has the shape \(1024,\)"),
        ("token_embd.weight", lambda info: replace(info, shape=(2**40, 256)), r"token_embd\.weight has the shape"),
        ("blk.1.attn_norm.weight", lambda info: None, r"blk\.1\.attn_norm\.weight is missing"),
        ("blk.1.attn_norm.weight", lambda info: replace(info, shape=(1, 256)), r"has the shape \(1, 256\)"),
        ("blk.1.attn_q.weight", lambda info: replace(info, ggml_type=gguf.GGMLQuantizationType.I32), r"block type I32"),
        ("output.weight", lambda info: F32_NORM, r"blk\.1\.attn_norm\.weight has the shape"),
        (
            "blk.0.attn_sinks.weight",
            lambda info: F32_NORM,
            r"1 tensors that this family does not use, such as 'blk\.0\.attn_sinks",
        ),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(
    file: GgufFile, name: str, change: Callable[[TensorInfo | None], TensorInfo | None], reason: str
) -> None:
    with pytest.raises(ModelFileError, match=reason):
        load_config(changed(file, tensors={name: change(file.tensors.get(name))}))


def test_qwen2_must_have_its_biases(tmp_path: Path) -> None:
    with (
        GgufFile.open(tiny_model(tmp_path, arch="qwen2")) as file,
        pytest.raises(ModelFileError, match=r"attn_k\.bias is missing"),
    ):
        load_config(changed(file, tensors={"blk.0.attn_k.bias": None}))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_implies_exactly_the_tensors_of_its_file(files: dict[str, GgufFile], family: str) -> None:
    file = files[family]
    config = load_config(file)
    assert config.family == family
    assert set(tensor_shapes(config)) == set(file.tensors)


def test_a_hybrid_is_read(files: dict[str, GgufFile]) -> None:
    config = load_config(files["qwen35"])
    assert (config.num_layers, config.delta_layers) == (8, frozenset({0, 1, 2, 4, 5, 6}))
    assert config.delta == DeltaShape(k_heads=2, v_heads=6, head_dim=128, conv_taps=4)
    assert (config.head_dim, config.rope_dim, config.has_attention_gate, config.has_qk_norm) == (64, 16, True, True)
    assert config.mtp_tensors == frozenset({"nextn.shared_head_norm.weight"})


def test_experts_are_read(files: dict[str, GgufFile]) -> None:
    assert load_config(files["qwen3moe"]).experts == Experts(8, 2, 256, 0)
    assert load_config(files["qwen35moe"]).experts == Experts(8, 2, 256, 256)


def test_the_file_says_which_layers_are_recurrent(files: dict[str, GgufFile]) -> None:
    flags = np.array([True, True, True, False] * 2 + [False])
    keys = {"attention.recurrent_layers": flags, "full_attention_interval": None}
    assert load_config(changed(files["qwen35"], keys)).delta_layers == {0, 1, 2, 4, 5, 6}
    per_layer = np.array([0, 0, 0, 2, 0, 0, 0, 2, 2], np.int32)
    assert load_config(changed(files["qwen35"], {"attention.head_count_kv": per_layer})).kv_heads == 2


@pytest.mark.parametrize("width", [(256,), (1, 256)])
def test_the_gate_of_the_shared_expert_may_be_a_row(files: dict[str, GgufFile], width: tuple[int, ...]) -> None:
    name = "blk.0.ffn_gate_inp_shexp.weight"
    file = files["qwen35moe"]
    load_config(changed(file, tensors={name: replace(file.tensors[name], shape=width)}))


@pytest.mark.parametrize(
    ("family", "key", "value", "reason"),
    [
        ("qwen3", "attention.key_length", None, r"attention.value_length is 128, but must equal the head dimension 64"),
        ("qwen3", "rope.scaling.type", np.array([1]), r"rope\.scaling\.type is .* not a text"),
        ("qwen3", "expert_count", 8, r"expert_count, which is not supported"),
        ("qwen3moe", "expert_count", None, r"expert_count is missing"),
        ("qwen3moe", "expert_count", 2**31, r"not a whole number from 1 to 16384"),
        ("qwen3moe", "expert_count", 9, r"ffn_gate_inp\.weight has the shape \(8, 256\), but the metadata implies \(9, 256\)"),
        ("qwen3moe", "expert_used_count", 9, r"expert_used_count is 9, not a whole number from 1 to 8"),
        ("qwen3moe", "expert_gating_func", 2, r"expert_gating_func is 2"),
        ("qwen3moe", "expert_feed_forward_length", 512, r"ffn_gate_exps\.weight has the shape"),
        ("qwen35", "block_count", 1, r"only, not the model"),
        ("qwen35", "nextn_predict_layers", 2, r"nextn_predict_layers is 2, not a whole number from 0 to 1"),
        ("qwen35", "nextn_predict_layers", 0, r"blk\.8\.attn_qkv|blk\.8\.attn_q\.weight|blk\.8\.nextn"),
        ("qwen35", "full_attention_interval", 0, r"full_attention_interval is 0"),
        ("qwen35", "full_attention_interval", None, r"full_attention_interval is missing"),
        ("qwen35", "full_attention_interval", 3, r"blk\.2\.attn_q\.weight is missing"),
        ("qwen35", "attention.recurrent_layers", np.array([True]), r"recurrent_layers is .*, not 9 booleans"),
        ("qwen35", "attention.recurrent_layers", np.ones(9, np.int32), r"not 9 booleans"),
        ("qwen35", "attention.head_count_kv", np.array([0, 2, 4], np.int32), r"differs from layer to layer"),
        ("qwen35", "attention.head_count_kv", np.array([0, 0], np.int32), r"head_count_kv is 0"),
        ("qwen35", "rope.dimension_count", 15, r"dimension_count is 15, which is odd"),
        ("qwen35", "rope.dimension_count", 66, r"dimension_count is 66, not a whole number from 2 to 64"),
        ("qwen35", "ssm.time_step_rank", 5, r"5 V heads cannot be shared out over 2 K heads"),
        ("qwen35", "ssm.inner_size", 100, r"inner_size is 100, but must equal"),
        ("qwen35", "ssm.state_size", 64, r"inner_size is 768, but must equal"),
        ("qwen35", "ssm.conv_kernel", 5, r"ssm_conv1d\.weight has the shape \(1280, 4\), but the metadata implies \(1280, 5\)"),
        ("qwen35", "ssm.conv_kernel", 2**20, r"conv_kernel is 1048576"),
        ("qwen35moe", "expert_shared_feed_forward_length", None, r"expert_shared_feed_forward_length is missing"),
    ],
)
def test_a_value_that_cannot_be_in_its_family_is_refused(
    files: dict[str, GgufFile], family: str, key: str, value: object, reason: str
) -> None:
    with pytest.raises(ModelFileError, match=reason):
        load_config(changed(files[family], {key: value}))


@pytest.mark.parametrize("name", ["blk.8.nextn.eh_proj.weight", "blk.8.attn_q.weight", "blk.0.ssm_a", "blk.3.attn_q_norm.weight"])
def test_a_hybrid_must_have_all_its_tensors(files: dict[str, GgufFile], name: str) -> None:
    with pytest.raises(ModelFileError, match=rf"{name} is missing"):
        load_config(changed(files["qwen35"], tensors={name: None}))


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}


def test_yarn_is_read(files: dict[str, GgufFile]) -> None:
    assert load_config(changed(files["qwen3"], YARN)).yarn == Yarn(4.0, 32768)
    keys = YARN | {"rope.scaling.original_context_length": 4096, "rope.scaling.yarn_beta_fast": 32.0}
    assert load_config(changed(files["qwen3"], keys)).yarn == Yarn(4.0, 4096)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.factor", 0.5),
        ("rope.scaling.factor", float("nan")),
        ("rope.scaling.original_context_length", 0),
        ("rope.scaling.yarn_beta_fast", 16.0),
        ("rope.scaling.attn_factor", 2.0),
        ("rope.freq_base", 1.0),
    ],
)
def test_yarn_that_cannot_be_is_refused(files: dict[str, GgufFile], key: str, value: float) -> None:
    with pytest.raises(ModelFileError, match=key):
        load_config(changed(files["qwen3"], {**YARN, key: value}))
