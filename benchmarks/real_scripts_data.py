"""Made-up data for ``real_scripts.py``: small, random, and in the form in which the scripts expect
them."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
import struct
import tarfile
from base64 import b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

SAMPLES: Final = 1024
_RANDOM: Final = np.random.default_rng(0)
WORDS: Final = [
    "the",
    "of",
    "and",
    "memory",
    "graph",
    "tensor",
    "layer",
    "model",
    "train",
    "step",
    "<unk>",
    "a",
    "is",
    "it",
]


def mnist(folder: Path, samples: int = SAMPLES) -> None:
    """MNIST as torchvision stores it."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        images, labels = _pixels(samples, 28, 28), _labels(samples)
        for name, shape, values in (
            ("images-idx3", images.shape, images),
            ("labels-idx1", labels.shape, labels),
        ):
            head = struct.pack(f">I{len(shape)}I", 0x800 + len(shape), *shape)
            (raw / f"{part}-{name}-ubyte").write_bytes(head + values.tobytes())
            (raw / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(head + values.tobytes()))


def larger_mnist(folder: Path) -> None:
    """MNIST for a script that sets 5,000 samples aside."""
    mnist(folder, 8 * SAMPLES)


def cifar10(folder: Path) -> None:
    """CIFAR-10 as torchvision stores it."""
    target = folder / "cifar-10-batches-py"
    target.mkdir(parents=True)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        batch = {
            "data": _pixels(SAMPLES, 3072),
            "labels": [int(label) for label in _labels(SAMPLES)],
        }
        (target / name).write_bytes(pickle.dumps(batch))
    (target / "batches.meta").write_bytes(
        pickle.dumps({"label_names": [str(i) for i in range(10)]})
    )


def image_folder(folder: Path) -> None:
    """Ten classes of images in ``train`` and ``val``, as ImageNet is stored."""
    for part in ("train", "val"):
        for kind in range(10):
            (folder / part / f"class_{kind}").mkdir(parents=True)
            for i in range(26):
                _image(256, 256).save(folder / part / f"class_{kind}" / f"{i}.jpg")


def images(folder: Path) -> None:
    """A folder of images."""
    folder.mkdir(parents=True)
    for i in range(64):
        _image(256, 256).save(folder / f"{i}.jpg")


def style_image(path: Path) -> None:
    """One image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _image(256, 256).save(path)


def segmentation_images(folder: Path) -> None:
    """Images and masks in two folders, as U-Net's repository expects them."""
    for name in ("imgs", "masks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for i in range(24):
        _image(320, 480).save(folder / "imgs" / f"{i}.jpg")
        Image.fromarray(np.tile([[0, 255]], (320, 240)).astype(np.uint8)).save(
            folder / "masks" / f"{i}_mask.gif"
        )


def bsd300(folder: Path) -> None:
    """Berkeley's images for super-resolution."""
    for part in ("train", "test"):
        target = folder / "BSDS300" / "images" / part
        target.mkdir(parents=True)
        for i in range(80):
            _image(321, 481).save(target / f"{i}.jpg")


def words(folder: Path) -> None:
    """Three files of words, as WikiText-2 is stored."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "valid", "test"):
        lines = (
            " ".join(WORDS[i % len(WORDS)] + str(j % 200) for i in range(40)) for j in range(400)
        )
        (folder / f"{part}.txt").write_text("".join(f" {line} \n" for line in lines))


def text(path: Path) -> None:
    """One file of text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(f"{chr(65 + i % 26)}, {' '.join(WORDS)} {i % 10}!\n" for i in range(4000))
    )


def tokens(folder: Path) -> None:
    """Tokens of GPT-2's vocabulary, as nanoGPT stores them."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "val"):
        _RANDOM.integers(0, 50_000, 200_000).astype(np.uint16).tofile(folder / f"{part}.bin")


def characters(folder: Path) -> None:
    """Characters, as nanoGPT's Shakespeare is stored."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "val"):
        _RANDOM.integers(0, 65, 200_000).astype(np.uint16).tofile(folder / f"{part}.bin")
    names = {i: chr(40 + i) for i in range(65)}
    (folder / "meta.pkl").write_bytes(
        pickle.dumps({"vocab_size": 65, "itos": names, "stoi": {v: k for k, v in names.items()}})
    )


def tiny_stories(folder: Path) -> None:
    """Tokens of Llama's vocabulary, as llama2.c stores them."""
    target = folder / "TinyStories_all_data"
    target.mkdir(parents=True)
    for i in range(2):
        _RANDOM.integers(3, 32_000, 400_000).astype(np.uint16).tofile(target / f"data{i:02d}.bin")


def cora(folder: Path) -> None:
    """A citation network of Cora's size."""
    folder.mkdir(parents=True, exist_ok=True)  # a repository may have it
    features = _RANDOM.integers(0, 2, (2708, 1433))
    (folder / "cora.content").write_text(
        "".join(f"{i} {' '.join(map(str, row))} kind_{i % 7}\n" for i, row in enumerate(features))
    )
    edges = _RANDOM.integers(0, 2708, (5429, 2))
    (folder / "cora.cites").write_text("".join(f"{a} {b}\n" for a, b in edges))


def glue(folder: Path) -> None:
    """MRPC of the GLUE benchmark, as the hub stores it."""
    lines = (
        {
            "sentence1": " ".join(WORDS),
            "sentence2": " ".join(WORDS[i % 5 :]),
            "label": i % 2,
            "idx": i,
        }
        for i in range(400)
    )
    content = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "mrpc").mkdir(parents=True)
    for part in ("train", "validation", "test"):
        (folder / "mrpc" / f"{part}.jsonl").write_text(content)
    files = "".join(
        f"  - split: {part}\n    path: mrpc/{part}.jsonl\n"
        for part in ("train", "validation", "test")
    )
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n"
    )


def glue_metric(path: Path) -> None:
    """A metric under the name of GLUE's, which ``evaluate.load`` finds as a file."""
    path.parent.mkdir(parents=True)
    path.write_text(
        "import datasets\n"
        "import evaluate\n"
        "class Glue(evaluate.Metric):\n"
        "    def _info(self):\n"
        "        columns = dict.fromkeys(('predictions', 'references'), datasets.Value('int64'))\n"
        "        return evaluate.MetricInfo(description='', citation='', features=datasets.Features(columns))\n"
        "    def _compute(self, predictions, references):\n"
        "        return {'accuracy': 0.0}\n"
    )


def hf_preferences(path: Path) -> None:
    """A chosen and a rejected answer to each prompt, as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        {
            "prompt": " ".join(WORDS),
            "chosen": " ".join(WORDS[::-1]) + f" {i}",
            "rejected": " ".join(WORDS[2:]),
        }
        for i in range(400)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def llama_model(folder: Path) -> None:
    """A small Llama with a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    _tokenizer(folder)
    LlamaForCausalLM(
        LlamaConfig(**_SMALL, intermediate_size=688, num_attention_heads=8)
    ).save_pretrained(folder)


def bert_model(folder: Path) -> None:
    """A small BERT with a tokenizer."""
    from transformers import BertConfig, BertForSequenceClassification

    _tokenizer(folder)
    BertForSequenceClassification(
        BertConfig(**_SMALL, intermediate_size=1024, num_attention_heads=4)
    ).save_pretrained(folder)


_SMALL: Final = {"hidden_size": 256, "num_hidden_layers": 4}


def _tokenizer(folder: Path, words: int = 0, longest: int = 512) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {
        word: i
        for i, word in enumerate(
            ["<unk>", "<pad>", "</s>", "<s>", *sorted({*WORDS, *map(str, range(1000))} - {"<unk>"})]
        )
    }
    vocabulary |= {f"word{i}": i for i in range(len(vocabulary), words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        model_max_length=longest,
    )
    fast.chat_template = (
        "{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}"
    )
    fast.save_pretrained(folder)


def hub_model(folder: Path, files: int = 99) -> None:
    """A model of the catalogue under its name on the hub: its configuration, a tokenizer of as many
    words, and weights of zeros that take no room on the disk, in at most so many files."""
    import torch
    import transformers

    from gpumemnet.named.catalogue import find_model

    name = "/".join(folder.parts[-2:])
    sizes = dict(find_model(_SAME_SIZES.get(name, folder.name)).config)
    config = transformers.AutoConfig.for_model(**sizes, decoder_start_token_id=0)
    config.dtype = "bfloat16"
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    _tokenizer(folder, config.vocab_size, getattr(config, "max_position_embeddings", 512))
    config.save_pretrained(folder)
    tensors = model.state_dict()
    file_of = {}
    for name in tensors:
        block = int(name.partition("layers.")[2].partition(".")[0] or 0)
        file_of[name] = f"model-{block % files + 1:05}-of-{files:05}.safetensors"
    for file in set(file_of.values()):
        _zeros(folder / file, {name: tensors[name] for name in tensors if file_of[name] == file})
    index = {"weight_map": file_of, "metadata": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _zeros(file: Path, tensors: Any) -> None:
    """Write bfloat16 zeros in the form of safetensors, in a sparse file."""
    at, header = 0, {}
    for name, tensor in tensors.items():
        end = at + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps({**header, "__metadata__": {"format": "pt"}}).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + at)


_SAME_SIZES: Final = {
    "NousResearch/Hermes-3-Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "lmsys/vicuna-7b-v1.5": "meta-llama/Llama-2-7b-hf",
    "HuggingFaceTB/SmolLM3-3B-checkpoints": "HuggingFaceTB/SmolLM3-3B",
    "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr": "EleutherAI/pythia-1b",
    "AdamG012/chat-opt-1.3b-sft-deepspeed": "facebook/opt-1.3b",
    "AdamG012/chat-opt-350m-reward-deepspeed": "facebook/opt-350m",
}
"""Models that have the sizes of one in the catalogue."""


def torchtune_model(folder: Path) -> None:
    """A Llama in as many files as on the hub, with a tokenizer of single bytes."""
    hub_model(folder, 30 if "70B" in folder.name else 4)
    (folder / "original").mkdir(exist_ok=True)
    ranks = (f"{b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    (folder / "original" / "tokenizer.model").write_text("".join(ranks))


def hub_chats(folder: Path) -> None:
    """Long chats under the name of a data set on the hub."""
    said = {"content": " ".join(WORDS * 60)}
    _hub_rows(folder, {"messages": [{"role": role, **said} for role in ("user", "assistant") * 2]})


def hub_texts(folder: Path) -> None:
    """Texts, translations, or instructions with answers, under the name of a data set on the hub."""
    more = ("instruction", "input", "output") if folder.name.startswith("alpaca") else ()
    row = dict.fromkeys(("en", "ro", "text", *more), " ".join(WORDS * 40))
    _hub_rows(folder, row | {"translation": row})


def _hub_rows(folder: Path, row: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    parts = ("train", "test", "validation", "train_sft", "test_sft")
    for part in parts:
        (folder / f"{part}.jsonl").write_text((json.dumps(row) + "\n") * 600)
    files = "".join(f"  - split: {part}\n    path: {part}.jsonl\n" for part in parts)
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {name}\n  data_files:\n{files}" for name in ("default", "en", "ro-en")
        )
        + "---\n"
    )


def rows_on_disk(folder: Path) -> None:
    """Texts as ``datasets`` saves them to the disk."""
    import datasets

    row = dict.fromkeys(("prompt", "chosen", "rejected"), [" ".join(WORDS * 40)] * 4000)
    parts = {part: datasets.Dataset.from_dict(row) for part in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(folder)


def alpaca_file(path: Path) -> None:
    """Instructions, inputs and outputs as Stanford's Alpaca has them."""
    row = dict.fromkeys(("instruction", "input", "output"), " ".join(WORDS * 20))
    path.write_text(json.dumps([row] * 400))


def coco(folder: Path) -> None:
    """Images with boxes and masks, as COCO is stored."""
    for part in ("train2017", "val2017"):
        (folder / part).mkdir(parents=True)
        pictures, boxes = [], []
        for i in range(16):
            _image(480, 640).save(folder / part / f"{i:012d}.jpg")
            pictures.append({"id": i, "file_name": f"{i:012d}.jpg", "height": 480, "width": 640})
            for j in range(7):
                x, y = 20 + 40 * j, 30 + 30 * j
                corners = [x, y, x + 80, y, x + 80, y + 60, x, y + 60]
                boxes.append(
                    {
                        "id": 10 * i + j + 1,
                        "image_id": i,
                        "category_id": 1 + j,
                        "bbox": [x, y, 80, 60],
                        "area": 4800,
                        "iscrowd": 0,
                        "segmentation": [corners],
                    }
                )
        (folder / "annotations").mkdir(exist_ok=True)
        document = {
            "images": pictures,
            "annotations": boxes,
            "categories": [{"id": i, "name": str(i)} for i in range(1, 91)],
        }
        (folder / "annotations" / f"instances_{part}.json").write_text(json.dumps(document))


def cora_archive(path: Path) -> None:
    """An archive of the made-up citation network, for a script that downloads it."""
    cora(path.parent / "cora_files")
    with tarfile.open(path, "w:gz") as archive:
        for file in sorted((path.parent / "cora_files").iterdir()):
            archive.add(file, f"cora/{file.name}")
    shutil.rmtree(path.parent / "cora_files")


def vgg16_weights(folder: Path) -> None:
    """Weights of VGG-16 where torch.hub keeps downloads: zeros that take no room on the disk."""
    import torch
    from torchvision.models import vgg16

    with torch.device("meta"):
        network = vgg16(init_weights=False)
    zeros = {
        name: torch.zeros(1).expand(tensor.shape) for name, tensor in network.state_dict().items()
    }
    (folder / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(zeros, folder / "hub" / "checkpoints" / "vgg16-397923af.pth")


def empty_folder(folder: Path) -> None:
    """A folder for what the script writes."""
    folder.mkdir(parents=True, exist_ok=True)


def _pixels(*shape: int) -> np.ndarray:
    return _RANDOM.integers(0, 256, shape, dtype=np.uint8)


def _labels(samples: int) -> np.ndarray:
    return (np.arange(samples) % 10).astype(np.uint8)


def _image(height: int, width: int) -> Image.Image:
    small = Image.fromarray(_pixels(16, 16, 3))
    return small.resize((width, height))


MAKERS: Final[Mapping[str, Callable[[Path], None]]] = {
    name: maker
    for name, maker in globals().items()
    if not name.startswith("_") and getattr(maker, "__module__", "") == __name__
}
