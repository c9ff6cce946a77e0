"""Adapters are put where PEFT puts them, and written to disk whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

import poros
from poros.errors import CheckpointError, ConfigError
from poros.model import adapter
from poros.model.adapter import add_lora, save_adapter
from tests import checkpoints, tiny
from tests.checkpoints import one_thread  # noqa: F401

WEIGHTS = "adapter_model.safetensors"


def adapted(family: str = "llama", **options: Any) -> PeftModel:
    options = {"rank": 4, "alpha": 8, "seed": 1, **options}
    return add_lora(tiny.build(family, lora=False), **options)


def trainable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_the_adapters_are_pefts_own() -> None:
    base = tiny.build("llama", lora=False)
    torch.manual_seed(1)
    expected = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    found = trainable(adapted())
    assert list(found) == list(trainable(expected))
    assert len(found) == 2 * 7 * 7
    for name, parameter in trainable(expected).items():
        assert parameter.dtype == found[name].dtype == torch.float32
        assert torch.equal(found[name], parameter), name


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen3_5"])
def test_all_linear_of_a_multimodal_model_means_its_decoder_layers(family: str) -> None:
    """Text sends no gradient through the towers, so an adapter there would never train."""
    model = adapted(family)
    assert all(".language_model.layers." in name for name in trainable(model))
    model(**tiny.batch(family)).loss.backward()
    ends = [name for name, parameter in trainable(model).items() if "lora_B" in name and not parameter.grad.any()]
    assert ends == []


def test_named_modules_and_patterns_are_passed_on() -> None:
    assert {name.split(".")[-4] for name in trainable(adapted(target_modules=["q_proj", "v_proj"]))} == {
        "q_proj",
        "v_proj",
    }
    assert len(trainable(adapted(target_modules=r".*layers\.0\.mlp\.up_proj"))) == 2


def test_a_seed_decides_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (trainable(adapted(seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    differ = [name for name in first if not torch.equal(first[name], other[name])]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert differ == [name for name in first if "lora_A" in name]


def test_adapters_of_a_prepared_model_are_those_of_its_resident_twin() -> None:
    expected = trainable(adapted("qwen2"))
    prepared = poros.prepare(tiny.build("qwen2", lora=False), device="cpu")
    model = add_lora(prepared, rank=4, alpha=8, seed=1)
    found = trainable(model)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    model(**tiny.batch("qwen2")).loss.backward()
    assert all(parameter.grad is not None for parameter in found.values())


def test_dropout_on_fused_experts_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"Fused experts take no dropout: set it to 0, or adapt the attention only"):
        adapted("qwen3_moe", dropout=0.1)
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert len(trainable(adapted("qwen3_moe", dropout=0.1, target_modules=attention))) == 2 * 4 * 7
    assert len(trainable(adapted("gpt_oss", dropout=0.1))) == 2 * 4 * 7


def test_targets_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"PEFT cannot add these adapters.*nowhere.*Check target_modules"):
        adapted(target_modules=["nowhere"])


def test_the_file_is_that_of_save_pretrained(tmp_path: Path) -> None:
    model = adapted()
    model.save_pretrained(tmp_path / "expected")
    save_adapter(model, tmp_path / "deep/er/found")
    assert names_in(tmp_path / "deep/er/found") == names_in(tmp_path / "expected")
    for name in names_in(tmp_path / "expected"):
        assert (tmp_path / "deep/er/found" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    assert names_in(tmp_path / "deep/er") == ["found"]


def test_the_file_of_a_prepared_model_is_that_of_the_resident_one(tmp_path: Path) -> None:
    model = adapted("gemma3_text")
    save_adapter(model, tmp_path / "resident")
    save_adapter(poros.prepare(model, device="cpu"), tmp_path / "prepared")
    assert (tmp_path / "prepared" / WEIGHTS).read_bytes() == (tmp_path / "resident" / WEIGHTS).read_bytes()
    fresh = PeftModel.from_pretrained(tiny.build("gemma3_text", lora=False), tmp_path / "prepared")
    with torch.no_grad():
        batch = tiny.batch("gemma3_text")
        assert torch.equal(fresh.eval()(**batch).logits, model.eval()(**batch).logits)


def test_several_adapters_are_saved_in_folders_of_their_own(tmp_path: Path) -> None:
    model = adapted()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    save_adapter(model, tmp_path / "out")
    save_adapter(model, tmp_path / "out")  # and over themselves
    assert len(load_file(tmp_path / "out" / WEIGHTS)) == 2 * 7 * 7
    assert len(load_file(tmp_path / "out/second" / WEIGHTS)) == 2 * 7


def test_saving_over_an_adapter_replaces_it_and_keeps_what_else_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    save_adapter(adapted(), folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("---\nbase_model: mine\n---\nMy own words.\n")
    before = (folder / WEIGHTS).read_bytes()
    save_adapter(adapted(seed=2), folder)
    assert (folder / WEIGHTS).read_bytes() != before
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert "My own words." in (folder / "README.md").read_text()


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("moment", ["save", "flush"])
def test_a_crash_leaves_the_old_adapter_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, existing: bool
) -> None:
    folder = tmp_path / "out"
    model = adapted()
    if existing:
        save_adapter(model, folder)
    before = {name: (folder / name).read_bytes() for name in names_in(folder)} if existing else None

    def crash(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    if moment == "save":
        monkeypatch.setattr(model.peft_config["default"], "save_pretrained", crash)  # after the weights
    else:
        monkeypatch.setattr(adapter, "_flush", crash)
    with pytest.raises(KeyboardInterrupt):
        save_adapter(model, folder)
    after = {name: (folder / name).read_bytes() for name in names_in(folder)} if folder.exists() else None
    assert after == before
    assert names_in(tmp_path) == (["out"] if existing else [])


def test_everything_is_flushed_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1])
    monkeypatch.setattr(Path, "rename", lambda self, to: (events.append("named"), rename(self, to))[1])
    monkeypatch.setattr(Path, "replace", lambda self, to: (events.append("named"), replace(self, to))[1])
    model = adapted()
    for _ in range(2):  # a new folder, then an existing one
        events.clear()
        save_adapter(model, tmp_path / "out")
        flushed = [Path(event).name for event in events[: events.index("named")]]
        assert {WEIGHTS, "adapter_config.json", "README.md"} < set(flushed)
        assert events[-1] == str(tmp_path)  # the rename itself


def test_an_adapter_without_tensors_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/MakazhanAlpamys/Soup/issues/1009"""
    model = adapted()
    monkeypatch.setattr("peft.peft_model.get_peft_model_state_dict", lambda *_, **__: {})
    with pytest.raises(CheckpointError, match="no adapter tensor would be saved"):
        save_adapter(model, tmp_path / "out")
    assert names_in(tmp_path) == []


def test_a_bare_model_has_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a LlamaForCausalLM has no adapter to save"):
        save_adapter(tiny.build("llama", lora=False), tmp_path / "out")


def test_the_adapter_names_the_model_that_it_was_trained_on(tmp_path: Path) -> None:
    base = checkpoints.save(tmp_path / "base", "llama")
    model = add_lora(poros.load(base, dtype="float32", device="cpu"), rank=4, alpha=8)
    save_adapter(model, tmp_path / "out")
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["base_model_name_or_path"] == str(base)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
