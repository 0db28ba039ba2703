"""Buckets on streams: what is fetched, updated and written back, and who waits for whom.

``engine`` builds the lanes and runs a step; ``ring`` and ``host`` are the lanes; ``overlap``
runs them beside forward and backward; ``inventory`` decides what goes where.
"""
