"""Does a streamed model train to the bits of its resident twin? Run them side by side, and judge.

The resident run is repeated first (the *control*): where it does not reproduce itself, nothing can be said of
streaming, and the verdict is INCONCLUSIVE. So it is where a gradient is zero, because zeros are equal whatever happens
to the weights. FAIL is for a streamed run that parts from a resident run which does reproduce itself.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from poros.evidence import provenance
from poros.evidence.artifact import OF_THE_CARD
from poros.evidence.bits import Difference, Verdict
from poros.evidence.lockstep import SURFACES, Lane, Step, copy_adapters, reproducible, step_together
from poros.evidence.parity_result import ParityResult, memory_fields, setting_fields, what_streamed
from poros.evidence.text import random_ids, require_room, token_types
from poros.evidence.twins import ParitySettings, Twins, build_twins, differing_weight, explained
from poros.residency.discover import find_decoder
from poros.train.encode import IGNORED
from poros.train.loop import Batch

__all__ = ["ParityResult", "ParitySettings", "Twins", "build_twins", "check"]


def check(
    settings: ParitySettings,
    twins: Twins | None = None,
    *,
    before_step: Callable[[Twins, int], None] | None = None,
    on_step: Callable[[int, Step], None] | None = None,
) -> ParityResult:
    """Train the resident model, its repetition and the streamed model in lockstep, comparing all bits of every step.

    Each has adapters, an optimizer and a random state of its own. All start from the resident model's adapters.

    Args:
        twins: models of :func:`build_twins` to go on with, for a second check without building them again.
        before_step: called with the models and the number of each step.
        on_step: called with the number of each step and what it gave.

    Raises:
        UnsupportedModelError, CheckpointError, ConfigError: the models cannot be built.
        PorosError: memory is full, or an operation has no reproducible form on the path asked for.
    """
    start, place = time.monotonic(), provenance.provenance()
    with explained(settings):
        twins = twins or build_twins(settings)
        if twins.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(twins.device)
        tally = _Tally(twins)
        control_steps = min(settings.control_steps or settings.steps, settings.steps)
        batches, dataset = _text(settings, twins)
        with reproducible(settings.path, twins.device):
            for other in (twins.control, twins.streamed):
                copy_adapters(twins.resident, other)
            resident, control, streamed = (
                _lane(settings, twins, model) for model in (twins.resident, twins.control, twins.streamed)
            )
            for number in range(settings.steps):
                if before_step is not None:
                    before_step(twins, number)
                others = {"control": control} if number < control_steps else {}
                step = step_together(resident, others | {"streamed": streamed}, batches[number])
                tally.add(number, step)
                if on_step is not None:
                    on_step(number, step)
                if not math.isfinite(step.loss):
                    break
        result = _judge(tally, control_steps)
        result.note = what_streamed(twins)
    if twins.device.type == "cpu":  # the card of a host that has one had no part in it
        place |= dict.fromkeys(OF_THE_CARD)
    result.fields |= {
        **setting_fields(settings, twins),
        **memory_fields(twins),
        "dataset": dataset,
        "steps": tally.num_steps,
        "control_steps": min(control_steps, tally.num_steps),
        "wall_s": time.monotonic() - start,
        **place,
    }
    return result


@dataclass
class _Tally:
    """What the steps so far have shown."""

    twins: Twins
    equal: dict[str, dict[str, bool]] = field(
        default_factory=lambda: {name: dict.fromkeys(SURFACES, True) for name in ("streamed", "control")}
    )
    first: dict[str, Difference] = field(default_factory=dict)  # model -> its first difference
    max_abs: float = 0.0
    losses: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_gradients: int = 0
    vacuous: str | None = None

    def add(self, number: int, step: Step) -> None:
        """Take step ``number`` into account."""
        self.num_steps += 1
        for name, verdicts in step.verdicts.items():
            for surface, verdict in verdicts.items():
                if verdict.num_different:
                    self.equal[name][surface] = False
                    self.first.setdefault(name, _difference(number, surface, verdict))
        farthest = [verdict.max_abs for verdict in step.verdicts["streamed"].values()]
        self.max_abs = math.nan if any(map(math.isnan, farthest)) else max(self.max_abs, *farthest)
        self.num_gradients = sum(size is not None for size in step.largest.values())
        if math.isfinite(step.loss):
            self.losses.append(step.loss)
            self.vacuous = self.vacuous or self._vacuous(number, step)
        else:
            self.vacuous = self.vacuous or f"the resident run's loss is {step.loss} at step {number}"

    def _vacuous(self, number: int, step: Step) -> str | None:
        """Why equal gradients of this step would prove nothing; None if they do prove something."""
        zero = [name for name, size in step.largest.items() if size == 0.0]
        if zero:
            return (
                f"vacuous: {len(zero)} of {len(step.largest)} gradients are zero at step {number}, the first of them "
                f"{zero[0]}; zeros are equal whatever the weights are"
            )
        alive = [name for name, size in step.largest.items() if size is not None]
        for name, _ in find_decoder(self.twins.resident).layers:
            if not any(key.startswith(name + ".") for key in alive):
                return f"vacuous: layer {name} has no gradient at step {number}"
        return None


def _judge(tally: _Tally, control_steps: int) -> ParityResult:
    verdict: Literal["PASS", "FAIL", "INCONCLUSIVE"] = "PASS"
    reason, first = None, None
    if "control" in tally.first:
        verdict, first = "INCONCLUSIVE", tally.first["control"]
        reason = f"the resident run does not reproduce itself: {first}"
    elif "streamed" in tally.first:
        verdict, first = "FAIL", tally.first["streamed"]
        weight = differing_weight(tally.twins.resident, tally.twins.streamed)
        reason = f"{first}; " + (
            f"weights differ {weight}" if weight else "all weights in host memory are the resident ones"
        )
        if first.step >= control_steps:
            reason += f"; the resident run was repeated for {control_steps} steps only"
    elif tally.vacuous is not None:
        verdict, reason = "INCONCLUSIVE", tally.vacuous
    max_abs = tally.max_abs if math.isfinite(tally.max_abs) else None
    return ParityResult(verdict, reason, tally.equal, first, max_abs, tally.losses, tally.num_gradients, {})


def _difference(step: int, surface: str, verdict: Verdict) -> Difference:
    detail = f"{verdict.detail} ({verdict.num_different} elements of this surface differ)"
    return Difference(step, surface, verdict.tensor or "", detail, verdict.element)


def _lane(settings: ParitySettings, twins: Twins, model: Any) -> Lane:
    return Lane(
        model,
        twins.device,
        learning_rate=settings.learning_rate,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
    )


def _text(settings: ParitySettings, twins: Twins) -> tuple[list[list[Batch]], dict[str, Any]]:
    """The batches of each step, and what the row says of them."""
    base = twins.resident.get_base_model()
    shape = (settings.steps, settings.accumulation, settings.batch_size, settings.seq_len)
    require_room(shape)
    ids, sha256 = random_ids(base.config, shape, settings.seed)
    ids = ids.to(twins.device)
    labels = ids.clone()
    labels[..., 0] = IGNORED  # nothing predicts it
    more = token_types(base, ids[0, 0])
    steps: list[list[Batch]] = [
        [{"input_ids": ids[step, i], "labels": labels[step, i], **more} for i in range(settings.accumulation)]
        for step in range(settings.steps)
    ]
    return steps, {"name": "synthetic", "seed": settings.seed, "sha256": sha256}
