"""All skip logic of the tests."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_gpu_model = pytest.mark.skipif(
    "POROS_GPU_TEST_MODEL" not in os.environ,
    reason="set POROS_GPU_TEST_MODEL to a hub id, a folder, or a shape's name",
)
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl (pip install poros[trl])")


def _find_browser() -> str | None:
    """A Chromium of the system, or one that Playwright put in the user's cache."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", Path.home() / ".cache" / "ms-playwright"))
    installed = sorted(cache.glob("chromium*/chrome*/*chrom*"))
    return next(filter(None, map(shutil.which, names)), None) or next((str(p) for p in installed if p.is_file()), None)


BROWSER = _find_browser()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs a Chromium (sh scripts/install_browser.sh)")
