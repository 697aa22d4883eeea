"""Supervised fine-tuning with TRL, of a model and a file in this folder."""

import sys

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

samples = load_dataset("json", data_files="chats.jsonl", split="train")
arguments = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=8,
    max_steps=4,
    report_to=[],
    packing="packing" in sys.argv,
)
SFTTrainer(model="model", args=arguments, train_dataset=samples).train()
