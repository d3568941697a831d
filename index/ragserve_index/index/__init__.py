"""The vector index of each namespace: in memory (namespace_index), on disk (index_file), all of
them (pool).
"""
