"""Parity at a real model's shape: resident, resident again, and streamed, in lockstep on one GPU.

Set ``POROS_GPU_TEST_MODEL`` to a hub id, a folder, or a shape's name (random weights of a real configuration), then run
``pytest -m gpu tests/test_gpu_parity.py``. ``POROS_GPU_TEST_STEPS``, ``_SEQ_LEN``, ``_ACCUMULATION``, ``_BLOCK_SIZE``,
``_SLOTS``, ``_POISON`` and ``_CONTROL_STEPS`` (0: all) are settings of the check; ``POROS_GPU_TEST_PATHS`` says which
attention paths, and ``POROS_GPU_TEST_ROWS`` names a file to which the verdicts are appended. ``poros parity`` does the
same from the command line.
"""

import os
from dataclasses import replace

import pytest

from poros.evidence.artifact import append_row
from poros.evidence.parity import ParitySettings, Twins, build_twins, check
from tests import skips

# Read when cuBLAS is first used, by whichever test comes first.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [pytest.mark.gpu, skips.needs_cuda, skips.needs_gpu_model, pytest.mark.timeout(0)]

DEFAULTS = {
    "steps": 20,
    "seq_len": 512,
    "accumulation": 1,
    "block_size": 4,
    "slots": 2,
    "poison": 0,
    "control_steps": 0,
}


def settings_from_environment() -> ParitySettings:
    given = {name: int(os.environ.get(f"POROS_GPU_TEST_{name.upper()}", value)) for name, value in DEFAULTS.items()}
    given["poison"] = bool(given["poison"])
    given["control_steps"] = given["control_steps"] or None
    return ParitySettings(os.environ["POROS_GPU_TEST_MODEL"], device="cuda", **given)


@pytest.fixture(scope="module")
def twins() -> Twins:
    return build_twins(settings_from_environment())


@pytest.mark.parametrize("path", os.environ.get("POROS_GPU_TEST_PATHS", "strict,math").split(","))
def test_all_surfaces_are_equal(path: str, twins: Twins) -> None:
    result = check(replace(settings_from_environment(), path=path), twins)
    if target := os.environ.get("POROS_GPU_TEST_ROWS"):
        append_row(target, result.row())
    assert result.verdict == "PASS", str(result)
