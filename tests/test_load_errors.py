"""What cannot be loaded is refused before it is read, with the file, the tensor and the way out."""

from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.errors import CheckpointError, ConfigError, UnsupportedModelError
from poros.model.build import from_shape
from tests import checkpoints
from tests.checkpoints import one_thread  # noqa: F401


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.save(tmp_path, "llama")


def load(folder: str | Path, **options: Any) -> Any:
    return poros.load(folder, **{"dtype": "float32", "device": "cpu", **options})


def test_a_family_that_is_not_verified_is_refused_before_its_weights_are_looked_at(folder: Path) -> None:
    checkpoints.edit_json(folder / "config.json", lambda config: config.update(model_type="mamba2"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="'mamba2' is not supported"):
        load(folder)


def test_a_family_that_transformers_does_not_know_is_refused_by_name(folder: Path) -> None:
    checkpoints.edit_json(folder / "config.json", lambda config: config.update(model_type="llama9"))
    with pytest.raises(UnsupportedModelError, match="'llama9' is not supported"):
        load(folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "not valid JSON"), ("[]", "does not say its model_type"), ('{"a": 1}', "does not say its model_type")],
)
def test_a_configuration_that_is_none_is_refused(folder: Path, text: str, reason: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=reason):
        load(folder)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config.json, so it is not a saved model"):
        load(tmp_path)


def test_a_configuration_that_transformers_cannot_parse_is_refused(folder: Path) -> None:
    checkpoints.edit_json(folder / "config.json", lambda config: config.update(hidden_size="wide"))
    with pytest.raises(CheckpointError, match=r"the config.json of .* cannot be read as that of a llama model"):
        load(folder)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    checkpoints.rewrite(folder, lambda held: held.pop(name))
    with pytest.raises(CheckpointError, match=rf"the model needs '{name}', which the checkpoint"):
        load(folder)


def test_a_missing_layer_is_named_with_how_much_is_missing(folder: Path) -> None:
    checkpoints.edit_json(folder / "config.json", lambda config: config.update(num_hidden_layers=4))
    with pytest.raises(CheckpointError, match=r"needs 'model.layers.3.input_layernorm.weight' and 8 others"):
        load(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_a_missing_head_is_an_error_unless_it_is_tied(tmp_path: Path, tied: bool) -> None:
    folder = checkpoints.save(tmp_path, "llama", tied=tied)
    lost = ["model.embed_tokens.weight"] if tied else ["lm_head.weight"]
    checkpoints.rewrite(folder, lambda held: [held.pop(name) for name in lost])
    with pytest.raises(CheckpointError, match="lm_head"):
        load(folder)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("quantization", ["nf4", None])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path, name: str, quantization: Any) -> None:
    checkpoints.rewrite(folder, lambda held: held.update({name: held[name][:-64].clone()}))
    with pytest.raises(CheckpointError, match=rf"'{name}' has shape \(.*\) in the checkpoint, but config.json asks"):
        load(folder, quantization=quantization)


def test_an_expert_that_is_missing_or_misshapen_is_refused(tmp_path: Path) -> None:
    """Experts are merged on the way in, so their shapes show only then."""
    folder = checkpoints.save(tmp_path, "qwen3_moe")
    expert = "model.layers.1.mlp.experts.2.down_proj.weight"
    whole = (folder / "model.safetensors").read_bytes()
    checkpoints.rewrite(folder, lambda held: held.pop(expert))
    with pytest.raises(CheckpointError, match=r"'model.layers.1.mlp.experts.down_proj' has shape \(3, "):
        load(folder)
    (folder / "model.safetensors").write_bytes(whole)
    checkpoints.rewrite(folder, lambda held: held.update({expert: held[expert][:-1].clone()}))
    with pytest.raises(CheckpointError, match=r"the tensors of 'model.layers.1.mlp.experts.down_proj' cannot be load"):
        load(folder)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"quantization": "int8"}, "quantization is 'int8'; it must be 'nf4' or None"),
        ({"dtype": "float8"}, "dtype is 'float8'; it must be one of bfloat16, float16, float32"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"compute_dtype": "half"}, "compute_dtype is 'half'"),
        ({"device": "meta"}, "'meta' is not supported"),
        ({"block_size": 0}, "block_size is 0"),
        ({"slots": 0}, "slots is 0"),
        ({"attn_implementation": "nonsense"}, "attn_implementation 'nonsense' cannot be used"),
    ],
)
def test_a_setting_outside_its_limits_is_refused(folder: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(folder, **options)


def test_a_shape_that_is_not_shipped_is_looked_up_as_a_model() -> None:
    with pytest.raises(CheckpointError, match="'qwen9-1b' is not a folder, and the hub does not give it"):
        from_shape("qwen9-1b", device="cpu")


def test_a_shape_of_another_family_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="glm4_moe"):
        from_shape("glm-4.5-air", device="cpu")
