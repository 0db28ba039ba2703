"""Trainers that need more than the one line; each module imports its trainer's package."""
