"""Rows can be believed: what follows from readings is recomputed, and tampered copies are refused for their reason."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from poros.cli import app
from poros.errors import ResultError
from poros.evidence.artifact import SpeedRow, append_row, json_schema, read_rows, write_rows
from poros.evidence.verify import verify_file
from tests.result_rows import campaign, failed_row, parity_row, speed_row

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
    results.write_text(json.dumps(row) + "\n{")
    with pytest.raises(ResultError, match=r"rows.jsonl:2: the line is not JSON"):
        read_rows(results)
    with pytest.raises(ResultError, match=r"cannot read .*missing"):
        read_rows(results.parent / "missing")


def test_an_honest_file_is_verified(results):
    assert verify_file(results) == []
    answer = CliRunner().invoke(app, ["bench", "verify", str(results.parent)])
    assert answer.exit_code == 0
    assert "15 rows verified" in answer.output


def test_the_command_refuses_with_the_row_the_key_and_what_should_be(results):
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    rows[4]["s_per_step"] = 0.1
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer = CliRunner().invoke(app, ["bench", "verify", str(results)])
    assert answer.exit_code == 1
    assert "rows.jsonl: row 5 (qwen2.5-32b/unsloth): s_per_step is 0.1; the passes give 0.742" in answer.output
    answer = CliRunner().invoke(app, ["bench", "report", str(results)])
    assert answer.exit_code == 2
    assert "do not hold up" in answer.output


def test_rows_older_than_the_schema_are_refused_by_what_they_lack(tmp_path):
    older = {"kind": "speed", "model": "qwen2.5-32b", "method": "resident", "passes": [[0.7]], "s_per_step": 0.7}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(older)}\n" * 2)
    problems = verify_file(tmp_path / "rows.jsonl")
    assert [(problem.line, problem.key) for problem in problems] == [(1, "row_schema"), (2, "row_schema")]
    assert all("It lacks run_id, cell, weights," in problem.message for problem in problems)


def test_the_published_schema_is_up_to_date():
    published = json.loads((ROOT / "docs" / "schema" / "row.schema.json").read_text())
    assert published == json_schema(), "run scripts/row_schema.py"
