"""Observations: what finished jobs used, stored in a database and compared with the predictions.

* :mod:`.routes` receives observations.
* :mod:`.store` writes observations and predictions in one thread, as :mod:`.inserts` says.
* :mod:`.database` declares the tables, connects, and makes or migrates them.
* :mod:`.statistics` compares predictions with observations, and tests the coverage.
* :mod:`.export` writes the observations as a dataset for training.
"""
