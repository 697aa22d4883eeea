"""Trains a model on datasets, prints the table beside its baselines, and predicts a job.

``python examples/train_your_own.py [DATASET …]``; without a dataset it takes some hundred shipped
rows, which is enough to see how it goes: half a minute.
"""

import sys
from pathlib import Path

from gpumemnet import Predictor, job_from_json
from models.evaluation import evaluate, markdown_table
from models.training.card import save_classifier
from models.training.classifier import plan_of, train
from models.training.data import SHIPPED_DATASETS, load_labelled_jobs

SOME = ("published_transformer_a100.parquet", "real_runs/traced_ordinary_networks.parquet")


def main() -> None:
    # 1. A dataset, as `gpumemnet build` writes it.  Labels become memory above the CUDA context.
    paths = sys.argv[1:] or [SHIPPED_DATASETS / name for name in SOME]
    data = load_labelled_jobs(paths)
    print(f"{len(data)} jobs of {len(set(data.groups.tolist()))} architectures")

    # 2. The line over the closed form, five networks that correct it, and conformal bounds.
    trained = train(data, plan_of("mlp"))
    bundle = save_classifier(Path("my-model"), trained, data, name="mine", version="1")

    # 3. The table: every estimator on architecture families that it has not seen.
    print(markdown_table(evaluate(data, ["mlp"], by_source=False)))

    # 4. Predict, here or as a service: gpumemnet serve --bundle my-model
    job = job_from_json(Path(__file__).with_name("mlp_job.json").read_bytes())
    if job.family in bundle.card.families:
        answer = Predictor([bundle]).predict(job, gpu="A100")
        print(f"expected {answer.expected_bytes:,} bytes, safe {answer.safe_bytes or 0:,} bytes")


if __name__ == "__main__":
    main()
