"""Rows of a made-up campaign on one card, such as the commands that show and check rows take."""

from typing import Any

from poros.evidence.artifact import ParityRow, Row, SpeedRow
from poros.evidence.engines.base import Engine, describe

GIB = 2**30
PLACE = {
    "run_id": "h200-1",
    "time_utc": "2026-11-30T12:00:00Z",
    "gpu": "NVIDIA H200",
    "gpu_uuid": "GPU-1",
    "driver": "580.1",
    "link": "PCIe 5 x16",
    "gpu_memory_bytes": 141 * GIB,
    "host": "x86_64, 16 cores",
    "versions": {"python": "3.12.3", "torch": "2.11.0", "transformers": "5.17.0"},
    "poros_commit": "0123456789abcdef",
}
SETTINGS: dict[str, Any] = {
    "model": "qwen2.5-32b",
    "weights": "random",
    "family": "qwen2",
    "path": "fast",
    "device": "cuda",
    "attention": "sdpa",
    "quantization": "nf4",
    "double_quant": True,
    "dtype": "bfloat16",
    "seq_len": 512,
    "batch_size": 1,
    "accumulation": 1,
    "lora": {"rank": 16, "alpha": 32, "dropout": 0.05, "targets": "all-linear"},
    "dataset": {"name": "synthetic", "seed": 1, "sha256": "ab" * 32},
    "learning_rate": 2e-5,
    "max_grad_norm": 1.0,
    "steps": 5,
    "warmup_steps": 2,
    "num_passes": 3,
}

# method, label, seconds a step, GiB reserved, GiB of the host
METHODS: list[tuple[str, str, float, float, float]] = [
    ("poros", "poros, block size 1", 0.645, 4.1, 18.0),
    ("poros", "poros, block size 4", 0.63, 7.03, 18.1),
    ("resident", "resident", 0.627, 37.11, 1.9),
    ("resident-checkpointed", "resident, checkpointed", 0.83, 22.5, 1.9),
    ("unsloth", "Unsloth", 0.74, 20.61, 3.2),
    ("poros-train", "poros-train", 1.439, 14.69, 30.3),
    ("stream-loop", "stream loop", 0.61, 3.9, 17.7),
]


def speed_row(place: int, model: str = "qwen2.5-32b", scale: float = 1.0, **changed: Any) -> SpeedRow:
    """The row of ``METHODS[place]`` on ``model``, which takes ``scale`` times as long and as much."""
    method, label, seconds, reserved, host = METHODS[place]
    engine = describe(method)
    streams = method in ("poros", "stream-loop")
    wobble = [0.01, -0.004, 0.0, 0.006, -0.008]
    passes = [[(seconds + 0.002 * number + part) * scale for part in wobble] for number in range(3)]
    losses = [12.9 + 0.05 * ((7 * step) % 5 - 2) + (0.02 if engine.dropout == 0 else 0.0) for step in range(7)]
    size = int(reserved * scale * GIB)
    memory = {
        "allocated_bytes": int(0.9 * size),
        "reserved_bytes": size,
        "process_bytes": size + GIB // 2,
        "host_peak_bytes": int(host * scale * GIB),
        "host_locked_bytes": int(15 * scale * GIB) if streams else 0,
    }
    fields = {
        **SETTINGS,
        **PLACE,
        "cell": f"{model}/{label.replace(', ', '-').replace(' ', '-').lower()}",
        "model": model,
        "method": method,
        "label": label,
        "changes": engine.changes,
        "engine": launch_of(engine),
        "block_size": int(label[-1]) if label.startswith("poros, block") else None,
        "status": "ok",
        "reason": None,
        "passes": passes,
        "losses": [[] if method == "stream-loop" else losses] * 3,
        "pass_memory": [memory] * 3,
    }
    if engine.dropout == 0:
        fields["lora"] = {**SETTINGS["lora"], "dropout": 0.0}
    return SpeedRow.from_passes(**{**fields, **changed})


def launch_of(engine: Engine) -> str | None:
    """How a row says that the kernels of a method were launched."""
    return next(iter(engine.launches), None)


def failed_row(method: str, status: str, reason: str, **changed: Any) -> SpeedRow:
    """A row of a method that gave no figure after one good pass, or none."""
    empty = {"passes": [], "losses": [], "pass_memory": []}
    named = {"method": method, "label": method, "cell": f"{changed.get('model', 'qwen2.5-32b')}/{method}"}
    engine = describe(method)
    dropout = SETTINGS["lora"]["dropout"] if engine.dropout is None else engine.dropout
    known = {
        "changes": engine.changes,
        "engine": launch_of(engine),
        "lora": {**SETTINGS["lora"], "dropout": dropout},
    }
    return speed_row(2, **{**empty, **named, **known, "status": status, "reason": reason, **changed})


def parity_row(verdict: str = "PASS", **changed: Any) -> ParityRow:
    """A parity row; with the verdict FAIL, the gradients of one layer differ."""
    equal = dict.fromkeys(("loss", "gradients", "grad_norm", "adapters", "optimizer", "rng"), True)
    wrong = {**equal, "gradients": False, "grad_norm": False}
    where = {"step": 2, "surface": "gradients", "tensor": "layers.3.q_proj.lora_A", "index": [0, 4]}
    bits = {"expected": 0.5, "found": 0.25, "expected_bits": "0x3f000000", "found_bits": "0x3e800000"}
    path = changed.get("path", "strict")
    fields: dict[str, Any] = {
        **SETTINGS,
        **PLACE,
        "cell": f"{changed.get('model', 'qwen2.5-32b')}/parity-{path}",
        "method": "poros",
        "label": "poros, block size 4",
        "engine": launch_of(describe("poros")),
        "path": path,
        "block_size": 4,
        "slots": 2,
        "steps": 4,
        "warmup_steps": 0,
        "num_passes": 1,
        "verdict": verdict,
        "reason": None if verdict == "PASS" else "layers.3 differs",
        "max_abs_difference": 0.0 if verdict == "PASS" else 0.25,
        "surfaces": {
            "streamed": wrong if verdict == "FAIL" else equal,
            "control": wrong if verdict == "INCONCLUSIVE" else equal,
        },
        "first_difference": {**where, **bits} if verdict != "PASS" else None,
        "control_steps": 4,
        "num_gradients": 896,
        "losses": [12.9, 12.8, 12.85, 12.9],
        "wall_s": 130.5 + sum(map(ord, path + verdict)),  # no clock says the same twice
        "allocated_bytes": 40 * GIB,
        "reserved_bytes": 41 * GIB,
        "process_bytes": 42 * GIB,
        "host_peak_bytes": 18 * GIB,
        "host_locked_bytes": 15 * GIB,
    }
    return ParityRow(**{**fields, **changed})


def campaign() -> list[Row]:
    """Two models: all methods on one, with two failures; three methods on the other, and parity for both."""
    large = "qwen2.5-72b"
    return [
        *(speed_row(place) for place in range(7)),
        failed_row("accelerate-offload", "unsupported", "ValueError: 4-bit modules cannot be dispatched to the CPU"),
        *(speed_row(place, model=large, scale=2.2) for place in (1, 2, 5)),
        failed_row("unsloth", "out_of_memory", "torch.OutOfMemoryError: tried to allocate 8 GiB", model=large),
        parity_row(),
        parity_row(path="math"),
        parity_row("FAIL", model=large),
    ]
