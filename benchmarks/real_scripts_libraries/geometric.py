"""Graph networks of PyTorch Geometric on one random graph, with a mask of training nodes."""

import sys

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

LAYERS = {
    "gcn": lambda a, b: GCNConv(a, b),
    "gat": lambda a, b: GATConv(a, b, heads=1),
    "sage": lambda a, b: SAGEConv(a, b),
}


class Network(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = LAYERS[kind](1433, 64), LAYERS[kind](64, 7)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        x = F.dropout(
            F.relu(self.first(F.dropout(x, training=self.training), edges)), training=self.training
        )
        return self.second(x, edges)


data = Data(
    x=torch.rand(2708, 1433),
    edge_index=torch.randint(0, 2708, (2, 10_556)),
    y=torch.randint(0, 7, (2708,)),
)
data.train_mask = torch.arange(2708) < 140
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data, model = data.to(device), Network(sys.argv[1]).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(10):
    model.train()
    optimizer.zero_grad()
    output = model(data.x, data.edge_index)
    loss = F.cross_entropy(output[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    accuracy = (output.argmax(dim=1) == data.y)[data.train_mask].float().mean()
    print(f"{epoch:03d} {loss:.4f} {float(accuracy):.3f}")
