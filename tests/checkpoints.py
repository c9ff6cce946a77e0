"""Tiny checkpoints on disk, ways to damage them, and the comparison of two models byte by byte."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig, PreTrainedModel

from poros.families import MULTIMODAL
from poros.model.quantize import keep_weights_as_packed
from tests import tiny


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Equal bits need equal threads, and on a busy machine more of them are slower. Importing it turns it on."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save(folder: Path, family: str, *, shard_size: str = "1GB", **options: Any) -> Path:
    """Save an unquantised tiny model (see :func:`tests.tiny.build`) into ``folder`` and return it."""
    if not family.startswith("gemma4"):  # whose shared keys and values need all of its layers
        options = {"num_layers": 3, **options}
    options = {"quant": None, "lora": False, **options}
    tiny.build(family, **options).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def resident(
    folder: Path, *, quantization: str | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> PreTrainedModel:
    """What ``from_pretrained`` makes of ``folder``; ``quantization`` is ``"nf4"``, ``"nf4-dq"`` or None."""
    options: dict[str, Any] = {"dtype": dtype, "device_map": {"": device}}
    if quantization is not None:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=quantization == "nf4-dq",
            bnb_4bit_compute_dtype=dtype,
        )
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    auto = AutoModelForImageTextToText if model_type in MULTIMODAL else AutoModelForCausalLM
    model = auto.from_pretrained(folder, **options)
    keep_weights_as_packed(model)  # or a first evaluation rewrites them on a CPU with AVX512-BF16
    return model


def tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that the forward reads: parameters, buffers of both kinds, and quantisation statistics."""
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        yield name, tensor
        state = getattr(tensor, "quant_state", None)
        for level, part in (("", state), (".nested", getattr(state, "state2", None))):
            if part is not None:
                yield f"{name}{level}.absmax", part.absmax
                yield f"{name}{level}.code", part.code
                yield f"{name}{level}.about", torch.tensor([part.blocksize, *(part.shape or ())])
                if part.offset is not None:
                    yield f"{name}{level}.offset", part.offset


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    """Same modules, same tensors in the same order, bit for bit, and 4-bit weights that know their module."""
    assert {n: type(m) for n, m in model.named_modules()} == {n: type(m) for n, m in expected.named_modules()}
    found, wanted = dict(tensors(model)), dict(tensors(expected))
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        other = found[name]
        assert (other.dtype, other.shape, other.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert torch.equal(_bits(other), _bits(tensor)), name
        if getattr(tensor, "quant_state", None) is not None:
            module = model.get_submodule(name.rpartition(".")[0])
            assert module.quant_state is module.weight.quant_state, name
            assert module.weight.quant_state.dtype == tensor.quant_state.dtype, name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Let ``change`` edit the tensors of a single-file checkpoint."""
    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    held = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(held)
    save_file(held, file, metadata=metadata)


def edit_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Let ``change`` edit a JSON file."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
