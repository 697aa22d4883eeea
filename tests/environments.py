import os


def environment_without_settings(**more: str) -> dict[str, str]:
    """The environment of this process without the settings of the service and its clients, and with
    ``more``."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith("GPUMEMNET_")
    } | more
