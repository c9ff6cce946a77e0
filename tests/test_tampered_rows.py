"""Lies that a file of rows gives away: each is refused on its line, for its reason, and never with a traceback."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from poros.cli import app
from poros.evidence.artifact import Row, write_rows
from poros.evidence.verify import examine, verify_file
from tests.result_rows import GIB, campaign, failed_row, parity_row, speed_row

ROOT = Path(__file__).resolve().parent.parent
LARGE = "qwen2.5-72b"


@pytest.fixture
def results(tmp_path):
    write_rows(tmp_path / "rows.jsonl", campaign())
    return tmp_path / "rows.jsonl"


def _set(place, key, value):
    """Change one value of one row; dots and numbers in ``key`` lead into it."""

    def tamper(rows):
        *path, last = [int(part) if part.isdigit() else part for part in key.split(".")]
        inner = rows[place]
        for part in path:
            inner = inner[part]
        inner[last] = value(inner[last]) if callable(value) else value

    return tamper


def _all(*tampers):
    def tamper(rows):
        for one in tampers:
            one(rows)

    return tamper


def _meters(place, key, value):
    """Change a meter in every pass, and the figure that they give."""
    return _all(_set(place, key, value), *(_set(place, f"pass_memory.{number}.{key}", value) for number in range(3)))


def _drop_a_pass(rows):
    for key in ("passes", "losses", "pass_memory"):
        rows[2][key].pop()


def _repeat(rows):
    rows.insert(1, rows[0])


def _copy_a_pass(rows):
    rows[0]["passes"][1] = rows[0]["passes"][0]


def _copy_a_row(rows):
    rows.append({**rows[2], "cell": f"{rows[2]['model']}/resident-again", "label": "resident again"})


# what was done to the file -> the key that is refused, and a part of the reason
READINGS = {
    "a pass is missing": (_drop_a_pass, "passes", "has 2 passes; num_passes is 3"),
    "a step is missing": (_set(1, "passes.2", lambda steps: steps[1:]), "passes.2", "has 4 entries; steps is 5"),
    "a status of ok has no readings": (_set(1, "pass_memory", []), "pass_memory", "has 0 passes"),
    "a card was used and its meter is empty": (
        _meters(2, "reserved_bytes", None),
        "pass_memory.0.reserved_bytes",
        "is null; a row measured on a card says what it took there",
    ),
    "one pass says nothing of the card": (
        _set(2, "pass_memory.1.allocated_bytes", None),
        "pass_memory.1.allocated_bytes",
        "is null",
    ),
    "the figure is not that of its passes": (_set(0, "s_per_step", 0.5), "s_per_step", "the passes give 0.647"),
    "the last bit of the spread is wrong": (
        _set(0, "s_per_step_std", lambda std: std * (1 + 2**-52)),
        "s_per_step_std",
        "the passes give",
    ),
    "a peak is below that of a pass": (_set(0, "reserved_bytes", 4 * GIB), "reserved_bytes", "the passes give"),
    "tokens a second of a longer sequence": (_set(3, "tokens_per_s", 9e4), "tokens_per_s", "the passes give 615"),
    "a step took no time": (_set(0, "passes.1.3", 0.0), "passes.1.3", "should be from 1e-06 to 1e+06"),
    "a step took almost no time": (_set(0, "passes.1.3", 5e-324), "passes.1.3", "should be from 1e-06 to 1e+06"),
    "a step took an age": (_set(0, "passes.1.3", 1e308), "passes.1.3", "should be from 1e-06 to 1e+06"),
    "a step took for ever": (_set(0, "passes.1.3", float("inf")), "the line", "holds Infinity, which is no number"),
    "a loss is no number": (_set(0, "losses.0.6", float("nan")), "the line", "holds NaN, which is no number"),
    "a loss is negative": (_set(0, "losses.0.6", -0.5), "losses.0.6", "should be at least 0"),
    "a loss is missing": (_set(0, "losses.1", lambda losses: losses[1:]), "losses.1", "has 6 entries"),
    "losses where none are computed": (_set(6, "losses.0", [1.0] * 7), "losses.0", "stream-loop computes no loss"),
    "no losses where they are computed": (_set(2, "losses.0", []), "losses.0", "has 0 entries"),
    "two passes to the last bit": (_copy_a_pass, "passes.1", "is passes.0 of row 1 in every bit"),
    "two rows to the last bit": (_copy_a_row, "passes.0", "is passes.0 of row 3 in every bit"),
    "the allocator handed out more than it had": (
        _set(0, "pass_memory.0.allocated_bytes", 5 * GIB),
        "pass_memory.0.reserved_bytes",
        "below allocated_bytes",
    ),
    "the process took more than the card has": (
        _set(0, "pass_memory.0.process_bytes", 150 * GIB),
        "pass_memory.0.process_bytes",
        "the card has",
    ),
    "more bytes than there are": (_set(0, "budget_bytes", 2**60), "budget_bytes", "less than 1152921504606846976"),
    "fewer bytes than none": (
        _set(0, "pass_memory.0.host_locked_bytes", -1),
        "pass_memory.0.host_locked_bytes",
        "greater than or equal to 0",
    ),
    "no peak of the host": (_meters(2, "host_peak_bytes", None), "pass_memory.0.host_peak_bytes", "is null"),
    "a process of no size": (_meters(2, "host_peak_bytes", 1000), "pass_memory.0.host_peak_bytes", "at least"),
    "more locked than resident": (
        _meters(0, "host_locked_bytes", 19 * GIB),
        "pass_memory.0.host_locked_bytes",
        "above host_peak_bytes",
    ),
    "a failure of which no pass failed": (
        _all(*(_set(7, key, value) for key, value in (("passes", [[1.0] * 5] * 3), ("losses", [[1.0] * 7] * 3)))),
        "passes",
        "has 3 passes with the status 'unsupported'",
    ),
    "a figure of no family": (_set(0, "family", None), "family", "which family the model is of"),
    "an unknown status": (_set(0, "status", "fine"), "status", 'is "fine"'),
    "a failure without its reason": (_set(7, "reason", None), "reason", "should say why"),
    "a failure with a blank reason": (_set(7, "reason", "  "), "reason", "should say why"),
    "a reason of a success": (_set(0, "reason", "lucky"), "reason", "with the status 'ok'"),
}
SETTINGS = {
    "an unknown method": (_set(0, "method", "sorcery"), "method", "is 'sorcery'"),
    "changes of another method": (_set(3, "changes", []), "changes", "resident-checkpointed changes ['gradient"),
    "launched as the method is not": (_set(2, "engine", "replay"), "engine", "that of resident is null"),
    "replayed where nothing can be": (
        _all(_set(0, "device", "cpu"), _set(0, "engine", "replay")),
        "engine",
        "no graphs to replay",
    ),
    "a row of poros without its engine": (_set(0, "engine", None), "engine", "that of poros is 'eager' or 'replay'"),
    "a cell of the other engine": (_set(1, "cell", "qwen2.5-32b/poros-bs4-replay"), "cell", "but engine is eager"),
    "a block size of a method that has none": (_set(2, "block_size", 4), "block_size", "resident has none"),
    "no layer a block": (_set(0, "block_size", 0), "block_size", "greater than or equal to 1"),
    "dropout of a method that takes none": (_set(4, "lora.dropout", 0.05), "lora.dropout", "takes 0.0 only"),
    "no label": (_set(0, "label", ""), "label", "neither is empty"),
    "a label of two lines": (_set(0, "label", "poros\n# Best"), "label", "has no control characters"),
    "a label in letters that look alike": (_set(2, "label", "pоros"), "label", "should be printable ASCII"),  # noqa: RUF001
    "a label of another method": (_set(0, "label", "Unsloth"), "label", "which is the method unsloth"),
    "a label of another block size": (_set(1, "label", "poros, block size 2"), "label", "but block_size is 4"),
    "a blank behind a name": (_set(0, "gpu", "NVIDIA H200 "), "gpu", "begins or ends with a blank"),
    "a cell of another model": (_set(0, "cell", "qwen3-32b/poros"), "cell", "should begin with the model"),
    "a cell of another method": (_set(2, "cell", "qwen2.5-32b/poros-bs4"), "cell", "but method is resident"),
    "a cell of another block size": (_set(1, "cell", "qwen2.5-32b/poros-bs2"), "cell", "but block_size is 4"),
    "a cell of another window": (_set(1, "cell", "qwen2.5-32b/poros-bs4-s3"), "cell", "but slots is None"),
    "a parity cell that is none": (
        _set(12, "cell", "qwen2.5-32b/best"),
        "cell",
        "reads like qwen2.5-32b/parity-strict",
    ),
    "a parity cell of another path": (_set(12, "cell", "qwen2.5-32b/parity-math-x"), "cell", "but path is strict"),
    "a rate that teaches nothing": (_set(0, "learning_rate", 0.0), "learning_rate", "greater than 0"),
    "no alpha": (_set(0, "lora.alpha", 0), "lora.alpha", "greater than 0"),
    "no rank": (_set(0, "lora.rank", 0), "lora.rank", "greater than or equal to 1"),
    "nothing gets an adapter": (_set(0, "lora.targets", []), "lora.targets", "should name what gets an adapter"),
    "everything dropped": (_set(0, "lora.dropout", 1.0), "lora.dropout", "less than 1"),
    "clipped below nothing": (_set(0, "max_grad_norm", -1.0), "max_grad_norm", "greater than or equal to 0"),
    "an unknown dtype": (_set(0, "dtype", "float8"), "dtype", "should be 'bfloat16'"),
    "an unknown optimizer": (_set(0, "optimizer", "sgd"), "optimizer", "should be 'adamw'"),
    "an unknown quantization": (_set(0, "quantization", "int2"), "quantization", 'is "int2"'),
    "a hash that is none": (_set(0, "dataset.sha256", "best"), "dataset.sha256", "64 hexadecimal digits"),
    "a figure of unknown data": (_set(0, "dataset.sha256", None), "dataset.sha256", "which tokens it rests on"),
    "synthetic data from a file": (_set(0, "dataset.path", "train.jsonl"), "dataset.path", "the data are synthetic"),
    "a commit that is none": (_set(0, "poros_commit", "main"), "poros_commit", "should be hexadecimal"),
    "a version of two lines": (_set(0, "versions.python", "3\n12"), "versions", "no control characters"),
    "no versions": (_set(0, "versions", {}), "versions", "should name torch"),
    "a figure of no device": (_set(0, "device", None), "device", "where it was computed"),
    "a card without a name": (_set(0, "gpu", None), "gpu", "a row measured on a card names it"),
    "a card without a size": (_set(0, "gpu_memory_bytes", None), "gpu_memory_bytes", "names it"),
    "a card of a CPU": (_set(0, "device", "cpu"), "gpu", "but the device is the CPU"),
    "memory of a card of a CPU": (
        _set(0, "device", "cpu"),
        "pass_memory.0.reserved_bytes",
        "but the device is the CPU",
    ),
    "a driver of a CPU": (
        _all(_set(0, "device", "cpu"), _set(0, "gpu", None), _set(0, "gpu_memory_bytes", None)),
        "driver",
        "but the device is the CPU",
    ),
    "real weights of a shape": (_set(0, "weights", "real"), "weights", "is the name of a shape"),
    "a family that the shape is not of": (_set(0, "family", "llama"), "family", "qwen2.5-32b is of 'qwen2'"),
    "measured in the future": (_set(0, "time_utc", "2999-01-01T00:00:00Z"), "time_utc", "has not come yet"),
    "measured before there were rows": (_set(0, "time_utc", "2019-01-01T00:00:00Z"), "time_utc", "before there were"),
    "no time": (_set(0, "time_utc", "yesterday"), "time_utc", "should read like"),
    "a row without its schema": (lambda rows: rows[0].pop("row_schema"), "row_schema", "is missing"),
}
TOGETHER = {
    "a cell twice": (_repeat, "cell", "is the cell of row 1 too"),
    "another rate in the same run": (_set(3, "learning_rate", 1e-4), "learning_rate", "rows of run h200-1 have 2e-05"),
    "another card in the same run": (_set(3, "gpu_uuid", "GPU-2"), "gpu_uuid", "other rows of run h200-1 have 'GPU-1'"),
    "another link in the same run": (_set(3, "link", "PCIe 3 x4"), "link", "other rows of run h200-1"),
    "another dropout that was not declared": (_set(3, "lora.dropout", 0.0), "lora", "other rows of run h200-1"),
    "other data in the same run": (_set(3, "dataset.sha256", "cd" * 32), "dataset", "other rows of run h200-1"),
    "other weights of the same model": (_set(3, "weights", "real"), "weights", "other rows of run h200-1"),
    "another family of the same model": (_set(3, "family", "llama"), "family", "other rows of run h200-1"),
    "another attention in the same run": (_set(3, "attention", "eager"), "attention", "other rows of run h200-1"),
    "another torch in the same run": (_set(3, "versions.torch", "2.4.0"), "versions", "other rows of run h200-1"),
    "more threads in the same run": (
        _all(*(_set(place, "options", {"num_threads": 1 + (place == 3)}) for place in range(7))),
        "options",
        "is {'num_threads': 2}; other rows",
    ),
    "a week later in the same run": (_set(3, "time_utc", "2026-11-20T12:00:00Z"), "time_utc", "two days apart"),
}
PARITY = {
    "a pass that was no pass": (
        _set(12, "surfaces.streamed.optimizer", False),
        "verdict",
        "is PASS, but the streamed run differs in optimizer",
    ),
    "a failure that its control shares": (
        _set(14, "surfaces.control.loss", False),
        "verdict",
        "is FAIL, but the control differs in loss",
    ),
    "nothing to conclude from nothing": (
        _all(
            _set(12, "verdict", "INCONCLUSIVE"),
            _set(12, "reason", "a hunch"),
        ),
        "verdict",
        "is INCONCLUSIVE, but every surface is equal",
    ),
    "a pass that compared nothing": (_set(12, "num_gradients", 0), "num_gradients", "proves nothing"),
    "a failure in which all is equal": (
        _set(
            14,
            "surfaces.streamed",
            dict.fromkeys(("loss", "gradients", "grad_norm", "adapters", "optimizer", "rng"), True),
        ),
        "verdict",
        "is FAIL, but every surface",
    ),
    "a difference in a pass": (_set(12, "max_abs_difference", 1e-9), "max_abs_difference", "with the verdict PASS"),
    "a distance below nothing": (_set(14, "max_abs_difference", -1.0), "max_abs_difference", "at least 0"),
    "parity of another method": (_set(12, "method", "resident"), "method", "is checked for poros"),
    "parity where nothing repeats": (_set(12, "path", "fast"), "path", "is not reproducible"),
    "a place where a pass differs": (
        _set(12, "first_difference", {"step": 0, "surface": "loss"}),
        "first_difference",
        "is given, but the verdict is PASS",
    ),
    "a failure nowhere": (_set(14, "first_difference", None), "first_difference", "is null, but the verdict is FAIL"),
    "a difference of no bit": (
        _set(14, "first_difference.found_bits", "0x3f000000"),
        "first_difference.found_bits",
        "which are the expected bits",
    ),
    "a reason of a pass": (_set(12, "reason", "lucky"), "reason", "with the verdict PASS"),
    "a difference after the end": (_set(14, "first_difference.step", 9), "first_difference.step", "from 0 to 3"),
    "a difference of nothing": (_set(14, "first_difference.surface", "soul"), "first_difference.surface", "there are"),
    "a difference of what is equal": (
        _set(14, "first_difference.surface", "loss"),
        "first_difference.surface",
        "equal at every step",
    ),
    "a loss of no step": (_set(12, "losses", lambda losses: [*losses, 1.0]), "losses", "has 5 entries; steps is 4"),
    "a check that warms up": (_set(12, "warmup_steps", 1), "warmup_steps", "a parity check has 0"),
    "a control longer than the run": (_set(12, "control_steps", 5), "control_steps", "of 4 steps"),
    "a failure without a reason": (_set(14, "reason", " "), "reason", "should say why"),
}
TAMPERED = READINGS | SETTINGS | TOGETHER | PARITY


@pytest.mark.parametrize("case", TAMPERED)
def test_a_tampered_copy_is_refused_for_its_reason(results, case):
    tamper, key, reason = TAMPERED[case]
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    tamper(rows)
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = verify_file(results)
    assert len({problem.line for problem in problems}) == 1, problems
    assert any(problem.key == key and reason in problem.message for problem in problems), problems


def test_passes_on_a_deterministic_path_have_the_same_losses(tmp_path):
    losses = [[12.9] * 7, [12.9] * 7, [12.9] * 6 + [12.8]]
    write_rows(tmp_path / "rows.jsonl", [speed_row(2, path="strict", losses=losses)])
    assert [(problem.key, problem.line) for problem in verify_file(tmp_path / "rows.jsonl")] == [("losses.2", 1)]
    write_rows(tmp_path / "rows.jsonl", [speed_row(2, losses=losses)])
    assert verify_file(tmp_path / "rows.jsonl") == []


def test_an_engine_of_ones_own_changes_what_it_says(tmp_path):
    row = speed_row(2, changes=["a kernel"], block_size=3, options={"module": "mine.engine"})
    write_rows(tmp_path / "rows.jsonl", [row])
    assert verify_file(tmp_path / "rows.jsonl") == []


def test_a_cell_is_named_for_options_of_the_spec_only(tmp_path):
    options = {"how": "well", "num_threads": 2}
    rows = [
        speed_row(1, cell="qwen2.5-32b/poros-bs4-how-well", options=options, poros_commit="0123abcd+4567cdef"),
        speed_row(0, cell="qwen2.5-32b/my-own", label="my own", options=options, poros_commit="0123abcd+4567cdef"),
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert verify_file(tmp_path / "rows.jsonl") == []


def test_a_method_with_its_own_packages_has_its_own_versions(tmp_path):
    other = speed_row(4, versions={"python": "3.12.3", "torch": "2.9.0", "unsloth": "2026.1"})
    write_rows(tmp_path / "rows.jsonl", [speed_row(0), speed_row(2), other])
    assert verify_file(tmp_path / "rows.jsonl") == []


def test_what_came_to_no_result_is_verified_too(tmp_path):
    inconclusive = {"surfaces": parity_row().surfaces, "first_difference": None}
    rows = [
        failed_row("resident", "diverged", "the loss is nan at step 3"),
        parity_row("INCONCLUSIVE"),
        parity_row("INCONCLUSIVE", path="math", reason="vacuous: no gradients", num_gradients=0, **inconclusive),
        parity_row(
            "INCONCLUSIVE", model="qwen2.5-72b", reason="the loss is nan at step 3", losses=[12.9] * 3, **inconclusive
        ),
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert verify_file(tmp_path / "rows.jsonl") == []


def test_a_run_in_two_files_is_one_run(tmp_path):
    def together(*files: list[Row]) -> list[str]:
        paths = [tmp_path / f"{number}.jsonl" for number in range(len(files))]
        for path, rows in zip(paths, files, strict=True):
            write_rows(path, rows)
            assert verify_file(path) == []
        return [f"{Path(problem.file).name}: {problem}" for problem in examine(paths)[1]]

    rest = [speed_row(place) for place in (2, 3)]
    assert together([speed_row(0)], rest) == []
    assert "1.jsonl: row 1 (qwen2.5-32b/resident): cell is the cell of row 1" in together(rest, [speed_row(2)])[0]
    alien = speed_row(0, gpu_uuid="GPU-2", poros_commit="fedcba98", learning_rate=1.0)
    assert [problem.split(": ")[2].split()[0] for problem in together(rest, [alien])] == [
        "gpu_uuid", "poros_commit", "learning_rate",
    ]  # fmt: skip
    assert "is passes.0 of row 1 of" in together([speed_row(2)], [speed_row(2, run_id="another")])[0]


HOSTILE_LINES = {
    "nested deeply": (b"[" * 100_000, "nested more than 16 levels deep"),
    "nested as deep as JSON allows": (b"[" * 500 + b"]" * 500, "nested more than 16 levels deep"),
    "an integer without end": (b'{"steps": ' + b"9" * 5000 + b"}", "an integer of 5000 digits"),
    "more than a number": (b'{"steps": 1e999}', "holds 1e999"),
    "half a surrogate pair": (b'{"label": "\\ud800"}', "half of a surrogate pair"),
    "half a surrogate pair as a key": (b'{"\\ud800": 1}', "half of a surrogate pair"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "byte order mark"),
    "a key twice": (b'{"status": "crashed", "status": "ok"}', "has the key 'status' twice"),
    "not a number": (b'{"loss": NaN}', "holds NaN"),
    "less than a number": (b'{"loss": -Infinity}', "holds -Infinity"),
    "another encoding": ("{\u00e9}".encode("latin-1"), "is not UTF-8"),
    "no JSON": (b"{", "is not JSON"),
    "no object": (b"7", "is not a JSON object"),
    "a kind that is a list": (b'{"row_schema": 1, "kind": [[]]}', "it should be speed or parity"),
    "a terminal's commands as a key": (b'{"row_schema": 1, "kind": "speed", "\\u001b[2J": 1}', "is no key of a row"),
}


@pytest.mark.parametrize("case", HOSTILE_LINES)
def test_a_hostile_line_is_refused_with_its_number(results, case):
    line, reason = HOSTILE_LINES[case]
    results.write_bytes(results.read_bytes() + line + b"\n")
    answer = CliRunner().invoke(app, ["bench", "verify", str(results)])
    assert answer.exit_code == 1, answer.exception
    assert "row 16: " in answer.output
    assert reason in answer.output
    assert "\x1b" not in answer.output
    answer = CliRunner().invoke(app, ["bench", "report", str(results)])
    assert answer.exit_code == 2, answer.exception


@pytest.mark.parametrize("end", ["\u2028", "\u0085", "\x0c"])
def test_a_line_ends_where_it_ends(results, end):
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    rows[7]["reason"] = f"one{end}two"
    results.write_text("".join(json.dumps(row, ensure_ascii=end < " ") + "\n" for row in rows), encoding="utf-8")
    assert verify_file(results) == []
    assert CliRunner().invoke(app, ["bench", "report", str(results)]).exit_code == 0


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "validation").glob("*.jsonl")), ids=lambda file: file.stem)
def test_the_committed_rows_are_verified(file):
    assert verify_file(file) == []
