"""All skip logic of the tests."""

import os

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_gpu_model = pytest.mark.skipif(
    "POROS_GPU_TEST_MODEL" not in os.environ,
    reason="set POROS_GPU_TEST_MODEL to a hub id, a folder, or a shape's name",
)
