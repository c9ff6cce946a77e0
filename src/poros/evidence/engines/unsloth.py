"""Unsloth: its own kernels, its own checkpointing, its own loader.

It replaces parts of transformers and PEFT when it is imported, so it has its process for itself and is imported before
them. It loads checkpoints only: the random weights of a shape are made by another process and kept in the cache folder.
"""

import json
import os
import subprocess
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from poros.evidence.engines.base import CellRequest, Engine

ENGINE = Engine(
    name="unsloth",
    title="Unsloth",
    changes=("dropout 0", "gradient checkpointing: its own", "attention and kernels: its own", "expandable segments"),
    packages=("unsloth", "unsloth_zoo", "trl"),
    # It sets the second by itself when it is imported before torch, which is too late here.
    environment={"UNSLOTH_DISABLE_STATISTICS": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    dropout=0.0,
    folder=True,
)

# Its loader takes names only; these are all the linears of the families that it is measured on.
_ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_MIN_SEQ_LEN = 2048  # of its rotary cache; shorter rows do not make it smaller


def build(request: CellRequest, recorder: Any) -> Any:
    """The model as Unsloth loads and adapts it.

    Raises:
        ModuleNotFoundError: Unsloth is not installed, nor in the folder that was given.
        UnsupportedModelError: there is no GPU, or the base is not to be in 4 bits.
    """
    from poros.errors import UnsupportedModelError

    if find_spec("unsloth") is None:
        raise ModuleNotFoundError(
            "there is no package unsloth: install it (pip install --target FOLDER unsloth), and name the folder in "
            "environments.unsloth of the spec or in POROS_BENCH_UNSLOTH"
        )
    if recorder.device.type != "cuda":
        raise UnsupportedModelError("Unsloth's kernels need a CUDA device")
    if request.quantization != "nf4":
        raise UnsupportedModelError("Unsloth is compared over a 4-bit base; set precision.quantization to nf4")
    checkpoint = _checkpoint(request) if request.weights == "random" else request.source
    # What it compiles goes to a folder of its own, not to the one that the user happens to be in.
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(Path(request.cache) / "unsloth_compiled"))
    import torch
    from unsloth import FastLanguageModel  # type: ignore[import-not-found, unused-ignore]

    model, _ = FastLanguageModel.from_pretrained(
        checkpoint,
        max_seq_length=max(request.seq_len, _MIN_SEQ_LEN),
        load_in_4bit=True,
        dtype=getattr(torch, request.dtype),
        local_files_only=True,
    )
    lora = request.lora
    model = FastLanguageModel.get_peft_model(
        model,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_ALL_LINEAR if lora.targets == "all-linear" else lora.targets,
        use_gradient_checkpointing="unsloth",
        random_state=request.seed,
    )
    model.train()
    FastLanguageModel.for_training(model)
    recorder.facts["family"] = model.config.model_type
    return model


def checkpoint_folder(request: CellRequest) -> Path:
    """Where the random weights of a request are kept; another shape or precision has another folder."""
    config = Path(request.source) / "config.json"
    made_of = [request.source, request.dtype, request.double_quant, config.read_text() if config.is_file() else None]
    key = sha256(json.dumps(made_of).encode()).hexdigest()[:12]
    return Path(request.cache) / "checkpoints" / f"{Path(request.source).name}-{key}"


def _checkpoint(request: CellRequest) -> str:
    """The folder with the request's random weights, which another process makes if it is not there."""
    folder = checkpoint_folder(request)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        maker = "poros.evidence.engines.unsloth_checkpoint"
        subprocess.run([sys.executable, "-m", maker, str(folder)], input=request.to_json(), text=True, check=True)
    return str(folder)
