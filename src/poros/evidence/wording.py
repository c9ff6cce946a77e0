"""What a row says of its settings, its place, its seconds and its verdict, in the words of reports."""

from collections import Counter
from collections.abc import Sequence

from poros.evidence.artifact import ParityRow, Row, SpeedRow

# status -> what a table shows in place of a figure
STATUS_TEXT = {
    "out_of_memory": "out of memory",
    "missing_package": "missing package",
    "unsupported": "unsupported",
    "diverged": "diverged",
    "timeout": "time limit",
    "crashed": "crashed",
}

# How the figures of a report are to be read.
READING = (
    "Seconds a step are the median over passes of each pass's median, with the standard deviation of the passes' "
    "medians. Of memory, each figure is the largest of all passes. Reserved is what the allocator takes of the card, "
    "process what the whole process takes with its CUDA context; of the host, peak is the largest resident set, and "
    "locked what was page-locked. Ratios are to rows of the same run on the same machine, never of another. "
    "A memory cut is the reserved memory of the baseline over that of the row."
)


def settings_parts(row: SpeedRow) -> dict[str, str]:
    """Each setting of a row in words, by what it is of."""
    base = "no quantisation" if row.quantization is None else row.quantization.upper()
    base += " with double quantisation" if row.quantization and row.double_quant else ""
    targets = row.lora.targets if isinstance(row.lora.targets, str) else ", ".join(row.lora.targets)
    clipped = f"gradients clipped to {row.max_grad_norm:g}" if row.max_grad_norm else "gradients not clipped"
    return {
        "weights": f"{row.weights} weights",
        "seq_len": f"{row.seq_len} tokens",
        "batch_size": f"batch {row.batch_size}",
        "accumulation": f"accumulation {row.accumulation}",
        "base": base,
        "dtype": row.dtype,
        "rank": f"LoRA r={row.lora.rank}",
        "alpha": f"alpha {row.lora.alpha:g}",
        "dropout": f"dropout {row.lora.dropout:g}",
        "targets": f"targets {targets}",
        "rate": f"{row.optimizer} at {row.learning_rate:g}",
        "clipped": clipped,
        "path": f"{row.path} path",
        "attention": f"attention {row.attention}" if row.attention else "the model's own attention",
        "data": f"{row.dataset.name} data",
        "passes": f"{row.num_passes} {'pass' if row.num_passes == 1 else 'passes'} of {row.steps} counted steps",
        "warmup": f"{row.warmup_steps} steps of warm-up",
    }


def usual_settings(parts: Sequence[dict[str, str]]) -> dict[str, str]:
    """The settings that more than half of the rows have."""
    counts = ((key, Counter(part[key] for part in parts).most_common(1)[0]) for key in parts[0])
    return {key: text for key, (text, count) in counts if count > len(parts) / 2}


def settings_text(parts: Sequence[dict[str, str]], usual: dict[str, str]) -> str:
    """The usual settings in one sentence, which says of which there are exceptions."""
    said = []
    for key, text in usual.items():
        shared = all(part[key] == text for part in parts)
        if key != "weights" or not shared:  # those that all share are in the heading
            said.append(text if shared else f"{text} unless the row says otherwise")
    return ", ".join(said) + "."


def place_text(row: Row) -> str:
    """Where and with what a row was measured, without the time."""
    card = ", ".join(part for part in (row.gpu, row.link, row.driver and f"driver {row.driver}") if part)
    versions = ", ".join(f"{name} {number}" for name, number in row.versions.items() if number)
    commit, plus, changes = (row.poros_commit or "").partition("+")
    commit = f"; commit {commit[:10]}{plus}{changes}" if commit else ""
    return f"{f'{card}; ' if card else ''}{row.host}; {versions}{commit}"


def seconds_text(seconds: float, std: float | None = None) -> str:
    """Seconds of a step, with their standard deviation if there is one, and the digits that mean something."""
    digits = 3 if seconds >= 0.1 else 4 if seconds >= 0.001 else 7
    return f"{seconds:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def failure_text(row: SpeedRow) -> str:
    """Why a row has no figure, in one line."""
    return f"{row.label}: {STATUS_TEXT[row.status]}: {row.reason}"


def surfaces_text(row: ParityRow) -> tuple[str, str]:
    """On how many surfaces the streamed run, and the control, were equal."""
    counts = [list(part.model_dump().values()) for part in (row.surfaces.streamed, row.surfaces.control)]
    streamed, control = (f"{sum(equal)} of {len(equal)}" for equal in counts)
    return streamed, control


def verdict_text(row: ParityRow) -> str:
    """``PASS (0.00e+00)``, or the verdict alone."""
    if row.max_abs_difference is None or row.verdict == "INCONCLUSIVE":
        return row.verdict
    return f"{row.verdict} ({row.max_abs_difference:.2e})"


def why_text(row: ParityRow) -> str:
    """Why a verdict is not PASS, with the first difference; and what is noted besides."""
    first, note = row.first_difference, row.options.get("note")
    parts = [row.reason]
    if first is not None:
        where = f"step {first.step}, {first.surface}" + ("" if first.tensor is None else f" of {first.tensor}")
        where += "" if first.index is None else f" at {first.index}"
        values = "" if first.found is None else f": {first.found} instead of {first.expected}"
        bits = "" if first.found_bits is None else f" (bits {first.found_bits}, not {first.expected_bits})"
        parts.append(f"first difference: {where}{values}{bits}")
    return "; ".join(part for part in (*parts, note) if isinstance(part, str))
