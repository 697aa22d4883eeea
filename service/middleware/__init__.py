"""What surrounds the answers: who may ask, how often and how many at once, what is logged, and what is counted."""
