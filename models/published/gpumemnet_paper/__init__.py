"""GPUMemNet's estimators and the formulas that its paper compares (arXiv 2602.17817), reimplemented as baselines.

They reproduce the published tables row by row on our folds.  No bundle contains them.
"""
