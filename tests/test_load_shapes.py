"""Random weights of a real shape: the same bytes streamed and resident, different ones everywhere else."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import poros
from poros.errors import ConfigError, UnsupportedModelError
from poros.families import text_family
from poros.model.build import from_shape
from poros.model.quantize import is_4bit
from poros.model.shapes import read_shape, shape_names
from tests import checkpoints, tiny
from tests.checkpoints import one_thread  # noqa: F401

FAMILIES = ["llama", "qwen2", "gemma3_text", "gemma4", "qwen3_5", "qwen3_moe", "gpt_oss"]


def config_of(family: str) -> Any:
    return tiny.build(family, quant=None, lora=False).config


def build(shape: Any, **options: Any) -> Any:
    return from_shape(shape, **{"dtype": "float32", "device": "cpu", **options})


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_and_resident_hold_the_same_bytes(family: str) -> None:
    config = config_of(family)
    resident = build(config, stream=False, seed=3)
    streamed = build(config, block_size=2, seed=3)
    batch = tiny.batch(family)
    with torch.no_grad():
        expected, found = resident(**batch), streamed(**batch)
    assert torch.isfinite(expected.loss)
    assert torch.equal(found.logits, expected.logits)
    poros.unprepare(streamed)
    checkpoints.assert_same(streamed, resident)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", ["nf4", None])
def test_no_tensor_is_like_another_layers_or_another_seeds(family: str, quantization: str | None) -> None:
    """A layer that is served with another one's tensor must compute something else: norms and buffers included."""
    config = config_of(family)
    first, second = (build(config, quantization=quantization, stream=False, seed=seed) for seed in (0, 1))
    layers = tiny.text_layers(first)
    computed = {name for name, _ in first.named_non_persistent_buffers()}
    other = {**dict(second.named_parameters()), **dict(second.named_buffers())}
    for name, tensor in (*first.named_parameters(), *first.named_buffers()):
        assert tensor.is_floating_point() is False or torch.isfinite(tensor).all(), name
        assert torch.equal(tensor, other[name]) == (name in computed), name
    for a, b in pairwise(layers):
        twins = dict(b.named_parameters()) | dict(b.named_buffers())
        for name, tensor in (*a.named_parameters(), *a.named_buffers()):
            if name in twins and twins[name].shape == tensor.shape:
                assert not torch.equal(tensor, twins[name]), name


def test_the_precision_is_the_one_that_was_asked_for() -> None:
    model = build(config_of("qwen2"), dtype="bfloat16", compute_dtype="float32", double_quant=False, stream=False)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16, torch.uint8}
    linears = [module for module in model.modules() if is_4bit(module)]
    assert {linear.compute_dtype for linear in linears} == {torch.float32}
    assert not any(linear.weight.quant_state.nested for linear in linears)
    assert model.is_loaded_in_4bit


def test_a_build_leaves_the_random_state_and_the_given_configuration_alone() -> None:
    config = config_of("qwen3_5")
    described, random = config.to_dict(), torch.get_rng_state()
    build(config, stream=False)
    assert torch.equal(torch.get_rng_state(), random)
    assert config.to_dict() == described


def test_a_folder_gives_its_shape_without_its_weights(tmp_path: Path) -> None:
    config_of("llama").save_pretrained(tmp_path)
    model = build(tmp_path, stream=False)
    assert model.config.num_hidden_layers == len(tiny.text_layers(model)) == 7


def test_every_shipped_shape_is_a_configuration_that_transformers_reads() -> None:
    names = shape_names()
    assert len(names) > 20
    assert {"qwen2.5-32b", "qwen2.5-72b"} <= set(names)
    for name in names:
        shape = read_shape(name)
        assert AutoConfig.for_model(**shape).model_type == shape["model_type"]


def test_the_shapes_of_verified_families_can_be_built() -> None:
    refused = []
    for name in shape_names():
        try:
            text_family(read_shape(name)["model_type"])
        except UnsupportedModelError:
            refused.append(name)
    assert refused == ["glm-4.5-air"]


def test_an_unknown_shape_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"there is no shape 'qwen'; there are .*qwen2.5-72b"):
        read_shape("qwen")


def test_shapes_can_be_listed_without_torch() -> None:
    source = Path(read_shape.__code__.co_filename).read_text()
    assert "torch" not in source
    assert json.dumps(shape_names())
