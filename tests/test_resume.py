"""A run that was killed at any instant resumes to the bits of one that was not."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from poros.train.checkpoints import MANIFEST, complete_checkpoints, whole_folder
from tests import killed_run, tiny_run

STEPS = 7  # of three an epoch, with a checkpoint every second
NUM_KILLS = 5


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rows, and an uninterrupted run in ``whole``."""
    folder = tmp_path_factory.mktemp("resume")
    tiny_run.model_folder(folder / "model")
    tiny_run.write_rows(folder / "rows.jsonl", tiny_run.some_rows())
    assert tiny_run.poros("train", settings(folder, folder / "whole")).exit_code == 0
    return folder


def settings(home: Path, output: Path, **train: Any) -> Path:
    run = tiny_run.settings(
        home / "model",
        home / "rows.jsonl",
        output,
        train={"steps": STEPS, "save_steps": 2, "schedule": "constant", **train},
    )
    return tiny_run.write_settings(output.with_suffix(".yaml"), run)


def assert_same_end(output: Path, whole: Path) -> None:
    """Adapter, optimizer, schedule and random state, bit for bit."""
    adapter = Path("adapter") / "adapter_model.safetensors"
    assert (output / adapter).read_bytes() == (whole / adapter).read_bytes()
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        mine, theirs = (
            torch.load(folder / f"checkpoint-{STEPS}" / name, weights_only=False) for folder in (output, whole)
        )
        assert_equal(mine, theirs, name)
    assert sorted(path.name for path in output.iterdir()) == sorted(path.name for path in whole.iterdir())


def assert_equal(mine: Any, theirs: Any, where: str) -> None:
    assert type(mine) is type(theirs), where
    if isinstance(mine, torch.Tensor):
        assert torch.equal(mine, theirs), where
    elif isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), where
        for key in mine:
            assert_equal(mine[key], theirs[key], f"{where}.{key}")
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(theirs), where
        for i, pair in enumerate(zip(mine, theirs, strict=True)):
            assert_equal(*pair, f"{where}.{i}")
    elif hasattr(mine, "tobytes"):
        assert mine.tobytes() == theirs.tobytes(), where
    else:
        assert mine == theirs, where


def test_a_run_killed_at_any_instant_resumes_to_the_same_bits(home: Path, tmp_path: Path) -> None:
    events = killed_run.run(settings(home, tmp_path / "counted"))
    assert events is not None
    assert_same_end(tmp_path / "counted", home / "whole")
    for kill_at in random.Random(0).sample(range(1, events), NUM_KILLS):
        output = tmp_path / f"killed-{kill_at}"
        run = settings(home, output)
        assert killed_run.run(run, kill_at=kill_at) is None
        assert not (output / "adapter").exists() or kill_at > events * 0.8
        resume = ["--resume"] if complete_checkpoints(output) else []
        result = tiny_run.poros("train", run, *resume)
        assert result.exit_code == 0, f"killed at {kill_at} of {events}: {result.output}"
        assert_same_end(output, home / "whole")


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_every_step_can_be_resumed_from(home: Path, tmp_path: Path, step: int) -> None:
    """In the middle of an epoch, at its end, and at the start of the next."""
    output = tmp_path / "out"
    run = settings(home, output, save_steps=1, save_total_limit=STEPS)
    assert tiny_run.poros("train", run).exit_code == 0
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(output / f"checkpoint-{later}")
    shutil.rmtree(output / "adapter")
    result = tiny_run.poros("train", run, "--resume")
    assert result.exit_code == 0, result.output
    assert f"resume from step {step}" in result.stderr
    adapter = Path("adapter") / "adapter_model.safetensors"
    assert (output / adapter).read_bytes() == (home / "whole" / adapter).read_bytes()


def test_an_epoch_that_ends_within_an_accumulation_can_be_resumed(home: Path, tmp_path: Path) -> None:
    """Six batches an epoch, four a step: the second step of each epoch has two."""
    shape = {"steps": None, "epochs": 2.0, "accumulation": 4, "save_steps": 1, "save_total_limit": 4}
    whole, output = tmp_path / "whole", tmp_path / "out"
    assert tiny_run.poros("train", settings(home, whole, **shape)).exit_code == 0
    assert [checkpoint.step for checkpoint in complete_checkpoints(whole)] == [1, 2, 3, 4]
    for step in (1, 2, 3):
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(whole / f"checkpoint-{step}", output / f"checkpoint-{step}")
        result = tiny_run.poros("train", settings(home, output, **shape), "--resume")
        assert result.exit_code == 0, result.output
        adapter = Path("adapter") / "adapter_model.safetensors"
        assert (output / adapter).read_bytes() == (whole / adapter).read_bytes()


def test_resuming_may_move_the_weights_but_changes_no_bit(home: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(home / "whole", output)
    shutil.rmtree(output / f"checkpoint-{STEPS}")
    shutil.rmtree(output / "adapter")
    run = tiny_run.settings(
        home / "model",
        home / "rows.jsonl",
        output,
        model={"stream": False},
        train={"steps": STEPS, "save_steps": 2, "schedule": "constant", "logging_steps": 3},
    )
    assert tiny_run.poros("train", tiny_run.write_settings(tmp_path / "run.yaml", run), "--resume").exit_code == 0
    assert_same_end(output, home / "whole")


@pytest.mark.parametrize("damage", ["no manifest", "file missing", "file cut short", "manifest cut short"])
def test_a_checkpoint_that_is_not_complete_is_ignored(home: Path, tmp_path: Path, damage: str) -> None:
    output = tmp_path / "out"
    shutil.copytree(home / "whole", output)
    shutil.rmtree(output / "adapter")
    newest = output / f"checkpoint-{STEPS}"
    if damage == "no manifest":
        (newest / MANIFEST).unlink()
    elif damage == "file missing":
        (newest / "optimizer.pt").unlink()
    else:
        file = newest / ("optimizer.pt" if damage == "file cut short" else MANIFEST)
        file.write_bytes(file.read_bytes()[:-10])
    assert [checkpoint.step for checkpoint in complete_checkpoints(output)] == [6]
    result = tiny_run.poros("train", settings(home, output), "--resume")
    assert result.exit_code == 0, result.output
    assert "resume from step 6" in result.stderr
    assert f"note   checkpoint-{STEPS} is incomplete or damaged" in result.stderr
    assert_same_end(output, home / "whole")


def test_resuming_a_finished_run_trains_no_further(home: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(home / "whole", output)
    shutil.rmtree(output / "adapter")
    result = tiny_run.poros("train", settings(home, output), "--resume")
    assert "adapter of 7 steps saved" in result.stdout
    assert_same_end(output, home / "whole")


def test_libraries_that_changed_since_the_checkpoint_are_named(home: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(home / "whole", output)
    manifest = output / f"checkpoint-{STEPS}" / MANIFEST
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "versions": {**content["versions"], "torch": "1.0"}}))
    result = tiny_run.poros("train", settings(home, output), "--resume")
    assert "torch was 1.0 and is" in result.stderr


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint-1"
    with whole_folder(final) as folder:
        (folder / "a").write_text("a")
        assert not final.exists()
    assert {path.name for path in tmp_path.rglob("*")} == {"checkpoint-1", "a"}

    def fill_half() -> None:
        with whole_folder(final) as folder:
            (folder / "b").write_text("b")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill_half()
    assert {path.name for path in tmp_path.rglob("*")} == {"checkpoint-1", "a"}
