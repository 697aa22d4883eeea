"""Other people's estimators, rebuilt from their papers."""
