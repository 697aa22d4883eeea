"""Observations: what finished jobs used, stored in a database and compared with the predictions.

* :mod:`.routes` and :mod:`.schemas` receive observations and return the summary.
* :mod:`.store` writes observations and predictions in one thread, with the SQL statements of
  :mod:`.tables`.
* :mod:`.database_tables` declares the tables; :mod:`.migrate` and ``migrations/`` create and update
  them; :mod:`.database` connects.
* :mod:`.summary` compares predictions with observations; :mod:`.alarm` tests the coverage;
  :mod:`.metrics` publishes both.
* :mod:`.export` writes the observations as a dataset for training.
"""
