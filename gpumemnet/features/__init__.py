"""The classifiers' inputs: the feature vector and the layer sequence of a job."""
