"""Private names of PyTorch: the installed version has them, a missing one is named, and nothing
else touches one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gpumemnet
from gpumemnet.errors import UnsupportedTorchError
from gpumemnet.torch_private.names import aten

"""Names with an underscore that Python itself documents."""


def traced() -> gpumemnet.TraceAnswer:
    return gpumemnet.trace(nn.Linear(4, 4), torch.empty(2, 4, device="meta"), optimizer="sgd")


def test_an_untested_version_is_traced_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = traced()
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    answer = traced()
    assert answer.expected_bytes == expected.expected_bytes
    note, *others = answer.notes
    assert tuple(others) == expected.notes
    assert note.startswith(
        "Traced with PyTorch 2.99.1+cpu, which this version of gpumemnet was not tested with"
    )


def test_a_missing_name_stops_a_trace_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    monkeypatch.delattr(torch._C, "_current_autograd_node")
    with pytest.raises(
        UnsupportedTorchError,
        match=r"torch\._C\._current_autograd_node is missing: install a tested PyTorch",
    ):
        traced()


def test_names_for_several_gpus_do_not_stop_a_trace_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nn.parallel.DistributedDataParallel, "_pre_forward")
    assert traced().expected_bytes > 0
    with pytest.raises(
        UnsupportedTorchError, match=r"DistributedDataParallel\._pre_forward is missing"
    ):
        gpumemnet.trace(nn.Linear(4, 4), torch.empty(2, 4, device="meta"), parallel="ddp", ranks=2)


def test_an_operator_that_is_missing_is_named() -> None:
    assert aten.add is torch.ops.aten.add
    with pytest.raises(
        UnsupportedTorchError, match=r"torch\.ops\.aten\.no_such_operator is missing"
    ):
        aten.no_such_operator  # noqa: B018
