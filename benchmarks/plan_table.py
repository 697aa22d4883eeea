"""Plans what people fine-tune for 70 % of its peak, and checks each plan.

    python benchmarks/plan_table.py [ROW|MODEL …]

Each row, or any other model of the catalogue with batch size 8, builds a model by its name as
``gpumemnet plan`` does, without weights, for an H200.  The budget is 70 % of the expected peak.
*Re-traced* is the peak of a trace with the plan applied.  Then a small variant with weights trains
one step on the CPU, as it is and with a mixture of all decisions: its loss and all gradients must
be equal to the last bit.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from gpumemnet.extract.checkpointing import blocks
from gpumemnet.extract.module_calls import as_model_inputs
from gpumemnet.gpu import find_profile
from gpumemnet.named.catalogue import NamedModel, find_model
from gpumemnet.named.exact import trace_options
from gpumemnet.named.fit import fit
from gpumemnet.named.methods import Method
from gpumemnet.named.real_model import RealModel, built
from gpumemnet.planner import Decision, applied
from gpumemnet.planner.api import within_budget
from gpumemnet.planner.plan_choice import plan_request
from gpumemnet.planner.plans import DECISION_TEXTS, PlanRequest
from gpumemnet.torch_private.names import tree_map_only
from gpumemnet.tracing.api import checked_request
from gpumemnet.tracing.model_tracer import ModelTracer
from gpumemnet.units import GIB

SHARE: Final = 0.7
_TEXT: Final = {"sequence_length": 1024, "batch_size": 8}
ROWS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "T5-large": ("google-t5/t5-large", {**_TEXT, "sequence_length": 512}),
    "Whisper large": ("openai/whisper-large-v3", {"batch_size": 4, "sequence_length": 256}),
    "Swin-B": ("timm/swin_base_patch4_window7_224", {"batch_size": 64}),
    "ConvNeXt-B": ("timm/convnext_base", {"batch_size": 64}),
    "PixArt, a DiT": ("PixArt-alpha/PixArt-XL-2-1024-MS:transformer", {"batch_size": 4}),
    "OLMoE, as Mixtral, LoRA": ("allenai/OLMoE-1B-7B-0924", {**_TEXT, "method": "lora"}),
    "ViT-L": ("google/vit-large-patch16-224", {"batch_size": 64}),
    "BERT-large": ("google-bert/bert-large-uncased", {"batch_size": 32, "sequence_length": 512}),
    "GPT-2 XL": ("openai-community/gpt2-xl", {**_TEXT, "batch_size": 4}),
    "Llama 3.1 8B, LoRA": ("meta-llama/Llama-3.1-8B", {**_TEXT, "method": "lora", "batch_size": 2}),
    "SDXL's UNet": ("stabilityai/stable-diffusion-xl-base-1.0:unet", {"batch_size": 2}),
    "SD 1.5's UNet": (
        "stable-diffusion-v1-5/stable-diffusion-v1-5:unet",
        {"batch_size": 8, "resolution": 512},
    ),
}
"""Row → name of the model, and how it is trained."""
SMALL: Final = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_decoder_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,  # PixArt's conditions take thirds of its width
    "attention_head_dim": 24,
    "cross_attention_dim": 96,
    "block_out_channels": 96,
    "transformer_layers_per_block": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_layers": 4,
    "decoder_ffn_dim": 128,
    "decoder_attention_heads": 4,
    "num_layers": 4,
}
"""Sizes of the small variants, where a configuration has them; of a list, every level has that size."""


def row(name: str) -> str:
    """Return the cells of one model."""
    model, training = ROWS.get(name, (name, {"batch_size": 8}))
    named, gpu = find_model(model), find_profile("H200")
    how = fit(named, gpu=gpu, checkpointing=False, **training).method
    real = built(named, how)
    inputs = as_model_inputs(real.inputs, how.batch_size)
    request = checked_request(trace_options(how), gpu)
    before = ModelTracer(real.module, inputs, request).answer()
    budget = round(SHARE * before.expected_bytes)
    started = time.process_time()
    answer = plan_request(
        real.module,
        inputs,
        PlanRequest(trace=within_budget(request, budget), with_alternatives=False),
    )
    seconds = time.process_time() - started
    is_equal = "equal" if gradients_agree(named.name, dict(named.config), how) else "**differ**"
    amounts, texts = [before.expected_bytes, budget], [f"none: {answer.reason}", *[""] * 4]
    if answer.plan is not None and answer.after is not None:
        chosen = Counter(map(DECISION_TEXTS.get, answer.plan.decisions.values()))
        texts = [", ".join(f"{count} {decision}" for decision, count in chosen.items())]
        after = answer.after
        for each in (answer.plan.process_bytes, after.expected_bytes, after.safe_bytes):
            texts.append(f"{each / GIB:.2f}")
        texts.append(f"{answer.plan.slowdown:+.1%}")
    cells = [name, *(f"{each / GIB:.2f}" for each in amounts), *texts, f"{seconds:.0f}", is_equal]
    return f"| {' | '.join(cells)} |"


def gradients_agree(name: str, config: dict[str, Any], method: Method) -> bool:
    """Whether one step of a small variant has the same loss and gradients with a plan."""
    small = {
        key: [SMALL[key]] * len(value) if isinstance(value, list) else SMALL[key]
        for key, value in config.items()
        if key in SMALL
    }
    side = 128 if config.get("model_type") == "diffusers" else None
    fewer = replace(method, batch_size=2, sequence_length=32, resolution=side, precision="fp32")
    real = built(NamedModel(name, config | small | {"built_by_transformers_5.23": None}, ""), fewer)
    torch.manual_seed(0)
    real.module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*real.module.parameters(), *real.module.buffers()):
            tensor.normal_(0, 0.02) if tensor.is_floating_point() else tensor.zero_()
    names = {module: path for path, module in real.module.named_modules()}
    turns = cycle([*Decision][1:])
    plan = {names[block]: next(turns) for block in blocks(real.module)}
    plain = _step(real)
    with applied(real.module, plan):
        return all(map(torch.equal, plain, _step(real)))


def _step(real: RealModel) -> list[Tensor]:
    torch.manual_seed(1)
    real.module.zero_grad(set_to_none=True)

    def value(tensor: Tensor) -> Tensor:
        real_tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return real_tensor.normal_() if tensor.is_floating_point() else real_tensor.random_(0, 2)

    loss = real.module(**tree_map_only(Tensor, value, real.inputs))["loss"]
    loss.backward()
    return [loss, *(each.grad for each in real.module.parameters() if each.grad is not None)]


def main() -> None:
    """Print one row, or the table by one process for each row."""
    if len(sys.argv) == 3 and sys.argv[1] == "--row":
        print(row(sys.argv[2]))
        return
    print(
        "| model | peak | budget | decisions | planned | re-traced | safe | step | s | gradients |"
    )
    print("|---|--:|--:|---|--:|--:|--:|--:|--:|---|")
    for name in sys.argv[1:] or ROWS:
        command = [sys.executable, __file__, "--row", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = (done.stdout if not done.returncode else done.stderr).strip().splitlines()
        print(lines[-1] if lines else "", flush=True)


if __name__ == "__main__":
    main()
