"""The runtime for MLServer answers as the predictor does; MLServer itself is replaced by the few
names that the runtime takes from it."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpumemnet import Predictor, job_from_dict

FOLDER = Path(__file__).parents[2] / "integrations" / "mlserver"
JOB = json.loads((FOLDER.parents[1] / "examples" / "mlp_job.json").read_text())


class InferenceError(Exception):
    pass


class MLModel:
    name = "gpumemnet"
    settings = SimpleNamespace(parameters=None)


class StringCodec:
    @staticmethod
    def decode_input(tensor: Any) -> list[str]:
        return list(tensor.data)

    @staticmethod
    def encode_output(name: str, texts: list[str]) -> Any:
        return SimpleNamespace(name=name, data=texts)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    names: dict[str, dict[str, Any]] = {
        "mlserver": {"MLModel": MLModel},
        "mlserver.codecs": {"StringCodec": StringCodec},
        "mlserver.errors": {"InferenceError": InferenceError},
        "mlserver.types": {"InferenceRequest": object, "InferenceResponse": SimpleNamespace},
    }
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(FOLDER))
    module_name, _, class_name = json.loads((FOLDER / "model-settings.json").read_text())[
        "implementation"
    ].partition(".")
    model = getattr(__import__(module_name), class_name)()
    asyncio.run(model.load())
    yield model
    del sys.modules[module_name]


def ask(runtime: Any, jobs: list[Any], **options: Any) -> list[Any]:
    parameters = SimpleNamespace(model_dump=lambda: {"content_type": None, **options})
    tensor = SimpleNamespace(data=[json.dumps(job) for job in jobs])
    answer = asyncio.run(runtime.predict(SimpleNamespace(inputs=[tensor], parameters=parameters)))
    assert (answer.model_name, answer.outputs[0].name) == ("gpumemnet", "prediction")
    return [json.loads(text) for text in answer.outputs[0].data]


def test_it_answers_as_the_predictor(runtime: Any) -> None:
    unusual = {**JOB, "optimizer": "adafactor", "batch_size": 10**6}
    predictor = Predictor.default()
    for job, answer in zip((JOB, unusual), ask(runtime, [JOB, unusual]), strict=True):
        prediction = predictor.predict(job_from_dict(job))
        assert answer["expected_bytes"] == prediction.expected_bytes
        assert answer["safe_bytes"] == prediction.safe_bytes
        assert answer["reasons"] == list(prediction.reasons)


def test_its_options_are_those_of_a_prediction(runtime: Any) -> None:
    [answer] = ask(runtime, [JOB], coverage=0.95, gpu="H100")
    expected = Predictor.default().predict(job_from_dict(JOB), coverage=0.95, gpu="H100")
    assert (answer["safe_bytes"], answer["gpu"]) == (expected.safe_bytes, expected.gpu)


@pytest.mark.parametrize(
    ("jobs", "options", "field"),
    [
        ([JOB, {**JOB, "batch_size": 0}], {}, "batch_size"),
        ([JOB], {"gpu": "Q9000"}, "gpu"),
    ],
)
def test_a_mistake_names_its_field(
    runtime: Any, jobs: list[Any], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InferenceError, match=field):
        ask(runtime, jobs, **options)
