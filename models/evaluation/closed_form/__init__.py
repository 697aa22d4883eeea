"""Calibrates the line over the closed form on real networks, with no training of a network.

A bundle's network is trained on synthetic networks.  The closed form is calibrated on networks that
nobody designed it for.  In the order of reading::

    rows.py  the jobs that it is calibrated on, and their memory above the CUDA context
    fit.py   the line (:mod:`gpumemnet.predict.closed_form`), and the bounds of each group of jobs
    card.py  what a bundle's card says of both
"""
