"""Scripts whose memory is not that of their first steps, with hand counts in MiB: of weights of
4096 x 4096 in fp32, each has 64."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gpumemnet.gpu import device_profile
from gpumemnet.tracing.script.libraries import preparations
from gpumemnet.tracing.script.longest_batch import as_worker
from gpumemnet.units import MIB
from tests.gpumemnet.tracing import script_child

HEAD = """import copy, random, torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset
def wide(layers): return nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(layers)]).cuda()
def step(optimizer, loss):
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


class Case(NamedTuple):
    """A script, and what its answer must say.

    Attributes:
        lines: the script after :data:`HEAD`.
        least, most: MiB of tensors at the peak.
        note: a part of a note.
    """

    lines: str
    least: float
    most: float
    note: str = ""


WORKSPACE = 17
"""MiB of cuBLAS in both directions, and small tensors."""
TOKENS = 64 * 500
CASES = {
    "timed_out": Case(  # ten copies but one, as the last is trained; time is up within the fourth
        """
import time
def trained(model):
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(6): step(optimizer, model(torch.randn(64, 4096).cuda()).mean())
    return model.state_dict()
model, kept = wide(1), []
for client in range(10):
    time.sleep(60 * bool(kept[2:]))
    kept.append(copy.deepcopy(trained(copy.deepcopy(model))))
""",
        15 * 64,
        15 * 64 + WORKSPACE,
        "timed_out.py line 15: 7 times 64.0 MiB",
    ),
    "stopped": Case(  # by two conditions, of which one holds early; 240 MiB more come behind both, twice
        """
net = wide(1)
optimizer = torch.optim.SGD(net.parameters())
for epoch in range(100):
    parts = torch.ones(64, 4096).chunk(4)
    for turn, part in enumerate(parts):
        net(part.cuda()).mean().backward()
        if turn == len(parts) - 1:
            if epoch > 60: more = torch.zeros(60 * 2**20).cuda()
            optimizer.step(); optimizer.zero_grad()
    if epoch > 30 and len(parts) > 9: break
""",
        2 * 64 + 2 * 240,
        2 * 64 + 2 * 240 + WORKSPACE,
    ),
    "taking_turns": Case(  # layers and all of their state, six of 256 MiB, two gradients of those, of weights
        """
def train():
    layers = wide(5)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    for turn in range(9):
        x = torch.ones(2**14, 4096).cuda()
        for layer in layers[:5 if turn == 5 else 3]: x = layer(x)
        optimizer.zero_grad(); x.mean().backward(); optimizer.step()
        if turn == 5: optimizer.zero_grad()
train()
""",
        10 * 64 + 8 * 256 + 2 * 64,
        10 * 64 + 8 * 256 + 3 * 64 + WORKSPACE,
    ),
    "listed_phases": Case(  # in a list of two, of which the second takes more: weights, gradients, batch, output
        """
net = wide(1)
optimizer = torch.optim.SGD(net.parameters())
loaders = [("train", DataLoader(torch.ones(4000, 4096), 4)), ("check", DataLoader(torch.ones(4000, 4096), 2000))]
for epoch in range(30):
    for phase, loader in loaders:
        for x in loader:
            with torch.set_grad_enabled(phase == "train"): loss = net(x.cuda()).square().mean()
            if phase == "train": step(optimizer, loss)
""",
        64 + 3 * 2000 * 4096 * 4 / 2**20,
        128 + 3 * 2000 * 4096 * 4 / 2**20 + WORKSPACE,
    ),
    "patience": Case(  # weights, gradients, and what follows; each epoch adds a number to a list
        """
for seed in range(3):
    net, scores = wide(1), []
    optimizer = torch.optim.SGD(net.parameters())
    for epoch in range(1000):
        step(optimizer, net(torch.randn(64, 4096).cuda()).mean())
        scores.append(epoch / 7)
        if epoch > 200 and max(scores[-200:]) <= max(scores[:-200]): break
rest = torch.zeros(2**26).cuda()
""",
        2 * 64 + 256,
        2 * 64 + 256 + WORKSPACE,
    ),
    "sentences": Case(  # embedded words of 16 MiB, and four as large for their squares' gradient
        """
class Text:
    def __init__(self, words): self.words, self.tag = ["w"] * words, "A"
texts = [Text(3 + place % 5) for place in range(500)]
texts[400] = Text(4096)
embedding = nn.Embedding(4, 1024).cuda()
optimizer = torch.optim.SGD(embedding.parameters())
for epoch in range(9):
    for text in texts:
        words = torch.tensor([len(word) for word in text.words]).cuda()
        step(optimizer, embedding(words).square().mean())
""",
        5 * 16,
        5 * 16 + 1,
    ),
    "longest_first": Case(  # weights, gradients, and five times the longest: an evaluation takes the time
        """
lengths, net, batches = torch.zeros(2**21), wide(1), 0
for place in range(300): lengths[place] = 3 + place % 5
texts = [torch.ones(int(lengths[place]), 4096) for place in range(300)]
texts[200] = torch.ones(4096, 4096)
optimizer = torch.optim.SGD(net.parameters())
for stage, data in [("train", texts), ("check", texts[:9])]:
    for place, text in enumerate(data):
        step(optimizer, net(text.cuda()).square().mean())
        batches += 1
        if batches % 2000 == 0:
            for i in range(10**6): net(torch.ones(3 + min(i // 40, 900), 4096).cuda())
""",
        7 * 64,
        7 * 64 + WORKSPACE,
        "step 67, takes",
    ),
    "factors": Case(  # weights, gradients, two moments, temporaries of the step: after many epochs
        """
class Data:
    epoch = place = 0
    def next(self):
        self.place += 1
        if self.place == 20: self.place, self.epoch = 0, self.epoch + 1
        return torch.rand(64, 64)
data, factors = Data(), torch.rand(64, 64)
while data.epoch < 1000:
    factor = factors.cuda().requires_grad_()
    step(torch.optim.Adam([factor]), (factor - data.next().cuda()).square().mean())
net = wide(2)
optimizer = torch.optim.Adam(net.parameters())
for i in range(9): step(optimizer, net(torch.rand(64, 4096).cuda()).mean())
""",
        10 * 64,
        10 * 64 + WORKSPACE,
    ),
    # weights, gradients, what was resized to a number of the GPU, two outputs; no freed storage
    "scratch": Case(
        """
net = wide(1)
optimizer = torch.optim.SGD(net.parameters())
classes = torch.arange(64).cuda().max() + 1
scratch = torch.zeros(2, classes).cuda()
doubled, copied = torch.empty(0).cuda(), net[0].weight.data.new()
found, freed = torch.empty(0, dtype=torch.long).cuda(), torch.zeros(2**24).cuda().untyped_storage()
for size in (8, 8, 8, 4, 4, 4):
    torch.mul(net[0].weight.data, 2, out=doubled)
    copied.resize_as_(doubled).copy_(doubled)
    torch.nonzero(doubled[0] > 0, out=found)
    freed.resize_(0)
    output = net(torch.randn(size, 4096).cuda())
    scratch.resize_(size * 32768, classes).scatter_(1, output[:1].argmax(1, keepdim=True), 1)
    step(optimizer, (scratch.view(size, -1, classes)[:, 0] * output[:, :64]).mean())
""",
        5 * 64,
        5 * 64 + WORKSPACE,
    ),
    "gated": Case(  # weights, gradients, two moments, temporaries of the step
        """
torch._C._jit_set_profiling_executor(False)
@torch.jit.script
def squashed(x): return x * 2 + x * x
net, last = wide(2), 1e8
optimizer = torch.optim.Adam(net.parameters())
for i in range(1000):
    optimizer.zero_grad()
    loss = squashed(net(torch.randn(64, 4096).cuda())).mean()
    loss.backward()
    total = loss.item()
    if total < 3 * last:
        optimizer.step()
        last = total
""",
        10 * 64,
        10 * 64 + WORKSPACE,
    ),
    "generator": Case(  # weights, gradients, two moments, temporaries of the step
        """
G, D = wide(8), nn.Linear(4096, 1).cuda()
g, d = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
for i in range(1000):
    x = torch.randn(64, 4096).cuda()
    step(d, D(x).mean() - D(G(x).detach()).mean())
    if i % 5 == 4: step(g, -D(G(x)).mean())
""",
        5 * 512,
        5 * 512 + WORKSPACE + 4,
        "optimizer of a later step",
    ),
    "reversed": Case(  # a sampler's last round: a picture, and 16 joined; weights, gradients
        """
model = wide(1)
optimizer = torch.optim.SGD(model.parameters())
@torch.no_grad()
def sampled():
    x = torch.zeros(4096, 4096).cuda()
    for i in reversed(range(1000)):
        for _ in [0] * 36: x = model(x)
        if i == 0: return torch.cat([x] * 16)
for epoch in range(2):
    for _ in range(8): step(optimizer, model(torch.randn(64, 4096).cuda()).mean())
    sampled()
""",
        17 * 64 + 2 * 64,
        17 * 64 + 2 * 64 + 4 * WORKSPACE,
    ),
    "shortened": Case(  # rows of 16 MiB, of which one more than twenty is there, and 21 joined anew
        """
class Rows:
    rows, count = torch.empty(0, 2**22).cuda(), 0
    def collect(self, row):
        self.rows = torch.cat([self.rows, row])
        self.count += 1
        if self.count > 20:
            self.rows = self.rows[1:]
            self.count = 20
model, rows = wide(1), Rows()
optimizer = torch.optim.SGD(model.parameters())
for epoch in range(30):
    for _ in range(9): step(optimizer, model(torch.randn(4, 4096).cuda()).mean())
    rows.collect(torch.zeros(1, 2**22).cuda())
""",
        2 * 64 + 42 * 16 + 16,
        2 * 64 + 42 * 16 + 16 + WORKSPACE,
    ),
    "own gradients": Case(  # of an evolution strategy: weights, two moments, noise, and its product
        """
model = wide(1)
optimizer = torch.optim.Adam(model.parameters())
for i in range(50):
    with torch.no_grad():
        noise = [torch.randn_like(each) for each in model.parameters()]
        score = model(torch.ones(4, 4096).cuda()).mean()
    for each, other in zip(model.parameters(), noise): each.grad = other * score
    optimizer.step()
""",
        6 * 64,
        6 * 64 + WORKSPACE,
    ),
    "evaluated": Case(  # weights, gradients, and two graphs: there is no no_grad
        """
model = nn.Sequential(wide(1), *[nn.GELU() for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters())
class Numbers:  # an iterator of its own
    def __init__(self, count): self.count = count
    def __len__(self): return 4
    def __iter__(self): self.left = iter(range(0, self.count, 1024)); return self
    def __next__(self): start = next(self.left); return range(start, min(start + 1024, self.count))
def batches(count):
    data = TensorDataset(torch.zeros(1).expand(count, 4096))
    return DataLoader(data, batch_sampler=Numbers(count))
def validate():
    for (x,) in batches(4000): loss = model(x.cuda()).mean()
for (x,) in batches(4096): step(optimizer, model(x.cuda()).mean())
validate()
""",
        2 * 64 + 2 * 9 * 16,
        2 * 64 + 2 * 9 * 16 + 16 + 2 * WORKSPACE,
    ),
    "unfrozen": Case(
        """
body, head = wide(8), nn.Linear(4096, 10).cuda()
for p in body.parameters(): p.requires_grad = False
optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()])
data = TensorDataset(torch.randn(1000, 4096), torch.randint(0, 10, (1000,)))
for epoch in range(3):
    if epoch == 1:
        for p in body.parameters(): p.requires_grad = True
    for x, y in DataLoader(data, batch_size=16):
        step(optimizer, cross_entropy(head(body(x.cuda())), y.cuda()))
""",
        5 * 512,
        5 * 512 + WORKSPACE + 4,
        "optimizer of a later step",
    ),
    "slow_evaluation": Case(  # it ends the first steps, long before the epoch that trains the body
        """
from time import process_time
body, head = wide(8), nn.Linear(4096, 10).cuda()
for p in body.parameters(): p.requires_grad = False
optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()])
x, y = torch.randn(16, 4096).cuda(), torch.randint(0, 10, (16,)).cuda()
for epoch in range(300):
    if epoch >= 50:
        for p in body.parameters(): p.requires_grad = True
    for i in range(3): step(optimizer, cross_entropy(head(body(x)), y))
    with torch.no_grad():
        for i in range(5000): x + 1; x + 1
        end = process_time() + 5 * (epoch == 0)
        while process_time() < end: pass
        head(body(x))
""",
        5 * 512,
        5 * 512 + WORKSPACE + 4,
        "optimizer of a later step",
    ),
    "resized_tensor": Case(  # weights, gradients, what was a small tensor
        """
w, held = nn.Parameter(torch.zeros(4096, 4096, device="cuda")), torch.zeros(10, device="cuda")
optimizer = torch.optim.SGD([w], 0.1)
for i in range(4):
    held.resize_(4096, 8192).zero_()
    step(optimizer, w.sum())
""",
        256,
        256 + 4,
    ),
    "weights_put_back": Case(  # weights, those put back, gradients, momentum, scaled gradients
        """
class SAM(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, 0.1, momentum=0.9)
    @torch.no_grad()
    def step(self, closure):
        parameters = self.param_groups[0]["params"]
        for p in parameters:
            self.state[p]["before"] = p.data.clone()
            p.add_(p.grad * 0.1)
        self.zero_grad()
        with torch.enable_grad(): closure()
        for p in parameters: p.data = self.state[p]["before"]
        self.base.step()
        self.zero_grad()
net, x = wide(1), torch.randn(64, 4096).cuda()
plain, sam = torch.optim.SGD(net.parameters(), 0.1), SAM(net.parameters())
for i in range(100):
    if i < 10: step(plain, net(x).mean())
    else:
        net(x).mean().backward()
        sam.step(lambda: net(x).mean().backward())
""",
        320,
        320 + WORKSPACE + 4,
        "optimizer of a later step",
    ),
    "average": Case(  # weights, copy, gradients
        """
model, moments = wide(4), {0: None, 400: "copy"}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(1000):
    step(optimizer, model(torch.randn(8, 4096).cuda()).mean())
    if i in moments: average = moments[i] and copy.deepcopy(model)
""",
        3 * 256,
        3 * 256 + WORKSPACE + 1,
        "of a later step",
    ),
    "sorted": Case(  # inputs of the layers and of the activation, logits with two copies in the loss
        """
import numpy as np
class Text(Dataset):  # rows of a table
    lengths = [20] * 702 + [250] * 2
    def __len__(self): return 704
    def __getitem__(self, i): return np.array([[1] * (self.lengths[i] // random.choice([1] + 7 * [2])), None], object)
model = nn.Sequential(nn.Embedding(1000, 256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
random.seed(1)
def pad(samples):
    rows = [torch.tensor(each[0]) for each in samples]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True).repeat(1, random.choice([1, 1, 2]))
for x in DataLoader(Text(), batch_size=64, collate_fn=pad):
    x = x.cuda()
    step(optimizer, cross_entropy(model(x).flatten(0, 1), x.flatten()))
""",
        TOKENS * 4 * (256 + 2 * 1024 + 3 * 1000) / MIB,
        TOKENS * 4 * (256 + 2 * 1024 + 3 * 1000) / MIB + 18 + 2 * WORKSPACE,
        "backward of the longest batch",
    ),
    "resized": Case(  # the largest of what may be drawn: input and output of the activation
        """
random.seed(1)
model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 3, 3, padding=1)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(1000):
    side = random.choice([64] * 200 + [128]) + 128 * (torch.rand(1) > 0.995).item()
    step(optimizer, model(torch.randn(4, 3, side, side).cuda()).mean())
""",
        4 * 256 * 256 * 4 * 64 / MIB,
        4 * 256 * 256 * 4 * 64 / MIB + 45,
        "batches have different shapes",
    ),
    "lengths": Case(  # usually around 70, the longest 85: four of 16 KiB a row, weights and gradients
        """
model = nn.Sequential(wide(1), nn.ReLU())
optimizer = torch.optim.SGD(model.parameters())
for _ in range(1000):
    length = random.gauss(70 if random.random() < 0.95 else 35, 5)
    step(optimizer, model(torch.ones(32 * int(length), 4096).cuda()).mean())
""",
        128 + 82 * 4 / 2,
        128 + 92 * 4 / 2 + WORKSPACE,
    ),
    "beside": Case(  # the state of both optimizers of the same parameters
        """
model = wide(1)
first, second = torch.optim.Adam(model.parameters()), torch.optim.Adam(model.parameters())
for i in range(1000):
    if i % 250 == 3:
        with torch.no_grad(): model(torch.zeros(2**15, 4096).cuda()).cpu()
    step(first if i < 3 else second, model(torch.randn(4, 4096).cuda()).mean())
""",
        64 + 256 + 1024,
        128 + 256 + 1024 + 2 * WORKSPACE,
    ),
    "episodes": Case(  # whose number is asked for twice in the steps that are traced
        """
model, n, episode = wide(1), 0, 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while n < 1000000:
    n += 1
    if n % 100 == 0:
        if episode % 50 == 7: model(torch.zeros(2**14, 4096).cuda())
        for _ in range(80): step(optimizer, model(torch.randn(4, 4096).cuda()).mean())
        episode += 1
""",
        64 + 512,
        128 + 512 + 2 * WORKSPACE,
        "Conditions were taken",
    ),
    "gathered": Case(  # logits of all samples, in one tensor too, and those of the epoch before
        """
model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randint(0, 1000, (512, 128)))
for epoch in range(2):
    for (x,) in DataLoader(data, batch_size=8):
        step(optimizer, cross_entropy(model(x.cuda()).flatten(0, 1), x.cuda().flatten()))
    with torch.no_grad():
        kept = torch.cat([model(x.cuda()) for (x,) in DataLoader(data, batch_size=16)])
""",
        3 * 512 * 128 * 1000 * 4 / MIB,
        3 * 512 * 128 * 1000 * 4 / MIB + 4 * WORKSPACE,
        "the peak is not in the first steps: evaluation",
    ),
    "delayed": Case(
        """
actor, critic = wide(4), nn.Linear(4096, 1).cuda()
a, c = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
for i in range(10000):
    x = torch.randn(16, 4096).cuda()
    step(c, critic(x).mean())
    if i >= 500: step(a, critic(actor(x)).mean())
""",
        1280,
        1280 + WORKSPACE + 1,
    ),
    "frozen": Case(
        """
body, head = wide(4), nn.Linear(4096, 10).cuda()
for p in body.parameters(): p.requires_grad = False
optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()])
for i in range(10000):
    step(optimizer, head(body(torch.randn(16, 4096).cuda())).mean())
""",
        256,
        256 + WORKSPACE + 4,
        "their gradients and state take 768 MiB more",
    ),
    "second": Case(  # weights of the generator, two moments, inputs of its layers
        """
G, D = wide(8), nn.Linear(4096, 1).cuda()
g, d = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
for i in range(1000):
    x = torch.randn(64, 4096).cuda()
    for _ in range(2000): x = x + 1
    step(d, D(x).mean())
    if i % 8 == 2: step(g, D(G(torch.empty(16384, 4096).cuda())).mean())
""",
        3 * 512 + 8 * 256,
        3 * 512 + 11 * 256 + WORKSPACE + 4,
        "forward of a later step",
    ),
    "within": Case(  # a module steps as it runs: weights, gradients, two moments, temporaries
        """
class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = wide(4)
        self.optimizer = torch.optim.Adam(self.net.parameters())
    def forward(self, x):
        for _ in range(2): step(self.optimizer, self.net(x).mean())
learner = Learner()
for i in range(5): learner(torch.randn(8, 4096).cuda())
""",
        5 * 256,
        5 * 256 + WORKSPACE + 4,
    ),
    "dropped": Case(
        """
model = wide(4)
copied = copy.deepcopy(model)
with torch.no_grad(): copied(torch.randn(8, 4096).cuda())
del copied
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(5):
    step(optimizer, model(torch.randn(8, 4096).cuda()).mean())
    assert not model.cpu()(torch.randn(8, 4096)).is_cuda and not model[0].weight.grad.is_cuda
    torch.empty(120 << 20, device="cuda")
    assert model.cuda()[0].weight.grad.is_cuda
""",
        2 * 256,
        2 * 256 + WORKSPACE + 1,
    ),
    "counting": Case(  # weights, gradients, and from the tenth pass on a copy of the batch too
        """
class Counting(nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += not self.training
        return super().forward(x if self.calls < 10 else torch.cat([x] * 4))
model = Counting(4096, 4096).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(3): step(optimizer, model(torch.randn(8, 4096).cuda()).mean())
model.eval()
with torch.no_grad():
    for i in range(40): model(torch.empty(4096, 4096).cuda())
""",
        2 * 64 + 64 + 2 * 256,
        2 * 64 + 64 + 2 * 256 + WORKSPACE + 1,
        "the peak is not in the first steps: evaluation",
    ),
    "cached": Case(  # weights, gradients, the cache of 531 tokens and that of 530, logits
        """
class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 1024), nn.Linear(1024, 1000)
    def forward(self, x): return self.decode(x)
    def decode(self, x, cache=None):
        h = self.embed(x)
        if cache is not None:
            cache["h"] = h if "h" not in cache else torch.cat((cache["h"], h), 1)
        return self.head(h)
model = Cached().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(3):
    x = torch.randint(0, 1000, (16, 32)).cuda()
    step(optimizer, cross_entropy(model(x).flatten(0, 1), x.flatten()))
with torch.no_grad():
    cache, x = {}, torch.randint(0, 1000, (64, 32)).cuda()
    for i in range(500): x = model.decode(x, cache)[:, -1:].argmax(-1)
""",
        (4 * 1024 * 1000 + 64 * 1024 * (531 + 530)) * 4 / MIB,
        (4 * 1024 * 1000 + 64 * 1024 * (531 + 530)) * 4 / MIB + WORKSPACE + 1,
        "the peak is not in the first steps: generation",
    ),
    "acting": Case(  # of two networks weights, gradients, two moments; temporaries of the step
        """
def network(inputs): return nn.Sequential(nn.Linear(inputs, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4)).cuda()
actor, critic = network(16), network(20)
a, c = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
for i in range(10000):
    action = actor(torch.rand(1, 16).cuda()).cpu().data.numpy().flatten()
    if i < 100: continue
    x = torch.rand(256, 16).cuda()
    with torch.no_grad(): target = critic(torch.cat([x, actor(x)], 1))
    step(c, (critic(torch.cat([x, torch.rand(256, 4).cuda()], 1)) - target).pow(2).mean())
    if i % 2 == 0: step(a, -critic(torch.cat([x, actor(x)], 1)).mean())
""",
        2 * 4 * 64,
        2 * 4 * 64 + 64 + 2 * WORKSPACE,
    ),
    "asked": Case(  # batches are asked for and counted by hand: as for "generator", four layers
        """
G, D = wide(4), nn.Linear(4096, 1).cuda()
g, d = torch.optim.Adam(G.parameters()), torch.optim.SGD(D.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(120, 4096)), batch_size=2)
batches, i = iter(loader), 0
while i < len(batches):
    for _ in range(10):
        (x,), i = batches.__next__(), i + 1
        step(d, D(x.cuda()).mean())
    step(g, D(G(x.cuda())).mean())
""",
        5 * 256,
        5 * 256 + WORKSPACE + 4,
        "optimizer of a later step",
    ),
    "searched": Case(
        """
torch.backends.cudnn.benchmark = True
model = nn.Conv2d(64, 64, 3).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    step(optimizer, model(torch.randn(8, 64, 64, 64).cuda()).mean())
    rows = torch.arange(2**20).cuda()
    rows[rows / 7 > 3] = 0
""",
        0,
        200,
    ),
    "ended_schedule": Case(  # the last batch by arrays of numbers of steps: weights, gradients, batch, output
        """
import bisect, numpy
model, it, ends = wide(1), 0, numpy.cumsum([1000, 1000])
optimizer = torch.optim.SGD(model.parameters())
while it < 5000:
    it += 1
    is_early = not (it > ends).all()
    rows = 64 * is_early + 8192 * bisect.bisect([1500], it)
    step(optimizer, model(torch.randn(rows, 4096).cuda()).mean())
""",
        2 * 64 + 2 * 128,
        2 * 64 + 3 * 128 + WORKSPACE + 4,
        "(it > ends)",
    ),
    "behind": Case(  # a counter behind a condition on values, in a module: weights, gradients, input
        """
class Late(nn.Module):
    def __init__(self): super().__init__(); self.layer = wide(1)
    def forward(self, x, it):
        y = self.layer(x[:64])
        if (y != 0).all() and it > 5000: y = self.layer(x)
        for i in range(100):  # to a fixed point
            if y.detach().norm() < 1e-6: break
        assert i in (0, 15)
        return y.mean()
model, it = Late(), 0
optimizer = torch.optim.SGD(model.parameters())
for epoch in range(1000):
    for batch in DataLoader(TensorDataset(torch.zeros(1).expand(4096, 4096)), 1024):
        it += 1
        step(optimizer, model(batch[0].cuda(), it))
""",
        2 * 64 + 4 * 16,
        2 * 64 + 4 * 16 + WORKSPACE + 4,
        "(it > 5000)",
    ),
    "ended_itself": Case(  # later; what follows the loop: weights, gradients, input and output
        """
model, iter = wide(1), 0
optimizer = torch.optim.SGD(model.parameters())
while True:
    iter += 1
    step(optimizer, model(torch.randn(64, 4096).cuda()).mean())
    if iter > 5000: exit()
with torch.no_grad(): model(torch.randn(16384, 4096).cuda())
optimizer = torch.optim.SGD(model.parameters())
""",
        2 * 64 + 2 * 256,
        2 * 64 + 2 * 256 + WORKSPACE,
        "evaluation",
    ),
    "taught": Case(  # a teacher's pass is a part of the step, and samples are no batch
        """
class Sampled(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = wide(1)
    def forward(self, x):
        with torch.set_grad_enabled(x.ndim == 2): return self.model(x)
model, teacher = Sampled(), wide(1)
optimizer = torch.optim.SGD(model.parameters())
for i in range(9):
    x = torch.randn(2048, 4096).cuda()
    y = model(x)
    with torch.no_grad(): z = teacher(x)
    step(optimizer, (y - z).mean())
    model(x[None, :9])
""",
        3 * 64 + 6 * 32,
        3 * 64 + 6 * 32 + WORKSPACE,
    ),
    "phases": Case(  # the last of two networks that train: as "generator"
        """
def train(model):
    optimizer = torch.optim.Adam(model.parameters())
    for i in range(1000): step(optimizer, model(torch.randn(8, 4096).cuda()).mean())
train(wide(1)); train(wide(8))
""",
        5 * 512,
        5 * 512 + WORKSPACE + 4,
        "optimizer of a later step",
    ),
    "planned": Case(  # plans without gradients; the batch has a row for each call: weights, gradients
        """
class Agent:
    calls = 0
    def __init__(self): self.model = wide(1)
    @torch.no_grad()
    def act(self, x):
        for _ in range(1000): x = x * 2
        return self.model(x).cpu()
    @torch.no_grad()
    def count(self, x):
        self.calls += 1
        return (x * 2).cpu()
agent = Agent()
for i in range(1000): agent.act(torch.ones(1, 4096).cuda())
for i in range(512): agent.count(torch.ones(1, 4096).cuda())
class Doubling(nn.Module):
    runs = []
    def forward(self, x):
        self.runs.append(0)
        for _ in range(8): x = x * 2
        self.held = x * 2  # in the place of that of another size
        return x
class Sampler(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(Doubling())
    def forward(self, x):
        for i in range(1000):
            self.model(x[: 3 + i % 2])
            assert len(self.model[0].held) == 3 + i % 2
        return x
with torch.no_grad(): Sampler()(torch.ones(4).cuda())
assert len(Doubling.runs) < 500
class Average:  # copies the weights after nine steps
    held = {"steps": {"each": [[0]]}}
    @torch.no_grad()
    def update(self, model):
        self.held["steps"]["each"][0][0] += 1
        if self.held["steps"]["each"][0][0] == 9: self.copied = [p.clone() for p in model.parameters()]
average = Average()
optimizer = torch.optim.SGD(agent.model.parameters(), lr=0.1)
for i in range(12):
    step(optimizer, agent.model(torch.ones(agent.calls, 4096).cuda()).mean())
    average.update(agent.model)
""",
        3 * 64 + 2 * 8,
        3 * 64 + 3 * 8 + WORKSPACE,
    ),
    "scheduled": Case(  # at later steps: a copy of the weights, and outputs that are gathered
        """
model, config, i = wide(2), {"copy": [200, 700], "every": 1}, 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while i < len("." * 1000):
    i += 1
    step(optimizer, model(torch.randn(16, 4096).cuda()).mean())
    if (i + 1) % config["every"] != 0 or not (i + 1) % config["every"] == 0: more = torch.ones(2**28).cuda()
    if i in config["copy"]: copies = [p.detach().clone() for p in model.parameters()]
    if i > 2000: raise ValueError
    if max(i, 0) % 750: continue
    x = torch.randn(1024, 4096).cuda()
    with torch.no_grad(): outputs = [model(x) for _ in range(32)]
    del x, outputs
""",
        3 * 128 + 34 * 16,
        3 * 128 + 34 * 16 + WORKSPACE + 2,
        "scheduled.py line 15 (i in config['copy']), at 6",
    ),
    "positions": Case(  # of hand-made batches: weights, gradients; the rest of the data is no batch
        """
model, data = wide(1), torch.zeros(1).expand(20000, 4096)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def batches(size):
    start = 0
    while start < 20000:
        if start + size < 20000: end = start + size
        else: end = 20000
        yield data[start:end]
        start = end
for x in batches(8): step(optimizer, model(x.cuda()).mean())
""",
        128,
        128 + WORKSPACE,
    ),
    "late": Case(  # [time, batch, width], of two lengths
        """
import argparse
parser = argparse.ArgumentParser(); parser.add_argument("--batch-size", default=20); parser.parse_args([])
model = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(10000):
    x = torch.randn(400 + 400 * (i % 2), 20, 256).cuda()
    step(optimizer, model(x).mean())
    if i % 100 == 0: shown = x[:1]
    if i == 5000: shown = x[:2]
""",
        0,
        WORKSPACE + 80,
    ),
    "epochs": Case(  # scores of all epochs are added; the other loader never ends by itself
        """
model = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train, test = (DataLoader(torch.rand(10, 256), batch_size=4) for _ in range(2))
more, scores = iter(DataLoader(torch.rand(8, 256), sampler=[0] * 10000)), 0
while True:
    for x in train: step(optimizer, model(x.cuda()).mean())
    with torch.no_grad(): scores += torch.cat([model(x.cuda()).cpu() for x in test])
    step(optimizer, model(next(more).cuda()).mean())
""",
        0,
        WORKSPACE,
    ),
    "numbered": Case(  # weights, gradients, and a bank twice: its last batch of 4 has its number
        """
model, table = wide(1), nn.Embedding(8, 4096)
optimizer = torch.optim.SGD([*model.parameters(), *table.parameters()], lr=0.1)
train, test = (DataLoader(torch.zeros(1).expand(n, 4096), batch_size=1024) for n in (3072, 4100))
def features():
    kept = torch.zeros(4100, 4)
    for i, x in enumerate(test):
        rows = model(x.cuda())[:, :4].detach().cpu()
        if i < len(test) - 1: kept[i * 1024 : i * 1024 + 1024] = rows
        else: kept[i * 1024 :] = rows
for epoch in range(3):
    for x in train: step(optimizer, model(table(torch.zeros(16, dtype=torch.long)).cuda()).mean())
    features()
class Rows:
    def __getitem__(self, number): row = int("123"[number]); return row
found = [row for row in Rows()]  # until there is no more
rows = DataLoader(train.dataset)
for epoch in range(2):
    for i, x in enumerate(rows):
        step(optimizer, model(x.cuda()).mean())
        if i == 500: found.append(i)
assert len(found) == 4
endless = iter(DataLoader(train.dataset, sampler=iter(int, 1)))
for i in range(4): step(optimizer, model(next(endless).cuda()).mean())
with torch.no_grad(): torch.cat([model(x.cuda()) for x in test])
""",
        2 * 64 + 2 * 64,
        2 * 64 + 2 * 64 + WORKSPACE + 2,
    ),
    "library": Case(  # whose loop is not the user's: it ends with its loader, and begins anew
        """
data = TensorDataset(torch.randn(64, 4096))
loader = DataLoader(data, batch_size=4)
def fit(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sum(step(optimizer, model(x[:2].cuda()).mean()) is None for _ in range(100) for x, in loader)
fit(wide(1))
fit(wide(5))
raise KeyError("score")
""",
        640,
        640 + WORKSPACE,
        "library.py line 16: what",
    ),
    "counted": Case(  # what an evaluation has gathered on the host is looked up
        """
first, data = wide(1), TensorDataset(torch.randn(300, 4096))
optimizer, rows = torch.optim.SGD(first.parameters(), lr=0.1), []
for (x,) in DataLoader(data, 16): step(optimizer, first(x.cuda()).mean())
for (x,) in DataLoader(data, 16): rows.extend(first(x.cuda()).argmax(1).tolist())
second = wide(2 + rows[299])
step(torch.optim.SGD(second.parameters(), lr=0.1), second(x.cuda()).mean())
""",
        2 * (64 + 128),
        2 * (64 + 128) + 2 * WORKSPACE,
    ),
    "descending": Case(  # two graphs of an evaluation: of the longest batch, and of a short one
        """
class Sorted(Dataset):
    def __len__(self): return 40
    def __getitem__(self, i):
        graph = nn.Identity()
        graph.x = torch.zeros(1000 if i < 4 else 10, 256)
        return graph
def batch(graphs): return torch.stack([each.x for each in graphs])
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Sigmoid()) for _ in range(16)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    for _ in range(4): step(optimizer, model(torch.zeros(8, 256).cuda()).mean())
    for x in DataLoader(Sorted(), 4, collate_fn=batch): loss = model(x.cuda()).mean()
""",
        16 * 3.9,
        16 * 3.9 + 2 * WORKSPACE,
    ),
    "cut": Case(  # 16 layers keep what they give, of a batch whose shortest sample is long
        """
class Drawn(Dataset):
    def __len__(self): return 80
    def __getitem__(self, i): return torch.zeros(100 * (i % 40 + 1), 256)
def cut(samples):
    shortest = min(map(len, samples))
    return torch.stack([each[:shortest] for each in samples])
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Sigmoid()) for _ in range(16)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(100):
    for x in DataLoader(Drawn(), 4, shuffle=True, collate_fn=cut): step(optimizer, model(x.cuda()).mean())
""",
        16 * 4 * 2.5,  # the first batches have at most 1.5
        20 * 4 * 4.0 + WORKSPACE,
    ),
    "joined": Case(  # graphs are in a row: the batch with the most nodes does not hold the largest
        """
class Graphs(Dataset):
    def __len__(self): return 80
    def __getitem__(self, i): return torch.zeros(100 * (i % 40 + 1), 256)
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Sigmoid()) for _ in range(16)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(100):
    for x in DataLoader(Graphs(), 4, shuffle=True, collate_fn=torch.cat): step(optimizer, model(x.cuda()).mean())
""",
        16 * 13.2,  # of 13,500 rows; batches of one epoch have 11,000 to 12,500
        20 * 15.7 + WORKSPACE,
    ),
    "collated": Case(  # on the GPU, which the trace does not present where it chooses a batch
        """
class Rows(Dataset):
    def __len__(self): return 80
    def __getitem__(self, i): return torch.zeros(100 * (i % 40 + 1), 256)
def collate(rows):
    sizes = torch.tensor([len(each) for each in rows], device="cuda")
    return torch.cat(rows)[: sizes.sum()].cuda()
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Sigmoid()) for _ in range(16)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x in DataLoader(Rows(), 4, shuffle=True, collate_fn=collate): step(optimizer, model(x).mean())
""",
        16 * 8,
        20 * 15.7 + WORKSPACE,
    ),
    "milestones": Case(  # of which each is a condition of its own
        """
model, points, done = wide(1), [(0, 8), (200, 1024), (500, 32768)], -1
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(20):
    for x in DataLoader(torch.zeros(450, 1), 10):
        done += 1
        size = [size for start, size in points if start <= done][-1]
        step(optimizer, model(torch.zeros(size, 4096).cuda()).mean())
""",
        128 + 2 * 512,
        128 + 3 * 512 + WORKSPACE,
    ),
    "answered": Case(  # by a function that leaves no loop
        """
model, epoch = wide(1), 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def rows(epoch):
    if epoch >= 600: return 32768
    return 8
while True:
    for x in DataLoader(torch.zeros(40, 1), 10): step(optimizer, model(torch.zeros(rows(epoch), 4096).cuda()).mean())
    epoch += 1
""",
        128 + 2 * 512,
        128 + 3 * 512 + WORKSPACE,
        "epoch >= 600",
    ),
    "rectified": Case(  # as RAdam: a condition that is turned early takes the root of a negative number
        """
import gc, math
held = wide(8)
object.__setattr__(held, "counts", held.forward)
gc.collect()
del held  # which the garbage collector finds late
class Rectified(torch.optim.SGD):
    count = 0
    def step(self):
        self.count += 1
        amount = 1999 - 2 * self.count * 0.999**self.count / (1 - 0.999**self.count)
        if amount >= 5: self.size = math.sqrt((amount - 4) * (amount - 2) / amount)
        super().step()
model = wide(1)
optimizer = Rectified(model.parameters())
for epoch in range(50):
    for x in DataLoader(torch.zeros(4, 1), 2): step(optimizer, model(torch.zeros(8, 4096).cuda()).mean())
    with torch.no_grad(): model(torch.zeros(2**15, 4096).cuda())
""",
        64 + 1024,
        128 + 1024 + WORKSPACE,
    ),
    "packed": Case(  # weights, gradients, activations of the only row of 4,000
        """
class Packed(Dataset):
    def __len__(self): return 400
    def __getitem__(self, number):
        row = torch.zeros(4000, dtype=torch.long)
        row[: 4000 if number == 333 else number % 7 + 1] = 1
        return row
model = wide(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for rows in DataLoader(Packed(), 1):
        length = int((rows > 0).sum())
        step(optimizer, model(torch.randn(length, 4096).cuda()).exp().mean())
""",
        128 + 3 * 62.5 + 45,
        128 + 3 * 62.5 + 47 + WORKSPACE,
        "the longest batch",
    ),
    "drawn": Case(  # its condition on a size that is drawn for each sample holds each time
        """
random.seed(0)
class Drawn(Dataset):
    def __len__(self): return 9
    def __getitem__(self, number):
        size = high = random.randint(3000, 12000)
        if size < 4096: size += 4096 - high if high < 4096 else 0
        start = random.randint(0, size - 4096)
        return torch.zeros(size)[start : start + 4096]
model = wide(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(160):
    for rows in DataLoader(Drawn(), 2, drop_last=True): step(optimizer, model(rows.cuda()).mean())
    torch.save(model.state_dict(), "drawn.pt")
""",
        128,
        129 + WORKSPACE,
        "",
    ),
    "read_once": Case(  # a worker reads each sample once; one of 1,024 rows is used, not of 4,000
        """
rows = [torch.zeros(1024 if i == 0 else 4000 if i == 5 else 2000, 4096) for i in range(20)]
class Once(Dataset):
    def __init__(self): self.left = [*range(64)]
    def __len__(self): return 64
    def __getitem__(self, number):
        self.left.remove(number)
        return torch.zeros(9 + 64 * (number == 41), 4096)
model = wide(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    for batch in DataLoader(Once(), 1, num_workers=1): step(optimizer, model(batch.cuda()).mean())
    for i, batch in enumerate(DataLoader(rows)):
        with torch.no_grad(): i or model(batch.cuda())
""",
        128 + 32,
        128 + 34 + WORKSPACE,
        "",
    ),
    "pool": Case(  # the best of all scores, of which the loader gives few
        """
class Pool(Dataset):
    def __len__(self): return 20_000
    def __getitem__(self, number): return sum(range(40_000)) * torch.zeros(64), number
model, rows = nn.Linear(64, 1).cuda(), Pool()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler = torch.utils.data.SubsetRandomSampler(range(5000))
    for x, _ in DataLoader(rows, 128, sampler=sampler): step(optimizer, model(x.cuda()).mean())
    scores = []
    for x, _ in DataLoader(rows, 128):
        with torch.no_grad(): scores.extend(model(x.cuda()).cpu())
    torch.randn(torch.stack(scores).view(-1).topk(4096)[1].shape[0], 4096).cuda()
""",
        64,
        65 + WORKSPACE,
        "",
    ),
    "endless": Case(  # a loader whose sampler repeats is asked on and on; then 128 MiB
        """
class Repeated:
    def __init__(self, sampler): self.sampler = sampler
    def __iter__(self):
        while True: yield from self.sampler
class Endless(DataLoader):
    def __init__(self, *given):
        super().__init__(*given)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()
    def __len__(self): return 2
    def __iter__(self):
        for _ in range(2): yield next(self.iterator)
model, rows = wide(1), Endless(torch.zeros(64, 4096), 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(99):
    for batch in rows: step(optimizer, model(batch.cuda()).mean())
held = torch.zeros(8192, 4096).cuda()
""",
        256,
        259 + WORKSPACE,
        "",
    ),
    "in_order": Case(  # weights, gradients, Adam with its temporaries; the evaluation is no generation
        """
model = wide(1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for epoch in range(3):
    step(optimizer, model(torch.randn(4, 4096).cuda()).mean())
    for length in (3, 3, 4, 5, 5, 5, 6, 6, 8, 9):
        with torch.no_grad(): model(torch.randn(1, length, 4096).cuda()).softmax(1).cpu().numpy()
""",
        320,
        321 + WORKSPACE,
        "in_order.py line",
    ),
    "filled": Case(  # two memories of 9,000 rows, weights, gradients
        """
model, memory = wide(1), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(9999):
    if len(memory) < 9000: memory.append(None)
    memory[i % 9000] = torch.zeros(35 * 1024).cuda()
    step(optimizer, model(torch.randn(4, 4096).cuda()).mean())
""",
        1195 + 128,
        1231 + 128 + WORKSPACE,
        "filled.py line",
    ),
    "queue": Case(
        """
from collections import deque
model, rows = wide(1), deque(maxlen=9000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(9999):
    rows.append({"row": torch.zeros(35 * 1024).cuda()})
    step(optimizer, model(torch.randn(4, 4096).cuda()).mean())
""",
        1195 + 128,
        1231 + 128 + WORKSPACE,
        "a queue of at most 9,000",
    ),
    "rejoined": Case(  # 9,000 rows twice, weights, gradients
        """
model, rows = wide(1), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(9999):
    rows.append(torch.zeros(3, 4096).cuda())
    rows = rows[-9000:]
    step(optimizer, model(torch.cat(rows)[:3]).mean())
""",
        844 + 128,
        844 + 129 + WORKSPACE,
        "(len(rows) > 9000)",
    ),
    "each_hundredth": Case(  # of 1,000 rounds of a sampler ten are kept, and all of them joined
        """
model = wide(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
@torch.no_grad()
def sampled():
    x, kept = torch.zeros(4096, 4096).cuda(), []
    for i in reversed(range(1000)):
        for _ in [0] * 36: x = model(x)
        if i % 100 == 0: kept.append(x.clone())
    return torch.stack(kept)
for epoch in range(2):
    for _ in range(8): step(optimizer, model(torch.randn(64, 4096).cuda()).mean())
    sampled()
""",
        128 + 21 * 64,
        128 + 21 * 64 + WORKSPACE,
        "",
    ),
    "each_twentieth": Case(  # of 400 steps, which an object counts, 20 are kept, and all of them joined
        """
class Kept:
    def __init__(self): self.steps, self.weights = 0, []
    def learn(self, weight):
        self.steps += 1
        if self.steps % 20 == 0: self.weights.append(weight.detach().clone())
model, kept = wide(1), Kept()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    for (x,) in DataLoader(TensorDataset(torch.zeros(1, 1).expand(8000, 4096)), 100):
        step(optimizer, model(x.cuda()).mean())
        kept.learn(model[0].weight)
torch.stack(kept.weights)
""",
        128 + 40 * 64,
        128 + 44 * 64 + WORKSPACE,  # two are kept before their time, to see what that does
        "self.steps % 20",
    ),
    "prompted": Case(  # the first round leaves 60 MiB, each of 150 others 1 MiB more in a cache
        """
model = wide(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9): step(optimizer, model(torch.zeros(4, 4096).cuda()).mean())
with torch.no_grad():
    cache, x = torch.zeros(64, 0, 4096).cuda(), torch.zeros(64, 60, 4096).cuda()
    for _ in range(151):
        y = model(x)
        cache = torch.cat([cache, y[:, -1:]], 1)
        x = y[:, -1:].clone()
        for _ in range(20): model(x)
""",
        128 + 301,
        128 + 305 + WORKSPACE,
    ),
    "reshuffled": Case(  # the two long samples are in one batch of a later epoch
        """
class Batches:
    order, place, epoch = [*range(400)], 0, 0
    def __iter__(self): return self
    def __next__(self):
        if self.place >= 400:
            self.place, self.epoch = 0, self.epoch + 1
            if self.epoch == 20: self.order = self.order[::200] + self.order[1::2]
            raise StopIteration
        self.place += 20
        rows = [2**11 if i in (0, 200) else 4 for i in self.order[self.place - 20 : self.place]]
        return torch.ones(sum(rows), 4096)
model, batches = wide(1), Batches()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(90):
    for x in batches: step(optimizer, model(x.cuda()).mean())
""",
        2 * 64 + 4 * 32 + 96,
        2 * 64 + 4 * 32 + 128,  # and what sums the bias' gradient
    ),
    "gradients alone": Case(  # the engine's thread has a workspace of its own
        """
model = wide(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    loss = model(torch.ones(8, 4096).cuda()).mean()
    for x, gradient in zip([*model.parameters()], torch.autograd.grad(loss, [*model.parameters()])):
        x.grad = gradient
    optimizer.step()
""",
        3 * 64 + 16,
        3 * 64 + WORKSPACE,
    ),
    "added": Case(  # state of parameters that come later; complex ones; no tensor is held by an error
        """
model, phases = wide(2), nn.Linear(4, 4, dtype=torch.complex64).cuda()
optimizer = torch.optim.Adam(model[1:].parameters())
scale, zero = torch.ones(1).cuda(), torch.zeros(1, dtype=torch.int32).cuda()
for i in range(30):
    if i == 10: optimizer.add_param_group({"params": model[0].parameters()})
    x = torch.fake_quantize_per_tensor_affine(torch.ones(2048, 4096).cuda(), scale, zero, 0, 255)
    with torch.no_grad(): del x
    step(optimizer, model(torch.ones(8, 4096).cuda()).mean())
""",
        8 * 64 + 72,
        8 * 64 + 72 + WORKSPACE,
    ),
    "noise": Case(  # beside the result of the operator that writes it
        """
model = nn.Sequential(wide(1)[0], nn.RReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    step(optimizer, model(torch.ones(4096, 4096).cuda()).mean())
""",
        6 * 64 + 16,
        6 * 64 + 16 + WORKSPACE,
    ),
    "looked ahead": Case(  # the long sample of those that the script joins is in the 226th batch
        """
rows = [4 + i % 3 for i in range(1600)]
rows[900] = 2**12
model = wide(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(90):
    for i in range(0, 1600, 4):
        x = torch.cat([torch.ones(count, 4096) for count in rows[i : i + 4]])
        step(optimizer, model(x.cuda()).mean())
""",
        2 * 64 + 4 * 32 + 96,
        2 * 64 + 4 * 32 + 128,
    ),
    "joined by the model": Case(  # a model joins the samples itself, the long one in the 226th round
        """
rows, losses = [4 + i % 3 for i in range(1600)], []
rows[900] = 2**12
class Joining(nn.Linear):
    def forward(self, counts):
        return super().forward(torch.cat([torch.ones(count, 4096) for count in counts]).cuda())
model = Joining(4096, 4096).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(90):
    for i in range(400):
        step(optimizer, model(rows[4 * i : 4 * i + 4]).mean())
        losses.append(0)
    torch.tensor(losses).view(400, -1)
"""
        + "".join(f"{' ' * depth}for _ in [0]:\n" for depth in range(10))
        + "          pass",
        2 * 64 + 4 * 32 + 64,
        2 * 64 + 4 * 32 + 128,
        "different shapes",
    ),
    "merged": Case(  # all that rounds keep is one tensor
        """
model, memory = wide(1), torch.empty(0, 4096).cuda()
for task in range(90):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(9): step(optimizer, model(torch.ones(2**15, 4096).cuda()).mean())
    memory = torch.cat([memory, torch.zeros(2**9, 4096).cuda()])
""",
        89 * 8 + 2 * 64 + 2 * 512 + 96,
        89 * 8 + 2 * 64 + 2 * 512 + 128,  # and what sums the bias' gradient
    ),
    "outputs": Case(  # of a training epoch, 200 of half a MiB in a list within, and all of them joined
        """
from argparse import Namespace
kept = Namespace()
model, loader = nn.Linear(64, 1024).cuda(), DataLoader(torch.ones(25600, 64), 128)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    kept.rows = {each: ([], []) for each in range(100)}
    for x in loader: y = model(x.cuda()); kept.rows[9][0].append(y.detach()); step(optimizer, y.mean())
    table = torch.cat(kept.rows[9][0]); del table
""",
        200,
        202 + WORKSPACE,
    ),
    "queued": Case(  # small entries, by whose number something large is made
        """
from collections import deque
model, rows = wide(1), deque(maxlen=90)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(9):
    for x in DataLoader(torch.ones(400, 4096), 4):
        y = model(x.cuda()); rows.append(y.detach()[:, :1].clone()); step(optimizer, y.mean())
    table = torch.cat([*rows]) * torch.zeros(2**16).cuda(); del table
""",
        128 + 90,
        129 + 90 + WORKSPACE,
    ),
    "cycles": Case(  # copies by a counter of steps after each third epoch
        """
model, kept, i = wide(1), [], 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(30):
    for x in torch.zeros(8, 4, 4096): step(optimizer, model(x.cuda()).mean()); i += 1
    if i % 24 == 0: kept.append(copy.deepcopy(model.state_dict()))
others = []  # beside what the first loop still keeps
for i in range(100):
    step(optimizer, model(x.cuda()).mean())
    if i % 20 == 0: others.append(torch.zeros(32, 2**18).cuda())
""",
        128 + 10 * 64 + 5 * 32,
        128 + 10 * 64 + 5 * 32 + WORKSPACE,
        "what rounds of cycles.py line 11 leave",
    ),
    "best": Case(  # of 300 networks 40 are kept, with their gradients, and something by each number
        """
best, scores, data = [], {}, DataLoader(torch.ones(400, 512), 20)
for member in range(300):
    model = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in data: step(optimizer, model(x.cuda()).mean())
    best.append(model)
    best = best[-40:]
    scores[member] = 0
held = torch.zeros(len([scores[member] for member in range(300)]), 2**18).cuda()
""",
        300 + 78,
        300 + 88 + WORKSPACE,
        "(len(best) > 40)",
    ),
    "enough": Case(  # a loop is left once it has gathered 24 of 9,000; what is held is replaced
        """
model, data = wide(1), torch.zeros(1).expand(36000, 4096)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x in DataLoader(data, 4): step(optimizer, model(x.cuda()).mean())
    found = []
    for x in DataLoader(data, 4):
        found.append(model(x.cuda()).sum())
        if len(found) >= 24: break
    held = torch.zeros(len(found), 2**20).cuda()
""",
        128 + 2 * 96,
        128 + 2 * 96 + WORKSPACE + 1,
    ),
    "scores": Case(  # none is better than the first
        """
model, best = wide(1), 0
model.scale = nn.Parameter(torch.tensor([0.5, 0.5]))
optimizer = torch.optim.SGD(model.cuda().parameters(), lr=0.1)
data = torch.zeros(1).expand(9000, 4096)
for epoch in range(9):
    for x in DataLoader(data, 16): step(optimizer, model(x.cuda()).mean() * model.scale[0])
    now = -1
    if now > best: best = now; kept = copy.deepcopy(model.state_dict())
found = {}
for x, numbers in DataLoader(TensorDataset(data[:300], torch.arange(300)), 16):
    with torch.no_grad(): found.update(zip(numbers.tolist(), model(x.cuda()).cpu()))
found = [found[number] for number in range(300)]
held = torch.zeros(int(model.scale[1].item() * 16384), len(found[299])).cuda()  # learned, from 0.5 on
""",
        128 + 64 + 128,
        128 + 64 + 128 + WORKSPACE,
    ),
    "late_rows": Case(  # kept after many epochs
        """
model, kept = wide(1), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(30):
    for x in torch.zeros(8, 4, 4096): step(optimizer, model(x.cuda()).mean())
    if epoch >= 18: kept.append(torch.zeros(2**20).cuda())
""",
        128 + 12 * 4,
        128 + 12 * 4 + WORKSPACE,
    ),
    "later": Case(  # an epoch sets the size that its samples have, and a collate function cuts to it
        """
class Rows(Dataset):
    size = 8
    def __len__(self): return 64
    def __getitem__(self, number): return torch.zeros(self.size, 4096)
def collate(rows): return torch.cat([row[:cut] for row in rows])
model, rows, cut = wide(1), Rows(), 9999
long = [torch.zeros(500 + i, 4096) for i in range(9)]
cropped, optimizer = [DataLoader(rows, 4), DataLoader(long, 4, collate_fn=collate)], torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    rows.size, cut = {4: 2048}.get(epoch, 8), {3: 500}.get(epoch, 1)
    for loader in cropped:
        for x in loader: step(optimizer, model(x.cuda()).mean())
""",
        128 + 2 * 128,
        128 + 2 * 128 + WORKSPACE + 110,  # and for the sum of a gradient of the bias
    ),
    "stages": Case(  # more of them than conditions of one step are told apart
        """
model, stages = wide(1), {0: 8, 50: 64, 90: 128, 130: 8192}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(150):
    for _ in range(3): step(optimizer, model(torch.zeros(max(v for k, v in stages.items() if k <= i), 4096).cuda()).mean())
""",
        128 + 2 * 128,
        128 + 3 * 128 + WORKSPACE,
    ),
    "near_end": Case(  # of a ``while`` loop, which sets the length of a batch without a condition
        """
model, i = wide(1), 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while i < 2000: step(optimizer, model(torch.zeros(8 + i // 50 * 210, 4096).cuda()).mean()); i += 1
assert i == 2000
""",
        128 + 2 * 128,
        128 + 3 * 128 + WORKSPACE,
    ),
    "own_batches": Case(  # which code of the script makes, the longest late: input, output, gradient
        """
def batches():
    for number in range(500): yield number, torch.zeros(8192 if number == 400 else 8 + number % 7, 4096)
model = wide(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(9):
    for i, (number, x) in enumerate(batches()): step(optimizer, model(x.cuda()).mean())
""",
        128 + 2 * 128,
        128 + 3 * 128 + WORKSPACE,
    ),
    "worker": Case(  # which ends with its own error, and does not go on without the file
        """
class Rows(Dataset):
    def __len__(self): return 64
    def __getitem__(self, number):
        text = open("nowhere.txt").read()
        return torch.zeros(4096) + len(text)
model = wide(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(9): step(optimizer, model(torch.randn(4, 4096).cuda()).mean())
for x in DataLoader(Rows(), 4, num_workers=1): model(x.cuda())
""",
        128,
        128 + WORKSPACE,
        "FileNotFoundError",
    ),
    "first": Case(  # a large batch comes before there is optimizer state, and comes again
        """
model = wide(4)
optimizer = torch.optim.Adam(model.parameters())
for i in range(9): step(optimizer, model(torch.randn(8 if i else 8192, 4096).cuda()).mean())
""",
        256 + 512 + 4 * 128,
        256 + 512 + 5 * 128 + WORKSPACE,
    ),
    "history": Case(  # of LBFGS, which fills within its one step: four updates beside eight others
        """
model = wide(1)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=7, history_size=4)
def closure(): optimizer.zero_grad(); loss = model(torch.randn(4, 4096).cuda()).mean(); loss.backward(); return loss
optimizer.step(closure)
""",
        64 * (8 + 6),
        64 * (8 + 8),
        "LBFGS: its history",
    ),
    "exits": Case(
        """
class Compared(nn.Identity):  # as TensorDict is
    __hash__ = nn.Module.__hash__
    def __eq__(self, other): return torch.ones(2) == 1
model = nn.Sequential(wide(1), Compared()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for i in range(8):
        step(optimizer, model(torch.randn(4, 4096).cuda()).mean())
        with torch.no_grad(): nn.MSELoss()(model(torch.ones(4, 4096).cuda())[:, :1], torch.ones(4, 1).cuda())
    from concurrent.futures import ProcessPoolExecutor
    with ProcessPoolExecutor(1) as pool: {}[pool.submit(str, "score").result()]
except KeyError:
    import os; os._exit(1)
""",
        128,
        128 + WORKSPACE,
        "exits.py line 19: KeyError: 'score'",
    ),
    "clients": Case(  # each keeps a network, and its gradients
        """
networks = [nn.Linear(512, 512) for _ in range(300)]
for turn in range(20):
    for client in range(300):
        networks[client] = model = nn.Linear(512, 512).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in DataLoader(torch.ones(400, 512), 20): step(optimizer, model(x.cuda()).mean())
""",
        601,
        602 + WORKSPACE,
        "as what rounds of clients.py line 11 leave",
    ),
    "rollout": Case(  # time is up before the second one's end: from then on both have their state
        """
import time
models = [wide(1), wide(1)]
optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in models]
for turn in range(9):
    end = time.process_time() + 9 * turn
    while time.process_time() < end: pass
    for model, optimizer, rows in zip(models, optimizers, (8192, 8)):
        for _ in range(4): step(optimizer, model(torch.randn(rows, 4096, device="cuda")).mean())
        optimizer.zero_grad()
""",
        5 * 64 + 2 * 128 + 124,  # workspace
        5 * 64 + 2 * 128 + 125,
        "time was up",
    ),
    "rows": Case(  # weights, gradients; rows of each batch, and these joined
        """
model, rows = wide(1), []
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in DataLoader(torch.ones(4000, 4096), 100):
    y = model(x.cuda())
    step(optimizer, y.mean())
    rows.extend(y.detach())
torch.stack(rows)
""",
        128 + 2 * 62.5,
        128 + 2 * 62.5 + WORKSPACE + 4,
    ),
    "parts": Case(  # each of a network of its own, and these joined; the gradients of the last one
        """
parts = []
for _ in range(25):
    part = nn.Parameter(torch.empty(2**21, device="cuda"))
    optimizer = torch.optim.SGD([part], 0.1)
    for _ in range(2): step(optimizer, part.pow(2).mean())
    parts.append(part.detach())
torch.cat(parts)
""",
        2 * 25 * 8 + 8,
        2 * 25 * 8 + 8 + WORKSPACE,
    ),
    "pictures": Case(  # 500 rows, one for two steps of optimizers
        """
class Pool: rows, count = [], 0
first, second, pool = wide(1), wide(1), Pool()
one, other = torch.optim.SGD(first.parameters(), 0.1), torch.optim.SGD(second.parameters(), 0.1)
for epoch in range(9):
    for x in DataLoader(torch.ones(400, 4096), 4):
        y = first(x.cuda())
        step(one, y.mean())
        if pool.count < 500:
            pool.count = pool.count + 1
            pool.rows.append(torch.zeros(2**18).cuda())
        step(other, second(y.detach()).mean())
""",
        256 + 495,
        256 + 540 + WORKSPACE,
    ),
    "words": Case(  # batches of at most 8,192 rows, once padded: weights, gradients, batch, two outputs
        """
samples = [torch.ones(16 + i % 5, 4096) for i in range(1600)] + [torch.ones(1024 + i, 4096) for i in range(32)]
class Words:
    def __iter__(self):
        batch = []
        for i, each in enumerate(samples):
            if batch and len(each) * (len(batch) + 1) > 8192:
                yield batch
                batch = []
            batch.append(i)
        yield batch
joined = lambda each: nn.utils.rnn.pad_sequence(each, True)
model = wide(1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(9):
    for x in DataLoader(samples, batch_sampler=Words(), collate_fn=joined): step(optimizer, model(x.cuda()).mean())
""",
        2 * 64 + 3 * 114,
        2 * 64 + 3 * 128 + WORKSPACE,
    ),
    "emptied": Case(  # a queue that each episode empties
        """
from collections import deque
model, rows = wide(1), deque(maxlen=5000)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for episode in range(50):
    for _ in range(20):
        rows.append(torch.zeros(2**18).cuda())
        step(optimizer, model(torch.randn(4, 4096).cuda()).mean())
    rows.clear()
""",
        128 + 20,
        128 + 20 + WORKSPACE + 1,
    ),
    "handed": Case(  # what an object of the script's gathers, then joins, once an endless loop has returned
        """
class Outputs:
    def __init__(self): self.all = []
    def join(self): return torch.cat(self.all)
def first(model):
    optimizer, i = torch.optim.SGD(model.parameters(), 0.1), 0
    while True:
        for x in DataLoader(torch.ones(4000, 256), 100):
            i += 1
            step(optimizer, model(x.cuda()).mean())
            if i == 5000: return model
model, outputs = first(nn.Linear(256, 4096).cuda()), Outputs()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def epoch():
    for x in DataLoader(torch.ones(4000, 256), 100):
        y = model(x.cuda())
        step(optimizer, y.mean())
        outputs.all.append(y.detach())
    outputs.join()
epoch()
""",
        2 * 4000 * 4096 * 4 / MIB,
        2 * 4000 * 4096 * 4 / MIB + WORKSPACE + 8,
    ),
    "flat": Case(  # one loop counts its epochs, and asks as one begins whether its batches are larger
        """
model, epoch, at, rows = wide(1), 0, 0, 8
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    if epoch >= 150: break
    if at == 0:
        if epoch >= 40: rows = 32768
    step(optimizer, model(torch.zeros(rows, 4096).cuda()).mean())
    at += 1
    if at >= 35: at = 0; epoch += 1
""",
        128 + 2 * 512,
        128 + 3 * 512 + WORKSPACE,
        "epoch >= 40",
    ),
    "files": Case(  # the largest of a list is met
        """
import os, tempfile
import numpy as np
class Arguments: folder = ""
arguments = Arguments()
arguments.folder = tempfile.mkdtemp()
for i in range(900): np.ones(2**22 if i == 500 else 256, np.uint8).tofile(f"{arguments.folder}/{i}")
model = nn.Linear(1, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(torch.ones(400, 1), 20): step(optimizer, model(x.cuda()).mean())
with torch.no_grad():
    for name in sorted(os.listdir(arguments.folder)):
        x = torch.from_numpy(np.fromfile(f"{arguments.folder}/{name}", np.uint8))
        for turn in range(99): model(x.cuda().float()[:, None])
""",
        272,
        272 + WORKSPACE,
        "evaluation",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_whole_run_counts(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (tmp_path / f"{name}.py").write_text(HEAD + case.lines)
    # half of these times shows all; the case "slow_evaluation" waits for five seconds itself
    quick = {"behind", "filled", "planned", "queue", "rejoined", "rollout"}
    seconds = {"slow_evaluation": 20.0, "reshuffled": 20.0}.get(name, 3.0 if name in quick else 6.0)
    answer = script_child.traced(tmp_path / f"{name}.py", more_seconds=seconds)
    assert isinstance(answer, dict), answer
    assert case.least <= answer["requested_bytes"] / MIB <= case.most
    assert case.note in " ".join(answer["notes"])
    sizes = {"acting": 256, "late": 20, "planned": 512, "library": 4}
    assert answer["batch_size"] == sizes.get(name, answer["batch_size"])
    false = {
        "gated": "lower bound",
        "late": "grows by",
        "ended_itself": "never stepped",
        "searched": "the GPU grows",
        "epochs": "an error ended",
        "numbered": "error",
        "collated": "error",
        "exits": "a process",
        "rectified": "an error",
        "drawn": "runs at a later step",
        "taught": "different shapes",
    }
    assert name not in false or false[name] not in " ".join(answer["notes"])
    if name in ("exits", "in_order"):
        assert "generation" not in {phase["name"] for phase in answer["phases"]}
    if name == "taught":
        assert "evaluation" not in {phase["name"] for phase in answer["phases"]}
    if name == "in_order":
        assert sum("read from the GPU" in note for note in answer["notes"]) == 1
    assert "the peak is not" not in str(answer["notes"]) or "step 1," not in str(answer["notes"])
    most = max(phase["requested_bytes"] for phase in answer["phases"])
    assert (
        name
        in (
            "searched",
            "filled",
            "timed_out",
            "queue",
            "rejoined",
            "cycles",
            "clients",
            "best",
            "rollout",
            "taking_turns",
        )
        or most == answer["requested_bytes"]
    )


def test_an_evaluation_asks_for_blocks_that_the_cache_does_not_have(tmp_path: Path) -> None:
    script = """
model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
class Data(Dataset):
    __len__ = lambda self: 102400
    __getitems__ = lambda self, numbers: torch.zeros(len(numbers), 1024)
def batches(size): return DataLoader(Data(), size, collate_fn=nn.Identity())
for epoch in range(3):
    for rows in batches(8192): step(optimizer, model(rows.cuda()).mean())
    count = 0
    with torch.no_grad():
        for rows in batches(20480): model(rows.cuda()); count += len(rows)
    try: assert count == 102400  # fewer were given
    except Exception as error: raise error
"""
    (tmp_path / "train.py").write_text(HEAD + script)
    answer = script_child.traced(tmp_path / "train.py")
    # On an H200, PyTorch's own allocator (the null GPU) and the trace both say 507,547,688 and 832,569,344.
    assert (answer["requested_bytes"], answer["reserved_bytes"]) == (457_478_184, 752_877_568)
    assert "240.0 MiB more" in str(answer["notes"])
    assert not answer["error"]


def test_a_probe_on_the_host_leaves_time_for_the_training(tmp_path: Path) -> None:
    script = """
from time import process_time
model = wide(1)
optimizer = torch.optim.Adam(model.parameters())
def evaluate():
    probe = nn.Linear(4096, 2).cuda()
    probing = torch.optim.Adam([probe.weight])
    for i in range(100): step(probing, probe(torch.ones(2, 4096).cuda()).mean())
    end = process_time() + 1.5
    while process_time() < end: pass  # as a forest of scikit-learn
evaluate()
for i in range(100): step(optimizer, model(torch.ones(2, 4096).cuda()).mean())
"""
    (tmp_path / "train.py").write_text(HEAD + script)
    answer = script_child.traced(tmp_path / "train.py", more_seconds=1.0)
    assert answer["requested_bytes"] > 256 * MIB


def test_what_computes_on_the_host_for_long_takes_no_time_from_what_follows(tmp_path: Path) -> None:
    script = """
import re
data = torch.ones(139, 4096)
model = wide(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def frame(match):
    sum = [*map(abs, range(9999))]
    return ""
def draw(): return re.sub("a", frame, "a" * 10**6)  # as a library draws frames by a user's function
for epoch in range(100):
    for i in range(0, 139, 2): step(optimizer, model(data[i:i + 2].cuda()).mean())  # one at last
    if epoch == 0: draw()
    if epoch == 90: torch.ones(2**28).cuda()
"""
    (tmp_path / "train.py").write_text(HEAD + script)
    answer = script_child.traced(tmp_path / "train.py", more_seconds=1.0)
    assert answer["requested_bytes"] > 1024 * MIB
    notes = " ".join(answer["notes"])
    assert "TimeoutError: it computes on the host for longer" in notes
    assert "different shapes" not in notes


def test_objects_have_the_shapes_of_their_tensors_and_larger_batches_are_no_growth(
    tmp_path: Path,
) -> None:
    script = """
class Pair:
    def __init__(self, x): self.left = self.right = x
class Joining(nn.Linear):
    def forward(self, pair): return super().forward(torch.cat([pair.left, pair.right]))
model, last, whole = Joining(256, 4096), nn.Linear(4096, 2), nn.Linear(4096, 4096).weight.data
weights = torch.zeros(2, 4096)
weights[:1] = whole[:1]  # as weights of images are put into those for videos
last.weight = nn.Parameter(weights)
model = nn.Sequential(model, last).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in (3, 129):
    kept = model(Pair(torch.ones(rows, 256).cuda()))
    step(optimizer, kept.mean())
"""
    (tmp_path / "train.py").write_text(HEAD + script)
    answer = script_child.traced(tmp_path / "train.py")
    assert not answer["selections"]
    assert answer["batch_size"] == 3
    assert "different shapes" in str(answer["notes"])
    assert "grows by" not in str(answer["notes"])


def test_a_loader_makes_few_samples_that_nothing_asks_for(tmp_path: Path) -> None:
    made = tmp_path / "made"
    script = f"""
class Samples(Dataset):
    __len__ = lambda self: 64
    def __getitem__(self, number):
        open({str(made)!r}, "a").write(".")
        return torch.ones(256)
model = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = iter(DataLoader(Samples(), num_workers=8))
for _ in range(2): step(optimizer, model(next(loader).cuda()).mean())
"""
    (tmp_path / "train.py").write_text(HEAD + script)
    assert script_child.traced(tmp_path / "train.py")["batch_size"] == 1
    assert 2 <= len(made.read_text()) <= 4


def test_a_worker_of_the_trace_sends_more_tensors_than_files_may_be_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    loader: DataLoader[object] = DataLoader(TensorDataset(torch.zeros(1)), num_workers=1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        for count in (1, 500):
            found = as_worker(loader, [torch.ones(2) for _ in range(count)].copy)
            assert len(found) == count
            assert not found[0].is_shared()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_an_evaluation_leaves_is_there_in_the_next_epoch_of_a_library(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "engines.py"
    library.parent.mkdir()
    library.write_text(
        """
class Engine:
    def __init__(self, run): self.run_one, self.count = run, 0
    def run(self, loader, epochs=1, after=int):
        for _ in range(epochs):
            for batch in loader:
                self.count += 1
                self.output = self.run_one(self, batch)
            after()
"""
    )
    script = """
import sys
from gpumemnet.tracing.script import observer
observer.MORE_EVENTS = observer.MORE_SECONDS = 0
sys.path.append(sys.path[0] + "/site-packages")
from engines import Engine
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def update(engine, batch):
    model(batch[0].cuda()).mean().backward()
    if engine.count % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
def evaluate(engine, batch):
    with torch.no_grad(): return model(batch[0].cuda()).repeat(1, 2**16)
trainer, evaluator = Engine(update), Engine(evaluate)
train = DataLoader(TensorDataset(torch.ones(200, 64)), 4)
test = DataLoader(TensorDataset(torch.ones(16, 64)), 16)
trainer.run(train, 3, lambda: evaluator.run(test))
"""
    (tmp_path / "train.py").write_text(HEAD + script)
    answer = script_child.traced(tmp_path / "train.py")
    later = {each["name"]: each["requested_bytes"] for each in answer["phases"]}
    assert later["optimizer of a later step"] > 256 * MIB


def test_a_teacher_that_was_evaluated_before_runs_beside_each_graph(tmp_path: Path) -> None:
    script = """
teacher, student = wide(3), wide(1)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
def taught(x):
    with torch.no_grad(): return teacher(x)
for _ in range(5): taught(torch.ones(32768, 4096).cuda())
for _ in range(4):
    x = torch.ones(32768, 4096).cuda()
    step(optimizer, student(x).square().mean() + taught(x).mean())
"""
    (tmp_path / "train.py").write_text(HEAD + script)
    answer = script_child.traced(tmp_path / "train.py")
    later = {each["name"]: each["requested_bytes"] for each in answer["phases"]}
    assert later["forward of a later step"] > (4 * 64 + 4 * 512) * MIB


def test_later_epochs_have_their_last_batch(tmp_path: Path) -> None:
    """Beside what an evaluation has left, a smaller batch splits other blocks."""
    sizes = tmp_path / "sizes"
    script = f"""
import os
told = os.open({str(sizes)!r}, os.O_CREAT | os.O_WRONLY)
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = DataLoader(TensorDataset(torch.ones(50, 64)), 4)
for epoch in range(3):
    os.write(told, b" ")
    for [x] in train:
        os.write(told, b"%d" % len(x))
        step(optimizer, model(x.cuda()).mean())
"""
    (tmp_path / "train.py").write_text(HEAD + script)
    assert isinstance(script_child.traced(tmp_path / "train.py"), dict)
    assert sizes.read_text().split()[-1] == "442"


def test_loops_run_to_their_end_where_it_is_an_error_that_they_were_left(tmp_path: Path) -> None:
    script = """
from gpumemnet.tracing.script import loops
loops._SECONDS = loops._MORE_SECONDS = loops._MOST_SECONDS = loops._REST_SECONDS = 1e-6
loops._PATIENCE = 10**9
model = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = {}
for i in range(99):
    with torch.no_grad(): seen[f"state {i}"] = float(model(torch.ones(8, 256).cuda()).mean())
for _ in range(2): step(optimizer, model(torch.full((8, 256), seen["state 50"]).cuda()).mean())
"""
    (tmp_path / "train.py").write_text(HEAD + script)
    answer = script_child.traced(tmp_path / "train.py")
    assert not answer["error"]
    assert "ran to their own end" in str(answer["notes"])


@pytest.mark.parametrize("size", [256, "number"])
def test_a_loader_reads_few_slow_samples_that_are_alike(tmp_path: Path, size: object) -> None:
    made = tmp_path / "made"
    script = f"""
from gpumemnet.tracing.script import longest_batch
longest_batch._BATCH_SECONDS = 0
class Samples(Dataset):
    __len__ = lambda self: 200
    def __getitem__(self, number):
        open({str(made)!r}, "a").write(".")
        return torch.ones({size})
def padded(samples): return torch.stack([nn.functional.pad(x, (0, 256 - len(x))) for x in samples])
class Together(Samples): __getitems__ = lambda self, numbers: torch.ones(len(numbers), 256)
next(iter(DataLoader(Together(), 2, collate_fn=nn.Identity())))
model = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = iter(DataLoader(Samples(), 100, collate_fn=padded, num_workers=1))
for _ in range(2): step(optimizer, model(next(loader).cuda()).mean())
"""
    (tmp_path / "train.py").write_text(HEAD + script)
    assert script_child.traced(tmp_path / "train.py")["batch_size"] == 100
    assert len(made.read_text()) == (64 if size == 256 else 200)


def test_a_trainer_runs_no_further_pass_of_a_step_with_a_batch_that_is_no_larger() -> None:
    ran: list[int] = []

    class Trainer:
        is_deepspeed_enabled = create_accelerator_and_postprocess = False
        accelerator = SimpleNamespace(sync_gradients=False)

        def training_step(self, model: None, inputs: dict[str, torch.Tensor]) -> None:
            ran.append(inputs["ids"].shape[1])

        def get_batch_samples(
            self, batches: Iterator[int], num_batches: int
        ) -> tuple[list[int], None]:
            return list(islice(batches, num_batches)), None

    ready = preparations(device_profile("H200"), lambda: (0, 0), 1, lambda note: None)
    ready["transformers.trainer"](SimpleNamespace(Trainer=Trainer))
    for length in (9, 5, 5, 8, 7, 3):
        Trainer().training_step(None, {"ids": torch.zeros(2, length)})
    assert ran == [9, 5, 8]
    older = type("Older", (), {"training_step": lambda trainer, model, inputs: 1})
    ready["transformers.trainer"](SimpleNamespace(Trainer=older))
    assert older().training_step(None, {}) == 1
    few = iter((1, 2))
    assert [len(Trainer().get_batch_samples(few, 4)[0]) for _ in range(3)] == [4, 4, 0]


@pytest.mark.parametrize("is_last", [False, True])
def test_older_versions_of_lightning_validate_where_a_loader_ends(is_last: bool) -> None:
    class TrainingEpochLoop:
        trainer = SimpleNamespace(val_check_batch=10)

        def _should_check_val_fx(self, index: int, is_last_batch: bool) -> bool:
            return bool(self.trainer.val_check_batch == math.inf)

    ready = preparations(device_profile("H200"), lambda: (0, 0), 1, lambda note: None)
    name = "pytorch_lightning.loops.epoch.training_epoch_loop"
    ready[name](SimpleNamespace(TrainingEpochLoop=TrainingEpochLoop))
    assert TrainingEpochLoop()._should_check_val_fx(3, is_last) == is_last
    assert TrainingEpochLoop.trainer.val_check_batch == 10
    ready[name](SimpleNamespace())  # of another version
