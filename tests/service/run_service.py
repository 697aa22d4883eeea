import subprocess
import sys

from tests.environments import environment_without_settings


def run_service(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a service that ends by itself, because it cannot start."""
    command = [sys.executable, "-m", "service", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment_without_settings(**environment),
    )
