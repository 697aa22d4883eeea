"""Saves a dataset, then checkpoints in the ways that training codes do, in the folder that it is
given; ``seen`` holds what other programs would read while it runs."""

import io
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

assert type(print) is type(open)  # scripts ask so whether they have replaced print already
folder = Path(sys.argv[1])


def seen(name):  # by another program, which a trace does not watch
    subprocess.run(["cp", folder / name, folder / "seen" / name], check=True)


(folder / "runs").mkdir()
(folder / "runs" / "config.yaml").write_text("epochs: 1")
subprocess.run(["cp", __file__, folder / "runs" / "train.py.backup"], check=True)
subprocess.run(["mkdir", folder / "runs" / "other"], check=True)
subprocess.run(["cp", __file__, folder / "runs" / "other" / "weights"], check=True)
(folder / "logs").mkdir()
(folder / "old.log").rename(folder / "logs" / "old.log")
shutil.rmtree(folder / "checkpoint-1")
(folder / "checkpoint-1").mkdir()
(folder / "stale.pt").unlink()
(folder / "tmp-2").mkdir()
(folder / "tmp-2" / "config.json").write_text("{}")
(folder / "tmp-2").rename(folder / "checkpoint-2")
shutil.rmtree(folder / "checkpoint-2")
torch.save({"vocabulary": torch.arange(5)}, folder / "data.pt")
buffer = io.BytesIO()
torch.save([torch.ones(3)], buffer)
(folder / "processed.pt").write_bytes(buffer.getvalue())

model = nn.Linear(64, 32).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.write(b"a cache")
    (folder / "_SUCCESS").touch()
    with open(folder / f"{step}.diff", "x") as file:  # noqa: PTH123
        file.write("+")
    model(torch.ones(8, 64).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}
    torch.save(state, folder / "last.tmp")
    os.replace(folder / "last.tmp", folder / "last.pt")  # noqa: PTH105
    (folder / "linked.pt").unlink(missing_ok=True)
    os.link(folder / "last.pt", folder / "linked.pt")
    (folder / "latest.pt").unlink(missing_ok=True)
    (folder / "latest.pt").symlink_to("linked.pt")
    seen("last.pt")
    shutil.copy(folder / "last.pt", folder / "best.pt")
    with open(folder / "handle.pt", "wb") as file:  # noqa: PTH123
        torch.save(model, file)
    seen("handle.pt")
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    (folder / "buffer.pt").write_bytes(buffer.getvalue())
    (folder / "new.pt").write_bytes(buffer.getvalue())
    seen("buffer.pt")
    save_file(model.state_dict(), folder / "model.safetensors")
    seen("model.safetensors")
    torch.save(model.state_dict(), "/nonexistent/model.pt")
    torch.save({"optimizer": optimizer}, folder / "whole.pt")
    pickle.dumps(torch.ones(2))  # saves its storage by torch.save
    for mode in ("a", "w"):
        with open(folder / "results.csv", mode) as file:  # noqa: PTH123
            file.write("1,0.5")
    assert torch.load(folder / "last.pt")["model"]["weight"].is_cuda
    assert torch.load(folder / "best.pt", map_location="cpu")["epoch"] == 1
    assert torch.load(folder / "handle.pt", weights_only=False).bias.is_cuda


def interrupted(
    path, unlink=Path.unlink, **options
):  # as where workers of a data loader die meanwhile
    os.kill(os.getpid(), signal.SIGCHLD)
    os.kill(os.getpid(), signal.SIGALRM)  # the deadline
    unlink(path, **options)


def fail(number, frame):
    raise RuntimeError


threading.Thread(target=threading.Event().wait, daemon=True).start()  # gets the signals
for number in (signal.SIGCHLD, signal.SIGALRM):
    signal.signal(number, fail)
Path.unlink = interrupted
