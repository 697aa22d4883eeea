"""What jobs really used: stored durably, compared with what was predicted, and handed on to the dataset."""
