"""``python -m research readings``: compares ``gpumemnet fit`` with published readings of fine-tuning
runs, and calibrates its safe bytes.

Like is compared with like: the allocator's peak with ``torch_max_allocated``, its reserved bytes
with ``torch_max_reserved``, and these with the CUDA context with what ``nvidia-smi`` showed.  A row
is left out, with its reason, where a setting cannot be said or is not stated.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import gpumemnet
from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import GpumemnetError
from gpumemnet.named.fit import COVERAGE, FitAnswer, fit
from gpumemnet.named.methods import METHODS
from gpumemnet.predict.conformal import conformal_quantiles

TABLES: Final = ("fms-acceleration", "litgpt", "qwen", "peft")
_FLUX_TOKENS: Final = 512 + 1024
"""Of text, and of an image of 512 pixels."""
_GPTQ: Final = "gptq_lora"
_TARGETS: Final = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "projection": "o_proj",
    "mlp": "gate_proj,up_proj,down_proj",
    "head": "lm_head",
    "c_attn": "q_proj,k_proj,v_proj",
    "c_proj": "o_proj,down_proj",
    "w1": "up_proj",
    "w2": "gate_proj",
}
_MODELS: Final = {
    "black-forest-labs/FLUX.2-klein-base-4B": "black-forest-labs/FLUX.2-klein-4B",
    "NousResearch/Llama-2-70b-hf": "meta-llama/Llama-2-70b-hf",
    "TheBloke/Llama-2-70B-GPTQ": "meta-llama/Llama-2-70b-hf",
    "TheBloke/Mistral-7B-v0.1-GPTQ": "mistralai/Mistral-7B-v0.1",
    "unsloth/Mistral-7B-v0.2": "mistralai/Mistral-7B-v0.1",
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}
"""Name in the tables → a model of the catalogue with the same blocks."""


class Reading(NamedTuple):
    """A published reading, and what ``fit`` says of the same quantity."""

    source: str
    row: str
    read_bytes: float
    expected_bytes: float
    answer: FitAnswer

    @property
    def error(self) -> float:
        """How far the expectation lies above the reading, relative to it."""
        return self.expected_bytes / self.read_bytes - 1.0

    @property
    def ratio(self) -> float:
        """The reading over the expectation."""
        return self.read_bytes / self.expected_bytes


def readings(folder: Path, *, exact: bool = False) -> Iterator[Reading | str]:
    """Readings of jobs on one GPU; a sentence for each row that is left out.

    Adapters of ``litgpt`` are traced as those of ``peft``.
    """
    depth = {"exact": True, "library": "peft"} if exact else {}
    for table in TABLES:
        with (folder / f"{table}.csv").open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["usable"] == "yes" and row["gpus"] == "1":
                    yield _reading(table, row, depth)


def _reading(table: str, row: dict[str, str], depth: dict[str, Any]) -> Reading | str:
    reason = _obstacle(row)
    if reason:
        return f"{row['row_id']}: {reason}"
    options = _options(table, row) | depth
    gpu = (
        "A10G"
        if "A10G" in row["gpu"]
        else "L40S"
        if "L40S" in row["gpu"]
        else "A100-80GB"
        if "80" in row["gpu"]
        else "A100"
    )
    try:
        answer = fit(_model(row["model"]), gpu=gpu, **options)
    except GpumemnetError as error:
        return f"{row['row_id']}: {error}"
    kind, read = row["reading_kind"], row["reading_bytes"]
    if row.get("near_capacity") == "1":
        kind, read = "torch_max_allocated", row["torch_max_allocated_bytes"]
    parts = dict(answer.parts)
    expected = answer.expected_bytes
    if kind.startswith("torch_max"):
        expected -= parts["context_bytes"]
    if kind == "torch_max_allocated":
        expected -= parts["fragmentation_bytes"]
    return Reading(table, row["row_id"], float(read), expected, answer)


def _obstacle(row: dict[str, str]) -> str:
    """Why ``fit`` cannot be asked for the job of this row."""
    if row["method"] not in (*METHODS, _GPTQ):
        return f"method {row['method']}"
    if not row["sequence_length"]:
        return "padded to a length that is not stated"
    if "lm_head" in (row.get("lora_targets") or ""):
        return "also trains copies of embeddings and head"
    kernels = row.get("kernels") or ""
    if "foak" in kernels and "liger" not in kernels:
        return "fused kernels that are not Liger's"
    return ""


def _model(name: str) -> str:
    name = name.removesuffix("-Int4").removesuffix("-Chat") if name.startswith("Qwen/") else name
    return _MODELS.get(name, name)


def _options(table: str, row: dict[str, str]) -> dict[str, Any]:
    method = row["method"]
    is_gptq = method == _GPTQ
    targets = row.get("lora_targets") or row.get("target_modules") or ""
    names = [_TARGETS.get(each, each) for each in targets.replace(" ", ",").split(",") if each]
    values: dict[str, Any] = {
        "method": "lora" if is_gptq else method,
        "sequence_length": int(row["sequence_length"]),
        "batch_size": int(row["batch_per_gpu"]),
        "gradient_accumulation": int(row["gradient_accumulation"] or 1),
        "checkpointing": row["checkpointing"].startswith("full"),
        "implementation": "foreach",
        "lora_target": ",".join(names) or "all-linear",
        "lora_rank": int(row.get("lora_rank") or 16),
        # The scripts and configurations of litgpt all state 0.05.
        "lora_dropout": float(row.get("lora_dropout") or (0.05 if table == "litgpt" else 0.0)),
        "has_autocast": "amp" in row["precision"],
        "attention": "flash",
        "year": 2023 if table in ("qwen", "litgpt") else 2024,
        "raises_frozen": "baseline" in (row.get("framework_config") or ""),
        "precision": "bf16",
        "kernels": "fused_loss" if "liger" in (row.get("kernels") or "") else "none",
    }
    if is_gptq:
        values["quantisation"] = "gptq"
    elif "nf4" in row["precision"] and "dq" not in row["precision"]:
        values["quantisation"] = "nf4"
    if table == "litgpt":
        values |= {"library": "litgpt", "adapter_bytes": 2, "raises_logits": False}
        if method == "qlora":
            # What is not quantised stays in fp32, and bitsandbytes answers in its input's type.
            values |= {"optimizer": "paged_adamw", "raises_frozen": "confighub" in row["row_id"]}
    if table == "peft":
        stated = json.loads(row["peft_config"])
        values |= {"sequence_length": _FLUX_TOKENS, "lora_rank": stated.get("r", 16), "year": 2026}
        values["method"] = "dora" if stated.get("use_dora") else method
    if table == "qwen":
        values["raises_logits"] = False  # its own class, which autocast raises
        # finetune_qlora_single_gpu.sh runs DeepSpeed, which has no autocast.
        if is_gptq:
            values |= {"has_autocast": False, "parallel": "zero2"}
    return values


def safety_factors(found: list[Reading]) -> dict[str, float]:
    """The factors over the expectation below which :data:`COVERAGE` of the readings lie: of bases
    that GPTQ quantised, and of others; wider by what readings of a new source need.

    Too few readings of one kind, and the factor is the largest ratio of all.
    """
    needed = [each.ratio / factors[_kind(each)] for each, factors in by_other_sources(found)]
    margin = float(np.quantile(needed, COVERAGE, method="higher"))
    return {kind: round(factor * max(margin, 1.0), 3) for kind, factor in _factors(found).items()}


def by_other_sources(found: list[Reading]) -> Iterator[tuple[Reading, dict[str, float]]]:
    """Each reading, and the factors from the readings of other sources."""
    for source in {each.source for each in found}:
        factors = _factors([each for each in found if each.source != source])
        yield from ((each, factors) for each in found if each.source == source)


def _factors(found: list[Reading]) -> dict[str, float]:
    ratios: dict[str, list[float]] = {"plain": [], "gptq": []}
    for each in found:
        ratios[_kind(each)].append(each.ratio)
    largest = max([1.0, *ratios["plain"], *ratios["gptq"]])
    factors = {
        kind: conformal_quantiles(np.array(own), [COVERAGE])[0] for kind, own in ratios.items()
    }
    return {kind: factor or largest for kind, factor in factors.items()}


def _kind(reading: Reading) -> str:
    return "gptq" if reading.answer.method.quantisation == "gptq" else "plain"


def compare(folder: Path, *, write: bool = False, exact: bool = False) -> str:
    """The comparison as text; ``write`` replaces the factors that ``fit`` uses."""
    lines: list[str] = []
    found: list[Reading] = []
    for each in readings(folder, exact=exact):
        if isinstance(each, str):
            lines.append(f"left out  {each}")
        else:
            found.append(each)
            read, expected = each.read_bytes / 1e9, each.expected_bytes / 1e9
            lines.append(
                f"{each.row:24} read {read:6.2f}  expected {expected:6.2f}  {each.error:+.1%}"
            )
    factors = safety_factors(found)
    others = list(by_other_sources(found))
    for source in (*sorted({each.source for each in found}), ""):
        own = [each for each in found if source in ("", each.source)]
        below = sum(each.ratio <= factors[_kind(each)] for each in own)
        apart = sum(
            each.ratio <= known[_kind(each)]
            for each, known in others
            if source in ("", each.source)
        )
        text = f"safe above {below}/{len(own)}, without the margin by other sources {apart}"
        lines.append(f"{source or 'all'}: {_summary(own)}, {text}")
    lines.append(f"factors of the safe bytes, from all: {factors}")
    if write:
        path = Path(gpumemnet.__file__).parent / "named" / "safety.json"
        replace_file(path, (json.dumps(factors) + "\n").encode())
    return "\n".join(lines)


def _summary(found: list[Reading]) -> str:
    errors = np.abs([each.error for each in found])
    return f"{len(found)} rows, median {np.median(errors):.1%}, 90th {np.quantile(errors, 0.9):.1%}"
