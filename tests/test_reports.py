"""Reports say what the rows say: tables with ratios and failures, and what changed between two runs."""

import re
from itertools import dropwhile, takewhile

import pytest
from typer.testing import CliRunner

from poros.cli import app
from poros.errors import ResultError
from poros.evidence.artifact import write_rows
from poros.evidence.compare import compare, comparison_lines
from poros.evidence.report import markdown_report, table
from poros.evidence.summary import summarize
from tests.result_rows import GIB, campaign, failed_row, parity_row, speed_row


def _table(text: str, heading: str) -> list[dict[str, str]]:
    """The first Markdown table below a heading, as dictionaries."""
    below = dropwhile(lambda line: not line.startswith("|"), text.split(heading, 1)[1].splitlines())
    lines = takewhile(lambda line: line.startswith("|"), below)
    head, _, *body = (line[2:-2].split(" | ") for line in lines)
    return [dict(zip(head, line, strict=True)) for line in body]


def test_the_table_has_every_method_with_its_changes_figures_and_ratios():
    text = markdown_report(summarize(campaign()), "Results")
    rows = _table(text, "## qwen2.5-32b, random weights (run `h200-1`)")
    assert [row["method"] for row in rows][:3] == ["poros, block size 1", "poros, block size 4", "resident"]
    ours = rows[1]
    assert ours["what it changes"] == "nothing"
    assert ours["parity"] == "PASS (strict, 4 steps; math, 4 steps)"
    assert rows[0]["parity"] == "PASS (strict, 4 steps, block size 4; math, 4 steps, block size 4)"
    assert ours["s/step"] == "0.632 ± 0.002"
    assert ours["s/step of each pass"] == "0.630, 0.632, 0.634"
    assert ours["s/step over poros-train"] == "0.44"
    assert ours["reserved GiB"] == "7.03"
    assert rows[4]["what it changes"] == (
        "dropout 0; gradient checkpointing: its own; attention and kernels: its own; expandable segments"
    )
    assert rows[7]["s/step"] == "unsupported"


def test_failures_parity_and_provenance_are_told():
    text = markdown_report(summarize(campaign()), "Results")
    assert "- unsloth: out of memory: torch.OutOfMemoryError: tried to allocate 8 GiB" in text
    assert "| PASS (0.00e+00) |" in text
    assert "first difference: step 2, gradients of layers.3.q_proj.lora_A at [0, 4]: 0.25 instead of 0.5" in text
    assert "equal to those of resident in every bit, at every step: poros, block size 1; poros, block size 4;" in text
    assert "NVIDIA H200, PCIe 5 x16, driver 580.1; x86_64, 16 cores; python 3.12.3, torch 2.11.0" in text


def test_a_first_difference_without_an_element_is_told_with_the_note():
    first = {"step": 2, "surface": "rng"}
    noted = {"poison": False, "note": "nothing was reloaded"}
    text = markdown_report(summarize([parity_row("FAIL", first_difference=first, options=noted)]), "Results")
    assert "layers.3 differs; first difference: step 2, rng; nothing was reloaded\n" in text


def test_a_verdict_stands_beside_what_it_is_about_only():
    ours = speed_row(1)

    def beside(**changed):
        group = summarize([ours, speed_row(2), parity_row(**changed)]).groups[0]
        return [entry.cells["parity"].text for entry in group.entries]

    assert beside(steps=20) == ["PASS (strict, 20 steps)", ""]
    assert beside(steps=1, block_size=1) == ["PASS (strict, 1 step, block size 1)", ""]
    noted = beside(options={"note": "nothing was reloaded"})
    assert noted == ["PASS (strict, 4 steps, nothing was reloaded)", ""]
    others = {"model": "other", "weights": "real", "family": "llama", "dtype": "float32", "engine": None}
    for key, value in (*others.items(), ("quantization", None), ("double_quant", False)):
        assert beside(**{key: value}) == ["", ""], key
    ours = speed_row(1, quantization=None)  # without quantisation there is nothing to quantise twice
    assert beside(quantization=None, double_quant=False) == ["PASS (strict, 4 steps)", ""]
    text = markdown_report(summarize([ours, parity_row(weights="real")]), "Results")
    assert "PASS (0.00e+00)" in text.split("## Parity")[1]


def test_rows_of_two_places_share_no_table():
    here, there = [speed_row(0), speed_row(2)], [speed_row(2, scale=3.0, gpu_uuid="GPU-2", gpu="NVIDIA A100")]
    for rows in (here + there, [*here, speed_row(2, run_id="another")]):
        groups = summarize(rows).groups
        assert [len(group.entries) for group in groups] == [2, 1]
        assert groups[1].entries[0].cells["of_resident"].text == "1.00"
        glance = _table(markdown_report(summarize(rows), "Results"), "## At a glance")
        assert [line["run"] for line in glance] == [group.where for group in groups]


def test_what_rows_do_not_share_is_in_their_lines():
    group = summarize([speed_row(0), speed_row(2), speed_row(4), speed_row(3, attention="eager")]).groups[0]
    assert "dropout 0.05 unless the row says otherwise" in group.settings
    assert "512 tokens, batch 1" in group.settings
    assert [entry.changes for entry in group.entries][:2] == [(), ()]
    assert group.entries[2].changes.count("dropout 0") == 1
    assert group.entries[3].changes == ("gradient checkpointing", "attention eager")
    halves = summarize([speed_row(0), speed_row(2, seq_len=64)]).groups[0]
    assert "tokens" not in halves.settings
    assert [entry.changes for entry in halves.entries] == [("512 tokens",), ("64 tokens",)]
    mixed = summarize([speed_row(0), speed_row(2, weights="real")]).groups[0]
    assert mixed.heading == "qwen2.5-32b"
    assert mixed.entries[1].changes == ("real weights",)


def test_uncommitted_changes_are_told():
    text = markdown_report(summarize([speed_row(0, poros_commit="0123456789abcdef+changes")]), "Results")
    assert "commit 0123456789+changes" in text


def test_the_glance_names_the_fastest_poros_row_and_its_memory_cut():
    glance = _table(markdown_report(summarize(campaign()), "Results"), "## At a glance")
    assert [line["model"] for line in glance] == ["qwen2.5-32b", "qwen2.5-72b"]
    assert glance[0]["fastest Poros row"] == "poros, block size 4"
    assert glance[0]["memory cut against resident"] == "5.28"
    assert glance[1]["parity"] == "FAIL (strict, 4 steps, block size 4)"


def test_meters_that_nobody_has_get_no_column():
    nothing = dict.fromkeys(("allocated_bytes", "reserved_bytes", "process_bytes"))
    memory = [{**nothing, "host_peak_bytes": GIB, "host_locked_bytes": 0}]
    place = {"gpu": None, "gpu_uuid": None, "driver": None, "link": None, "gpu_memory_bytes": None, "device": "cpu"}
    row = speed_row(0, num_passes=1, passes=[[0.01] * 5], losses=[[1.0] * 7], pass_memory=memory, **place)
    text = markdown_report(summarize([row]), "Results")
    assert "reserved GiB" not in text
    assert "memory cut against" not in text
    assert "| 0.0100 |" in text  # one pass: no spread


def test_a_run_without_figures_still_has_a_report():
    rows = [failed_row("unsloth", "missing_package", "ImportError: no unsloth"), parity_row("INCONCLUSIVE")]
    text = markdown_report(summarize(rows), "Results")
    assert "missing package: ImportError: no unsloth" in text
    assert "INCONCLUSIVE: layers.3 differs" in text
    assert "## Parity" in markdown_report(summarize([parity_row()]), "Results")


def test_a_bar_in_a_cell_does_not_end_it():
    assert table(["a"], [["x|y\nz"]]).splitlines()[-1] == "| x\\|y z |"


HOSTILE = "a\n\n# Best | <b>x</b> [go](http://x) `c` **b** &lt; \\| __i__\u2028"


def test_names_and_reasons_stay_text():
    rows = [
        speed_row(0, label=HOSTILE, changes=[HOSTILE], run_id="r`x", cell=HOSTILE, host=HOSTILE),
        failed_row("unsloth", "crashed", HOSTILE, run_id="r`x", cell="b", host=HOSTILE),
        parity_row("FAIL", reason=HOSTILE, cell=HOSTILE),
    ]
    text = markdown_report(summarize(rows), HOSTILE)
    plain = markdown_report(summarize(campaign()[:2]), "Results")
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert all(line.startswith(("# a  #", "## ")) for line in heads)
    assert "\u2028" not in text
    assert not re.search(r"(?<!\\)<b>|(?<!\\)\]\(|(?<!\\)\*\*|(?<!\\)&lt;", text)
    bars = [line.count("|") - line.count("\\|") for line in text.splitlines() if line.startswith("|")]
    assert len(set(bars)) <= 3  # one for each of the tables
    assert "(run `r x`)" in text
    assert plain.count("\\") == 0


def test_a_change_is_told_with_whether_it_is_beyond_both_spreads():
    before = [speed_row(place) for place in range(6)]
    after = [speed_row(0, scale=1.002), *(speed_row(place, scale=0.9) for place in range(1, 6))]
    verdicts = {change.cell.split("/")[1]: change.verdict for change in compare(before, after).changes}
    assert verdicts["poros-block-size-1"] == "within the spread"
    assert verdicts["poros-block-size-4"] == "faster"
    lines = comparison_lines(compare(after, before))
    assert any("+11.1 %  slower, beyond both spreads" in line for line in lines)
    assert any(line.startswith("qwen2.5-32b/resident: memory: allocated +11.1 %") for line in lines)


def test_one_pass_has_no_spread_to_be_beyond():
    single = speed_row(0, num_passes=1, passes=[[1.0] * 5], losses=[[1.0] * 7], pass_memory=[{}])
    assert compare([single], [speed_row(0)]).changes[0].verdict == "unknown"


def test_settings_that_differ_failures_and_lone_cells_are_told():
    after = [
        speed_row(0, poros_commit="f" * 40, lora={"rank": 8, "alpha": 32, "dropout": 0.05, "targets": "all-linear"}),
        failed_row("resident", "crashed", "killed", cell="qwen2.5-32b/resident"),
        speed_row(3),
    ]
    lines = comparison_lines(compare([speed_row(0), speed_row(2), speed_row(1)], after))
    assert "qwen2.5-32b/poros-block-size-1: lora.rank: 16 -> 8" in lines
    assert any("0.629 ± 0.002 s" in line and "crashed" in line and line.endswith("changed") for line in lines)
    assert "only before: qwen2.5-32b/poros-block-size-4" in lines
    assert "only after: qwen2.5-32b/resident-checkpointed" in lines


def test_faster_with_other_settings_is_not_said_plainly():
    after = [speed_row(2, scale=0.5, seq_len=256, dtype="float16")]
    lines = comparison_lines(compare([speed_row(2)], after))
    assert lines[0].startswith("What differs besides the readings")
    differing = lines.index("all cells: seq_len: 512 -> 256")
    verdict = next(place for place, line in enumerate(lines) if "faster" in line)
    assert differing < verdict
    assert "not like for like (2 settings differ): faster, beyond both spreads" in lines[verdict]
    newer = comparison_lines(compare([speed_row(2)], [speed_row(2, scale=0.5, poros_commit="f" * 40)]))
    assert not any("not like for like" in line for line in newer)


def test_two_runs_that_cannot_be_compared_are_refused():
    with pytest.raises(ResultError, match="no cell in common"):
        compare([speed_row(0)], [speed_row(1)])
    with pytest.raises(ResultError, match=r"two rows of the cell qwen2\.5-32b/resident"):
        compare([speed_row(2), speed_row(2, run_id="other")], [speed_row(2)])


def test_the_commands_write_both_reports_and_compare_folders(tmp_path):
    write_rows(tmp_path / "rows.jsonl", campaign())
    answer = CliRunner().invoke(app, ["bench", "report", str(tmp_path), "--title", "One night"])
    assert answer.exit_code == 0, answer.output
    assert (tmp_path / "report.md").read_text().startswith("# One night\n")
    assert "<h1>One night</h1>" in (tmp_path / "report.html").read_text()
    answer = CliRunner().invoke(app, ["bench", "compare", str(tmp_path), str(tmp_path)])
    assert answer.exit_code == 0, answer.output
    assert "within the spread" in answer.output


@pytest.mark.parametrize("place", ["/proc/x", "file", "taken"])
def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path, place):
    write_rows(tmp_path / "rows.jsonl", campaign())
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "report.html").mkdir(parents=True)
    answer = CliRunner().invoke(app, ["bench", "report", str(tmp_path), "-o", str(tmp_path / place)])
    assert answer.exit_code == 2, answer.exception
    assert "the report cannot be written to" in answer.output
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["file", "rows.jsonl"]


def test_a_run_in_two_files_is_reported_as_one_or_refused(tmp_path):
    for name, rows in ("one", [speed_row(0)]), ("two", [speed_row(2)]), ("three", [speed_row(3, gpu_uuid="GPU-2")]):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "rows.jsonl", rows)
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
    assert CliRunner().invoke(app, ["bench", "report", one, two]).exit_code == 0
    assert "| 1.03 |" in (tmp_path / "one" / "report.md").read_text()
    answer = CliRunner().invoke(app, ["bench", "report", one, two, three])
    assert answer.exit_code == 2
    assert "gpu_uuid" in answer.output
    answer = CliRunner().invoke(app, ["bench", "verify", one, one])
    assert answer.exit_code == 1
    assert "is the cell of row 1 too, in the same run" in answer.output
