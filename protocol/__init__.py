"""The protocol of worker and client: structs, codecs, limits, errors and the session's state table.

Nothing here does I/O or reads a clock; both ends drive the same code.
"""
