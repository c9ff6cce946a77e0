"""Write docs/validation/README.md from the result rows beside it. The test suite checks that it is up to date.

python scripts/validation_tables.py
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "validation"
SURFACES = ("loss", "gradients", "grad_norm", "adapters", "optimizer", "rng")


def read_rows(name: str) -> list[dict[str, Any]]:
    """The rows of one campaign."""
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def table(head: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines])


def parity_table(rows: list[dict[str, Any]]) -> str:
    """One line a run: settings, verdict, and on how many of the surfaces all tensors were equal at every step."""
    lines = []
    for row in sorted(rows, key=lambda row: (row["model"], row["path"])):
        equal = row["surfaces"]["streamed"]
        shared = [str(row[key]) for key in ("steps", "accumulation", "block_size", "slots")]
        poison = "yes" if row["options"]["poison"] else "no"
        same = f"{sum(equal[name] for name in SURFACES)} of {len(SURFACES)}"
        gradients = str(row["num_gradients"])
        lines.append([row["model"], row["path"], *shared, poison, gradients, same, row["verdict"]])
    head = ["shape", "path", "steps", "accumulation", "block size", "slots", "poisoned"]
    return table([*head, "gradients compared", "surfaces equal", "verdict"], lines)


def speed_table(rows: list[dict[str, Any]]) -> str:
    """One line a method: seconds a step, and the peaks on the card."""
    lines = []
    original = next(row for row in rows if row["method"] == "poros-train")
    for row in rows:
        name = row["method"] + (f", block size {row['block_size']}, {row['slots']} slots" if row["block_size"] else "")
        peaks = [f"{row[key] / 2**30:.2f}" for key in ("allocated_bytes", "reserved_bytes", "process_bytes")]
        passes = sorted(row["passes"][0])
        spread = f"{passes[0]:.2f} to {passes[-1]:.2f}"
        lines.append(
            [name, f"{row['s_per_step']:.3f}", spread, f"{row['s_per_step'] / original['s_per_step']:.2f}", *peaks]
        )
    head = ["method", "s/step (median)", "all steps", "of poros-train", "allocated GiB", "reserved GiB", "process GiB"]
    return table(head, lines)


def provenance(rows: list[dict[str, Any]]) -> str:
    """Where and with what the rows were measured."""
    row = rows[0]
    versions = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
    return f"{row['gpu']}, {row['link']}, driver {row['driver']}; {versions}; commit `{row['poros_commit'][:10]}`."


def render() -> str:
    """The whole page."""
    parity, speed = read_rows("h200_parity_eager.jsonl"), read_rows("h200_speed_eager.jsonl")
    locked = max(row["host_locked_bytes"] / row["host_bytes"] for row in (*parity, *speed) if row.get("host_bytes"))
    lora = (
        "LoRA r=16, alpha 32, dropout 0.05 on all linears (fp32), NF4 with double quantisation, AdamW, clipping at 1.0"
    )
    controls = "; ".join(
        f"{row['model']} {row['path']}: {row['control_steps']} of {row['steps']} steps"
        for row in sorted(parity, key=lambda row: (row["model"], row["path"]))
    )
    setting = f"{speed[0]['model']} shape, random weights, batch 1, {speed[0]['seq_len']} tokens; {lora}"
    return f"""# Validation

Written by `scripts/validation_tables.py` from the result rows in this folder; do not edit. A row holds the settings, every step and the provenance.

## Parity: eager engine (`h200_parity_eager.jsonl`)

By `poros parity`, run by `scripts/gpu_parity_campaign.sh`; `poros bench verify` accepts the rows. A resident model, its repetition (the control) and a streamed model step side by side; after each step every tensor of six surfaces ({", ".join(SURFACES)}) is compared bit by bit. The control was equal in all runs ({controls}). `strict` is flash attention with deterministic algorithms, `math` the plain attention. Random weights of the real configuration, 512 tokens; {lora}.

{parity_table(parity)}

{provenance(parity)}

## Speed and memory: eager engine (`h200_speed_eager.jsonl`)

By `scripts/bench_eager.py`: one process a method, one after the other in one call. {setting}; {speed[0]["warmup_steps"]} steps of warm-up and {speed[0]["steps"]} counted. Deterministic algorithms off. `process` is the whole process on the card with its CUDA context. Absolute times drift with the host (its eager kernel launches are what is measured here); the ratios are within one run.

{speed_table(speed)}

Page-locked host memory over the slabs' bytes, largest of all rows: {locked:.4f}.

{provenance(speed)}
"""


def render_readme(text: str) -> str:
    """The project's README with its table of results written anew."""
    begin, end = "<!-- results: written by scripts/validation_tables.py -->\n", "<!-- /results -->"
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    speed = read_rows("h200_speed_eager.jsonl")
    row = speed[0]
    lines = [f"{row['model']} shape, {row['seq_len']} tokens, batch {row['batch_size']}, one {row['gpu']}, in one run:"]
    return before + begin + "\n".join([*lines, "", speed_table(speed), ""]) + end + after


if __name__ == "__main__":
    readme = FOLDER.parent.parent / "README.md"
    readme.write_text(render_readme(readme.read_text()))
    (FOLDER / "README.md").write_text(render())
