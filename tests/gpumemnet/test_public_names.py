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


def test_every_name_is_there() -> None:
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
