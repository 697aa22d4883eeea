"""One file for each revision; what is here has run on somebody's database and is not changed any more."""
