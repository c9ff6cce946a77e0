"""All skip logic of the tests."""

import importlib.util
import os

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_gpu_model = pytest.mark.skipif(
    "POROS_GPU_TEST_MODEL" not in os.environ,
    reason="set POROS_GPU_TEST_MODEL to a hub id, a folder, or a shape's name",
)
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl (pip install poros[trl])")
