"""The same plan by the settings that libraries have, where the plan is that regular; and a script
that applies any plan.

This module loads no torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from gpumemnet.planner.decisions import Decision, Plan
from gpumemnet.units import format_bytes

_MEMBER: Final = re.compile(r"(?P<stack>.+)\.\d+")
_RECOMPUTED: Final = (Decision.RECOMPUTE, Decision.RECOMPUTE_AND_SWAP_INPUT)


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting of a library with the effect of a plan.

    Attributes:
        library: where the setting is.
        code: Python that makes it for a ``model``; empty if it cannot have the plan's effect.
        note: how its effect differs from the plan's, or why there is no code; one sentence, or
            empty.
    """

    library: str
    code: str
    note: str = ""


def knobs_of(plan: Plan) -> tuple[Knob, ...]:
    """Return the settings of Hugging Face, of FSDP's wrappers and of ``torch.compile`` that have
    the effect of ``plan``."""
    return _hugging_face(plan), _wrappers(plan), _memory_budget(plan)


def script_of(plan: Plan) -> str:
    """Return Python that puts ``plan`` in force for a ``model``; comments name settings with the
    same effect."""
    # A swapped unit's memory is released and fetched when its neighbours run, so the script names
    # those, too.
    units = (
        plan.units
        if any(decision.swaps for decision in plan.decisions.values())
        else tuple(plan.decisions)
    )
    rows = "".join(f'    "{unit}": "{plan.decision(unit)}",\n' for unit in units)
    return (
        f"# Predicted for {plan.gpu}: {format_bytes(plan.process_bytes)} instead of {format_bytes(plan.keep_process_bytes)}; "
        f"a step takes {100 * plan.slowdown:+.1f} %, modelled.\n"
        "from gpumemnet.planner import applied\n\n"
        f"DECISIONS = {{\n{rows}}}\n"
        "in_force = applied(model, DECISIONS)  # before the training loop; in_force.undo() ends it\n"
        + "".join(map(_comment, knobs_of(plan)))
    )


def _comment(knob: Knob) -> str:
    first = f"Instead, by {knob.library}:" if knob.code else f"Not by {knob.library}: {knob.note}"
    lines = [first, *([*knob.code.splitlines(), knob.note] if knob.code else [])]
    return "\n" + "".join(f"# {line}".rstrip() + "\n" for line in lines if line)


def _hugging_face(plan: Plan) -> Knob:
    library = "Hugging Face transformers"
    stack, decision, reason = _one_decision(plan)
    if decision is None:
        return Knob(library, "", reason)
    chosen = [number for number, unit in enumerate(stack) if unit in plan.decisions]
    every = next(
        (n for n in range(1, len(stack) + 1) if chosen == list(range(0, len(stack), n))), None
    )
    if every is None:
        return Knob(
            library,
            "",
            f"It recomputes all blocks or every n-th from the first one on, not these {len(chosen)}.",
        )
    arguments = [
        *([f"every_n_layers={every}"] if every > 1 else []),
        *(["offload=True"] if decision.swaps else []),
    ]
    note = "Older versions call it gradient_checkpointing_enable, and many of them know no such arguments."
    return Knob(library, f"model.activation_checkpointing_enable({', '.join(arguments)})", note)


def _wrappers(plan: Plan) -> Knob:
    library = "PyTorch's wrappers for FSDP"
    if Decision.RECOMPUTE_CHEAP in plan.decisions.values():
        return Knob(
            library,
            "",
            f"They recompute a module as a whole, and the plan keeps results of expensive operators of "
            f"'{next(unit for unit, each in plan.decisions.items() if each is Decision.RECOMPUTE_CHEAP)}'.",
        )
    by_decision: dict[Decision, list[str]] = defaultdict(list)
    for unit, decision in plan.decisions.items():
        if decision is not Decision.KEEP:
            by_decision[decision].append(unit)
    wrapped = {
        Decision.RECOMPUTE: "checkpoint_wrapper(module)",
        Decision.RECOMPUTE_AND_SWAP_INPUT: "offload_wrapper(checkpoint_wrapper(module))",
        Decision.SWAP: "offload_wrapper(module)",
    }
    functions = sorted(
        {name for each in by_decision for name in re.findall(r"\w+_wrapper", wrapped[each])}
    )
    lines = [
        f"from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import {', '.join(functions)}",
        "",
    ]
    for decision, units in by_decision.items():
        lines += ["for name in (", *(f'    "{unit}",' for unit in units), "):"]
        lines += [
            "    module = model.get_submodule(name)",
            f"    model.set_submodule(name, {wrapped[decision]})",
        ]
    note = (
        "Copies to the host wait for the GPU, and include weights."
        if any(each.swaps for each in by_decision)
        else ""
    )
    return Knob(
        library,
        "\n".join(lines) + "\n",
        f"Names of modules and of their weights change.  {note}".strip(),
    )


def _memory_budget(plan: Plan) -> Knob:
    library = "torch.compile"
    stack, decision, reason = _one_decision(plan)
    if decision is None:
        return Knob(library, "", reason)
    if decision.swaps:
        return Knob(
            library, "", "Its budget recomputes and does not swap, and the plan swaps inputs."
        )
    share = 1 - len(plan.decisions) / len(stack)
    code = f"torch._functorch.config.activation_memory_budget = {share:.2f}\nmodel = torch.compile(model)\n"
    return Knob(
        library,
        code,
        "It keeps that share of what compiled code saves, by a choice of its own; the peak is another.",
    )


def _one_decision(plan: Plan) -> tuple[tuple[str, ...], Decision | None, str]:
    """Return the stack of blocks and the one decision that some of them take, or ``None`` and why
    there is none."""
    stacks: dict[str, list[str]] = defaultdict(list)
    for unit in plan.units:
        member = _MEMBER.fullmatch(unit)
        if member:
            stacks[member["stack"]].append(unit)
    largest: list[str] = max([*stacks.values(), []], key=len)
    stack = tuple(largest)
    chosen = {
        unit: decision for unit, decision in plan.decisions.items() if decision is not Decision.KEEP
    }
    others = [unit for unit in chosen if unit not in stack]
    if others:
        return (
            stack,
            None,
            f"It acts on one stack of blocks alone, and the plan has a decision for '{others[0]}' too.",
        )
    kinds = sorted(set(chosen.values()))
    if len(kinds) != 1 or kinds[0] not in _RECOMPUTED:
        return (
            stack,
            None,
            f"It recomputes blocks in one way, and the plan has {', '.join(kinds) or 'nothing to recompute'}.",
        )
    return stack, kinds[0], ""
