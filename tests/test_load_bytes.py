"""What ``poros.load`` gives is what ``from_pretrained`` gives, to the byte: https://github.com/huggingface/transformers.

Whatever the family, the files' layout and the precision; streamed or resident.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import poros
from poros.model.quantize import is_4bit
from tests import checkpoints, tiny
from tests.checkpoints import one_thread  # noqa: F401


def load(folder: Path, **options: Any) -> Any:
    return poros.load(folder, **{"dtype": "float32", "device": "cpu", **options})


def logits(model: Any, family: str) -> torch.Tensor:
    image = family in ("gemma3", "gemma4", "qwen3_5")
    with torch.no_grad():
        return model(**tiny.batch(family, image=image)).logits


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_every_family_loads_to_the_bytes_of_from_pretrained(family: str, tmp_path: Path) -> None:
    """Tied, multimodal and renamed, fused experts, hybrid layers: streamed, run, and taken back apart."""
    folder = checkpoints.save(tmp_path, family)
    expected = checkpoints.resident(folder, quantization="nf4-dq")
    model = load(folder, block_size=2)
    assert type(model) is type(expected)
    assert torch.equal(logits(model, family), logits(expected, family))
    poros.unprepare(model)
    checkpoints.assert_same(model, expected)


@pytest.mark.parametrize("shard_size", ["1GB", "100KB"], ids=["one-file", "sharded"])
@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("nf4", "float32"), ("nf4-dq", "bfloat16"), (None, "float32"), (None, "bfloat16"), (None, "float16")],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_every_precision_and_layout(
    family: str, quantization: str | None, dtype: str, shard_size: str, tmp_path: Path
) -> None:
    folder = checkpoints.save(tmp_path, family, shard_size=shard_size)
    assert len(list(folder.glob("*.safetensors"))) > 1 or shard_size == "1GB"
    expected = checkpoints.resident(folder, quantization=quantization, dtype=getattr(torch, dtype))
    model = load(
        folder,
        quantization=quantization and "nf4",
        double_quant=quantization == "nf4-dq",
        dtype=dtype,
        stream=False,
    )
    checkpoints.assert_same(model, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tie_is_kept_and_only_a_tie(tied: bool, tmp_path: Path) -> None:
    model = load(checkpoints.save(tmp_path, "llama", tied=tied))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_a_checkpoint_that_holds_the_other_side_of_a_tie(tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path, "llama", tied=True)
    checkpoints.rewrite(folder, lambda held: held.update({"lm_head.weight": held.pop("model.embed_tokens.weight")}))
    model = load(folder, stream=False)
    checkpoints.assert_same(model, checkpoints.resident(folder, quantization="nf4-dq"))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_model_says_of_itself_what_from_pretrained_says(tmp_path: Path) -> None:
    """PEFT and the Trainer decide by these attributes how to treat a 4-bit model."""
    folder = checkpoints.save(tmp_path, "qwen2")
    GenerationConfig(do_sample=True, top_k=7).save_pretrained(folder)
    expected = checkpoints.resident(folder, quantization="nf4-dq")
    model = load(folder, stream=False, attn_implementation="sdpa")
    for name in ("is_loaded_in_4bit", "is_quantized", "quantization_method", "training", "name_or_path", "dtype"):
        assert getattr(model, name) == getattr(expected, name), name
    assert type(model.hf_quantizer) is type(expected.hf_quantizer)
    assert model.hf_quantizer.is_trainable
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    assert model.generation_config.top_k == 7
    assert model.get_memory_footprint() == expected.get_memory_footprint()


def test_generation_settings_come_from_the_configuration_where_there_is_no_file_of_them(tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path, "gemma3")
    (folder / "generation_config.json").unlink()
    model = load(folder, quantization=None, stream=False)
    assert model.generation_config.to_dict() == checkpoints.resident(folder).generation_config.to_dict()


def test_an_unquantised_model_does_not_claim_to_be_quantised(tmp_path: Path) -> None:
    model = load(checkpoints.save(tmp_path, "llama"), quantization=None, stream=False)
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model.config, "quantization_config")


def test_everything_is_frozen_and_stays_packed(tmp_path: Path) -> None:
    """Poros trains adapters only; and an evaluation must not repack 4-bit weights in place, as some CPUs would."""
    model = load(checkpoints.save(tmp_path, "qwen2"))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    linears = [module for module in model.modules() if is_4bit(module)]
    assert len(linears) == 3 * 7
    assert not any(linear.support_avx512bf16_for_cpu for linear in linears)


def test_the_compute_dtype_is_the_dtype_unless_told(tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path, "llama")
    for options, expected in (
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({"dtype": "bfloat16", "compute_dtype": "float32"}, torch.float32),
    ):
        model = load(folder, stream=False, **options)
        assert {module.compute_dtype for module in model.modules() if is_4bit(module)} == {expected}
        assert model.model.norm.weight.dtype == torch.bfloat16


def test_loading_leaves_the_global_state_alone(tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path, "qwen3_5")
    random, default = torch.get_rng_state(), torch.get_default_dtype()
    load(folder, dtype="bfloat16")
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_default_dtype() is default


def test_a_saved_copy_is_the_same_model(tmp_path: Path) -> None:
    """The renamings that were applied on the way in are undone on the way out, as after ``from_pretrained``."""
    folder = checkpoints.save(tmp_path / "first", "gemma3")
    load(folder, quantization=None, stream=False).save_pretrained(tmp_path / "second")
    assert (tmp_path / "second/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_tensors_that_the_model_has_no_use_for_are_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoints.save(tmp_path, "llama")
    checkpoints.rewrite(folder, lambda held: held.update({"extra.weight": torch.zeros(1)}))
    load(folder, stream=False)
    assert "1 tensors are not part of the model and were not loaded, such as extra.weight" in caplog.text
