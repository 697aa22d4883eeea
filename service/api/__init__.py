"""Predictions over HTTP: requests, answers, errors and the description of the API."""
