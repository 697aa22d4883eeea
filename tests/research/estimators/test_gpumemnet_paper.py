"""GPUMemNet's own estimators, rebuilt: what they read of a job, what they learn, and the formulas
by hand."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from gpumemnet.job.layers import GROUP_NAMES, Layer
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.distribution import PUBLISHED_BINS
from gpumemnet.units import MIB
from models.evaluation import Answers, commonest_bin
from models.training.data import LabelledJobs, folds
from research.estimators.gpumemnet_paper import (
    ACTIVATION_ORDER,
    PaperTransformer,
    fit_paper_mlp,
    fit_paper_transformer,
    paper_features,
    paper_sequences,
)

SCHEMES = (PUBLISHED_BINS["published-2000mib"], PUBLISHED_BINS["published-1000mib"])

MLP = TrainingJob(
    family="mlp",
    batch_size=64,
    input_elements=100,
    optimizer="adam",
    precision="fp32",
    activation_function="relu",
    layers=(
        Layer("linear", 512, 51_712),
        Layer("batch_norm1d", 512, 1_024),
        Layer("relu", 512),
        Layer("dropout", 512),
        Layer("linear", 10, 5_130),
    ),
)


def with_layers(job: TrainingJob, *layers: Layer) -> TrainingJob:
    return replace(
        job, layers=layers, total_activations=None, total_parameters=None, trainable_parameters=None
    )


CNN = with_layers(
    replace(MLP, family="cnn", activation_function=None),
    *(
        Layer("conv2d", 800, 224),
        Layer("batch_norm2d", 800, 16),
        Layer("adaptive_avg_pool", 8),
        Layer("linear", 10, 90),
    ),
)


def network_and_inputs(
    jobs: Sequence[TrainingJob],
) -> tuple[PaperTransformer, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    sequences, mask = paper_sequences(jobs)
    features = torch.from_numpy(paper_features(jobs)).float()
    inputs = features, torch.from_numpy(sequences).float(), torch.from_numpy(mask)
    torch.manual_seed(0)
    return PaperTransformer(*inputs, classes=5).eval(), inputs


def test_features_are_the_papers_columns() -> None:
    angle = math.pi * ACTIVATION_ORDER.index("relu") / len(ACTIVATION_ORDER)
    amounts = [
        2,
        1,
        1,
        64,
        57_866,
        2_058,
    ]  # linear, batch norm, dropout, batch, parameters, activations
    np.testing.assert_allclose(
        paper_features([MLP]), [[*np.log1p(amounts), math.sin(angle), math.cos(angle)]]
    )

    angle = math.pi * ACTIVATION_ORDER.index("identity") / len(ACTIVATION_ORDER)
    amounts = [
        1,
        1,
        0,
        1,
        64,
        330,
        1_618,
        1_618 * 64,
    ]  # a convolution, and activations of the batch
    np.testing.assert_allclose(
        paper_features([CNN]), [[*np.log1p(amounts), math.sin(angle), math.cos(angle)]]
    )

    transformer = with_layers(
        replace(MLP, family="transformer"),
        Layer("layer_norm", 6, 2),
        Layer("linear", 6, 3),
        Layer("layer_norm", 6, 2),
    )
    assert np.expm1(paper_features([transformer]))[0, :4] == pytest.approx([1, 0, 0, 2])


def test_sequences_are_padded_and_masked() -> None:
    short = with_layers(MLP, Layer("linear", 10, 1_010), Layer("dropout", 10))
    sequences, mask = paper_sequences([short, MLP])
    assert sequences.shape == (2, 5, 3)
    assert mask.tolist() == [[True, True, False, False, False], [True] * 5]
    np.testing.assert_allclose(
        sequences[0, 0], [GROUP_NAMES.index("linear"), math.log(11), math.log(1_011)]
    )
    np.testing.assert_allclose(sequences[0, 1], [GROUP_NAMES.index("dropout"), math.log(11), 0.0])
    assert not sequences[0, 2:].any()


def test_padding_and_other_jobs_do_not_change_the_transformer_s_answer(
    synthetic: LabelledJobs,
) -> None:
    network, (features, sequences, mask) = network_and_inputs(synthetic.jobs)
    shortest = min(range(len(synthetic)), key=lambda row: len(synthetic.jobs[row].layers))
    alone, alone_mask = (
        torch.from_numpy(part) for part in paper_sequences([synthetic.jobs[shortest]])
    )
    assert alone.shape[1] < sequences.shape[1]
    with torch.no_grad():
        among_others = network(features, sequences, mask)[shortest]
        by_itself = network(features[[shortest]], alone.float(), alone_mask)[0]
    torch.testing.assert_close(by_itself, among_others, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fit", "epochs"),
    [
        (fit_paper_mlp, 100),
        pytest.param(fit_paper_transformer, 25, marks=pytest.mark.nightly),
    ],
)
def test_bins_of_unseen_jobs_are_predicted(
    synthetic: LabelledJobs, fit: Callable[..., Callable[[LabelledJobs], Answers]], epochs: int
) -> None:
    sizes = np.array([job.total_activations or 0 for job in synthetic.jobs])
    third = np.searchsorted(np.quantile(sizes, [1 / 3, 2 / 3]), sizes)
    labels = np.array([1_500.0, 2_500.0, 4_500.0])[third] * MIB
    data = replace(
        synthetic, label_bytes=labels, lower_bytes=labels - MIB, upper_bytes=labels + MIB
    )
    training, test = (data.take(rows) for rows in folds(data.groups, 3, seed=1)[0])
    answers = fit(training, SCHEMES, seed=0, epochs=epochs)(test)
    for scheme in SCHEMES:
        measured = scheme.index(test.label_bytes)
        commonest = commonest_bin(training, test, SCHEMES).bins[scheme.name]
        assert (answers.bins[scheme.name] == measured).mean() > (commonest == measured).mean() + 0.1
    predicted = answers.bins["published-1000mib"]  # the finest, though it is not the first
    np.testing.assert_array_equal(answers.expected_bytes, (predicted * 1000 + 500) * MIB)
    np.testing.assert_array_equal(answers.safe_bytes, (predicted + 1) * 1000 * MIB)


@pytest.mark.nightly
def test_jobs_that_ran_out_of_memory_are_in_the_top_class_which_has_no_bound(
    synthetic: LabelledJobs,
) -> None:
    batches = np.array([job.batch_size for job in synthetic.jobs])
    too_large = batches > np.median(batches)
    data = replace(
        synthetic,
        label_bytes=np.where(too_large, np.nan, 1_500.0 * MIB),
        lower_bytes=np.where(too_large, 7_200.0 * MIB, 1_499.0 * MIB),
        upper_bytes=np.where(too_large, np.inf, 1_501.0 * MIB),
        capacity_bytes=7_200 * MIB,
    )
    training, test = (data.take(rows) for rows in folds(data.groups, 3, seed=1)[0])
    answers = fit_paper_mlp(training, SCHEMES, seed=0, epochs=100)(test)
    predicted = answers.bins["published-1000mib"]
    assert (predicted == np.where(np.isnan(test.label_bytes), 7, 1)).mean() > 0.9
    np.testing.assert_array_equal(np.isnan(answers.safe_bytes), predicted == 7)
    assert set(answers.expected_bytes[predicted == 7]) == {7_000 * MIB}
