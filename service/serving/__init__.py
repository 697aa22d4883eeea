"""The served release: loads the bundles of a release, tests them, and replaces them without
dropping a request.

A release must pass its self-test before it serves.  A challenger can predict a share of the jobs in
the background (shadow mode), so that it can be compared with the champion.

* :mod:`.served_release` loads releases and swaps them; :mod:`.watch` follows changes of the
  registry in each worker.
* :mod:`.self_test` tests a release with golden jobs; :mod:`.shadow` runs the challenger;
  :mod:`.metrics` publishes both. :mod:`.background` is the thread in which the follower and the
  challenger run.
"""
