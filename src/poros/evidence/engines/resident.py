"""Plain QLoRA, the whole base on the device: what every other method is compared with."""

from typing import Any

from poros.evidence.engines.base import CellRequest, Engine

ENGINE = Engine(name="resident", title="resident")


def build(request: CellRequest, recorder: Any) -> Any:
    from poros.evidence.engines.qlora import build_resident

    return build_resident(request, recorder)
