"""One file for each revision of the schema; a released revision is never changed, because databases
have run it."""
