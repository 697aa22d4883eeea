"""Evaluates estimators on jobs that they were not trained on.

Five commands start here, each with its own path through the folder::

    gpumemnet evaluate          folds.py        every candidate on the folds of one dataset
                                folds_report.py their table, as Markdown and JSON
    python -m research report     full_report.py  every candidate on every dataset
                                study.py        runs the folds in processes, and gathers sections
                                section.py      jobs, labels and answers: all that a report is drawn
                                    from
                                report/         tables and pictures of sections
    python -m research real-networks
                                real_networks.py estimators on real networks, their families held
                                out
    python -m research calibrate-closed-form
                                closed_form/    the line over the closed form, written into bundles'
                                cards
    python -m research scoreboard scoreboard/     published estimators and ours on the same published
    runs

The first two use ``baselines.py`` and ``metrics.py``; the full report also uses ``candidates.py``,
``comparison.py`` and ``learning_curves.py``.
"""
