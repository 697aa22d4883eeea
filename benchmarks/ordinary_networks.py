"""Ordinary networks that nobody tuned the predictor for: torchvision, timm, Hugging Face
configurations, and some by hand.

Each function of :data:`NETWORKS` returns ``(model, inputs)``; weights are random, and on the meta
device where a caller builds under ``gpumemnet.extract.placement.placement``.  The kind of each is
its architecture family, so that a split by family keeps all ResNets together.  Needs torchvision,
timm and transformers in addition to torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS: Final = 256
_OPERATORS: Final = torch.library.Library("torchvision", "FRAGMENT")
for _operator in (
    "nms",
    "qnms",
):  # torchvision names both on import; a torchvision for another PyTorch build lacks them
    with suppress(RuntimeError):
        _OPERATORS.define(f"{_operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")


@dataclass(frozen=True, slots=True)
class Network:
    """One network, and how it is usually trained.

    Attributes:
        name: for people, unique.
        kind: its architecture family.
        make: builds ``(model, inputs)`` for a batch size.
        batch_size, optimizer, precision: of the training job.
    """

    name: str
    kind: str
    make: Callable[[int], tuple[nn.Module, Any]]
    batch_size: int = 32
    optimizer: str = "adamw"
    precision: str = "fp32"


def vision(
    home: str, name: str, kind: str, batch_size: int = 32, size: int = 224, **options: Any
) -> Network:
    """A vision model of ``torchvision`` or ``timm`` by its name there; ``options`` are fields of
    :class:`Network`."""

    def make(batch: int) -> tuple[nn.Module, Any]:
        if home == "torchvision":
            arguments = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
            model = getattr(import_module("torchvision.models"), name)(weights=None, **arguments)
        else:
            model = import_module("timm").create_model(name)
        return model, torch.empty(batch, 3, size, size, device="meta")

    return Network(f"{home}/{name}", kind, make, batch_size, **options)


def _segmentation(name: str, kind: str, batch_size: int) -> Network:
    class Output(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            factory = getattr(import_module("torchvision.models.segmentation"), name)
            self.model = factory(weights=None, weights_backbone=None)

        def forward(self, images: Tensor) -> Tensor:
            output: Tensor = self.model(images)["out"]
            return output

    return Network(
        f"torchvision/{name}",
        kind,
        lambda batch: (Output(), torch.empty(batch, 3, 256, 256, device="meta")),
        batch_size,
    )


def _ids(batch: int, length: int = TOKENS) -> Tensor:
    return torch.ones(batch, length, dtype=torch.long)


def hugging_face(
    name: str,
    head: str,
    kind: str,
    batch_size: int,
    inputs: str = "causal",
    length: int = TOKENS,
    options: Any = None,
    **sizes: Any,
) -> Network:
    """A model class of transformers with a configuration of these sizes; ``inputs`` says what the
    training loop hands it."""

    def make(batch: int) -> tuple[nn.Module, Any]:
        transformers = import_module("transformers")
        configuration = getattr(transformers, f"{name}Config")(**sizes)
        model = getattr(transformers, f"{name}{head}")(configuration)
        ids = _ids(batch, length)
        mask = torch.ones(
            batch, length, dtype=torch.long
        )  # no sample is padded, and the model may look
        pixels = torch.empty(batch, 3, 224, 224, device="meta")
        labels = torch.zeros(batch, dtype=torch.long, device="meta")
        feeds: dict[str, Any] = {
            "causal": {"input_ids": ids, "labels": ids},
            "masked": {"input_ids": ids, "attention_mask": mask, "labels": ids},
            "classes": {"input_ids": ids, "attention_mask": mask, "labels": labels},
            "pixels": {"pixel_values": pixels, "labels": labels},
            "sound": {
                "input_features": torch.empty(batch, 80, 3000, device="meta"),
                "labels": _ids(batch, 128),
            },
            "wave": {"input_values": torch.empty(batch, 80_000, device="meta"), "labels": labels},
            "pair": {"input_ids": ids, "pixel_values": pixels},
        }
        return model, feeds[inputs]

    return Network(f"transformers/{name}{head}", kind, make, batch_size, **(options or {}))


class TextClassifier(nn.Module):
    """An embedding, a bidirectional LSTM, and a linear layer on its last state."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU] = nn.LSTM) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30_000, 256)
        self.recurrent = kind(
            256, 512, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2
        )
        self.head = nn.Linear(1024, 10)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(ids))
        answer: Tensor = self.head(states[:, -1])
        return answer


class LanguageLstm(nn.Module):
    """A word-level language model (as in PyTorch's examples)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30_000, 650)
        self.recurrent = nn.LSTM(650, 650, num_layers=2, batch_first=True, dropout=0.5)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(650, 30_000)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.recurrent(self.drop(self.embedding(ids)))
        answer: Tensor = self.head(self.drop(states))
        return answer


class Recommender(nn.Module):
    """Embedding tables, two MLPs and pairwise products (DLRM, arXiv 1906.00091)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(100_000, 64) for _ in range(26))
        self.bottom = nn.Sequential(
            nn.Linear(13, 512),
            nn.ReLU(),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, 64),
            nn.ReLU(),
        )
        self.top = nn.Sequential(
            nn.Linear(64 + 27 * 26 // 2, 512),
            nn.ReLU(),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
        )

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        first = self.bottom(dense)
        vectors = torch.stack(
            [first, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], dim=1
        )
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = torch.tril_indices(27, 27, offset=-1)
        answer: Tensor = self.top(torch.cat([first, products[:, rows, columns]], dim=1))
        return answer


class UNet(nn.Module):
    """Four levels down and up, with batch norms (arXiv 1505.04597)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        self.down = nn.ModuleList(
            _double(3 if i == 0 else widths[i - 1], widths[i]) for i in range(5)
        )
        self.rise = nn.ModuleList(
            nn.ConvTranspose2d(widths[i + 1], widths[i], 2, 2) for i in range(4)
        )
        self.up = nn.ModuleList(_double(2 * widths[i], widths[i]) for i in range(4))
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(width, 21, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            skipped.append(x)
        for level in reversed(range(4)):
            x = self.up[level](torch.cat([skipped[level], self.rise[level](x)], dim=1))
        answer: Tensor = self.head(x)
        return answer


def _double(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [
            nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class MixerBlock(nn.Module):
    """Token mixing and channel mixing (MLP-Mixer, arXiv 2105.01601)."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(
            nn.Linear(tokens, width // 2), nn.GELU(), nn.Linear(width // 2, tokens)
        )
        self.channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = x + self.channels(self.second(x))
        return mixed


class Mixer(nn.Module):
    """Patches, mixing blocks, a mean and a head."""

    def __init__(self, width: int = 512, depth: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.Sequential(*(MixerBlock(196, width) for _ in range(depth)))
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        answer: Tensor = self.head(
            self.blocks(self.patches(images).flatten(2).transpose(1, 2)).mean(dim=1)
        )
        return answer


class WrittenGelu(nn.Module):
    """The tanh form of GELU in elementary operations, as in GPT-2's first code."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            0.5
            * x
            * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        )


class GptBlock(nn.Module):
    """Attention and an MLP, each behind a norm; the attention is fused, or its products are written
    out."""

    def __init__(self, width: int, heads: int, activation: nn.Module, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), activation, nn.Linear(4 * width, width), nn.Dropout(0.1)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.inward(self.first(x)).split(width, dim=2)
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        if self.fused:
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = (query @ key.transpose(-2, -1)) * (1.0 / math.sqrt(key.size(-1)))
            mask = torch.tril(torch.ones(length, length, device=x.device)) == 0
            y = self.drop(F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)) @ value
        x = x + self.drop(self.outward(y.transpose(1, 2).reshape(batch, length, width)))
        result: Tensor = x + self.mlp(self.second(x))
        return result


class Gpt(nn.Module):
    """A small GPT by hand."""

    def __init__(
        self,
        activation: Callable[[], nn.Module],
        fused: bool,
        width: int = 512,
        depth: int = 8,
        length: int = 512,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(32_000, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GptBlock(width, 8, activation(), fused) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32_000, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        answer: Tensor = self.head(self.norm(x))
        return answer


class Encoder(nn.Module):
    """PyTorch's own encoder layers as a text classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30_000, 512)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6)
        self.head = nn.Linear(512, 5)

    def forward(self, ids: Tensor) -> Tensor:
        answer: Tensor = self.head(self.encoder(self.embedding(ids)).mean(dim=1))
        return answer


class WaveNet(nn.Module):
    """Dilated one-dimensional convolutions with gates (arXiv 1609.03499)."""

    def __init__(self, channels: int = 64, depth: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, channels, 1)
        self.filters = nn.ModuleList(
            nn.Conv1d(channels, 2 * channels, 3, padding=2 ** (i % 8), dilation=2 ** (i % 8))
            for i in range(depth)
        )
        self.mixes = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(depth))
        self.head = nn.Conv1d(channels, 256, 1)

    def forward(self, wave: Tensor) -> Tensor:
        x = self.first(wave)
        total = torch.zeros_like(x)
        for filters, mix in zip(self.filters, self.mixes, strict=True):
            a, b = filters(x).chunk(2, dim=1)
            skipped = mix(torch.tanh(a) * torch.sigmoid(b))
            total = total + skipped
            x = x + skipped
        answer: Tensor = self.head(F.relu(total)).mean(dim=-1)
        return answer


class Autoencoder(nn.Module):
    """Strided convolutions down, transposed ones up."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 64, 128, 256, 512]
        down = [
            layer
            for a, b in pairwise(widths)
            for layer in (nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2))
        ]
        back = widths[::-1]
        up = [
            layer
            for a, b in pairwise(back)
            for layer in (nn.ConvTranspose2d(a, b, 4, 2, 1), nn.ReLU())
        ]
        self.layers = nn.Sequential(*down, *up[:-1], nn.Tanh())

    def forward(self, images: Tensor) -> Tensor:
        answer: Tensor = self.layers(images)
        return answer


class PointNet(nn.Module):
    """Shared MLPs over points, and a maximum over them (arXiv 1612.00593)."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 64, 128, 1024]
        pairs = list(pairwise(widths))
        self.points = nn.Sequential(
            *(m for a, b in pairs for m in (nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()))
        )
        self.head = nn.Sequential(
            nn.Linear(1024, 512),
            nn.BatchNorm1d(512),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(512, 40),
        )

    def forward(self, points: Tensor) -> Tensor:
        answer: Tensor = self.head(self.points(points).max(dim=2).values)
        return answer


class TabularMlp(nn.Module):
    """A multilayer perceptron with batch norms and dropout."""

    def __init__(self) -> None:
        super().__init__()
        widths = [512, 2048, 2048, 1024]
        pairs = list(pairwise(widths))
        layers = [
            m
            for a, b in pairs
            for m in (nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Dropout(0.2))
        ]
        self.layers = nn.Sequential(*layers, nn.Linear(1024, 10))

    def forward(self, rows: Tensor) -> Tensor:
        answer: Tensor = self.layers(rows)
        return answer


def _own(
    name: str,
    kind: str,
    model: Callable[[], nn.Module],
    inputs: Callable[[int], Any],
    batch_size: int,
    **options: Any,
) -> Network:
    return Network(
        f"own/{name}", kind, lambda batch: (model(), inputs(batch)), batch_size, **options
    )


def _images(batch: int) -> Tensor:
    return torch.empty(batch, 3, 224, 224, device="meta")


def _recommended(batch: int) -> tuple[Tensor, Tensor]:
    return torch.empty(batch, 13, device="meta"), torch.zeros(
        batch, 26, dtype=torch.long, device="meta"
    )


_SGD: Final = {"optimizer": "sgd_momentum"}
_BF16: Final = {"precision": "amp_bf16"}
_BERT: Final[dict[str, Any]] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
_LLAMA: Final[dict[str, Any]] = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 2816,
    "vocab_size": 32_000,
}

NETWORKS: Final = (
    vision("torchvision", "resnet18", "resnet", 64, **_SGD),
    vision("torchvision", "resnet50", "resnet", **_SGD),
    vision("torchvision", "resnet152", "resnet", **_BF16),
    vision("torchvision", "wide_resnet50_2", "resnet"),
    vision("torchvision", "resnext50_32x4d", "resnet", optimizer="adam"),
    vision("torchvision", "vgg16", "vgg", **_SGD),
    vision("torchvision", "alexnet", "alexnet", 128, **_SGD),
    vision("torchvision", "densenet121", "densenet", **_SGD),
    vision("torchvision", "mobilenet_v2", "mobilenetv3", 64),
    vision("torchvision", "mobilenet_v3_large", "mobilenetv3", 64, optimizer="rmsprop"),
    vision("torchvision", "efficientnet_b0", "efficientnet"),
    vision("torchvision", "efficientnet_v2_s", "efficientnet", **_BF16),
    vision("torchvision", "convnext_tiny", "convnext"),
    vision("torchvision", "regnet_y_3_2gf", "regnet"),
    vision("torchvision", "shufflenet_v2_x1_0", "shufflenet", 64),
    vision("torchvision", "squeezenet1_1", "squeezenet", 64),
    vision("torchvision", "googlenet", "inception"),
    vision("torchvision", "mnasnet1_0", "efficientnet", 64),
    vision("torchvision", "vit_b_16", "vision_transformer"),
    vision("torchvision", "swin_t", "swin_transformer"),
    vision("torchvision", "swin_v2_t", "swin_transformer", 16, size=256),
    vision("torchvision", "maxvit_t", "maxxvit", 16),
    _segmentation("deeplabv3_resnet50", "deeplab", 8),
    _segmentation("fcn_resnet50", "fcn", 8),
    vision("timm", "vit_small_patch16_224", "vision_transformer", 64, **_BF16),
    vision("timm", "deit_base_distilled_patch16_224", "vision_transformer"),
    vision("timm", "beit_base_patch16_224", "beit", 16),
    vision("timm", "swin_tiny_patch4_window7_224", "swin_transformer"),
    vision("timm", "mixer_b16_224", "mlp_mixer"),
    vision("timm", "resmlp_24_224", "mlp_mixer"),
    vision("timm", "convnextv2_tiny", "convnext"),
    vision("timm", "convmixer_768_32", "convmixer", 16),
    vision("timm", "maxvit_rmlp_tiny_rw_256", "maxxvit", 8, size=256),
    vision("timm", "coatnet_0_rw_224", "maxxvit", 16),
    vision("timm", "poolformer_s12", "metaformer"),
    vision("timm", "efficientnetv2_rw_s", "efficientnet", 16),
    vision("timm", "xception41", "xception_aligned", 16, size=299),
    vision("timm", "cait_s24_224", "cait", 16),
    vision("timm", "pvt_v2_b2", "pvt_v2", 16),
    vision("timm", "eva02_small_patch14_224", "eva", 16, **_BF16),
    vision("timm", "regnetz_b16", "regnet", 16),
    vision("timm", "mobilevit_s", "mobilevit", 16, size=256),
    vision("timm", "resnetv2_50", "resnet", 16, **_SGD),
    vision("timm", "hrnet_w18", "hrnet", 16),
    hugging_face("Bert", "ForMaskedLM", "bert", 16, "masked", **_BERT),
    hugging_face("Bert", "ForSequenceClassification", "bert", 32, "classes", 128, _BF16, **_BERT),
    hugging_face("Roberta", "ForMaskedLM", "bert", 16, "masked", **_BERT),
    hugging_face("DistilBert", "ForSequenceClassification", "bert", 32, "classes", 128),
    hugging_face("Electra", "ForSequenceClassification", "bert", 32, "classes"),
    hugging_face("Albert", "ForMaskedLM", "albert", 16, "masked", **_BERT),
    hugging_face("DebertaV2", "ForSequenceClassification", "deberta", 8, "classes", 128, **_BERT),
    hugging_face("GPT2", "LMHeadModel", "gpt", 8, length=512),
    hugging_face("OPT", "ForCausalLM", "gpt", 8, length=512),
    hugging_face("GPTNeoX", "ForCausalLM", "gpt", 4, "causal", 512, _BF16, **_BERT),
    hugging_face(
        "Bloom",
        "ForCausalLM",
        "bloom",
        4,
        "causal",
        256,
        None,
        hidden_size=768,
        n_layer=8,
        n_head=12,
        vocab_size=50_000,
    ),
    hugging_face("Llama", "ForCausalLM", "llama", 4, "causal", 512, _BF16, **_LLAMA),
    hugging_face("Mistral", "ForCausalLM", "llama", 4, "causal", 512, **_LLAMA),
    hugging_face(
        "Qwen2", "ForCausalLM", "llama", 4, "causal", 512, {"precision": "bf16"}, **_LLAMA
    ),
    hugging_face("Gemma", "ForCausalLM", "gemma", 4, "causal", 512, _BF16, head_dim=64, **_LLAMA),
    hugging_face("T5", "ForConditionalGeneration", "t5", 8, decoder_start_token_id=0),
    hugging_face(
        "Bart",
        "ForConditionalGeneration",
        "bart",
        8,
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
    ),
    hugging_face("ViT", "ForImageClassification", "vision_transformer", 32, "pixels"),
    hugging_face("Swin", "ForImageClassification", "swin_transformer", 16, "pixels"),
    hugging_face("ConvNext", "ForImageClassification", "convnext", 32, "pixels"),
    hugging_face("CLIP", "Model", "clip", 16, "pair", 77, options=None),
    hugging_face(
        "Whisper",
        "ForConditionalGeneration",
        "whisper",
        4,
        "sound",
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
    ),
    hugging_face("Wav2Vec2", "ForSequenceClassification", "wav2vec", 4, "wave"),
    _own("lstm_classifier", "lstm", TextClassifier, _ids, 64, optimizer="adam"),
    _own("gru_classifier", "lstm", lambda: TextClassifier(nn.GRU), _ids, 64, optimizer="adam"),
    _own("lstm_language", "lstm", LanguageLstm, lambda batch: _ids(batch, 64), 32, optimizer="sgd"),
    _own("dlrm", "dlrm", Recommender, _recommended, 2048, optimizer="adagrad"),
    _own(
        "unet",
        "unet",
        UNet,
        lambda batch: torch.empty(batch, 3, 256, 256, device="meta"),
        8,
        optimizer="adam",
    ),
    _own("mixer", "mlp_mixer", Mixer, _images, 32),
    _own(
        "gpt_written_gelu",
        "gpt",
        lambda: Gpt(WrittenGelu, False),
        lambda batch: _ids(batch, 512),
        8,
    ),
    _own(
        "gpt_fused", "gpt", lambda: Gpt(nn.GELU, True), lambda batch: _ids(batch, 512), 8, **_BF16
    ),
    _own("encoder", "bert", Encoder, _ids, 32),
    _own(
        "wavenet", "wavenet", WaveNet, lambda batch: torch.empty(batch, 1, 16_000, device="meta"), 4
    ),
    _own(
        "autoencoder",
        "autoencoder",
        Autoencoder,
        lambda batch: torch.empty(batch, 3, 128, 128, device="meta"),
        64,
    ),
    _own(
        "pointnet",
        "pointnet",
        PointNet,
        lambda batch: torch.empty(batch, 3, 1024, device="meta"),
        32,
    ),
    _own(
        "tabular_mlp",
        "mlp",
        TabularMlp,
        lambda batch: torch.empty(batch, 512, device="meta"),
        4096,
        optimizer="adam",
    ),
)
"""The networks, each with one usual training job."""


def build(name: str, batch_size: int | None = None) -> tuple[nn.Module, Any]:
    """The network called ``name`` and its inputs: a factory for ``gpumemnet extract``."""
    network = next(network for network in NETWORKS if network.name == name)
    return network.make(batch_size or network.batch_size)
