"""Who else looks into a forward: torch.compile, and transformers' collection of outputs."""

import sys
from typing import Any

import torch

from poros.errors import ResidencyError

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # an older transformers collects in another way
    _active_collector: Any = None  # type: ignore[no-redef]


def refuse_compiling() -> None:
    """Refuse to run inside torch.compile, which would trace through the borrowed weights."""
    # Where tracing breaks off, Dynamo runs this eagerly and goes on tracing what is called: its callback tells.
    frames = torch._C._dynamo.eval_frame if "torch._dynamo" in sys.modules else None
    callback = None if frames is None else getattr(frames, "get_eval_frame_callback", lambda: None)()
    if torch.compiler.is_compiling() or callback is not None:
        raise ResidencyError("a prepared model cannot be traced by torch.compile; run it without compiling")


def captured_outputs() -> set[str]:
    """Which outputs transformers collects from the layers in this forward.

    Raises:
        ResidencyError: it collects some inside the layers, where they would not be connected to the graph.
    """
    if _active_collector is None:
        return set()
    captured = set(_active_collector.get() or ())
    inner = sorted(key for key in captured if not key.startswith(("hidden_states", "_")))
    if inner:
        raise ResidencyError(
            f"output_{inner[0]}=True is not possible in a forward with gradients of a prepared model: what is captured "
            "inside a layer would carry no gradient (a router's auxiliary loss among it). Set it to False, or run "
            "under torch.no_grad()."
        )
    return captured
