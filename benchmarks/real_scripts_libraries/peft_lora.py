"""LoRA on a causal language model with PEFT and Trainer."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict:
        ids = torch.randint(0, 32_000, (256,))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


sizes = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32_000, **sizes))
options = {"use_dora": True} if "dora" in sys.argv else {}
model = get_peft_model(
    model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
)
model.print_trainable_parameters()
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    max_steps=4,
    report_to=[],
    bf16=True,
    gradient_checkpointing="checkpointing" in sys.argv,
)
Trainer(model=model, args=arguments, train_dataset=Samples()).train()
