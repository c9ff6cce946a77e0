"""A matrix of two tiny models and three methods: what fails is a row, what is killed resumes, what is told is true."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from poros.errors import ConfigError
from poros.evidence import provenance
from poros.evidence.artifact import SpeedRow, append_row, read_rows
from poros.evidence.cell import run_cell, status_of
from poros.evidence.engines.base import CellRequest, Lora
from poros.evidence.engines.unsloth_checkpoint import make_checkpoint
from poros.evidence.matrix import run_matrix
from poros.evidence.process import run_request
from poros.evidence.verify import verify_file
from poros.model.memory import HostMemory, require_host_memory
from tests import tiny_run
from tests.result_rows import parity_row

ROOT = Path(__file__).parents[1]
SHAPES = ROOT / "configs" / "bench" / "shapes"
STEPS, WARMUP = 3, 1
FAILING = {
    "method": "resident-checkpointed",
    "module": "tests.planted_engine",
    "label": "planted",
    "options": {"fail": {"one": "out_of_memory", "two": "killed"}},
}
SPEC: dict[str, Any] = {
    "name": "tiny",
    "models": [
        {"name": "one", "shape": str(SHAPES / "qwen3-tiny")},
        {"name": "two", "shape": str(SHAPES / "llama-tiny")},
    ],
    "methods": ["resident", FAILING, {"method": "poros", "block_size": 2}],
    "precision": {"dtype": "float32"},
    "seq_len": 16,
    "steps": STEPS,
    "warmup_steps": WARMUP,
    "passes": 1,
    "lora": {"rank": 2, "alpha": 4},
    "device": "cpu",
}


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """One thread, one commit whatever is committed meanwhile, and the tests' own engine within reach."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("POROS_COMMIT", "0" * 40)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.delenv("POROS_RUN_ID", raising=False)
        yield


def write_spec(folder: Path, **changes: Any) -> Path:
    file = folder / "spec.yaml"
    file.write_text(yaml.safe_dump({**SPEC, **changes}, sort_keys=False))
    return file


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes], str]:
    """The output folder; the records that were there when the matrix was killed; what was said on resuming."""
    home = tmp_path_factory.mktemp("matrix")
    spec, out = write_spec(home), home / "out"
    matrix = subprocess.Popen(
        [sys.executable, "-c", "from poros.cli import main; main()", "bench", "matrix", str(spec), "-o", str(out)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src") + os.pathsep + str(ROOT)},
    )
    try:
        wait_until(lambda: len(list((out / "passes").glob("*.json"))) >= 2 and children_of(matrix.pid))
        [cell] = children_of(matrix.pid)
    finally:
        matrix.kill()
        matrix.wait()
    wait_until(lambda: not Path(f"/proc/{cell}").exists())
    before = {file.name: file.read_bytes() for file in (out / "passes").glob("*.json")}
    said = tiny_run.poros("bench", "matrix", spec, "-o", out)
    assert said.exit_code == 0, said.output
    return out, before, said.stdout


def wait_until(condition: Any, limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def rows_of(out: Path) -> dict[str, SpeedRow]:
    rows = read_rows(out / "rows.jsonl")
    assert all(isinstance(row, SpeedRow) for row in rows)
    return {row.cell: row for row in rows}  # type: ignore[misc]


def test_a_killed_matrix_resumes_and_ends_with_every_row(
    killed_and_resumed: tuple[Path, dict[str, bytes], str],
) -> None:
    out, before, said = killed_and_resumed
    assert 2 <= len(before) < 6
    assert f"{len(before)} passes are there already" in said
    for name, content in before.items():
        assert (out / "passes" / name).read_bytes() == content
    assert sorted(rows_of(out)) == [
        f"{m}/{cell}" for m in ("one", "two") for cell in ("planted", "poros-bs2", "resident")
    ]
    assert len({row.run_id for row in rows_of(out).values()}) == 1
    assert {file.suffix for file in (out / "passes").iterdir()} == {".json"}


def test_rows_hold_every_step_and_every_loss(killed_and_resumed: tuple[Path, dict[str, bytes], str]) -> None:
    rows = rows_of(killed_and_resumed[0])
    for model in ("one", "two"):
        resident, streamed = rows[f"{model}/resident"], rows[f"{model}/poros-bs2"]
        for row in (resident, streamed):
            assert (row.status, row.reason, row.weights, row.device) == ("ok", None, "random", "cpu")
            assert [len(one) for one in row.passes] == [STEPS]
            assert [len(one) for one in row.losses] == [WARMUP + STEPS]
            assert row.s_per_step == statistics.median(row.passes[0])
            assert row.host_peak_bytes
            assert row.options == {"num_threads": 1}
            assert row.family == {"one": "qwen3", "two": "llama"}[model]
        assert streamed.losses == resident.losses
        assert streamed.dataset == resident.dataset
        assert (streamed.block_size, streamed.slots, resident.block_size) == (2, 2, None)


def test_running_out_of_memory_and_a_crash_are_rows(killed_and_resumed: tuple[Path, dict[str, bytes], str]) -> None:
    out, _, said = killed_and_resumed
    full, crashed = (rows_of(out)[f"{model}/planted"] for model in ("one", "two"))
    assert (full.status, full.reason) == ("out_of_memory", "MemoryError: one byte more than there is")
    assert crashed.status == "crashed"
    assert crashed.reason == (
        "killed by SIGKILL, perhaps by the kernel for lack of host memory; last said: about to be killed"
    )
    for row in (full, crashed):
        assert (row.passes, row.losses, row.pass_memory, row.s_per_step) == ([], [], [], None)
        assert row.changes == ["fails on purpose"]
        assert row.options["module"] == "tests.planted_engine"
        assert row.versions == rows_of(out)["one/resident"].versions
        assert row.dataset.sha256 == rows_of(out)[f"{row.model}/resident"].dataset.sha256
    assert "6 rows in" in said
    assert "2 of them without a figure" in said


def test_the_rows_are_believed_reported_and_compared(
    killed_and_resumed: tuple[Path, dict[str, bytes], str], tmp_path: Path
) -> None:
    rows = killed_and_resumed[0] / "rows.jsonl"
    assert verify_file(rows) == []
    report = tiny_run.poros("bench", "report", rows, "-o", tmp_path)
    assert report.exit_code == 0, report.output
    assert (tmp_path / "report.md").exists()
    assert (tmp_path / "report.html").exists()
    compared = tiny_run.poros("bench", "compare", rows, rows)
    assert compared.exit_code == 0, compared.output


def test_the_folder_of_another_spec_is_refused_with_what_differs(
    killed_and_resumed: tuple[Path, dict[str, bytes], str], tmp_path: Path
) -> None:
    out = killed_and_resumed[0]
    said = tiny_run.poros("bench", "matrix", write_spec(tmp_path, steps=9), "-o", out)
    assert said.exit_code == 2
    assert f"holds a run of another spec: steps is 9, and was {STEPS}" in said.stderr


@pytest.fixture
def one_pass(killed_and_resumed: tuple[Path, dict[str, bytes], str], tmp_path: Path) -> Path:
    """A run that was interrupted after its first pass."""
    before, out = killed_and_resumed[0], tmp_path / "out"
    (out / "passes").mkdir(parents=True)
    for name in ("spec.yaml", "run.json", FIRST):
        (out / name).write_bytes((before / name).read_bytes())
    return out


FIRST = "passes/one__resident-1.json"


def resume(out: Path) -> list[SpeedRow]:
    return run_matrix(out / "spec.yaml", out, lambda _: None)


def measures_nothing(*_: object) -> Any:
    raise AssertionError("a pass was run")


def test_a_pass_is_dropped_if_the_place_changed_while_it_ran(
    killed_and_resumed: tuple[Path, dict[str, bytes], str], one_pass: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(request: CellRequest, *_: object) -> Any:
        record = json.loads((killed_and_resumed[0] / "passes" / Path(request.record).name).read_text())
        record["provenance"]["poros_commit"] = "1" * 40
        Path(request.record).write_text(json.dumps(record))
        return record

    monkeypatch.setattr("poros.evidence.matrix.run_request", elsewhere)
    with pytest.raises(ConfigError, match=r"poros_commit is '1+', and was '0+' when one/resident was measured"):
        resume(one_pass)
    assert [file.name for file in (one_pass / "passes").glob("*.json")] == ["one__resident-1.json"]


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("POROS_COMMIT", "1" * 40, "poros_commit is '1+'"),
        ("OMP_NUM_THREADS", "2", "omp_num_threads is '2', and was '1'"),
    ],
)
def test_another_place_is_refused_before_anything_is_measured(
    variable: str, value: str, said: str, one_pass: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.evidence.matrix.run_request", measures_nothing)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=said):
        resume(one_pass)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("versions", {"torch": "1.0"}, "the version of torch is '1.0'"),
        ("host", "another", "host is 'another'"),
        ("time_utc", "2025-01-01T00:00:00Z", "passes of one run are at most 2 days apart"),
        ("num_threads", 64, "num_threads is 64, and was 1"),
        ("dataset", {"sha256": "ab"}, "dataset.sha256 is 'ab'"),
    ],
)
def test_records_of_two_places_are_not_put_together(
    key: str, value: object, said: str, killed_and_resumed: tuple[Path, dict[str, bytes], str], one_pass: Path
) -> None:
    record = json.loads((killed_and_resumed[0] / "passes" / "one__poros-bs2-1.json").read_text())
    record["provenance" if key in record["provenance"] else "facts"][key] = value
    (one_pass / "passes" / "one__poros-bs2-1.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=re.escape(said)):
        resume(one_pass)


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        (FIRST, lambda text: text[:100], "is damaged: .* Delete the file to have the pass measured again"),
        (
            FIRST,
            lambda text: text.replace('"number": 1', '"number": 2'),
            "should be pass 1 of one/resident, but is pass 2",
        ),
        (FIRST, lambda text: text.replace("one/resident", "two/resident"), "but is pass 1 of two/resident"),
        (FIRST, lambda text: text.replace('"seconds": [', '"seconds": [NaN, '), "is damaged: seconds.0"),
        (FIRST, lambda text: text.replace('"seconds": [', '"seconds": [1.0, '), "it has 4 of 3 counted steps"),
        (FIRST, lambda text: text.replace('"time_utc": "2', '"time_utc": "x'), "is damaged: provenance"),
        (FIRST, lambda _: "[]", "is damaged: all of it"),
        ("run.json", lambda _: "", "run.json is damaged: .* start in a new folder"),
        ("run.json", lambda _: "{}", "run.json is damaged: it has no run_id"),
        ("rows.jsonl", lambda _: "{", "rows.jsonl:1: .*mend or remove the line"),
    ],
)
def test_a_damaged_file_is_named_with_the_way_out(
    file: str, change: Any, said: str, one_pass: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.evidence.matrix.run_request", measures_nothing)
    path = one_pass / file
    path.write_text(change(path.read_text() if path.exists() else ""))
    with pytest.raises(ConfigError, match=f"(?s){said}") as caught:
        resume(one_pass)
    assert str(path) in str(caught.value)


def test_one_pass_is_one_and_a_model_folder_that_changed_is_refused(
    one_pass: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.evidence.matrix.run_request", measures_nothing)
    said: list[str] = []
    with pytest.raises(AssertionError, match="a pass was run"):
        run_matrix(one_pass / "spec.yaml", one_pass, said.append)
    assert said == ["1 pass is there already"]
    monkeypatch.setattr("poros.evidence.matrix.fingerprints", lambda _: {f"model {SHAPES / 'qwen3-tiny'}": "ab"})
    with pytest.raises(ConfigError, match=r"model .*qwen3-tiny has changed since the run in .* began"):
        resume(one_pass)


def test_a_pass_that_was_killed_is_run_again_with_more_time(
    killed_and_resumed: tuple[Path, dict[str, bytes], str], one_pass: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = killed_and_resumed[0] / "passes"
    monkeypatch.setattr(
        "poros.evidence.matrix.run_request",
        lambda request, *_: json.loads((records / Path(request.record).name).read_text()),
    )
    late = json.loads((one_pass / FIRST).read_text())
    late |= {"status": "timeout", "reason": "late", "seconds": [], "losses": [], "memory": None, "time_limit_s": 600}
    (one_pass / FIRST).write_text(json.dumps(late))
    assert resume(one_pass)[0].status == "timeout"
    more = write_spec(one_pass.parent, time_limit_s=601)
    assert run_matrix(more, one_pass, lambda _: None)[0].status == "ok"
    assert "time_limit_s: 601" in (one_pass / "spec.yaml").read_text()


def test_rows_of_parity_stay_in_the_file_of_a_run_that_goes_on(
    killed_and_resumed: tuple[Path, dict[str, bytes], str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(killed_and_resumed[0], out)
    append_row(out / "rows.jsonl", parity_row())
    assert len(resume(out)) == 6
    assert [row.kind for row in read_rows(out / "rows.jsonl")] == ["speed"] * 6 + ["parity"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"models": ["/no/such/folder"]}, "there is no folder '/no/such/folder'"),
        ({"models": [str(ROOT / "docs")]}, "has no config.json"),
        ({"models": [{"name": "one", "shape": str(SHAPES / "qwen3-tiny"), "weights": "real"}]}, "no *.safetensors"),
        ({"dataset": {"path": "/no/rows.jsonl"}}, "dataset.path is '/no/rows.jsonl', which cannot be read: No such"),
        ({"dataset": {"path": os.devnull}}, "which holds no rows"),
        pytest.param(
            {"device": "cuda"},
            "device is 'cuda', but torch sees no CUDA device; set device: cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_measured(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    ended = tiny_run.poros("bench", "matrix", write_spec(tmp_path, **changes), "-o", tmp_path / "out")
    assert ended.exit_code == 2
    assert said in ended.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="in use by another run"):
            run_matrix(write_spec(tmp_path), tmp_path, lambda _: None)


def a_request(folder: Path, method: str, **changes: Any) -> CellRequest:
    fields: dict[str, Any] = {
        "run_id": "r", "cell": f"one/{method}", "number": 1, "method": method, "module": None, "model": "one",
        "source": str(SHAPES / "qwen3-tiny"), "weights": "random", "quantization": "nf4", "double_quant": True,
        "dtype": "float32", "seq_len": 16, "batch_size": 2, "accumulation": 2, "steps": 2, "warmup_steps": 1,
        "path": "fast", "lora": Lora(2, 4, 0.05, "all-linear"), "dataset": None, "seed": 1, "learning_rate": 1e-2,
        "max_grad_norm": 1.0, "device": "cpu", "attention": "sdpa", "block_size": None, "slots": None,
        "resident_blocks": None, "options": {},
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


def test_run_shows_one_pass_of_each_and_adds_to_a_file(
    killed_and_resumed: tuple[Path, dict[str, bytes], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = killed_and_resumed[0] / "passes"
    monkeypatch.setattr(
        "poros.evidence.matrix.run_request",
        lambda request, *_: json.loads((records / Path(request.record).name).read_text()),
    )
    rows = tmp_path / "rows.jsonl"
    for _ in range(2):
        said = tiny_run.poros("bench", "run", write_spec(tmp_path, passes=3), "-o", rows)
        assert said.exit_code == 0, said.output
        rows.write_text(rows.read_text().rstrip("\n"))
    assert "one/planted  pass 1 of 1  out_of_memory: MemoryError: one byte more than there is" in said.stdout
    assert "two/poros-bs2  pass 1 of 1  0." in said.stdout
    assert f"added to {rows}: 6 rows" in said.stdout
    added = read_rows(rows)
    assert len(added) == 12
    assert len({row.run_id for row in added}) == 2
    assert {row.num_passes for row in added} == {1}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    command = sys.modules["poros.cli.bench"]  # the package's attribute of that name is the group of commands
    monkeypatch.setattr(command, "add_row", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said = tiny_run.poros("bench", "run", write_spec(tmp_path), "-o", rows)
    assert said.exit_code == 2
    kept = re.search(r"No space left on device\. All rows are in (\S+)\.\n", said.stderr)
    assert kept is not None
    assert verify_file(kept[1]) == []


@pytest.mark.parametrize("where", ["", "no/such/folder/rows.jsonl"])
def test_run_refuses_a_file_that_cannot_be_written_before_it_measures(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.evidence.matrix.run_request", measures_nothing)
    said = tiny_run.poros("bench", "run", write_spec(tmp_path), "-o", tmp_path / where)
    assert said.exit_code == 2
    assert "cannot be written" in said.stderr


def test_a_full_disk_ends_on_one_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "passes/x.json")

    monkeypatch.setattr("poros.evidence.matrix.run_request", full)
    said = tiny_run.poros("bench", "matrix", write_spec(tmp_path), "-o", tmp_path / "out")
    assert said.exit_code == 2
    assert said.stderr.startswith("error: passes/x.json: No space left on device.")
    assert "Traceback" not in said.stderr


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
