"""Administration of the served models: promotes a release to champion without dropping a request, and rolls it back.

A release must pass its self-test before it serves.  A challenger can predict a share of the jobs in the background (shadow
mode), so that it can be compared with the champion.
"""
