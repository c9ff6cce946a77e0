"""On a CUDA device: ``poros train`` in bfloat16 gives the same bits streamed, resident, and resumed.

Run with ``pytest -m gpu``.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import skips, tiny_run

pytestmark = [pytest.mark.gpu, skips.needs_cuda]


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The strict path: deterministic kernels only, so that two resident runs agree."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    tiny_run.model_folder(folder / "model")
    tiny_run.write_rows(folder / "rows.jsonl", tiny_run.some_rows())
    return folder


def train(home: Path, output: Path, *options: str, **model: Any) -> str:
    """Run ``poros train`` on the GPU; returns what it said."""
    placed = {"device": "cuda", "dtype": "auto", **model}
    run = tiny_run.settings(
        home / "model", home / "rows.jsonl", output, model=placed, train={"steps": 4, "save_total_limit": 4}
    )
    result = tiny_run.poros("train", tiny_run.write_settings(output.with_suffix(".yaml"), run), *options)
    assert result.exit_code == 0, result.output
    return str(result.stderr)


def adapter(output: Path) -> bytes:
    return (output / "adapter" / "adapter_model.safetensors").read_bytes()


def test_streamed_and_resident_runs_save_the_same_bytes(home: Path, tmp_path: Path) -> None:
    for name in ("resident", "again"):
        train(home, tmp_path / name, stream=False)
    assert adapter(tmp_path / "resident") == adapter(tmp_path / "again"), "inconclusive: resident runs differ"
    train(home, tmp_path / "streamed", block_size=1, slots=2)
    assert adapter(tmp_path / "streamed") == adapter(tmp_path / "resident")


@pytest.mark.parametrize("step", [1, 3])
def test_a_resumed_run_saves_the_same_bytes(home: Path, tmp_path: Path, step: int) -> None:
    """Dropout draws from the GPU's random state, which is part of the checkpoint."""
    train(home, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", tmp_path / "out" / f"checkpoint-{step}")
    assert f"resume from step {step}" in train(home, tmp_path / "out", "--resume")
    assert adapter(tmp_path / "out") == adapter(tmp_path / "whole")
