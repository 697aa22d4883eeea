"""Releases of bundles: which models there are, and which of them answer."""
