"""The start page and the API documentation: static files, served from memory.

:mod:`.routes` lists the files; they are read once, when the application is made.
"""
