"""Checkpoints that are in 4 bits already: whole, in part, or broken.

Parts of them in 16 bits where the skip list does not say so, packed weights without their state:
https://github.com/unslothai/unsloth/issues/4208, https://github.com/unslothai/unsloth/issues/10276
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import poros
from poros.errors import CheckpointError, UnsupportedModelError
from poros.model.quantize import is_4bit
from tests import checkpoints, tiny
from tests.checkpoints import one_thread  # noqa: F401

DOWN = "model.layers.1.mlp.down_proj"
STATE = f"{DOWN}.weight.quant_state.bitsandbytes__nf4"


def load(folder: Path, **options: Any) -> Any:
    return poros.load(folder, **{"dtype": "float32", "device": "cpu", **options})


def save_packed(folder: Path, family: str = "llama", **settings: Any) -> Path:
    """Save a tiny model in 4 bits, as its user would: load it quantised, save it."""
    source = checkpoints.save(folder / "source", family)
    settings = {"bnb_4bit_compute_dtype": torch.float32, "bnb_4bit_quant_type": "nf4", **settings}
    config = BitsAndBytesConfig(load_in_4bit=True, **settings)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, quantization_config=config)
    model.save_pretrained(folder / "packed")
    return folder / "packed"


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_packed_checkpoint_is_taken_as_it_is(
    family: str, double_quant: bool, storage: torch.dtype, tmp_path: Path
) -> None:
    """Whatever dtype the packed bytes pretend to have."""
    folder = save_packed(tmp_path, family, bnb_4bit_use_double_quant=double_quant, bnb_4bit_quant_storage=storage)
    expected = checkpoints.resident(folder)
    model = load(folder, double_quant=not double_quant)  # says nothing about weights that are quantised already
    batch = tiny.batch(family)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, expected(**batch).logits)
    poros.unprepare(model)
    checkpoints.assert_same(model, expected)
    assert model.config.to_dict() == expected.config.to_dict()


def test_the_compute_dtype_can_be_overridden(tmp_path: Path) -> None:
    folder = save_packed(tmp_path, bnb_4bit_compute_dtype=torch.bfloat16)
    stored, asked = load(folder, stream=False), load(folder, stream=False, compute_dtype="float32")
    assert {module.compute_dtype for module in stored.modules() if is_4bit(module)} == {torch.bfloat16}
    assert {module.compute_dtype for module in asked.modules() if is_4bit(module)} == {torch.float32}


@pytest.mark.parametrize("listed", [True, False], ids=["in-the-skip-list", "not-in-the-skip-list"])
def test_a_linear_that_was_left_in_full_precision_stays_so(tmp_path: Path, listed: bool) -> None:
    folder = save_packed(tmp_path, llm_int8_skip_modules=["lm_head", DOWN])
    expected = checkpoints.resident(folder)
    if not listed:  # or under a name that no longer matches
        checkpoints.edit_json(
            folder / "config.json",
            lambda config: config["quantization_config"].update(llm_int8_skip_modules=["lm_head", "layers.1.down"]),
        )
    model = load(folder)
    assert type(model.get_submodule(DOWN)) is nn.Linear
    batch = tiny.batch("llama")
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, expected(**batch).logits)
    poros.unprepare(model)
    checkpoints.assert_same(model, expected)


def test_a_linear_that_is_packed_although_the_skip_list_names_it_stays_packed(tmp_path: Path) -> None:
    folder = save_packed(tmp_path)
    expected = checkpoints.resident(folder)
    checkpoints.edit_json(
        folder / "config.json", lambda config: config["quantization_config"].update(llm_int8_skip_modules=["down_proj"])
    )
    model = load(folder, stream=False)
    assert is_4bit(model.get_submodule(DOWN))
    checkpoints.assert_same(model, expected)


@pytest.mark.parametrize("part", ["absmax", "quant_map", "nested_absmax", "nested_quant_map"])
def test_a_packed_weight_without_a_part_of_its_state_is_refused_by_name(tmp_path: Path, part: str) -> None:
    folder = save_packed(tmp_path, bnb_4bit_use_double_quant=True)
    checkpoints.rewrite(folder, lambda held: held.pop(f"{DOWN}.weight.{part}"))
    with pytest.raises(CheckpointError, match=rf"'{DOWN}.weight' is packed in 4 bits, but its {DOWN}.weight.{part} is"):
        load(folder)


@pytest.mark.parametrize("storage", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("keep", ["statistics", "nothing"])
def test_a_packed_weight_without_its_quant_state_is_refused_by_name(
    tmp_path: Path, keep: str, storage: torch.dtype
) -> None:
    folder = save_packed(tmp_path, bnb_4bit_quant_storage=storage)
    lost = [STATE] if keep == "statistics" else [STATE, f"{DOWN}.weight.absmax", f"{DOWN}.weight.quant_map"]
    checkpoints.rewrite(folder, lambda held: [held.pop(name) for name in lost])
    with pytest.raises(CheckpointError, match=rf"'{DOWN}.weight'.* is packed in 4 bits, but its {STATE} is missing"):
        load(folder)


def test_a_packed_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = save_packed(tmp_path)
    other = "model.layers.1.self_attn.k_proj.weight"

    def swap(held: dict[str, torch.Tensor]) -> None:
        for name in [name for name in held if name.startswith(f"{DOWN}.weight")]:
            held[name] = held[name.replace(f"{DOWN}.weight", other)].clone()

    checkpoints.rewrite(folder, swap)
    with pytest.raises(CheckpointError, match=rf"4-bit weight of {DOWN} has shape \(64, 128\); \(128, 192\) is needed"):
        load(folder)


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes 8-bit"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
    ],
)
def test_another_quantisation_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], method: str) -> None:
    folder = checkpoints.save(tmp_path, "llama")
    checkpoints.edit_json(folder / "config.json", lambda config: config.update(quantization_config=settings))
    with pytest.raises(UnsupportedModelError, match=rf"already quantised \({method}\).*16-bit checkpoint"):
        load(folder)
