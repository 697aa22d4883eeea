"""Mamba of transformers, without its kernels."""

import torch
from transformers import MambaConfig, MambaForCausalLM

model = MambaForCausalLM(
    MambaConfig(vocab_size=32_000, hidden_size=256, num_hidden_layers=2, state_size=16)
).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(4):
    ids = torch.randint(0, 32_000, (2, 64)).cuda()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
