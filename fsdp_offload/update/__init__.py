"""The arithmetic of one bucket: torch's own optimizer, packed moments, masters. No streams.

``schema`` describes a class's state, ``params`` a parameter and a step; ``bucket`` updates;
``shadow`` calls the class's own step; ``state`` shows, checks and writes state.
"""
