"""The networks of the classifiers."""
