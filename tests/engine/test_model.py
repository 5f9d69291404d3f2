"""Hyperparameters and tensors: read for both families, refused by name where they are wrong."""

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
from quadjet.engine.model import RopeStyle, load_config, tensor_shapes
from tiny_models import tiny_model


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return GgufFile.open(tiny_model(tmp_path_factory.mktemp("models"), arch=request.param))


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


def test_both_families_are_read(file: GgufFile) -> None:
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
        ("=general.architecture", "gpt2", r"family 'gpt2'; supported: llama, qwen2"),
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
        ("rope.scaling.type", "yarn", r"rope\.scaling\.type is 'yarn', which is not supported"),
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
        ("=split.count", 2, r"one part of a model split"),
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
