"""Calibration to a site: what fifty jobs or one probe change, for whom, and what they cannot
carry."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpumemnet.errors import DatasetError, InvalidJobError, InvalidRequestError
from gpumemnet.gpu import CONTEXT_GROWTH_BYTES
from gpumemnet.job.json_codec import job_to_dict
from gpumemnet.job.measurement import Measurement
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.bundle import Bundle, load_bundle, save_bundle, shipped_bundles
from gpumemnet.predict.predictor import Predictor
from gpumemnet.site.calibration import MIN_JOBS, Calibration, ModelCalibration, calibrate
from gpumemnet.site.calibration_cards import calibrated_cards
from gpumemnet.site.observations import read_site_rows
from gpumemnet.site.releases import Registry
from gpumemnet.units import MIB
from tests.jobs import small_job
from tests.registries import other_bundle, problems, shipped
from tests.sites import A100, DATASETS, gpumemnet, probes, published, site_rows, write_rows

NAME = "mlp"
MLPS = [shipped(NAME)]


def calibration_of(
    tmp_path: Path, rows: list[Measurement], bundles: list[Bundle] = MLPS, **options: Any
) -> Calibration:
    return calibrate(
        read_site_rows([write_rows(tmp_path / "rows.parquet", rows)]), bundles, **options
    )


def model_of(calibration: Calibration, name: str = NAME) -> ModelCalibration:
    return next(model for model in calibration.models if model.bundle.card.name == name)


def predictor_of(calibration: Calibration, tmp_path: Path) -> Predictor:
    cards = calibrated_cards(calibration)
    saved = [
        save_bundle(tmp_path / f"bundle-{number}", bundle.model, card)
        for number, (bundle, card) in enumerate(cards)
    ]
    return Predictor([load_bundle(bundle.source) for bundle in saved])


def plain(job: TrainingJob) -> TrainingJob:
    return replace(job, traced_peak_bytes=None)


def others(rows: list[Measurement], count: int = 400) -> tuple[list[TrainingJob], np.ndarray]:
    """Jobs of the same simulated site that are not among ``rows``, with what they took."""
    known = {row.architecture for row in rows} | {row.architecture_key for row in rows}
    left = [row for row in published() if row.architecture_key not in known][:count]
    return [plain(row.job) for row in left], np.array(
        [float(row.label_bytes or 0) - 600 * MIB for row in left]
    )


def test_fifty_jobs_of_another_context_take_the_error_away_and_keep_the_promise(
    tmp_path: Path,
) -> None:
    held: dict[float, list[float]] = {0.9: [], 0.95: [], 0.99: []}
    for seed in range(3):
        rows = site_rows(50, seed=seed)
        made = calibration_of(tmp_path, rows)
        model = model_of(made)
        assert model.site.shift_bytes / MIB == pytest.approx(1429 - 600, abs=5)
        assert made.context.value / MIB == pytest.approx(1429 - 600, abs=5)
        assert model.before is not None
        assert model.after is not None
        assert model.before.median_error_mib > 290
        assert model.after.median_error_mib < 10
        jobs, took = others(rows)
        predictor = predictor_of(made, tmp_path / str(seed))
        errors = (
            np.abs(np.array([one.expected_bytes for one in predictor.predict_many(jobs)]) - took)
            / MIB
        )
        assert np.median(errors) < 10  # as the cross-validation said
        for coverage, shares in held.items():
            safe = np.array(
                [one.safe_bytes for one in predictor.predict_many(jobs, coverage=coverage)],
                dtype=float,
            )
            shares.append(float(np.mean(took <= safe)))
            assert np.sum(safe) < 1.25 * np.sum(took)
    # on average over calibrations; with 34 jobs for the bounds one alone may miss by several per
    # cent
    assert np.mean(held[0.9]) >= 0.86
    assert np.mean(held[0.95]) >= 0.92
    assert np.mean(held[0.99]) >= 0.96


def test_a_coverage_is_carried_by_jobs_enough_and_by_no_fewer(tmp_path: Path) -> None:
    few, many = (model_of(calibration_of(tmp_path, site_rows(count))) for count in (30, 300))
    coverages = few.bundle.card.coverages
    carried = {
        coverage
        for coverage, multiple in zip(coverages, few.site.multiples, strict=True)
        if multiple is not None
    }
    assert (few.fit_jobs, few.calibration_jobs) == (10, 20)
    assert carried == {0.5, 0.8, 0.9, 0.95}
    assert (many.fit_jobs, many.calibration_jobs) == (50, 250)
    assert many.site.multiples[coverages.index(0.99)] is not None
    assert many.site.multiples[coverages.index(0.999)] is None


def test_a_bound_that_is_not_carried_is_the_shipped_one_or_the_largest_error(
    tmp_path: Path,
) -> None:
    made = calibration_of(tmp_path, site_rows(30, shift_mib=0))
    predictor, before = predictor_of(made, tmp_path), Predictor(MLPS)
    shift = model_of(made).site.shift_bytes
    context_bytes = before.prediction_gpu(None).context.bound_bytes
    job = plain(published()[5].job)
    for coverage in (0.975, 0.99, 0.999):
        calibrated, shipped_one = (
            predictor.predict(job, coverage=coverage),
            before.predict(job, coverage=coverage),
        )
        assert calibrated.safe_bytes is not None
        assert shipped_one.safe_bytes is not None
        assert calibrated.safe_bytes >= shipped_one.safe_bytes - context_bytes + shift
    bounds = [
        predictor.predict(job, coverage=coverage).safe_bytes for coverage in MLPS[0].card.coverages
    ]
    assert bounds == sorted(bounds, key=lambda bound: bound or 0)


def test_every_other_gpu_is_answered_as_before(tmp_path: Path) -> None:
    predictor, before = (
        predictor_of(calibration_of(tmp_path, site_rows(50)), tmp_path),
        Predictor(MLPS),
    )
    job = small_job()
    for gpu in ("H100", "L40S", "NVIDIA H200"):
        one, other = predictor.predict(job, gpu=gpu), before.predict(job, gpu=gpu)
        assert (one.expected_bytes, one.safe_bytes) == (other.expected_bytes, other.safe_bytes)
    shift = predictor.predict(job).expected_bytes - before.predict(job).expected_bytes
    assert shift / MIB == pytest.approx(1429 - 600 - 524, abs=5)
    assert "calibrated at this site" in predictor.predict(job).context_source
    assert (
        predictor.predict(job, gpu="A100").expected_bytes == predictor.predict(job).expected_bytes
    )
    for name in (None, "A100", "A30"):
        alone, [among_many] = (
            predictor.predict(job, gpu=name),
            predictor.predict_many([job], gpu=name),
        )
        assert (alone.expected_bytes, alone.safe_bytes) == (
            among_many.expected_bytes,
            among_many.safe_bytes,
        )
        np.testing.assert_allclose(
            alone.probabilities, among_many.probabilities, rtol=0, atol=1e-15
        )


def test_a_model_without_jobs_of_its_own_gets_the_context(tmp_path: Path) -> None:
    cnns = other_bundle(tmp_path / "cnns", "1", "transformer", families=["cnn"])
    made = calibration_of(tmp_path, site_rows(50), [*MLPS, cnns])
    model = model_of(made, "transformer")
    assert not model.is_own
    assert set(model.site.multiples) == {None}
    assert model.site.shift_bytes == round(made.context.value)
    assert model.site.shift_bound_bytes >= model.site.shift_bytes + CONTEXT_GROWTH_BYTES


@pytest.mark.parametrize(("count", "mib", "confidence"), [(1, 824, 0.0), (3, 825, 0.75)])
def test_one_probe_that_reads_the_context_is_enough_for_it(
    tmp_path: Path, count: int, mib: int, confidence: float
) -> None:
    made = calibration_of(tmp_path, probes(count))
    assert made.is_context_read
    assert made.context.value == mib * MIB
    assert made.context.confidence == pytest.approx(confidence)  # between least and largest
    model = model_of(made)
    assert not model.is_own
    assert model.before is not None
    assert model.after is not None
    assert model.after.median_error_mib < 30 < model.before.median_error_mib


def test_runs_of_one_job_count_once(tmp_path: Path) -> None:
    rows = site_rows(MIN_JOBS)
    made = calibration_of(tmp_path, [*rows, *rows, *rows])
    assert made.jobs == MIN_JOBS
    assert len(made.left_out["another run of the same job, which took no more"]) == 2 * MIN_JOBS
    with pytest.raises(
        DatasetError, match="19 different jobs within the models' support are too few"
    ):
        calibration_of(tmp_path, rows[1:] * 5)


def test_jobs_that_ran_out_of_memory_raise_the_bounds_and_do_not_move_the_shift(
    tmp_path: Path,
) -> None:
    rows = site_rows(60)
    burst = [
        replace(row, status="oom", reason="out of memory", peak_device_bytes=None)
        if n < 12
        else row
        for n, row in enumerate(rows)
    ]
    calm, wild = model_of(calibration_of(tmp_path, rows)), model_of(calibration_of(tmp_path, burst))
    assert wild.site.shift_bytes == pytest.approx(calm.site.shift_bytes, abs=5 * MIB)
    assert (
        wild.site.multiples[wild.bundle.card.coverages.index(0.9)] is None
    )  # one in five is above any bound
    with pytest.raises(DatasetError, match="ran out of memory"):
        calibration_of(
            tmp_path,
            [replace(row, status="oom", reason="oom", peak_device_bytes=None) for row in rows],
        )


def test_the_same_rows_in_another_order_calibrate_alike(tmp_path: Path) -> None:
    rows = site_rows(50)
    one, other = calibration_of(tmp_path, rows), calibration_of(tmp_path, rows[::-1])
    assert [model.site for model in one.models] == [model.site for model in other.models]
    assert model_of(one).after == model_of(other).after


def test_a_calibrated_bundle_is_calibrated_anew_from_its_graph(tmp_path: Path) -> None:
    first = predictor_of(calibration_of(tmp_path, site_rows(50)), tmp_path / "1")
    rows = site_rows(50, shift_mib=-300, seed=4)
    again = calibration_of(tmp_path, rows, list(first.bundles))
    assert model_of(again).site == model_of(calibration_of(tmp_path, rows)).site
    before = model_of(again).before
    assert before is not None
    assert before.median_error_mib == pytest.approx(
        300, abs=10
    )  # judged is what answered until now
    second = predictor_of(again, tmp_path / "2").bundles[0].card
    assert second.version.count("+site.") == 1
    assert second.version != first.bundles[0].card.version


def test_the_card_says_what_it_was_calibrated_on(tmp_path: Path) -> None:
    made = calibration_of(tmp_path, site_rows(50))
    card = predictor_of(made, tmp_path).bundles[0].card.document
    site = card["site_calibration"]
    assert (site["gpu"], site["jobs"], site["fit_jobs"], site["calibration_jobs"]) == (
        A100,
        50,
        16,
        34,
    )
    assert site["files"] == [{"name": "rows.parquet", "sha256": next(iter(made.files.values()))}]
    assert site["base"] == {"version": "1", "sha256": shipped(NAME).sha256}
    assert "exchangeable" in site["guarantee"]
    low, high = site["shift_interval_bytes"]
    assert low <= site["shift_bytes"] <= high
    assert str(tmp_path) not in json.dumps(card)


# observations


def observation(job: TrainingJob, peak_bytes: int, **changes: Any) -> dict[str, Any]:
    said = {
        "job": job_to_dict(job),
        "gpu": "A100",
        "peak_bytes": peak_bytes,
        "source": "slurm_gpumem",
    }
    return {**said, "observed_at": "2026-01-31T12:00:00Z", **changes}


def written(path: Path, documents: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_observations_one_a_line_need_their_job(tmp_path: Path) -> None:
    documents = [observation(row.job, int(row.label_bytes or 0)) for row in site_rows(50)]
    documents += [
        {
            "prediction_id": "01890000-0000-7000-8000-000000000000",
            "source": "slurm_gpumem",
            "peak_bytes": 5000 * 2**20,
        }
    ]
    made = calibrate(read_site_rows([written(tmp_path / "seen.jsonl", documents)]), MLPS)
    assert (made.gpu, made.label_source, made.jobs) == (A100, "slurm_gpumem", 50)
    assert made.first == made.last == "2026-01-31T12:00:00+00:00"
    assert [reason for reason in made.left_out if "names a prediction" in reason]
    assert model_of(made).site.shift_bytes / MIB == pytest.approx(1429 - 600, abs=5)


def poisoned(factor: float, count: int = 60) -> list[Measurement]:
    """485 rows of a site, of which ``count`` took so many times as much."""
    rows = site_rows(485)
    wrong = [replace(row, peak_device_bytes=round((row.label_bytes or 0) * factor)) for row in rows]
    return wrong[:count] + rows[count:]


@pytest.mark.parametrize(
    ("factor", "sentence"),
    [
        (3.0, r"would become .* times as wide.*: (rows\.parquet row \d+, ){59}.*took up to"),
        (
            100.0,
            r"of 485 rows cannot be true.*(rows\.parquet row \d+, ){59}.*took more than NVIDIA A100",
        ),
        (0.01, r"of 485 rows cannot be true.*(rows\.parquet row \d+, ){59}.*: took less"),
    ],
)
def test_poisoned_rows_are_named_and_refused(tmp_path: Path, factor: float, sentence: str) -> None:
    with pytest.raises(DatasetError, match=sentence):
        calibration_of(tmp_path, poisoned(factor))


def test_one_wild_row_among_few_is_named(tmp_path: Path) -> None:
    rows = site_rows(50)
    wild = replace(rows[4], peak_device_bytes=5 * int(rows[4].label_bytes or 0))
    with pytest.raises(DatasetError, match=r"would become .*: rows\.parquet row 5\b"):
        calibration_of(tmp_path, [*rows[:4], wild, *rows[5:]])


def test_a_context_that_no_gpu_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="a CUDA context would take"):
        calibration_of(tmp_path, site_rows(50, shift_mib=8000))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "seen.jsonl, line 2: no valid JSON"),
        (
            '{"source": "psychic", "peak_bytes": 3145728, "gpu": "A100"}',
            "line 2, source: is 'psychic'",
        ),
        ('{"family": "mlp"}', "line 2"),
        ("[1]", "line 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "seen.jsonl"
    path.write_text(json.dumps(observation(small_job(), 2**31)) + "\n" + line + "\n")
    with pytest.raises((InvalidJobError, InvalidRequestError)) as caught:
        read_site_rows([path])
    assert words in str(caught.value)


# refusals


def test_rows_that_cannot_carry_a_calibration(tmp_path: Path) -> None:
    rows = site_rows(50)
    several = [replace(row, gpu="NVIDIA H200") if n < 20 else row for n, row in enumerate(rows)]
    made = calibration_of(tmp_path, several)
    assert (made.gpu, len(made.left_out["of another gpu"])) == (A100, 20)
    assert calibration_of(tmp_path, several, gpu="H200").gpu == "NVIDIA H200"
    mixed = [
        replace(row, label_source="nvml_device_difference") if n < 20 else row
        for n, row in enumerate(rows)
    ]
    assert len(calibration_of(tmp_path, mixed).left_out["of another label source"]) == 20
    with pytest.raises(DatasetError, match="no rows of NVIDIA H200"):
        calibration_of(tmp_path, rows, gpu="H200")
    with pytest.raises(InvalidRequestError, match="no profile of 'Voodoo'"):
        calibration_of(tmp_path, rows, gpu="Voodoo")
    with pytest.raises(InvalidRequestError, match="no profile of 'Voodoo 2'"):
        calibration_of(tmp_path, [replace(row, gpu="Voodoo 2") for row in rows])
    with pytest.raises(
        DatasetError, match="5 different jobs within the models' support are too few"
    ):
        calibration_of(tmp_path, rows[:5])
    with pytest.raises(DatasetError, match="says of no job what it took"):
        calibration_of(tmp_path, [])


def test_traced_labels_are_refused() -> None:
    with pytest.raises(DatasetError, match="traced labels, which are predictions themselves"):
        calibrate(read_site_rows([DATASETS / "traced_mlp_h200.parquet"]), MLPS)


# the command


def test_the_command_writes_bundles(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.parquet", site_rows(50))
    out = tmp_path / "out"
    done = gpumemnet("calibrate", rows, "--out", out)
    assert done.returncode == 0, done.stderr
    assert re.search(r"8(2[6-9]|3[0-2]) MiB \(8(2[5-9]|3[0-2]) to 8(2[6-9]|3[0-4])", done.stdout)
    for words in ("MiB, from 16 + 34 jobs", "99% bound *"):
        assert words in done.stdout
    assert {folder.name for folder in out.iterdir()} == {
        bundle.card.name for bundle in shipped_bundles()
    }
    (tmp_path / "job.json").write_text(json.dumps(job_to_dict(small_job())))
    said = json.loads(
        gpumemnet("predict", tmp_path / "job.json", "--bundle", out / NAME, "--json").stdout
    )
    assert said == json.loads(
        gpumemnet("predict", tmp_path / "job.json", "--bundle", out, "--json").stdout
    )
    plain_one = json.loads(gpumemnet("predict", tmp_path / "job.json", "--json").stdout)
    assert (said["expected_bytes"] - plain_one["expected_bytes"]) / MIB == pytest.approx(
        1429 - 600 - 524, abs=5
    )


def test_calibrated_bundles_of_a_registry_become_a_release(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.parquet", site_rows(50))
    store, out = Registry(tmp_path / "registry"), tmp_path / "site"
    done = gpumemnet("calibrate", rows, "--registry", store.folder, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["models"][0]["cross_validated"]["after"]["jobs"] == 50
    assert gpumemnet("releases", "add", "site", out, "--registry", store.folder).returncode == 0
    assert store.aliases().champion == "shipped"
    assert len(store.release("site").bundles) == len(shipped_bundles())
    assert problems(store) == []
    assert gpumemnet("releases", "promote", "site", "--registry", store.folder).returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--gpu", "H100"), "holds no rows of NVIDIA H100"),
        (("--out", "rows.parquet"), "rows.parquet"),
    ],
)
def test_the_command_refuses_in_a_sentence(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    write_rows(tmp_path / "rows.parquet", site_rows(25))
    given = [tmp_path / one if one == "rows.parquet" else one for one in options]
    done = gpumemnet("calibrate", tmp_path / "rows.parquet", *given)
    assert done.returncode == 2
    assert words in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
