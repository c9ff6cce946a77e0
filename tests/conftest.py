"""What every test gets: no network, and a quick garbage collector."""

import gc
import importlib
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


@pytest.fixture(scope="session", autouse=True)
def imports_are_not_garbage():
    """Let collections skip the million objects that importing the libraries made; ``prepare`` collects each time."""
    for library in ("bitsandbytes", "peft", "transformers"):
        importlib.import_module(library)
    gc.collect()
    gc.freeze()
