import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from gpumemnet.physics.saved_tensors import reserve_elements
from tests.gpumemnet.tracing.corrected import meta, operators, saved

HALF = torch.float16


@pytest.mark.parametrize(("kind", "reserve_bytes"), [("lstm", 736_000_000), ("gru", 864_000_000)])
def test_the_reported_sizes(kind: str, reserve_bytes: int) -> None:
    # PyTorch's issue 2895: four layers of 320, 25,000 samples times steps
    assert (
        4 * reserve_elements(kind, steps=25_000, hidden=320, layers=4, directions=1)
        == reserve_bytes
    )


@pytest.mark.parametrize("batch_first", [True, False])
def test_an_lstm_keeps_input_states_weights_output_and_reserve(batch_first: bool) -> None:
    layer = nn.LSTM(4, 6, 2, batch_first=batch_first, device="meta")
    found = saved(lambda: layer(meta(*((3, 7, 4) if batch_first else (7, 3, 4))))[0])
    steps_first = "[3, 7, {}]" if batch_first else "[7, 3, {}]"
    assert found == {
        "float32" + steps_first.format(4): 1,
        "float32" + steps_first.format(6): 1,
        "float32[2, 3, 6]": 2,
        "float32[24, 4]": 1,
        "float32[24, 6]": 3,
        "float32[24]": 4,
        f"uint8[{4 * 7 * 3 * 6 * (5 * 2 + 1)}]": 1,
    }


def test_gradients_come_to_every_weight() -> None:
    layer = nn.LSTM(4, 6, 2, bidirectional=True, device="meta")
    x = meta(7, 3, 4)
    saved(lambda: layer(x)[0])
    assert x.grad is not None
    assert all(
        parameter.grad is not None and parameter.grad.shape == parameter.shape
        for parameter in layer.parameters()
    )
    # one buffer, as _cudnn_rnn_backward makes it
    assert (
        len(
            {
                parameter.grad.untyped_storage()._cdata
                for parameter in layer.parameters()
                if parameter.grad is not None
            }
        )
        == 1
    )


def test_a_gru_under_autocast_copies_its_weights_into_one_buffer() -> None:
    layer = nn.GRU(4, 6, device="meta")

    def run() -> Tensor:
        with torch.autocast("cuda"):
            output: Tensor = layer(meta(7, 3, 4))[0]
            return output

    found = saved(run)
    elements = sum(parameter.numel() for parameter in layer.parameters())
    assert found[f"float16[{elements}]"] == 1
    assert found[f"uint8[{2 * 7 * 3 * 6 * 6}]"] == 1
    assert layer.weight_ih_l0.grad is not None
    assert layer.weight_ih_l0.grad.dtype == torch.float32


def test_packed_sequences_reserve_for_the_longest() -> None:
    layer = nn.LSTM(4, 6, device="meta")

    def run() -> Tensor:
        packed = pack_padded_sequence(meta(3, 7, 4), torch.tensor([7, 5, 2]), batch_first=True)
        output: Tensor = layer(packed)[0].data
        return output

    assert saved(run)[f"uint8[{4 * 7 * 3 * 6 * 5}]"] == 1


@pytest.mark.parametrize(
    "layer",
    [lambda: nn.LSTM(4, 6, proj_size=3, device="meta"), lambda: nn.RNN(4, 6, device="meta")],
    ids=["projection", "plain"],
)
def test_what_is_not_corrected_runs_step_by_step(layer: object) -> None:
    assert callable(layer)
    assert operators(lambda: layer()(meta(7, 3, 4))[0])["addmm"] >= 7


def test_cudnn_switched_off_runs_step_by_step() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        assert operators(lambda: nn.LSTM(4, 6, device="meta")(meta(7, 3, 4))[0])["addmm"] >= 7


def test_an_lstm_cell_is_one_kernel() -> None:
    cell = nn.LSTMCell(4, 6, device="meta")
    found = saved(lambda: cell(meta(3, 4))[0])
    # _thnn_fused_lstm_cell: both gates, biases, cx, result1 (cy), result2 (the workspace); matmul:
    # inputs and weights
    assert found["float32[3, 24]"] == 3
    assert found["float32[24]"] == 2
    assert found["float32[3, 6]"] == 3  # cx, cy, and hx for the product with the weights
    assert cell.weight_ih.grad is not None
    assert cell.bias_ih.grad is not None


@pytest.mark.parametrize("bias", [True, False])
def test_a_gru_cell_is_one_kernel(bias: bool) -> None:
    cell = nn.GRUCell(4, 6, bias=bias, device="meta")
    found = saved(lambda: cell(meta(3, 4)))
    assert found["float32[3, 30]"] == 1  # the workspace
    assert found["float32[3, 18]"] == 2
    assert all(
        parameter.grad is not None and parameter.grad.shape == parameter.shape
        for parameter in cell.parameters()
    )


def test_cells_under_autocast_compute_in_half() -> None:
    cell = nn.GRUCell(4, 6, device="meta")

    def run() -> Tensor:
        with torch.autocast("cuda"):
            output: Tensor = cell(meta(3, 4))
            return output

    assert saved(run)["float16[3, 30]"] == 1
