"""Support for trainers that need more than one line; each module imports its trainer's package."""
