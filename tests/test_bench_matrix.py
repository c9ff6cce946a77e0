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
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from poros.errors import ConfigError
from poros.evidence.artifact import SpeedRow, append_row, read_rows
from poros.evidence.engines.base import CellRequest
from poros.evidence.matrix import run_matrix
from poros.evidence.verify import verify_file
from tests import tiny_run
from tests.bench_tiny import ROOT, SHAPES, steady_environment
from tests.result_rows import parity_row

__all__ = ["steady_environment"]  # pytest finds it here
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

    monkeypatch.setattr("poros.evidence.artifact.append_row", full)
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
