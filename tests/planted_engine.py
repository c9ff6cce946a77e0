"""An engine that fails as it is told to, for the tests of the harness: ``options: {fail: {MODEL: HOW}}``."""

import os
import signal
import time
from typing import Any

from poros.evidence.engines.base import CellRequest, Engine

ENGINE = Engine(name="planted", title="planted failure", changes=("fails on purpose",))


def run(request: CellRequest, recorder: Any) -> None:
    match request.options["fail"].get(request.model):
        case "out_of_memory":
            raise MemoryError("one byte more than there is")
        case "missing_package":
            import a_package_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401
        case "killed":
            print("about to be killed", flush=True)  # noqa: T201
            os.kill(os.getpid(), signal.SIGKILL)
        case "error":
            raise KeyError("no such thing")
        case "hang":
            time.sleep(600)
        case "too_few_steps":
            recorder.begin_step()
            recorder.end_step(1.0)
            return
    raise AssertionError("nothing was planted for this model")
