"""The command line: quick to answer, complete in its help, and what it says of a run's data."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import poros
from poros.config import RunConfig, describe_settings
from poros.config_file import load_config
from tests import tiny_run

SRC = str(Path(poros.__file__).parents[1])
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.yaml"))

_HEAVY = ("torch", "transformers", "peft", "bitsandbytes", "numpy")
_REPORT = f"import sys; sys.stdout.write(','.join(name for name in {_HEAVY!r} if name in sys.modules))"


def python(code: str) -> str:
    """What ``code`` writes in a fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": SRC}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_importing_poros_imports_none_of_the_heavy_libraries() -> None:
    assert python(f"import poros, poros.cli, poros.config_file; {_REPORT}") == ""


def test_help_comes_within_half_a_second() -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        said = python("import sys; sys.argv = ['poros', '--help']\nfrom poros.cli import main; main()")
        times.append(time.perf_counter() - start)
    assert "train" in said
    assert min(times) < 0.5


def test_version() -> None:
    for command in ("--version", "version"):
        assert tiny_run.poros(command).stdout == f"poros {poros.__version__}\n"


def test_settings_lists_every_setting_with_its_description() -> None:
    said = tiny_run.poros("train", "--settings").stdout
    listed = list(describe_settings())
    assert {name.partition(".")[0] for name, *_ in listed} == set(RunConfig.model_fields)
    for name, kind, default, description in listed:
        assert description, f"{name} has no description"
        assert f"{name}  ({kind}; {default})" in said
        assert description in said


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_shipped_settings_are_valid(file: Path) -> None:
    load_config(file)


def test_numbers_are_read_as_they_are_written(tmp_path: Path) -> None:
    """PyYAML reads 2e-4 as text."""
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\ndata: {train: d}\noutput: o\ntrain: {learning_rate: 2e-4, weight_decay: 1E-2}\n")
    train = load_config(file).train
    assert (train.learning_rate, train.weight_decay) == (2e-4, 1e-2)


def test_data_shows_tokens_labels_counts_and_what_was_left_out(tmp_path: Path) -> None:
    model = tiny_run.model_folder(tmp_path / "model", num_hidden_layers=1)
    rows = [{"prompt": "is it?", "completion": " yes"}, {"text": "no"}, {"messages": []}]
    data = tiny_run.write_rows(tmp_path / "rows.jsonl", rows)
    run = tiny_run.settings(model, data, tmp_path / "out", data={"eval": str(data)})
    file = tiny_run.write_settings(tmp_path / "run.yaml", run)
    said = tiny_run.poros("data", file, "--rows", "1").stdout
    tokenizer = tiny_run.tokenizer()
    head, tail = tokenizer("is it?")["input_ids"], [*tokenizer(" yes", add_special_tokens=False)["input_ids"], 2]
    assert said.splitlines() == [
        f"{data}:1  {len(head + tail)} tokens, {len(tail)} trained",
        f"  read   '<s>is it?'  {' '.join(map(str, head))}",
        f"  learn  ' yes</s>'  {' '.join(map(str, tail))}",
        *(
            f"{name}  {line}"
            for name in ("train", "eval")
            for line in (
                f"2 rows, {len(head + tail) + 3} tokens, {len(tail) + 2} of them trained",
                f"longest batch 2 x {len(head + tail)} tokens",
                f"1 row dropped, nothing to learn in them: {data}:3",
            )
        ),
    ]
    assert not (tmp_path / "out").exists()
