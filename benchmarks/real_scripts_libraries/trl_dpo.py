"""Direct preference optimization with TRL."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

samples = load_dataset("json", data_files="preferences.jsonl", split="train")
arguments = DPOConfig(output_dir="out", per_device_train_batch_size=4, max_steps=4, report_to=[])
model, tokenizer = (
    AutoModelForCausalLM.from_pretrained("model"),
    AutoTokenizer.from_pretrained("model"),
)
DPOTrainer(model=model, args=arguments, train_dataset=samples, processing_class=tokenizer).train()
