"""A GGUF file loads like the checkpoint that it was made from: unpacked, then quantised a layer at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import poros
from poros.errors import CheckpointError
from tests import checkpoints, tiny
from tests.checkpoints import one_thread  # noqa: F401

gguf = pytest.importorskip("gguf")

FILE = "tiny.F32.gguf"
NAMES = {  # transformers -> GGUF
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows in the order in which GGUF stores the rotary halves."""
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


@pytest.fixture
def model() -> LlamaForCausalLM:
    built: LlamaForCausalLM = tiny.build("llama", quant=None, lora=False, num_layers=3, tied=False)
    return built


@pytest.fixture
def folder(tmp_path: Path, model: LlamaForCausalLM) -> Path:
    config: LlamaConfig = model.config
    writer = gguf.GGUFWriter(str(tmp_path / FILE), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    held = model.state_dict()
    tensors = {
        "token_embd.weight": held["model.embed_tokens.weight"],
        "output.weight": held["lm_head.weight"],
        "output_norm.weight": held["model.norm.weight"],
    }
    for layer in range(config.num_hidden_layers):
        for name, stored in NAMES.items():
            weight = held[f"model.layers.{layer}.{name}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(stored)
            tensors[f"blk.{layer}.{stored}.weight"] = weight if heads is None else permuted(weight, heads)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path


@pytest.mark.parametrize("quantization", ["nf4", None])
def test_a_gguf_file_gives_the_model_that_it_was_made_from(
    folder: Path, model: LlamaForCausalLM, quantization: str | None, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "saved")
    expected = checkpoints.resident(tmp_path / "saved", quantization=quantization and "nf4-dq")
    loaded = poros.load(folder, gguf_file=FILE, quantization=quantization, dtype="float32", device="cpu")
    batch = tiny.batch("llama")
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, expected(**batch).logits)
    poros.unprepare(loaded)
    checkpoints.assert_same(loaded, expected)
    assert getattr(loaded, "is_loaded_in_4bit", False) == (quantization is not None)
    assert getattr(loaded.config, "quantization_config", None) == getattr(expected.config, "quantization_config", None)


def test_a_gguf_file_that_is_not_there_is_refused_with_those_that_are(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"has no file 'other.gguf' \(GGUF files there: {FILE}\)"):
        poros.load(folder, gguf_file="other.gguf", device="cpu")


def test_a_corrupt_gguf_file_is_refused(folder: Path) -> None:
    (folder / FILE).write_bytes(b"not a GGUF file at all, but long enough to be read")
    with pytest.raises(CheckpointError, match=rf"{FILE} cannot be read as a GGUF model"):
        poros.load(folder, gguf_file=FILE, device="cpu")
