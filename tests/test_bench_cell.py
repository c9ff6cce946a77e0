"""One pass of one method: what it records, and what every kind of failure is told as."""

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from poros.errors import ConfigError
from poros.evidence import provenance
from poros.evidence.cell import run_cell, status_of
from poros.evidence.engines.base import CellRequest, Lora
from poros.evidence.engines.unsloth_checkpoint import make_checkpoint
from poros.evidence.process import run_request
from poros.model.memory import HostMemory, require_host_memory
from tests import tiny_run
from tests.bench_tiny import SHAPES, steady_environment

__all__ = ["steady_environment"]  # pytest finds it here


def a_request(folder: Path, method: str, **changes: Any) -> CellRequest:
    fields: dict[str, Any] = {
        "run_id": "r", "cell": f"one/{method}", "number": 1, "method": method, "module": None, "model": "one",
        "source": str(SHAPES / "qwen3-tiny"), "weights": "random", "quantization": "nf4", "double_quant": True,
        "dtype": "float32", "seq_len": 16, "batch_size": 2, "accumulation": 2, "steps": 2, "warmup_steps": 1,
        "path": "fast", "lora": Lora(2, 4, 0.05, "all-linear"), "dataset": None, "seed": 1, "learning_rate": 1e-2,
        "max_grad_norm": 1.0, "device": "cpu", "attention": "sdpa", "block_size": None, "slots": None,
        "resident_blocks": None, "replay": None, "options": {},
        "folder": None, "cache": str(folder / "cache"), "record": str(folder / "record.json"), "started": time.time(),
    }  # fmt: skip
    return CellRequest(**{**fields, **changes})


def outcome(folder: Path, method: str, **changes: Any) -> dict[str, Any]:
    with tiny_run.one_thread():
        return run_cell(a_request(folder, method, **changes))


def test_the_trainer_and_checkpointing_learn_the_same_as_the_bare_loop(tmp_path: Path) -> None:
    records = {method: outcome(tmp_path, method) for method in ("resident", "resident-checkpointed", "poros-trainer")}
    assert [record["reason"] for record in records.values()] == [None, None, None]
    losses = [record["losses"] for record in records.values()]
    assert len(set(losses[0])) == 3
    assert losses[1:] == [losses[0], losses[0]]
    assert [len(record["seconds"]) for record in records.values()] == [2, 2, 2]


def test_accelerate_offloads_16_bits_and_says_why_not_4(tmp_path: Path) -> None:
    four = outcome(tmp_path, "accelerate-offload")
    assert four["status"] == "unsupported"
    assert "cannot offload a 4-bit weight of bitsandbytes" in four["reason"]
    more = {method: outcome(tmp_path, method, quantization=None) for method in ("resident", "accelerate-offload")}
    assert more["accelerate-offload"]["losses"] == more["resident"]["losses"]


def test_methods_that_need_a_gpu_or_a_package_say_so(tmp_path: Path) -> None:
    found = {method: outcome(tmp_path, method) for method in ("stream-loop", "unsloth", "poros-train")}
    assert [record["status"] for record in found.values()] == ["unsupported", "missing_package", "missing_package"]
    assert "CUDA" in found["stream-loop"]["reason"]
    assert "POROS_BENCH_UNSLOTH" in found["unsloth"]["reason"]
    assert "POROS_BENCH_POROS_TRAIN" in found["poros-train"]["reason"]


def test_rows_of_a_file_fill_every_sequence(tmp_path: Path) -> None:
    model = tiny_run.model_folder(tmp_path / "model")
    data = tiny_run.write_rows(tmp_path / "rows.jsonl", tiny_run.some_rows(3))
    record = outcome(tmp_path, "resident", source=str(model), weights="real", dataset=str(data), seq_len=64)
    assert record["status"] == "ok", record["reason"]
    assert record["facts"]["dataset"] | {"sha256": ""} == {
        "name": "rows", "seed": None, "path": str(data), "sha256": ""
    }  # fmt: skip
    assert record["losses"][0] > record["losses"][-1]


def test_rows_that_cannot_be_used_are_told_in_the_settings_of_a_spec(tmp_path: Path) -> None:
    model = tiny_run.model_folder(tmp_path / "model")
    data = tiny_run.write_rows(tmp_path / "rows.jsonl", [{"prompt": "is it so? " * 50, "completion": " yes"}])
    record = outcome(tmp_path, "resident", source=str(model), weights="real", dataset=str(data), seq_len=8)
    assert record["status"] == "unsupported"
    assert "raise seq_len." in record["reason"]
    assert "data." not in record["reason"]


def test_a_loss_that_is_no_number_ends_the_pass(tmp_path: Path) -> None:
    for method in ("resident", "poros-trainer"):
        record = outcome(tmp_path, method, learning_rate=1e30, steps=5)
        assert record["status"] == "diverged"
        assert re.fullmatch(r"the loss is nan at step \d of 6, .* with a learning rate of 1e\+30", record["reason"])
        json.dumps(record, allow_nan=False)


def test_more_tokens_than_memory_holds_are_refused_as_such(tmp_path: Path) -> None:
    record = outcome(tmp_path, "resident", seq_len=2**20, batch_size=2**16, steps=10**6)
    assert record["status"] == "out_of_memory"
    assert "Lower one of them." in record["reason"]


def test_the_checkpoint_for_loaders_of_checkpoints_holds_the_same_weights(tmp_path: Path) -> None:
    import poros
    from poros.model.build import from_shape

    request = a_request(tmp_path, "unsloth")
    make_checkpoint(request, tmp_path / "saved")
    saved = poros.load(tmp_path / "saved", stream=False, dtype="float32", device="cpu").state_dict()
    built = from_shape(request.source, stream=False, dtype="float32", device="cpu").state_dict()
    assert saved.keys() == built.keys()
    assert all(torch.equal(saved[name], built[name]) for name in built)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_pass_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    hanging = a_request(tmp_path, "resident", module="tests.planted_engine", options={"fail": {"one": "hang"}})
    start = time.monotonic()
    record = run_request(hanging, tmp_path / "log", 0.5)
    assert time.monotonic() - start < 60
    assert (record["status"], record["reason"]) == ("timeout", "not done after 0.5 s, and killed")
    assert record["time_limit_s"] == 0.5
    assert json.loads((tmp_path / "record.json").read_text()) == record


@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [
        ("missing_package", "missing_package", "ModuleNotFoundError: No module named 'a_package_that_nobody_has'"),
        ("error", "crashed", "KeyError: 'no such thing'"),
        ("too_few_steps", "crashed", "RuntimeError: 1 steps were taken instead of 3"),
    ],
)
def test_failures_are_told_apart(how: str, status: str, reason: str, tmp_path: Path) -> None:
    request = a_request(tmp_path, "resident", module="tests.planted_engine", options={"fail": {"one": how}})
    record = run_cell(request)
    assert (record["status"], record["reason"]) == (status, reason)


def test_a_gpu_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    record = outcome(tmp_path, "unsloth", device="cuda")
    assert (record["status"], record["reason"]) == ("unsupported", "device is 'cuda', but torch sees no CUDA device")


def test_what_torch_says_of_memory_is_understood() -> None:
    assert status_of(torch.OutOfMemoryError("CUDA out of memory")) == "out_of_memory"
    assert status_of(RuntimeError("CUDA error: out of memory")) == "out_of_memory"
    assert status_of(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")) == "out_of_memory"
    assert status_of(RuntimeError("shapes do not match")) == "crashed"


def test_a_refusal_for_lack_of_host_memory_is_running_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(available_bytes=10, cgroup_left_bytes=None)
    monkeypatch.setattr("poros.model.memory.read_host_memory", lambda _: memory)
    with pytest.raises(ConfigError) as caught:
        require_host_memory(11, "building it", "Free memory.")
    assert status_of(caught.value) == "out_of_memory"


def test_a_changed_checkout_is_told_from_another_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "src" / "poros" / "evidence"
    source.mkdir(parents=True)
    (source / "provenance.py").write_text("")
    (tmp_path / "note.txt").write_text("one")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(provenance, "__file__", str(source / "provenance.py"))
    seen = [provenance._commit()]
    for file, text in (("note.txt", "two"), ("note.txt", "three"), ("src/new.py", ""), ("src/new.py", "x = 1")):
        (tmp_path / file).write_text(text)
        seen.append(provenance._commit())
    assert re.fullmatch(r"[0-9a-f]{40}", str(seen[0]))
    assert all(re.fullmatch(rf"{seen[0]}\+[0-9a-f]{{8}}", str(commit)) for commit in seen[1:])
    assert len(set(seen)) == 5
    (source / "elsewhere.py").write_text("")
    monkeypatch.setattr(provenance, "__file__", str(source / "elsewhere.py"))  # of no checkout of this package
    assert provenance._commit() is None
