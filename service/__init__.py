"""The REST service: answers predictions from bundles, and loads no training code."""
