"""A recurrent model of samples of several lengths, packed so that no padding is computed."""

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.narrow = nn.Linear(64, 256), nn.Linear(256, 8)
        self.recurrent = nn.GRU(8, 16, batch_first=True)

    def forward(self, samples, lengths):
        packed = pack_padded_sequence(samples, lengths, batch_first=True, enforce_sorted=False)
        features = packed._replace(data=self.narrow(self.hidden(packed.data).sigmoid()))
        output, _ = self.recurrent(features)
        assert isinstance(output, PackedSequence)
        return pad_packed_sequence(output, batch_first=True)[0]


model = Tagger().to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(16, 50, 64).to("cuda"), torch.arange(35, 51)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
