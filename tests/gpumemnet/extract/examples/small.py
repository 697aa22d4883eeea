"""Small models, one for each thing that an extraction must see or say."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint


class ModuleMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.drop, self.second = (
            nn.Linear(8, 16),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(16, 4),
        )

    def forward(self, x):
        return self.second(self.drop(self.act(self.first(x))))


class FunctionalMLP(nn.Module):
    """The same network with weights of its own and functions only."""

    def __init__(self):
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.zeros(16))
        self.w2, self.b2 = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        x = F.dropout(torch.relu(F.linear(x, self.w1, self.b1)), 0.5, self.training)
        return F.linear(x, self.w2, self.b2)


class Functions(nn.Module):
    """Every functional layer that is common outside of modules, on [batch, 4, 8, 8] images."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.projection = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x):
        x = F.conv2d(x, self.kernel, padding=1)
        x = F.batch_norm(x, self.mean, self.variance, training=True)
        x = x + F.relu(x)
        x = F.layer_norm(x, (8,), self.scale, self.shift)
        x = F.gelu(x).sigmoid()
        x = torch.cat((x, x), dim=1)
        x = F.interpolate(x, scale_factor=2)
        x = F.max_pool2d(x, 2)
        x = F.pad(x, (1, 1)).narrow(3, 0, 8)
        x = x @ self.projection.t()
        x = torch.einsum("bchw,bcvw->bchv", x, x)
        x = F.softmax(x, dim=-1)
        x = F.scaled_dot_product_attention(x, x, x)
        return F.adaptive_avg_pool2d(x, 1).flatten(1)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(3):
            x = torch.relu_(self.layer(x))
        return x


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = ModuleMLP()
        self.spare = nn.Linear(8, 100)
        self.used.extra = nn.Parameter(torch.zeros(5))

    def forward(self, x):
        return self.used(x)


class Recurrent(nn.Module):
    def __init__(self, batch_first=True):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, batch_first=batch_first)
        self.batch_first = batch_first
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        outputs, _ = self.lstm(x if self.batch_first else x.transpose(0, 1))
        return self.head(outputs.mean(1 if self.batch_first else 0))


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(16, 4, 2, 2, 32, batch_first=True)

    def forward(self, source, target):
        return self.transformer(source, target)


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50)

    def forward(self, input_ids, labels=None, scale=1.0):
        logits = self.head(self.emb(input_ids)) * scale
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.body, self.reentrant = ModuleMLP(), reentrant

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class Frozen(ModuleMLP):
    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            x = self.first(x)
        return self.second(self.drop(self.act(x)))


class Standardised(nn.Module):
    """A convolution whose weight is computed from its parameter before every use."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3))

    def forward(self, x):
        weight = (self.weight - self.weight.mean()) / (self.weight.var() + 1e-5).sqrt()
        return F.conv2d(x, weight)


def with_loss():
    inputs = {
        "input_ids": torch.zeros(2, 7, dtype=torch.long),
        "labels": torch.zeros(2, 7, dtype=torch.long),
        "scale": 2.0,
    }
    return WithLoss(), inputs


def mixed_batches():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x, mask):
            return self.layer(x) + mask

    return Masked(), (torch.zeros(4, 5, 6), torch.zeros(5, 6))


def sized(width: int, activation: str = "relu"):
    return nn.Sequential(nn.Linear(8, width), getattr(nn, activation)(), nn.Linear(width, 2))


def weight_normed():
    return weight_norm(nn.Linear(8, 4))
