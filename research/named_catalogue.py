"""``python -m research catalogue``: makes the catalogue of named models from a table of
configurations.

A model is kept if the total of its parameters, computed from its blocks, differs by at most 1 % from
the published one, or from the recalled one where no source states it; the catalogue says which.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import InvalidRequestError
from gpumemnet.named.architectures import network

TOLERANCE: Final = 0.01
_ANY_LENGTH: Final = 128
_COUNTS: Final = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "shared_experts": "n_shared_experts",
    "first_dense_layers": "first_k_dense_replace",
    **{
        name: name
        for name in (
            *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "intermediate_size", "vocab_size", "max_position_embeddings"),
            *("moe_intermediate_size", "sliding_window"),
        )
    },
}
_SWITCHES: Final = ("tie_word_embeddings", "attention_bias", "qkv_bias")
CHECKED: Final = {"yes": "published", "recalled": "recalled"}
"""Column of the table → what a total of parameters was compared with."""
_NOT_NEEDED: Final = (
    *("rope_scaling", "rope_theta", "rms_norm_eps", "pad_token_id", "counted_as", "library"),
    *("router_aux_loss_coef", "norm_topk_prob", "remote_code", "config_json_model_type"),
    *(
        "intermediate_size_is",
        "hf_architecture",
        "layer_types_count",
        "config_json_intermediate_size",
    ),
)


def config_of_row(row: dict[str, str]) -> dict[str, Any]:
    """The configuration that a row of the table states."""
    config = json.loads(row["other"] or "{}")
    config = {name: value for name, value in config.items() if name not in _NOT_NEEDED}
    config |= {name: int(row[column]) for column, name in _COUNTS.items() if row[column]}
    config |= {name: row[name] == "yes" for name in _SWITCHES if row[name] in ("yes", "no")}
    return {"model_type": row["model_type"], "architectures": [row["architecture"]], **config}


def make_catalogue(table: Path, networks: Path, out: Path) -> str:
    """Writes the catalogue, and returns one line for each model that is left out.

    Args:
        table: configurations, one a row.
        networks: what :func:`make_networks` wrote; its models are in the catalogue, too.
        out: file of the catalogue.
    """
    extracted = json.loads(networks.read_bytes())
    models: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    lines = []
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        name, config = row["hub_id"], config_of_row(row)
        stated = row["published_parameters"] or row["recalled_parameters"]
        stated = stated or row["computed_parameters"]
        try:
            computed = (
                extracted[name]["parameters"]
                if name in extracted
                else network(config, _ANY_LENGTH).parameters
            )
        except InvalidRequestError as error:
            lines.append(f"{name}: {error.reason}")
            continue
        if abs(computed / int(stated) - 1.0) > TOLERANCE:
            lines.append(f"{name}: {computed:,} parameters instead of {int(stated):,}")
            continue
        models[name] = {
            "parameters": int(stated),
            "checked": CHECKED.get(row["checked"], "unchecked"),
            "config": config,
        }
        aliases |= {alias: name for alias in row["aliases"].split(";") if alias.strip()}
    for name, entry in extracted.items():
        if entry["config"]["model_type"] != "layers" and name not in models:
            models[name] = {each: entry[each] for each in ("parameters", "checked", "config")}
    text = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in models.items()]
    document = ",\n".join(text)
    body = f'{{"models": {{\n{document}\n}},\n"aliases": {json.dumps(aliases, indent=0)}}}\n'
    replace_file(out, body.encode())
    return "\n".join([*lines, f"{len(models)} models, {len(aliases)} aliases: {out}"])


def make_networks(table: Path, out: Path) -> str:
    """Extracts the networks that are no language models, one a line."""
    from research.extracted_networks import extracted, sources  # imports torch

    lines = []
    for source in sources(table):
        text = json.dumps(extracted(source), separators=(",", ":"))
        lines.append(f"{json.dumps(source.name)}: {text}")
    replace_file(out, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    return f"{len(lines)} networks: {out}"
