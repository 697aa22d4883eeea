"""bitsandbytes: an 8-bit or paged optimizer of Trainer, or a base in four bits under LoRA."""

import sys

import torch
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict:
        ids = torch.randint(0, 32_000, (128,))
        return {"input_ids": ids, "labels": ids}


way = sys.argv[1]
sizes = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
if way == "qlora":
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    quantized = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = LlamaForCausalLM.from_pretrained(
        "model", quantization_config=quantized, device_map={"": 0}
    )
    model = prepare_model_for_kbit_training(model)
    model = get_peft_model(
        model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
else:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32_000, **sizes))
optimizer = {"qlora": "paged_adamw_8bit"}.get(way, way)
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    max_steps=4,
    report_to=[],
    optim=optimizer,
    bf16=True,
)
Trainer(model=model, args=arguments, train_dataset=Samples()).train()
