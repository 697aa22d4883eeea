"""A graph convolution with a sparse adjacency matrix on the GPU, in COO as it is read and in
CSR."""

import torch
from torch import nn

NODES, EDGES = 1000, 5000
indices = torch.stack((torch.arange(EDGES) % NODES, torch.arange(EDGES) // NODES))
adjacency = torch.sparse_coo_tensor(indices, torch.ones(EDGES), (NODES, NODES)).cuda()
rows = torch.eye(NODES).to_sparse_csr().cuda()
first, second = nn.Linear(64, 128).cuda(), nn.Linear(128, 8).cuda()
optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
features, labels = torch.randn(NODES, 64).cuda(), torch.randint(0, 8, (NODES,)).cuda()
for _ in range(3):
    hidden = torch.spmm(adjacency, first(features)).relu()
    loss = nn.functional.cross_entropy(torch.sparse.mm(rows, second(hidden)), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
