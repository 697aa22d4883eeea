"""Compares states that DeepSpeed's engine keeps in a trace with DeepSpeed's own estimates of them.

``python benchmarks/deepspeed_states.py [MODEL …]`` traces ``gpumemnet fit --exact`` of each model on
eight GPUs, with short samples, at ZeRO-2 and ZeRO-3, and prints a table in Markdown.  Estimates are
those of ``estimate_zero2_model_states_mem_needs`` and ``estimate_zero3_model_states_mem_needs``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpumemnet.named.catalogue import find_model
from gpumemnet.named.fit import FitAnswer, fit
from gpumemnet.named.methods import Method

GPUS = 8
MODELS = (
    *("openai-community/gpt2", "facebook/opt-1.3b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    *("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-3B", "Qwen/Qwen3-1.7B", "google/gemma-2-2b"),
    *("meta-llama/Llama-3.2-1B", "microsoft/phi-2", "mistralai/Mistral-7B-v0.1"),
)
STATES = ("base_weights_bytes", "gradients_bytes", "optimizer_bytes")


def main() -> None:
    print("| model | parameters | ZeRO-2: estimated | traced | when | ZeRO-3: estimated | traced |")
    print("|---|--:|--:|--:|---|--:|--:|")
    for name in sys.argv[1:] or MODELS:
        second, third = (traced(name, f"zero{stage}") for stage in (2, 3))
        parameters, largest = second.parameters, largest_layer(name)
        estimates = (2 + 18 / GPUS) * parameters, 18 / GPUS * parameters + 4 * largest
        cells = [estimates[0], states(second), second.moment, estimates[1], states(third)]
        texts = (each if isinstance(each, str) else f"{each / 1e9:.3f}" for each in cells)
        print(f"| {name} | {parameters / 1e6:,.0f} M | {' | '.join(texts)} |", flush=True)


def traced(name: str, parallel: str) -> FitAnswer:
    """The answer at the exact depth, for samples that are too short to count."""
    answer = fit(name, gpu=f"{GPUS}xA100-80GB", parallel=parallel, exact=True, sequence_length=16)
    assert answer.depth == "exact", answer.notes
    return answer


def states(answer: FitAnswer) -> int:
    return sum(answer.parts[part] for part in STATES)


def largest_layer(name: str) -> int:
    """The most parameters that one module owns, as DeepSpeed counts them."""
    from gpumemnet.named.real_model import built

    model = find_model(name)
    module = built(model, Method(sequence_length=16)).module
    return max(
        sum(each.numel() for each in part.parameters(recurse=False)) for part in module.modules()
    )


if __name__ == "__main__":
    main()
