"""What a benchmark's spec may say, what it comes to, and how it is told that it may not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from poros.errors import ConfigError
from poros.evidence.engines.base import METHODS, CellRequest, Lora, describe
from poros.evidence.matrix import order
from poros.evidence.spec import BenchSpec, describe_spec, file_name, first_difference, load_spec
from tests import tiny_run

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs" / "bench").glob("*.yaml"))

LEAST: dict[str, Any] = {"name": "run", "models": ["qwen2.5-7b"], "methods": ["resident"]}


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "spec.yaml"
    file.write_text(yaml.safe_dump({**LEAST, **changes}, sort_keys=False))
    return file


def read(folder: Path, **changes: Any) -> BenchSpec:
    return load_spec(write(folder, **changes))


def refusal(folder: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, **changes)
    return str(caught.value)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_shipped_specs_are_valid(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spec = load_spec(file)
    assert spec.name == file.stem
    assert all(model.are_random for model in spec.models), "a shipped spec must run without a download"


def test_the_large_spec_compares_every_method_at_the_size_of_the_claims() -> None:
    spec = load_spec(ROOT / "configs" / "bench" / "h200_qwen25_32b.yaml")
    assert {method.method for method in spec.methods} == set(METHODS)
    assert {m.block_size for m in spec.methods if m.method == "poros"} == {1}
    assert (spec.seq_len, spec.steps, spec.warmup_steps, spec.passes) == (512, 15, 3, 3)


def test_names_alone_will_do_and_mappings_say_more(tmp_path: Path) -> None:
    spec = read(
        tmp_path,
        models=["qwen2.5-7b", {"name": "mine", "shape": "qwen3-8b"}],
        methods=["resident", {"method": "poros", "block_size": 4, "slots": 2}, {"method": "poros", "label": "ours"}],
    )
    assert [model.source for model in spec.models] == ["qwen2.5-7b", "qwen3-8b"]
    assert [method.key for method in spec.methods] == ["resident", "poros-bs4-s2", "ours"]
    assert [method.shown for method in spec.methods] == ["resident", "poros, block size 4, 2 slots", "ours"]


def test_weights_are_random_for_shapes_and_bare_folders_and_real_for_the_rest(tmp_path: Path) -> None:
    bare, full = tmp_path / "bare", tmp_path / "full"
    for folder in (bare, full):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    (full / "model.safetensors").write_bytes(b"")
    names = ["qwen2.5-7b", str(bare), str(full), "Qwen/Qwen2.5-7B"]
    spec = read(tmp_path, models=names)
    assert [model.are_random for model in spec.models] == [True, True, False, False]


def test_methods_take_turns_and_models_follow_each_other(tmp_path: Path) -> None:
    spec = read(tmp_path, models=["qwen2.5-7b", "qwen3-8b"], methods=["resident", "poros"], passes=2)
    assert [(cell.model.name, number, cell.method.method) for cell, number in order(spec)] == [
        (model, number, method)
        for model in ("qwen2.5-7b", "qwen3-8b")
        for number in (1, 2)
        for method in ("resident", "poros")
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": ["poroz"]}, "methods.0: there is no method 'poroz'; there are poros, "),
        ({"methods": [{"method": "resident", "block_size": 2}]}, "resident has no block_size; poros, "),
        ({"methods": [{"method": "resident", "module": "no.such"}]}, "module 'no.such' is not an engine"),
        ({"methods": ["poros", "poros"]}, "qwen2.5-7b/poros is there twice: give each of these methods a label"),
        ({"models": [{"name": "qwen2.5-7b", "weights": "real"}]}, "qwen2.5-7b is a shape: there are no weights to it"),
        (
            {"models": [{"name": "a", "weight": "real"}]},
            "models.0.weight is not a setting. Did you mean models.weights?",
        ),
        ({"step": 3}, "step is not a setting. Did you mean steps?"),
        ({"steps": 0}, "steps is 0; expected greater than or equal to 1"),
        ({"passes": "three"}, "passes is 'three'; expected a valid integer"),
        ({"lora": {"dropout": 1.0}}, "lora.dropout is 1.0; expected less than 1"),
        ({"dataset": "wikitext"}, "dataset is 'wikitext'; write synthetic, or {path: FILE.jsonl}"),
        ({"environments": {"resident": "x"}}, "resident takes no folder of packages; poros-train, unsloth do"),
        ({"name": "a b"}, "name is 'a b'"),
        ({"seq_len": 10**8}, "seq_len is 100000000; expected less than or equal to 1048576"),
        ({"batch_size": 10**12}, "batch_size is 1000000000000; expected less than or equal to 65536"),
        ({"steps": 10**20}, "steps is 100000000000000000000; expected less than or equal to 1000000"),
        ({"lora": {"rank": 10**8}}, "lora.rank is 100000000; expected less than or equal to 65536"),
        ({"seed": 2**32}, "seed is 4294967296; expected less than or equal to 4294967295"),
        ({"methods": [{"method": "poros", "options": {"x": float("nan")}}]}, "options cannot be written into a row"),
        ({"dataset": {"path": "rows.jsonl"}}, "dataset.path is a file, but qwen2.5-7b is a shape, which has no tok"),
    ],
)
def test_what_is_wrong_is_told_with_its_line_and_its_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    text = refusal(tmp_path, **changes)
    assert said in text
    assert str(tmp_path / "spec.yaml") in text
    assert text.endswith("'poros bench matrix --settings' lists every setting.")


def test_a_wrong_setting_of_a_list_is_told_with_its_own_line(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text("name: a\nmodels: [qwen2.5-7b]\nmethods:\n  - resident\n  - method: poros\n    block_size: 0\n")
    with pytest.raises(ConfigError, match=r"spec\.yaml:6: methods\.1\.block_size is 0; expected greater than"):
        load_spec(file)


def test_the_first_setting_in_which_two_specs_differ_is_named(tmp_path: Path) -> None:
    one = read(tmp_path)
    assert first_difference(one, read(tmp_path)) is None
    assert first_difference(one, read(tmp_path, cache="elsewhere", time_limit_s=5)) is None
    assert first_difference(one, read(tmp_path, steps=9)) == "steps is 9, and was 15"
    assert first_difference(one, read(tmp_path, methods=["poros"])) == (
        "methods[0].method is 'poros', and was 'resident'"
    )


def test_real_weights_do_not_go_by_the_name_of_a_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    said = refusal(tmp_path, models=[{"name": "qwen2.5-7b", "shape": str(tmp_path)}])
    assert "name is 'qwen2.5-7b', a shape's, but the weights are real" in said


def test_files_of_passes_are_not_hidden_and_not_too_long() -> None:
    assert file_name(".hidden/resident") == "hidden__resident"
    long = file_name(f"{'folder/' * 60}a/resident"), file_name(f"{'folder/' * 60}b/resident")
    assert max(map(len, long)) < 140
    assert long[0] != long[1]


def test_a_method_that_takes_no_dropout_gets_none(tmp_path: Path) -> None:
    spec = read(tmp_path, methods=["resident", "unsloth"])
    assert [spec.lora_of(method).dropout for method in spec.methods] == [0.05, 0.0]
    assert "dropout 0" in describe("unsloth").changes


def test_folders_of_packages_come_from_the_spec_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POROS_BENCH_POROS_TRAIN", "/from/environment")
    monkeypatch.delenv("POROS_BENCH_UNSLOTH", raising=False)
    spec = read(tmp_path, environments={"unsloth": "/from/spec"})
    found = [spec.folder_of(method) for method in ("unsloth", "poros-train", "resident")]
    assert found == ["/from/spec", "/from/environment", None]


def test_settings_lists_every_setting_with_its_description() -> None:
    for command in ("run", "matrix"):
        said = tiny_run.poros("bench", command, "--settings").stdout
        for name, default, description in describe_spec():
            assert description, f"{name} has no description"
            assert f"{name}  ({default})\n    {description}" in said


@pytest.mark.parametrize("method", METHODS)
def test_every_method_names_itself_and_can_be_described_without_its_libraries(method: str) -> None:
    engine = describe(method)
    assert engine.name == method
    assert engine.title


def test_a_request_survives_the_way_to_another_process() -> None:
    request = a_request()
    assert CellRequest.parse(request.to_json()) == request
    assert CellRequest.parse(replace(request, number=2).to_json()) != request


def a_request() -> CellRequest:
    fields: dict[str, Any] = {
        "run_id": "r", "cell": "m/resident", "number": 1, "method": "resident", "module": None, "model": "m",
        "source": "qwen2.5-7b", "weights": "random", "quantization": "nf4", "double_quant": True, "dtype": "float32",
        "seq_len": 8, "batch_size": 1, "accumulation": 1, "steps": 2, "warmup_steps": 1, "path": "fast",
        "lora": Lora(4, 8, 0.05, ["q_proj"]), "dataset": None, "seed": 1, "learning_rate": 1e-3, "max_grad_norm": 1.0,
        "device": "cpu", "attention": None, "block_size": None, "slots": None,
        "resident_blocks": None, "replay": None, "options": {}, "folder": None,
        "cache": "c", "record": "r.json",
    }  # fmt: skip
    return CellRequest(**fields)


@pytest.mark.parametrize("label", ["größer", " ours", "unsloth", "ours, block size 2"])
def test_a_label_that_rows_may_not_have_is_refused_before_anything_is_measured(tmp_path: Path, label: str) -> None:
    with pytest.raises(ConfigError, match="label is"):
        read(tmp_path, methods=[{"method": "poros", "block_size": 1, "label": label}])
