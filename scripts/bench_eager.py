"""Speed and memory of the eager engine beside the resident run and the archived poros-train, in one call.

Each method runs in a process of its own, over the same random weights of a real shape, with the same data, adapters,
optimizer and clipping. One row a method is appended to ROWS.

    python scripts/bench_eager.py all SHAPE ROWS [--seq-len 512] [--steps 15] [--original FOLDER]
    python scripts/bench_eager.py METHOD SHAPE ROWS ...     METHOD: resident | poros-1 | poros-4 | original

FOLDER holds the archived poros-train package; without it that method is left out.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402  # after the settings that it reads
from peft import LoraConfig, get_peft_model  # noqa: E402
from torch import nn  # noqa: E402

from poros.evidence import provenance  # noqa: E402

LORA = {"rank": 16, "alpha": 32, "dropout": 0.05, "targets": "all-linear"}
WARMUP_STEPS = 3
SLOTS = {"poros-1": 8, "poros-4": 3}


def build(shape: str, method: str) -> nn.Module:
    """The method's model, ready to train."""
    from poros.model.build import from_shape

    streamed = (
        {"block_size": int(method.rpartition("-")[2]), "slots": SLOTS[method]} if method.startswith("poros-") else {}
    )
    base = from_shape(shape, device="cuda", stream=bool(streamed), **streamed)
    base.requires_grad_(False)
    base.config.use_cache = False
    torch.manual_seed(1)
    config = LoraConfig(
        r=LORA["rank"],
        lora_alpha=LORA["alpha"],
        lora_dropout=LORA["dropout"],
        target_modules=LORA["targets"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    if streamed:
        import poros

        poros.prepare(model)
    return model.train()


def become_original(model: nn.Module, folder: str) -> nn.Module:
    """Hand the model to the archived package, which imports under the same name."""
    for name in [name for name in sys.modules if name == "poros" or name.startswith("poros.")]:
        del sys.modules[name]
    sys.path.remove(str(ROOT / "src"))
    sys.path.insert(0, folder)
    import poros

    assert str(Path(poros.__file__)).startswith(folder), poros.__file__
    return poros.prepare(  # type: ignore[call-arg]  # the archived package's own options
        model,
        architecture="off",
        stack="off",
        guarantee="off",
        unsafe_allow_uncertified_stack=True,
        unsafe_allow_uncertified_adapter=True,
    )


def train(model: nn.Module, steps: int, seq_len: int, vocabulary: int) -> tuple[list[float], list[float]]:
    """Seconds and loss of every step, warm-up included."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-5)
    generator = torch.Generator().manual_seed(1)
    seconds, losses = [], []
    for _ in range(WARMUP_STEPS + steps):
        ids = torch.randint(0, vocabulary, (1, seq_len), generator=generator).cuda()
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    return seconds, losses


def measure(method: str, shape: str, steps: int, seq_len: int, original: str | None) -> dict[str, Any]:
    """One row."""
    model = build(shape, method)
    vocabulary = model.config.get_text_config().vocab_size
    if method == "original":
        assert original is not None
        model = become_original(model, original)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds, losses = train(model, steps, seq_len, vocabulary)
    counted = sorted(seconds[WARMUP_STEPS:])
    row: dict[str, Any] = {
        "kind": "speed",
        "model": shape,
        "weights": "random",
        "method": {"original": "poros-train"}.get(method, method.partition("-")[0]),
        "engine": "eager",
        "path": "fast",
        "seq_len": seq_len,
        "batch_size": 1,
        "accumulation": 1,
        "lora": LORA,
        "block_size": None,
        "slots": None,
        "resident_blocks": None,
        "budget_bytes": None,
        "options": {},
        "steps": steps,
        "warmup_steps": WARMUP_STEPS,
        "passes": [seconds[WARMUP_STEPS:]],
        "s_per_step": counted[len(counted) // 2],
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "process_bytes": provenance.process_bytes_on_card(),
        "host_peak_bytes": provenance.host_peak_bytes(),
        "losses": losses,
    }
    if method.startswith("poros-"):
        import poros

        report = poros.report(model)
        row |= {
            "block_size": report.block_size,
            "slots": report.slots,
            "resident_blocks": 0,
            "host_locked_bytes": report.locked_bytes,
            "host_bytes": report.host_bytes,
            "window_bytes": report.window_bytes,
            "loads": report.num_loads,
            "late_loads": report.num_late_loads,
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=["all", "resident", "poros-1", "poros-4", "original"])
    parser.add_argument("shape")
    parser.add_argument("rows")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--original")
    options = parser.parse_args()
    if options.method != "all":
        row = measure(options.method, options.shape, options.steps, options.seq_len, options.original)
        with Path(options.rows).open("a") as file:
            file.write(json.dumps(row | provenance.provenance(), allow_nan=False) + "\n")
        print(
            f"{options.method:10} {row['s_per_step']:.3f} s/step, allocated {row['allocated_bytes'] / 2**30:.2f} GiB, "
            f"reserved {row['reserved_bytes'] / 2**30:.2f} GiB, process {(row['process_bytes'] or 0) / 2**30:.2f} GiB",
            flush=True,
        )
        return
    methods = ["resident", *(["original"] if options.original else []), "poros-4", "poros-1"]
    environment = os.environ | {"POROS_RUN_ID": provenance.RUN_ID}
    for method in methods:
        command = [sys.executable, __file__, method, *sys.argv[2:]]
        result = subprocess.run(command, env=environment, check=False)
        if result.returncode:
            print(f"{method}: failed with status {result.returncode}", flush=True)


if __name__ == "__main__":
    main()
