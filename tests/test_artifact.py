"""Rows can be believed: what follows from readings is recomputed, and tampered copies are refused for their reason."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from poros.cli import app
from poros.errors import ResultError
from poros.evidence.artifact import SpeedRow, append_row, json_schema, read_rows, write_rows
from poros.evidence.verify import verify_file
from tests.result_rows import GIB, campaign, failed_row, parity_row, speed_row

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def results(tmp_path):
    write_rows(tmp_path / "rows.jsonl", campaign())
    return tmp_path / "rows.jsonl"


def test_rows_come_back_as_they_were_written(results):
    assert read_rows(results) == campaign()
    append_row(results, parity_row(cell="again"))
    assert read_rows(results)[-1] == parity_row(cell="again")
    assert [path.name for path in results.parent.iterdir()] == ["rows.jsonl"], "a temporary file was left"


def test_a_row_reads_from_what_it_is_to_where_it_was_taken():
    keys = list(SpeedRow.model_fields)
    assert keys[:4] == ["row_schema", "kind", "run_id", "cell"]
    assert keys.index("seq_len") < keys.index("passes") < keys.index("time_utc")


def test_a_figure_is_the_median_of_the_passes_medians():
    row = speed_row(0, passes=[[1.0, 2.0, 9.0], [3.0, 3.0, 3.0], [4.0, 5.0, 60.0]], steps=3)
    assert row.s_per_step == 3.0
    assert row.s_per_step_std == pytest.approx(1.5275, rel=1e-4)
    assert row.tokens_per_s == 512 / 3.0
    assert speed_row(0, passes=[[1.0, 2.0]], steps=2).s_per_step_std is None
    assert failed_row("unsloth", "crashed", "died", passes=[[1.0]]).s_per_step is None


def test_an_error_names_file_line_and_key(results):
    row = json.loads(results.read_text().splitlines()[0])
    with results.open("a") as file:
        file.write("\n" + json.dumps(row | {"steps": "5", "colour": "red"}) + "\n")
    with pytest.raises(ResultError, match=r'rows.jsonl:17: steps is "5".*\n.*rows.jsonl:17: colour is no key of a row'):
        read_rows(results)
    results.write_text("{}\n{")
    with pytest.raises(ResultError, match=r"rows.jsonl:2: not JSON"):
        read_rows(results)
    with pytest.raises(ResultError, match=r"cannot read .*missing"):
        read_rows(results.parent / "missing")


def test_an_honest_file_is_verified(results):
    assert verify_file(results) == []
    answer = CliRunner().invoke(app, ["bench", "verify", str(results.parent)])
    assert answer.exit_code == 0
    assert "15 rows verified" in answer.output


def _set(place, key, value):
    """Change one value of one row; dots and numbers in ``key`` lead into it."""

    def tamper(rows):
        *path, last = [int(part) if part.isdigit() else part for part in key.split(".")]
        inner = rows[place]
        for part in path:
            inner = inner[part]
        inner[last] = value(inner[last]) if callable(value) else value

    return tamper


def _drop_a_pass(rows):
    for key in ("passes", "losses", "pass_memory"):
        rows[2][key].pop()


def _repeat(rows):
    rows.insert(1, rows[0])


# what was done to the file -> the key that is refused, and a part of the reason
TAMPERED = {
    "a pass is missing": (_drop_a_pass, "passes", "has 2 passes; num_passes is 3"),
    "a step is missing": (_set(1, "passes.2", lambda steps: steps[1:]), "passes.2", "has 4 entries; steps is 5"),
    "a status of ok has no readings": (_set(1, "pass_memory", []), "pass_memory", "has 0 passes"),
    "a card was used and its meters are empty": (
        lambda rows: (
            [_set(2, "reserved_bytes", None)(rows)]
            + [_set(2, f"pass_memory.{number}.reserved_bytes", None)(rows) for number in range(3)]
        ),
        "reserved_bytes",
        "is null; a row measured on a card says what it took there",
    ),
    "the figure is not that of its passes": (_set(0, "s_per_step", 0.5), "s_per_step", "the passes give 0.647"),
    "the last bit of the spread is wrong": (
        _set(0, "s_per_step_std", lambda std: std * (1 + 2**-52)),
        "s_per_step_std",
        "the passes give",
    ),
    "a peak is below that of a pass": (_set(0, "reserved_bytes", 4 * GIB), "reserved_bytes", "the passes give"),
    "tokens a second of a longer sequence": (_set(3, "tokens_per_s", 9e4), "tokens_per_s", "the passes give 615"),
    "another rate in the same run": (_set(3, "learning_rate", 1e-4), "learning_rate", "rows of run h200-1 have 2e-05"),
    "another card in the same run": (_set(3, "gpu_uuid", "GPU-2"), "gpu_uuid", "other rows of run h200-1 have 'GPU-1'"),
    "another dropout that was not declared": (_set(3, "lora.dropout", 0.0), "lora", "other rows of run h200-1"),
    "other data in the same run": (_set(3, "dataset.sha256", "cd" * 32), "dataset", "other rows of run h200-1"),
    "a step took no time": (_set(0, "passes.1.3", 0.0), "passes.1.3", "should be finite and above 0"),
    "a step took for ever": (_set(0, "passes.1.3", float("inf")), "passes.1.3", "should be finite and above 0"),
    "a loss is no number": (_set(0, "losses.0.6", float("nan")), "losses.0.6", "a loss should be finite"),
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
    "measured in the future": (_set(0, "time_utc", "2999-01-01T00:00:00Z"), "time_utc", "has not come yet"),
    "a cell twice": (_repeat, "cell", "is the cell of row 1 too"),
    "an unknown method": (_set(0, "method", "sorcery"), "method", "is 'sorcery'"),
    "an unknown status": (_set(0, "status", "fine"), "status", 'is "fine"'),
    "a failure without its reason": (_set(7, "reason", None), "reason", "is None with the status 'unsupported'"),
    "real weights of a shape": (_set(0, "weights", "real"), "weights", "is the name of a shape"),
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
    "a pass that compared nothing": (_set(12, "num_gradients", 0), "num_gradients", "proves nothing"),
    "a difference in a pass": (_set(12, "max_abs_difference", 1e-9), "max_abs_difference", "with the verdict PASS"),
    "a row without its schema": (lambda rows: rows[0].pop("row_schema"), "row_schema", "is missing"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_a_tampered_copy_is_refused_for_its_reason(results, case):
    tamper, key, reason = TAMPERED[case]
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    tamper(rows)
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = verify_file(results)
    assert len({problem.line for problem in problems}) == 1, problems
    assert problems[0].key == key
    assert reason in problems[0].message


def test_the_command_refuses_with_the_row_the_key_and_what_should_be(results):
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    _set(4, "s_per_step", 0.1)(rows)
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer = CliRunner().invoke(app, ["bench", "verify", str(results)])
    assert answer.exit_code == 1
    assert "rows.jsonl: row 5 (qwen2.5-32b/unsloth): s_per_step is 0.1; the passes give 0.742" in answer.output
    answer = CliRunner().invoke(app, ["bench", "report", str(results)])
    assert answer.exit_code == 2
    assert "do not hold up" in answer.output


def test_rows_older_than_the_schema_are_refused_by_what_they_lack():
    for problem in verify_file(ROOT / "docs" / "validation" / "h200_speed_eager.jsonl"):
        assert problem.key == "row_schema"
        assert "It lacks cell, label," in problem.message


def test_the_published_schema_is_up_to_date():
    published = json.loads((ROOT / "docs" / "schema" / "row.schema.json").read_text())
    assert published == json_schema(), "run scripts/row_schema.py"
