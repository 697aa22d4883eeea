"""Other people's published measurements, as datasets of this project."""
