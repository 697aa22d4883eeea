"""Idioms of scripts that read values which a trace does not compute; each holds 256 MiB more on one
of its ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpumemnet.units import MIB
from tests.gpumemnet.tracing import script_child

USES = """import io, math, os, pickle, torch, weakref
import numpy as np
os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"
assert torch.cuda.device_count() == 2
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
from torch import nn
from torch.utils.cpp_extension import load_inline
assert load_inline("unused", "", "__global__ void f()").f
class Scripted(torch.jit.ScriptModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
Scripted().cuda()
there, tag = io.BytesIO(), torch.serialization.location_tag
torch.serialization.location_tag = lambda storage: "cuda:0"
torch.save(torch.ones(2), there)
torch.serialization.location_tag = tag
assert torch.load(io.BytesIO(there.getvalue())).is_cuda
class Copied(nn.DataParallel):
    def replicate(self, module, devices): return [nn.Flatten(0)]
assert nn.DataParallel(nn.Identity())(torch.ones(2)).is_cuda
assert Copied(nn.Identity(), [0, 1])(torch.ones(2, 2)).ndim == 1
assert nn.DataParallel(nn.Identity(), [0, 1])(torch.ones(3, 2)).shape == (3, 2)
class Kind(torch.Tensor): pass
assert pickle.loads(pickle.dumps(torch.cuda.device_count))() == 2
assert (open.__name__, print.__name__) == ("open", "print")
model = nn.Linear(256, 256).cuda()
with torch.inference_mode(): score = model.bias.sum()
with torch.inference_mode(), torch.enable_grad(): assert not model(torch.ones(2, 256).cuda()).requires_grad
with torch.inference_mode(), torch.autocast("cuda"): assert model(torch.ones(2, 256).cuda()).dtype == torch.half
float(score)
assert not torch.equal(model.weight, model.bias)
assert torch.arange(2).type(torch.Tensor).is_floating_point()
assert torch.linalg.lstsq(model.weight, model.bias[:, None]).solution.shape == (256, 1)
torch.backends.cudnn.rnn.fp32_precision = "ieee"  # since then nothing says what allow_tf32 is
empty = nn.Linear(16384, 16384).to("meta").bias
assert empty.is_meta and not torch.empty_like(empty, device="cpu").is_meta
beams = torch.tensor(data=[[0]], device="cuda")
assert torch.take_along_dim(input=model.weight, indices=beams, dim=1).shape == (256, 1)
with torch.autocast("cuda", torch.bfloat16):
    torch.einsum("td,d->t", torch.arange(6).cuda().float().view(2, 3), torch.arange(3.0).cuda())
row = nn.Parameter(torch.arange(4.0, device="cuda"))
(row.cpu().cuda() * 2).backward(torch.arange(4).cuda().float())
assert row.grad.is_cuda
assert torch.tensor(((row.sum(), 0.0),), device="cuda").shape == (1, 2)
assert torch._C._nn._parse_to(device=0)[0] == row.device
(nn.LazyLinear(4).cuda()(row) * row * torch.randn(3, 1).expand(3, 4).cuda()[[0, 1]]).sum().backward()
assert torch.ones(3, 1).expand(3, 4).cuda().stride() == (4, 1)
pixels, laid = torch.ones(1, 4, 2, 2, device="cuda", requires_grad=True), []
last = (pixels * 1).contiguous(memory_format=torch.channels_last)
last.register_hook(lambda gradient: laid.append(gradient.is_contiguous()))
nn.functional.glu(last, 1).sum().backward()  # rules of layouts hold in a backward pass, too
assert laid == [True]
rows, used = nn.Embedding(9, 4, sparse=True).cuda(), torch.arange(4).cuda()
samples = torch.distributions.Gamma(row.abs() + 1, 1.0).rsample() * rows(used) * rows(used)
samples.sum().backward()
assert torch.zeros(1, dtype=torch.long).cuda().new([3]).tolist() == [3]
bits = nn.Parameter(torch.zeros(4, dtype=torch.uint8, device="cuda"), requires_grad=False)
padded = nn.utils.rnn.pad_sequence([model.bias, model.bias[:9]]).is_cuda
assert padded and torch.ones(2).type_as(model.bias).is_cuda and nn.functional.one_hot(bits.long()).is_cuda
wave = torch.istft(torch.complex(*model.bias[:90].view(2, 5, 9)), 8, window=model.bias[:8])
with torch.cuda.graph(torch.cuda.CUDAGraph()): bits + 1
sparse = torch.eye(4).to_sparse().cuda()
assert len((sparse + sparse).coalesce().values()) == 4 and model.weight[:2].to_sparse()._nnz() == 512
held = nn.Linear(4, 4)
same = weakref.ref(held.weight)  # as averages of weights have it
assert held.cuda(np.int64(0)).weight is same() and same().is_cuda and torch.device(np.int64(0)).type == "cuda"
held.adjacency = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
held.register_buffer("graph", torch.eye(4).to_sparse())
assert len(held.cuda().adjacency.coalesce().values()) == 4
scripted = torch.jit.script(nn.BatchNorm1d(4).cuda().eval())
with torch.no_grad(): outputs = [scripted(torch.ones(2, 4).cuda()) for _ in range(6)]
torch.where(torch.zeros_like(model.bias, dtype=torch.uint8), model.bias, 0 * model.bias).sum().backward()
torch.distributions.VonMises(model.bias, model.bias.exp()).sample()
with torch.inference_mode(): assert model.bias.clone()[: model.bias.clone().long().max()].ndim == 1
on_host = torch.zeros(2, 256)
on_host[0] = model.bias
on_host.sum().backward()
torch.jit.trace(nn.Tanh(), model.bias).save("tanh.pt")
assert torch.jit.load("tanh.pt")(model.bias).is_cuda and type(torch.ones(1).as_subclass(Kind).cuda()) is Kind
for name in ("get_device_properties", "mem_get_info", "memory_stats", "get_rng_state"):
    getattr(torch.cuda, name)(device=0)
few = torch.linspace(0, 7, 8).cuda()
joined = torch.cat([few[:1], few[few > 100], torch.empty(0).cuda(), few[-1:]])
assert torch.zeros(99)[: int(joined.sum())].shape == (7,)
largest = few.view(2, 4).max(1, keepdim=True)[0]
assert torch.zeros(99)[: int(largest.squeeze_(1).sum())].shape == (10,)
marks = torch.full((2, 4), 7)
marks[1] = few[:4]
assert torch.zeros(99)[: int(marks.sum())].shape == (34,)
nn.BatchNorm1d(4, affine=False).cuda().eval()(torch.ones(2, 4).cuda())
assert bits.is_set_to(bits.detach()) and not bits.is_set_to(bits[1:])
"""
"""What scripts do with tensors: once, before a case, as it takes longer than the case."""
START = """import math, torch
import numpy as np
from torch import nn
model = nn.Linear(256, 256).cuda()
bits = nn.Parameter(torch.zeros(4, dtype=torch.uint8, device="cuda"), requires_grad=False)
"""
STEP = """{start}optimizer = torch.optim.SGD([*model.parameters(), bits], lr=0.1)
def block(mib): return torch.zeros(mib * 2**18, device="cuda")
total, best = 0.0, 1e9
for i in range(4):
    keep = other = None
    x = torch.randn(64, 256).cuda()
    loss = model(x).pow(2).mean()
    {lines}
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
DURATIONS = (  # nothing is no duration: convolutions over it are errors
    "t = torch.arange(x[0].relu().ceil().sum().long(), device='cuda')[None].float(); "
    "nn.functional.conv1d(t, torch.ones(1, 1, 1, device='cuda'))"
)
CONDITIONS = {
    "truth": "if loss: keep = block(256)",
    "any": (
        "within = torch.vmap(lambda row: (row > 3).to(row.device) & row.new_zeros(1).bool()[:1].contiguous())\n"
        "if within(x).any(): keep = block(256)"
    ),
    "all": "if (x > 0).all(): keep = block(256)",
    "item": "value = loss.item() if x.max() > 0 else 0.0\nbest = max(best, value)\nif value > 5: keep = block(256)",
    "float": "if float(loss) > 300: keep = block(256)",
    "otherwise": "if x.sum() > 0: pass\nelse: keep = block(256)",
    "fails": "ways = []\nif x.sum() > 0: ways.append(block(256))\nkeep = ways[0]",
    "two_ways": "if x.sum() > 0: keep = block(128)\nif x.max() > 5: pass\nelse: other = block(128)",
    "equal": "are = torch.equal(x, x + 1), torch.allclose(x, x + 1)\nif are[0] and are[1]: keep = block(256)",
    "running_total": "total += loss.item()\nif total / (i + 1) > 0.5: keep = block(256)",
    "best": "value = loss.item() * 2\nif value < best - 1e-3:\n    best = value; keep = block(256)",
    "expression": "keep = block(256) if loss > 0.5 else None",
    "array": (
        "p = x.softmax(1).data[0].cpu().numpy(); __import__('numpy').random.choice(256, p=p)\n"
        "if x.cpu().numpy().mean() > 0.5: keep = block(256)"
    ),
    "scaled": (  # by their sum and their range, which is not 0
        "p = (x * loss).norm(dim=1).detach().cpu().numpy()\nassert len(set(p)) == 64 and max(p) < 1e-5\n"
        "__import__('numpy').random.choice(64, p=p / p.sum())\nkeep = block(256)"
    ),
    "list": "if x[0].tolist()[3] > 0.5: keep = block(256)",
    "key": "k = loss.gt(1).long().item()\nkeep = block({0: 1, 1: 256}[k])",
    "match": "match int(loss):\n    case 0: keep = block(1)\n    case _: keep = block(256)",
    "size": "n = int((x * loss > 0).sum())\nkeep = torch.zeros(n, 4096, device='cuda')",
    "largest": (
        "y = torch.arange(16384).cuda()\nassert y[x.flatten().argsort()].max().item() == 16383\n"
        "n = y[(x * loss)[:, 0].nonzero()[:, 0]].max().item() + 1\nkeep = torch.zeros(n, 4096, device='cuda')"
    ),
    "rounds": "n = int(((x * loss)[:, 0] > 0).sum())\nkeep = [block(4) for _ in range(n)]",
    "waiting": "while x.norm() > 1: keep = None; keep = block(256)",
    "bounded_exit": (
        "rows = []\nwhile True:\n    rows += [block(4)]\n    if (x * loss).norm() < 1: break\n"
        "    elif len(rows) == 64: break"
    ),
    "hops": (
        "h, n, hops, keep = (x * loss)[:, 0], torch.zeros(64).cuda(), 8, []\n"
        "while ((h < 0.9) & (n < hops)).byte().any(): n = n + (h < 1).float(); keep.append(block(32))"
    ),
    "ended_early": "n = 0\nwhile True:\n    n += 1\n    if x.norm() < 1: break\nkeep = block(256)",
    "padding": (
        "e = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1).cuda().eval()\n"
        "with torch.no_grad(): e(x.view(64, 32, 8), src_key_padding_mask=x[:, :32] > 0)\nkeep = block(256)"
    ),
    "read_twice": (  # by two lines, for which it is the same
        "goes = (x * loss).max() > 1\nif goes: keep = block(256)\nassert bool(goes) == ('keep' in dir())"
    ),
    "check": "assert loss < 100 and x.abs().max() < 1e4\nif loss > 100: raise ValueError\n"
    "if __import__('numpy').isnan(loss.detach().cpu()): other = block(256)\nkeep = block(256)",
    "equal_copies": 'assert (x == x.clone()).all(), "copies"\nkeep = block(256)',
    "rank": "rank = (x[0].argsort() == i + x[0].argmax()).nonzero()\nassert rank.size(0) == 1\nkeep = block(256)",
    "narrowed_mask": (
        "m = (x * loss)[:, 0] > 0\nassert len(x[(m & (torch.arange(64).cuda() < 9)).view(8, 8).flatten()]) == 9\n"
        "assert len((torch.arange(2**21).cuda() < 9).nonzero()) == 9\n"
        "w = torch.eye(1100, device='cuda')\nassert len((w @ w).nonzero()) == 1100\n"
        "assert len(x[__import__('numpy').arange(64) < 9]) == 9\n"
        "n = (x * loss)[m, 1] > 0\nkept = x[m][n]\nm[m.clone()] = n\n"
        "assert torch.cat([x, x])[torch.cat([m, m])].shape[0] == 2 * len(kept)\n"
        "k, f = torch.arange(64).cuda() < 9, (x * loss)[:, 0]\nf[~k] = 0\n"
        "for u in (k & m, k * m, f > 0, f.masked_fill(~k, 0) != 0, torch.where(k, f, 0) * f != 0):\n"
        "    assert len(x[u]) == int(u.sum()) == 9\nassert len(x[~(k & m)]) in (64, 55)\nkeep = block(256)"
    ),
    "patches": (  # as many as where no pixel is 0
        "o = ((torch.rand(32, 3, 256, 256).cuda() * loss).sum(1) != 0).float()[:, None]\n"
        "o = nn.functional.interpolate(o, size=(16, 16)).long()\n"
        "n = min((o[:, 0].sum(1)[:, 0] * o[:, 0].sum(2)[:, 0]).max(), 300)\n"
        "keep = block(int(n) * len(o.nonzero()) // 2**13)"
    ),
    "many_numbers": (  # of which more are computed than at once, and only once they are needed
        "depth = torch.zeros(2**20 + 9)\ndepth[:9] = 5.0\ny = depth.cuda()\nvalid = (y.sub_(1) / 2 > 0) & (y < 80)\n"
        "assert valid.sum() == 9 and len(y[valid]) == 9 and len(valid.nonzero()) == 9\n"
        "gate = nn.ParameterList([torch.ones(9)]).cuda()[0]\n"
        "assert len(gate.data.cpu().numpy().nonzero()[0]) == 9\nkeep = block(256)"
    ),
    "drawn": (  # a mask of many selects its share, but a single number may be anything
        "drawn = torch.rand(2**16, device='cuda')\nstate = torch.get_rng_state()\n"
        "assert 9e3 < len(x.new_zeros(2**16)[drawn < 0.15]) < 11e3\n"
        "assert 9e3 < len(torch.bernoulli(torch.full((2**16,), 0.15).cuda()).nonzero()) < 11e3\n"
        "assert torch.equal(state, torch.get_rng_state())\nkeep = None\n"
        "if (drawn < 0.15).any(): keep = block(256)\nif drawn[0] > 2: keep = None"
    ),
    "labels": (
        "y = torch.tensor([[0.0], [1.0], [1.0]]).cuda()\nm = torch.ones(2, 4, device='cuda')\n"
        "m[:, 2:] = 0\nn = sum(y.view(-1).tolist()) + len(m.nonzero()) + int((y > 0).sum())\n"
        "n += int(torch.triu(x.new_ones(2, 2)).bool().sum()) - len(torch.as_tensor([loss] * 3))\n"
        "z = torch.zeros_like(x[:3, :2], dtype=torch.bool)\nz[[True, False, True], :] = True\n"
        "n += int(z.sum()) - len(x[:3][z[:, 0]]) * (type(loss.item()) is float) - 2\n"
        "e = [x.new(2), x.new_empty(2), torch.empty(2, device='cuda'), torch.zeros_like(x[0])]\n"
        "for each in e: each[:2] = x.new_tensor([1.0, i])\n"
        "n += int(max(each[0] for each in e)) - 1\n"
        "torch.distributions.Beta(model.weight[0].exp(), 1.0).rsample().sum().backward()\n"
        "keep = [block(32) for _ in range(int(n))]"
    ),
    "sliced": (  # and what is printed, or asked whether it is finite, decides nothing
        "s = (x * loss).sum().long() * 8\nassert x[0, s : s + 32].shape[0] == 32\nkeep = block(256)\n"
        "rows = [0] * 4\nrows[i] = loss.detach().cpu().numpy()\n"
        "if i % 2 == 0 and not math.isnan(float(loss)): print('%f' % math.log(loss))"
    ),
    "usual_durations": (  # one step for each, and at least as many as the code says
        "d = torch.ceil((x * loss)[:, 0].exp() * (x[:, 0] != 0)) * 1.0\n"
        "n = torch.clamp_min(d.sum() / torch.tensor(4.0), 1).long().max()\n"
        "assert len(x.repeat_interleave(d.long().clamp(min=1), 0)) == 64\n"
        "keep = torch.zeros(n, 2**22, device='cuda')"
    ),
    "durations": f"{DURATIONS}\nkeep = block(256)",
    "later_durations": f"if i == 3:\n    {DURATIONS}\n    keep = block(256)",
    "flag": (  # of which no way is open once it is written
        "flag = torch.Tensor([False]).cuda() if i == 0 else flag\n"
        "flag.data.copy_(torch.Tensor([True]))\nkeep = block(128)\n"
        "if not flag: other = block(256)\nif flag.item() == 1: other = block(128)\n"
        "labels = torch.arange(64).cuda() % 4\n"  # whole numbers, and so are counts of them
        "if (labels == 7).float().sum() > 0: keep = block(512)"
    ),
    "failed": "if i: score = math.log10(0)\nkeep = block(256 * (i > 1))",
    "told": (  # and saved, which decides nothing, as dividing by a number does not
        "def of(loss): return loss.detach().cpu().numpy() / 2\nvalue = of(loss) + loss.item()\nbad = 0\n"
        "if value < best:\n    best = value; torch.save(model.state_dict(), 'best.pt')\nelse: bad += 1\n"
        "if bad > 3: break\nis_best = value > 5\nif is_best: print(value / loss)\nkeep = block(256)"
    ),
    "skipped_step": "if loss < 1e6: keep = block(256)\nelse: continue",
}
MIXTURE = """import torch
from torch import nn
E, K, D, H, T = 8, 2, 256, 1024, 4096
class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D)) for _ in range(E)
        )
    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).topk(K, dim=-1)
        flat, y = chosen.view(-1), torch.zeros_like(x)
        order = flat.argsort()
        {lines}
        return y
model = Mixture().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(T, D).cuda()).pow(2).mean().backward()
    optimizer.step(); optimizer.zero_grad()
"""
EXPERTS = {
    "mask": """for e, expert in enumerate(self.experts):
    mask = (chosen == e).any(-1)
    if mask.any():
        y[mask] = y[mask] + expert(x[mask])""",
    "one_hot": """mask = nn.functional.one_hot(chosen, E).permute(2, 1, 0)
for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
    slot, rows = torch.where(mask[e].squeeze(0))
    y.index_add_(0, rows, self.experts[int(e)](x[rows]) * weight[rows, slot, None])""",
    "counts": """ends = flat.bincount(minlength=E).cpu().numpy().cumsum(0)
for e, end in enumerate(ends):
    start = 0 if e == 0 else ends[e - 1]
    if start == end: continue
    rows = order[start:end] // K
    y.index_add_(0, rows, self.experts[e](x[rows]))""",
    "parts": """parts = x[order // K].split(flat.bincount(minlength=E).tolist())
found = [expert(part) for expert, part in zip(self.experts, parts)]
y.index_add_(0, order // K, torch.cat(found))""",
}
KEPT_MIB = 4 * (2 * 4096 * (256 + 1024) + 4096 * 256) / MIB
"""Inputs of the two layers of each expert, of two experts for each token, and the output."""


def traced(name: str, text: str, lines: str, folder: Path) -> Any:
    indent = " " * (4 if text is STEP else 8)
    start = USES if name == "truth" else START
    lines = lines.replace("\n", f"\n{indent}")
    (folder / f"{name}.py").write_text(text.format(start=start, lines=lines))
    return script_child.traced(folder / f"{name}.py")


@pytest.mark.parametrize("name", CONDITIONS)
def test_the_larger_way_is_found(name: str, tmp_path: Path) -> None:
    answer = traced(name, STEP, CONDITIONS[name], tmp_path)
    assert isinstance(answer, dict), answer
    assert 256 <= answer["requested_bytes"] / MIB < 280
    assert any(f"{name}.py line" in note for note in answer["notes"]) == (name != "flag")
    ways = {"item": 1, "sliced": 0, "told": 0}  # which number is taken is no way
    assert len(answer["branches"]) == ways.get(name, len(answer["branches"]))


@pytest.mark.parametrize("name", EXPERTS)
def test_each_expert_gets_its_share(name: str, tmp_path: Path) -> None:
    answer = traced(name, MIXTURE, EXPERTS[name], tmp_path)
    assert isinstance(answer, dict), answer
    assert KEPT_MIB <= answer["parts"]["saved_activation"] / MIB < 1.5 * KEPT_MIB
    assert any("topk was taken to pick all 8 equally often" in note for note in answer["notes"])
