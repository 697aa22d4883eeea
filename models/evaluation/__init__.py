"""Evaluates estimators on jobs that they were not trained on.

Two commands start here, each with its own path through the folder::

    python -m models evaluate   folds.py        every candidate on the folds of one dataset
                                folds_report.py their table, as Markdown and JSON
    python -m models report     full_report.py  every candidate on every dataset
                                study.py        runs the folds in processes, and gathers sections
                                section.py      jobs, labels and answers: all that a report is drawn from
                                report/         tables and pictures of sections

Both use ``baselines.py`` and ``metrics.py``; the full report also uses ``candidates.py`` and ``learning_curves.py``.
"""
