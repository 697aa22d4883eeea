"""Predicts whole files of jobs: a cluster's history or its queue, streamed in constant memory and spread over processes or Ray.

A file is cut into chunks of :data:`gpumemnet.batch.plan.CHUNK_ROWS` rows counted from its first one, and each chunk is answered
on its own; so how the work was shared out, or where a killed run went on, leaves no trace in the answers.
"""
