"""What the classifiers read of a job: the feature vector and the layer sequence."""
