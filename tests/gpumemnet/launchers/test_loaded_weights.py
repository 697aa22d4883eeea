"""Weights from files that are larger than what they may take in a trace."""

from __future__ import annotations

import json
from pathlib import Path

from gpumemnet.launchers.launch_line import Launch
from gpumemnet.tracing import trace_script

SCRIPT = """
import sys, torch
from safetensors import safe_open
class Packed(torch.nn.Parameter): pass  # as bitsandbytes has
packed = Packed(torch.zeros(8))
packed.data = packed.to("cuda")
packed.data = torch.empty(0)  # as FSDP does with what another rank keeps
with safe_open(sys.argv[1], "pt") as file:
    layer = torch.nn.Linear(65536, 65536, bias=False, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(layer.weight.to("meta"))  # as accelerate's empty weights
    assert (torch.cuda.memory_allocated(), layer.weight.device.type) == (0, "meta")
    layer.weight.data = file.get_tensor("wide")
    assert file.get_slice("wide")[:8].shape == (8, 65536)
    assert file.get_tensor("few").tolist() == [0, 0]
layer.cuda()
optimizer = torch.optim.SGD(layer.parameters())
for _ in range(3):
    layer(torch.zeros(1, 65536, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_large_tensors_are_loaded_without_their_values(tmp_path: Path) -> None:
    size = 2 * 65536**2
    header = json.dumps(
        {
            "wide": {"dtype": "BF16", "shape": [65536, 65536], "data_offsets": [0, size]},
            "few": {"dtype": "BF16", "shape": [2], "data_offsets": [size, size + 4]},
        }
    ).encode()
    file, script = tmp_path / "model.safetensors", tmp_path / "script.py"
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(8 + len(header) + size + 4)
    script.write_text(SCRIPT)
    answer = trace_script(Launch(str(script), arguments=(str(file),)))
    assert answer.host is not None
    assert (answer.parts["parameter"], answer.host.tensor_bytes) == (size, size)
