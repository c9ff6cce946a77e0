"""What the tests of benchmarks share: tiny shapes, and an environment that changes nothing under them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHAPES = ROOT / "configs" / "bench" / "shapes"


@pytest.fixture(scope="module", autouse=True)
def steady_environment() -> Iterator[None]:
    """One thread, one commit whatever is committed meanwhile, and the tests' own engine within reach."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("POROS_COMMIT", "0" * 40)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.delenv("POROS_RUN_ID", raising=False)
        yield
