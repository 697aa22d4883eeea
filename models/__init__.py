"""The classifiers: baselines, networks, training, calibration, evaluation and the export of
bundles."""
