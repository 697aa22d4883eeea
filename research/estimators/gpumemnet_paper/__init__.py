"""GPUMemNet's two estimators (arXiv 2602.17817), reimplemented as baselines of the report.  No
bundle contains them."""
