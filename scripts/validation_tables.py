"""Write docs/validation/README.md from the result rows beside it. The test suite checks that it is up to date.

python scripts/validation_tables.py
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "validation"
SPEED = "h200_launches_32b.jsonl"
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
        shared = [str(row[key]) for key in ("steps", "control_steps", "accumulation", "block_size", "slots")]
        poison = "yes" if row["options"]["poison"] else "no"
        same = f"{sum(equal[name] for name in SURFACES)} of {len(SURFACES)}"
        gradients = str(row["num_gradients"])
        lines.append([row["model"], row["path"], *shared, poison, gradients, same, row["verdict"]])
    head = ["shape", "path", "steps", "of them repeated", "accumulation", "block size", "slots", "poisoned"]
    return table([*head, "gradients compared", "surfaces equal", "verdict"], lines)


def speed_table(rows: list[dict[str, Any]]) -> str:
    """One line a method: seconds a step, and the peaks on the card."""
    lines = []
    original = next(row for row in rows if row["method"] == "poros-train")
    for row in rows:
        peaks = [f"{row[key] / 2**30:.2f}" for key in ("allocated_bytes", "reserved_bytes", "process_bytes")]
        steps = sorted(seconds for one in row["passes"] for seconds in one)
        spread = f"{steps[0]:.2f} to {steps[-1]:.2f}"
        ratio = f"{row['s_per_step'] / original['s_per_step']:.2f}"
        launched = {"eager": "one by one", "replay": "graphs"}.get(row["engine"], "one by one")
        lines.append([row["label"], launched, f"{row['s_per_step']:.3f}", spread, ratio, *peaks])
    head = ["method", "kernels launched", "s/step (median)", "all steps", "of poros-train"]
    return table([*head, "allocated GiB", "reserved GiB", "process GiB"], lines)


def provenance(rows: list[dict[str, Any]]) -> str:
    """Where and with what the rows were measured."""
    row = rows[0]
    versions = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
    return f"{row['gpu']}, {row['link']}, driver {row['driver']}; {versions}; commit `{row['poros_commit'][:10]}`."


def render() -> str:
    """The whole page."""
    eager, replay = read_rows("h200_parity_eager.jsonl"), read_rows("h200_parity_replay.jsonl")
    speed = read_rows(SPEED)
    lora = (
        "LoRA r=16, alpha 32, dropout 0.05 on all linears (fp32), NF4 with double quantisation, AdamW, clipping at 1.0"
    )
    setting = f"{speed[0]['model']} shape, random weights, batch 1, {speed[0]['seq_len']} tokens; {lora}"
    return f"""# Validation

Written by `scripts/validation_tables.py` from the result rows in this folder; do not edit. A row holds the settings, every step and the provenance, and `poros bench verify` accepts all of them.

## Parity

By `poros parity`. A resident model, its repetition (the control) and a streamed model step side by side; after each step every tensor of six surfaces ({", ".join(SURFACES)}) is compared bit by bit. The control was equal in all runs, for the steps that were repeated. `strict` is flash attention with deterministic algorithms, `math` the plain attention. Random weights of the real configuration, 512 tokens; {lora}.

### Kernels launched one by one (`h200_parity_eager.jsonl`)

Run by `scripts/gpu_parity_campaign.sh` with `PARITY_OPTIONS=--no-replay`.

{parity_table(eager)}

{provenance(eager)}

### Visits replayed from CUDA graphs (`h200_parity_replay.jsonl`)

{parity_table(replay)}

{provenance(replay)}

## Speed and memory (`{SPEED}`)

By `poros bench run configs/bench/{Path(SPEED).stem}.yaml`: one process a method, one after the other in one call. {setting}; {speed[0]["warmup_steps"]} steps of warm-up and {speed[0]["steps"]} counted, one pass. Deterministic algorithms off. `process` is the whole process on the card with its CUDA context. The bare loop of graphs has no embedding, head or loss. What is launched one by one drifts with the host, by a third between the hosts that were seen; the ratios are within one run.

{speed_table(speed)}

{provenance(speed)}
"""


def render_readme(text: str) -> str:
    """The project's README with its table of results written anew."""
    begin, end = "<!-- results: written by scripts/validation_tables.py -->\n", "<!-- /results -->"
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    speed = read_rows(SPEED)
    row = speed[0]
    lines = [f"{row['model']} shape, {row['seq_len']} tokens, batch {row['batch_size']}, one {row['gpu']}, in one run:"]
    return before + begin + "\n".join([*lines, "", speed_table(speed), ""]) + end + after


if __name__ == "__main__":
    readme = FOLDER.parent.parent / "README.md"
    readme.write_text(render_readme(readme.read_text()))
    (FOLDER / "README.md").write_text(render())
