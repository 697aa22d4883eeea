"""GPUMemNet's own estimators and the formulas it compares itself with (arXiv 2602.17817), rebuilt as reference candidates.

They exist so that the published tables can be reproduced row by row on our folds; nothing here is ever shipped in a bundle.
"""
