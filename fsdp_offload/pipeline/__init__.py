"""The three lanes, the shadow engine and the state codecs.

``records`` (what is known of a parameter and of a step) and ``schema`` (what state a class keeps)
are the ground; ``shadow`` calls the class's own step; ``bucket``, ``streamed`` and ``host`` are the
lanes; ``engine`` builds them and runs a step; ``inventory`` decides what goes where; ``state``
shows, checks and writes state.
"""
