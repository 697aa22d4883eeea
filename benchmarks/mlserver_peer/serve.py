"""Starts MLServer with the runtime of ``integrations/mlserver``: ``python serve.py default|bare PORT FOLDER``.
FOLDER takes its settings.

``default`` is MLServer as it installs itself; ``bare`` the quickest that it can be: no pool of
workers, no metrics, no log.
"""

import json
import socket
import sys
from pathlib import Path

from mlserver.cli import main


def write_settings(kind: str, port: int, folder: Path) -> None:
    """The files that MLServer reads."""
    settings = {
        "host": "127.0.0.1",
        "http_port": port,
        "grpc_port": _free_port(),
        "metrics_port": _free_port(),
        "metrics_dir": str(folder),
    }
    if kind == "bare":
        quiet = {"version": 1, "root": {"level": "WARNING"}}
        settings |= {
            "parallel_workers": 0,
            "metrics_endpoint": None,
            "debug": False,
            "logging_settings": quiet,
        }
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "gpumemnet").mkdir()
    model = {"name": "gpumemnet", "implementation": "runtime.Runtime"}
    (folder / "gpumemnet" / "model-settings.json").write_text(json.dumps(model))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":  # its workers import this file again
    write_settings(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    sys.argv = ["mlserver", "start", sys.argv[3]]
    main()
