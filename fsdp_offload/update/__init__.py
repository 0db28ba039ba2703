"""The arithmetic of one bucket: torch's own optimizer, reduced moments, masters. No streams.

``schema`` says what state a class keeps, ``params`` what is known of a parameter and of a step;
``bucket`` updates; ``shadow`` calls the class's own step; ``state`` shows, checks and writes state.
"""
