"""The loop of PyTorch's tutorials."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = TensorDataset(torch.randn(1000, 256), torch.randint(10, (1000,)))
    loader = DataLoader(data, batch_size=arguments.batch_size, shuffle=True)
    model = nn.Sequential(
        nn.Linear(256, arguments.width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(arguments.width, 10)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        total = 0.0
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: {total / len(loader):.3f}")


if __name__ == "__main__":
    main()
