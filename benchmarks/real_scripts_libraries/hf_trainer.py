"""Hugging Face's Trainer on one of thirteen architectures, with random weights and made-up
samples."""

import sys

import torch
import transformers
from transformers import Trainer, TrainingArguments

SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "vocab_size": 32_000}
ARCHITECTURES = {
    "bert": ("BertForSequenceClassification", "BertConfig", SMALL),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", SMALL),
    "distilbert": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"dim": 256, "n_layers": 4, "n_heads": 4},
    ),
    "albert": ("AlbertForSequenceClassification", "AlbertConfig", SMALL),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 256, "n_layer": 4, "n_head": 4}),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "ffn_dim": 1024,
            "word_embed_proj_dim": 256,
            "num_attention_heads": 4,
        },
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 256, "num_layers": 4, "d_ff": 1024, "num_heads": 4},
    ),
    "detr": (
        "DetrForObjectDetection",
        "DetrConfig",
        {
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": transformers.ResNetConfig(out_features=["stage4"]),
            "num_queries": 50,
        },
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", SMALL),
}


class Samples(torch.utils.data.Dataset):
    def __init__(self, architecture: str) -> None:
        self.is_image = architecture in ("vit", "detr")
        self.is_detector = architecture == "detr"
        self.is_classifier = "Classification" in ARCHITECTURES[architecture][0]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict:
        label = torch.tensor(i % 2)
        if self.is_detector:
            boxes = torch.rand(5, 4) / 4 + 0.25
            return {
                "pixel_values": torch.rand(3, 224, 224),
                "labels": {"class_labels": torch.arange(5), "boxes": boxes},
            }
        if self.is_image:
            return {"pixel_values": torch.rand(3, 224, 224), "labels": label}
        ids = torch.randint(0, 1000, (128,))
        mask = torch.ones(128, dtype=torch.long)
        mask[100 + i % 28 :] = 0
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": label if self.is_classifier else ids,
        }


def with_labels_as_lists(samples: list[dict]) -> dict:
    """Boxes differ in number from image to image."""
    return {
        "pixel_values": torch.stack([sample["pixel_values"] for sample in samples]),
        "labels": [sample["labels"] for sample in samples],
    }


if __name__ == "__main__":
    name = sys.argv[1]
    model, configuration, sizes = ARCHITECTURES[name]
    settings = getattr(transformers, configuration)(**sizes)
    settings.decoder_start_token_id = 0  # of T5
    network = getattr(transformers, model)(settings)
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        num_train_epochs=1,
        report_to=[],
        logging_steps=1,
        bf16="bf16" in sys.argv,
    )
    collator = with_labels_as_lists if name == "detr" else None
    Trainer(
        model=network, args=arguments, train_dataset=Samples(name), data_collator=collator
    ).train()
