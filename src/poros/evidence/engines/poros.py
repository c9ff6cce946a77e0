"""Poros: the base streams from host memory, in a bare loop."""

from typing import Any

from poros.evidence.engines.base import CellRequest, Engine

ENGINE = Engine(
    name="poros",
    title="poros",
    settings=("block_size", "slots", "resident_blocks", "replay"),
    launches=("eager", "replay"),
)


def build(request: CellRequest, recorder: Any) -> Any:
    from poros.evidence.engines.qlora import build_streamed

    return build_streamed(request, recorder)
