"""The public surface: its names, and what importing it loads."""

import subprocess
import sys

import gpumemnet

HEAVY = ("torch", "pandas", "sklearn", "matplotlib", "pyarrow", "onnxruntime", "fastapi", "scipy")


def loaded_by(statement: str) -> set[str]:
    script = f"import sys\n{statement}\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_names_are_these() -> None:
    assert gpumemnet.__all__ == [
        "AsyncClient",
        "BinScheme",
        "Bundle",
        "BundleCard",
        "Client",
        "DeviceProfile",
        "Prediction",
        "PredictionOptions",
        "PredictionTable",
        "Estimator",
        "FEATURE_COLUMNS",
        "GpumemnetError",
        "JobTable",
        "Layer",
        "PUBLISHED_BINS",
        "Predictor",
        "RayResources",
        "SEQUENCE_COLUMNS",
        "TraceAnswer",
        "TrainingJob",
        "TrainingOptions",
        "bins_of_width",
        "device_profile",
        "device_profiles",
        "feature_matrix",
        "fit",
        "job_from_dict",
        "job_from_json",
        "job_to_dict",
        "job_to_json",
        "large_tensors_on_meta",
        "layer_sequence",
        "load_bundle",
        "named_bins",
        "plan",
        "ray_resources",
        "shipped_bundles",
        "trace",
    ]
    assert all(getattr(gpumemnet, name) is not None for name in gpumemnet.__all__)
    assert not hasattr(gpumemnet, "pandas")


def test_importing_loads_nothing_heavy() -> None:
    assert loaded_by("import gpumemnet") == set()


def test_predicting_loads_onnxruntime_and_nothing_else_heavy() -> None:
    job = "gpumemnet.TrainingJob(family='mlp', batch_size=8, input_elements=4, optimizer='adam', precision='fp32',"
    job += " total_activations=100, total_parameters=100)"
    assert loaded_by(f"import gpumemnet\ngpumemnet.Predictor.default().predict({job})") == {
        "onnxruntime"
    }


def test_the_command_line_starts_light() -> None:
    assert loaded_by("import gpumemnet.cli") == set()
