"""Tells, before a deep-learning training job starts, how much GPU memory it will take."""
