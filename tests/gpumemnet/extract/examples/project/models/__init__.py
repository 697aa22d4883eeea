"""The user's own models, not ours."""
