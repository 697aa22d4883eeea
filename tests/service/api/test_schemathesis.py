"""Schemathesis asks every operation of the API's description: no failure, and no answer that the description does not allow."""

import os

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CASES = int(os.environ.get("GPUMEMNET_SCHEMATHESIS_CASES", "15"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="session")
def api(start_service, tmp_path_factory):
    registry = tmp_path_factory.mktemp("registry")
    with start_service(GPUMEMNET_REGISTRY=str(registry)) as running:
        yield schemathesis.openapi.from_url(f"{running.url}/openapi.json")
        assert "Traceback" not in running.log.read_text()


def failure_of(operation):
    """What the service answered that its description does not allow; empty when there is nothing."""

    @hypothesis.settings(
        max_examples=CASES,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    @hypothesis.given(case=operation.as_strategy())
    def ask(case):
        case.call_and_validate(checks=CHECKS)

    try:
        ask()
    except (Exception, BaseExceptionGroup) as failure:
        return f"{operation.label}: {failure}"
    return ""


def test_the_service_keeps_to_its_description(api):
    operations = [result.ok() for result in api.get_all_operations()]
    assert len(operations) > 20
    assert [failure for operation in operations if (failure := failure_of(operation))] == []
