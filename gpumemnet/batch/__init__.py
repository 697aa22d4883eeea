"""Predicts whole files of jobs, such as a cluster's history or queue, in constant memory, with
several processes or Ray.

A file is divided into chunks of :data:`gpumemnet.job.table_reader.CHUNK_ROWS` rows, counted from its
first row.  Each chunk is predicted independently, so the answers depend neither on the number of
workers nor on interrupted runs.
"""
