"""``python -m research readings``: compares ``gpumemnet fit`` with published readings of fine-tuning
runs, and calibrates its safe bytes.

Like is compared with like: the allocator's peak with ``torch_max_allocated``, its reserved bytes
with ``torch_max_reserved``, and these with the CUDA context with what ``nvidia-smi`` showed.  A row
is left out, with its reason, where a setting cannot be said or is not stated.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import gpumemnet
from gpumemnet.atomic_files import replace_file, shipped_json
from gpumemnet.errors import GpumemnetError
from gpumemnet.named.catalogue import find_model
from gpumemnet.named.fit import COVERAGE, fit
from gpumemnet.named.methods import METHODS
from gpumemnet.named.trainer_files import adapter_fields
from gpumemnet.physics.replicas import communicator_bytes
from gpumemnet.predict.conformal import conformal_quantiles
from research.batch_ladders import Ladder, comparison, ladder
from research.estimators.fine_tuning import rules
from research.vision_runs import GPU as V100
from research.vision_runs import TABLES as VISION
from research.vision_runs import vision_run

TABLES: Final = ("fms-acceleration", "litgpt", "qwen", "peft")
LADDERS: Final = "timm"
"""The table that holds the largest batch that ran, and no bytes."""
_FLUX_PIXELS: Final = 512
FIT: Final = "gpumemnet fit"
_TOO_LOW: Final = 0.9
"""Of a reading: what a rule says below that ends in an out-of-memory error in spite of a margin."""
_BENCHMARK_BYTES: Final = {"peft": 4 * 86_580_480 + 14 * 512 * 7680 * 2}
"""Table → what its script keeps on the GPU beside the training: PEFT's ``image-gen/run.py`` has the
judge of its images, DINOv2-base in fp32, and the embeddings of 14 prompts, in bfloat16."""
_GPTQ: Final = "gptq_lora"
ADAPTERS, QUANTISED = "adapters on frozen 16-bit weights", "4-bit base"
SEVERAL_RANKS: Final = "several ranks"
_BUILDING_LIBRARIES: Final = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "diffusers",
    "litgpt",
    "mmsegmentation",
    "mmdet",
)
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
    """A published reading, and what ``fit`` says of the same quantity.

    Attributes:
        source: name of the table.
        row: identifier of the row.
        kind: which factor its safe bytes have.
        read_bytes, expected_bytes: of the same quantity.
        rules: bytes by the rules of others (:func:`~research.estimators.fine_tuning.rules`).
        gpu, family: the card and the model's family.
        causes: what its memory depends on (:func:`_causes`).
        context_bytes: in both quantities; 0 where the allocator was read.
    """

    source: str
    row: str
    kind: str
    read_bytes: float
    expected_bytes: float
    rules: Mapping[str, float]
    gpu: str
    family: str
    causes: Sequence[str]
    context_bytes: int

    @property
    def error(self) -> float:
        """How far the expectation lies above the reading, relative to it."""
        return self.expected_bytes / self.read_bytes - 1.0

    @property
    def ratio(self) -> float:
        """The reading over the expectation."""
        return self.read_bytes / self.expected_bytes


def readings(
    folder: Path,
    *,
    exact: bool = False,
    kept: Path | None = None,
    sources: Sequence[str] = TABLES,
    seconds: float | None = None,
) -> Iterator[Reading | Ladder | str]:
    """Readings of jobs on one GPU; a sentence for each row that is left out.

    Args:
        folder: holds the tables.
        exact: whether each job is traced; a ladder of batches (``timm``) always is.
        kept: file of answers, in JSON lines: those of the same row, question and code are taken from
            it, others are added, so that a run that was stopped goes on.
        sources: the tables to compare with.
        seconds: time after which no further job is asked; an answer of earlier code stands for it.
    """
    answers = kept_answers(kept)
    earlier = {key.rpartition(" ")[0]: answer for key, answer in answers.items()}
    code = _code_digest() if kept is not None else ""
    end = inf if seconds is None else monotonic() + seconds
    for table in sources:
        with (folder / f"{table}.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
            if seconds is not None:  # so that those that are reached are a fair sample
                Random(0).shuffle(rows)
            for row in rows:
                is_alone = row["gpus"] == "1" or table in VISION
                if row["usable"] != "yes" or not (is_alone or (exact and _is_fsdp(row))):
                    continue
                question = f"{row['row_id']} {exact and table != LADDERS}"
                key = f"{question} {code}"
                if key not in answers:
                    if monotonic() > end:
                        if question in earlier:
                            yield earlier[question]
                        continue
                    depth = {"exact": True} if exact else {}
                    answers[key] = ladder(row) if table == LADDERS else _reading(table, row, depth)
                    if kept is not None:
                        with kept.open("a", encoding="utf-8") as file_of_answers:
                            file_of_answers.write(json.dumps([key, answers[key]]) + "\n")
                yield answers[key]


def kept_answers(kept: Path | None) -> dict[str, Reading | Ladder | str]:
    """The answers in a file: row, depth and code → answer."""
    answers: dict[str, Reading | Ladder | str] = {}
    if kept is not None and kept.exists():
        for line in kept.read_text("utf-8").splitlines():
            key, found = json.loads(line)
            made = Ladder if key.startswith(LADDERS) else Reading
            answers[key] = found if isinstance(found, str) else made(*found)
    return answers


def instant(answers: Mapping[str, Reading | Ladder | str]) -> list[Reading]:
    """The last answers of the instant depth."""
    latest = {key.rpartition(" ")[0]: each for key, each in answers.items()}
    return [
        each
        for question, each in latest.items()
        if isinstance(each, Reading) and question.endswith("False")
    ]


def _code_digest() -> str:
    """Names the code that answers: the package, this module, and the libraries' versions."""
    folder = Path(gpumemnet.__file__).parent
    own = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256()
    for path in (*sorted(folder.rglob("*.py")), *sorted(folder.rglob("*.json")), *own):
        digest.update(path.read_bytes())
    for library in _BUILDING_LIBRARIES:
        with suppress(PackageNotFoundError):
            digest.update(f"{library} {version(library)}".encode())
    return digest.hexdigest()[:16]


def _reading(table: str, row: dict[str, str], depth: dict[str, Any]) -> Reading | str:
    if table in VISION:
        run = vision_run(row)
        if isinstance(run, str):
            return f"{row['row_id']}: {run}"
        sizes = float(row["reading_bytes"]), run.allocated_bytes
        return Reading(run.kind, row["row_id"], "plain", *sizes, {}, V100, row["family"], [], 0)
    reason = _obstacle(row, is_exact=bool(depth))
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
    if depth and answer.depth != "exact":
        return f"{row['row_id']}: {next(note for note in answer.notes if 'not traced' in note)}"
    quantity, read = _quantity(row)
    parts = dict(answer.parts)
    expected = answer.expected_bytes + _BENCHMARK_BYTES.get(table, 0)
    context_bytes = parts["context_bytes"]
    if quantity.startswith("torch_max"):
        expected -= context_bytes + communicator_bytes((int(row["gpus"]),))
        context_bytes = 0
    if quantity == "torch_max_allocated":
        expected -= parts["fragmentation_bytes"]
    kind = "gptq" if answer.method.quantisation == "gptq" else "plain"
    config = find_model(answer.model).config
    others = rules(config, answer.parameters, answer.trained_parameters, answer.method)
    return Reading(
        table,
        row["row_id"],
        kind,
        read,
        expected,
        others,
        gpu,
        row["family"],
        _causes(row),
        context_bytes,
    )


def _quantity(row: Mapping[str, str]) -> tuple[str, float]:
    """What was read; where the card was full, or of several, what its allocator gave to tensors."""
    if row.get("near_capacity") == "1" or row["gpus"] != "1":
        return "torch_max_allocated", float(row["torch_max_allocated_bytes"])
    return row["reading_kind"], float(row["reading_bytes"])


def _causes(row: Mapping[str, str]) -> list[str]:
    """What the memory of a row's job depends on."""
    is_small = "4bit" in row["precision"] or "nf4" in row["precision"] or row["method"] == _GPTQ
    base = (
        QUANTISED
        if is_small
        else "all weights trained in 16 bits"
        if row["method"] == "full"
        else ADAPTERS
    )
    return [
        base,
        *(["autocast"] if "amp" in row["precision"] else []),
        *(["recomputed blocks"] if row["checkpointing"].startswith("full") else []),
        *([] if row["gpus"] == "1" else [SEVERAL_RANKS]),
    ]


def _is_fsdp(row: dict[str, str]) -> bool:
    """Whether the job ran on several GPUs, by FSDP1 alone."""
    return row["row_id"].startswith("fms:") and "ep=" not in row["parallel"]


def _obstacle(row: dict[str, str], *, is_exact: bool) -> str:
    """Why ``fit`` cannot be asked for the job of this row."""
    if row["method"] not in (*METHODS, _GPTQ) and not (is_exact and row.get("peft_config")):
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
        "attention": "flash" if "flash" in row["attention"] else None,
        "year": 2023 if table == "qwen" or ":resource:" in row["row_id"] else 2024,
        "raises_frozen": "baseline" in (row.get("framework_config") or ""),
        "precision": "bf16",
        "kernels": "fused_loss" if "liger" in (row.get("kernels") or "") else "none",
    }
    if row["gpus"] != "1":
        values |= {"gpus": int(row["gpus"]), "parallel": "fsdp1"}
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
        values |= {"resolution": _FLUX_PIXELS, "year": 2026}
        if method != "full":
            values |= adapter_fields({"peft_type": method.upper(), **stated})
            values["lora_target"] = ",".join(stated.get("target_modules") or ["all-linear"])
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
    needed = [each.ratio / factors[each.kind] for each, factors in by_other_sources(found)]
    margin = float(np.quantile(needed, COVERAGE, method="higher"))
    return {kind: round(factor * max(margin, 1.0), 3) for kind, factor in _factors(found).items()}


def factors_without(found: Sequence[Reading], family: str) -> dict[str, float]:
    """The factors from the readings of all other model families; the shipped ones if there are none."""
    others = [each for each in found if each.family != family]
    return safety_factors(others) if others else dict(shipped_json("named/safety.json"))


def by_other_sources(found: list[Reading]) -> Iterator[tuple[Reading, dict[str, float]]]:
    """Each reading, and the factors from the readings of other sources."""
    for source in {each.source for each in found}:
        factors = _factors([each for each in found if each.source != source])
        yield from ((each, factors) for each in found if each.source == source)


def _factors(found: list[Reading]) -> dict[str, float]:
    ratios: dict[str, list[float]] = {"plain": [], "gptq": []}
    for each in found:
        ratios[each.kind].append(each.ratio)
    largest = max([1.0, *ratios["plain"], *ratios["gptq"]])
    factors = {
        kind: conformal_quantiles(np.array(own), [COVERAGE])[0] for kind, own in ratios.items()
    }
    return {kind: factor or largest for kind, factor in factors.items()}


def compare(
    folder: Path,
    *,
    write: bool = False,
    exact: bool = False,
    kept: Path | None = None,
    sources: Sequence[str] = TABLES,
    seconds: float | None = None,
) -> str:
    """The comparison in Markdown; ``write`` replaces the factors that ``fit`` uses.

    Args:
        folder, exact, kept, sources, seconds: as in :func:`readings`.
        write: whether to calibrate the safe bytes: of traces if ``exact``, else of names.
    """
    found: list[Reading] = []
    ladders: list[Ladder] = []
    missing: list[str] = []
    for each in readings(folder, exact=exact, kept=kept, sources=sources, seconds=seconds):
        if isinstance(each, Reading):
            found.append(each)
        elif isinstance(each, Ladder):
            ladders.append(each)
        else:
            missing.append(each)
    lines = [*_bytes_compared(found, write=write and not exact)] if found else []
    lines += comparison(ladders) if ladders else []
    if exact:
        from research import calibration

        made = calibration.calibrated([*found, *ladders], instant(kept_answers(kept)))
        lines += ["", *calibration.table(made), "", f"margins of traces: {made.document}"]
        if write:
            calibration.write(made.document)
    return "\n".join([*lines, "", "Left out:", "", *(f"* {each}" for each in missing)])


def _bytes_compared(found: list[Reading], *, write: bool) -> Iterator[str]:
    factors = safety_factors(found)
    others = list(by_other_sources(found))
    yield from ("| row | read GB | expected GB | error | below safe |", "|---|--:|--:|--:|---|")
    for each in found:
        read, expected = each.read_bytes / 1e9, each.expected_bytes / 1e9
        is_below = "yes" if each.ratio <= factors[each.kind] else "no"
        yield f"| {each.row} | {read:.2f} | {expected:.2f} | {each.error:+.1%} | {is_below} |"
    yield ""
    for source in (*sorted({each.source for each in found}), ""):
        own = [each for each in found if source in ("", each.source)]
        below = sum(each.ratio <= factors[each.kind] for each in own)
        apart = sum(
            each.ratio <= known[each.kind] for each, known in others if source in ("", each.source)
        )
        text = f"safe above {below}/{len(own)}, without the margin by other sources {apart}"
        yield f"{source or 'all'}: {_summary(own)}, {text}"
    yield f"factors of the safe bytes, from all: {factors}"
    above = sum(each.ratio > factors_without(found, each.family)[each.kind] for each in found)
    yield f"above them, by factors from the other families: {above} of {len(found)}"
    yield from _scoreboard(found)
    if write:
        path = Path(gpumemnet.__file__).parent / "named" / "safety.json"
        replace_file(path, (json.dumps(factors) + "\n").encode())


def ratios(found: Sequence[Reading]) -> dict[str, NDArray[np.float64]]:
    """Estimates over the same readings, by ``fit`` and by the rules of others."""
    every: dict[str, list[float]] = {FIT: [1.0 + each.error for each in found]}
    for each in found:
        for name, rule_bytes in each.rules.items():
            every.setdefault(name, []).append(rule_bytes / each.read_bytes)
    return {name: np.array(own) for name, own in every.items()}


def figures(own: NDArray[np.float64]) -> tuple[float, float, float]:
    """Median and 90th percentile of the error, and the share of estimates that are more than 10 %
    too low."""
    errors = np.abs(own - 1.0)
    low = float(np.mean(own < _TOO_LOW))
    return float(np.median(errors)), float(np.quantile(errors, 0.9)), low


def _scoreboard(found: list[Reading]) -> Iterator[str]:
    """How far ``fit`` and the rules of others lie from the same readings, the nearest first."""
    yield from ("", "| estimator | rows | median error | 90th | more than 10 % too low |")
    yield "|---|--:|--:|--:|--:|"
    for name, own in sorted(ratios(found).items(), key=lambda each: figures(each[1])):
        median, most, low = figures(own)
        yield f"| {name} | {len(own)} | {median:.1%} | {most:.1%} | {low:.0%} |"


def _summary(found: list[Reading]) -> str:
    median, most, _ = figures(ratios(found)[FIT])
    return f"{len(found)} rows, median {median:.1%}, 90th {most:.1%}"
