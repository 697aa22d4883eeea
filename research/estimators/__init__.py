"""Published estimators of other authors, reimplemented from their papers."""
