"""What a row says of its settings, its place and its seconds, in the words of reports."""

from collections import Counter
from collections.abc import Sequence

from poros.evidence.artifact import Row, SpeedRow


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
    """Where and with what a row was measured, in one sentence."""
    card = ", ".join(part for part in (row.gpu, row.link, row.driver and f"driver {row.driver}") if part)
    versions = ", ".join(f"{name} {number}" for name, number in row.versions.items() if number)
    commit, plus, changes = (row.poros_commit or "").partition("+")
    commit = f"; commit {commit[:10]}{plus}{changes}" if commit else ""
    return f"{f'{card}; ' if card else ''}{row.host}; {versions}{commit}; {row.time_utc}."


def seconds_text(seconds: float, std: float | None = None) -> str:
    """Seconds of a step, with their standard deviation if there is one, and the digits that mean something."""
    digits = 3 if seconds >= 0.1 else 4 if seconds >= 0.001 else 7
    return f"{seconds:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")
